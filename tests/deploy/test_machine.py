"""What a machine computes wrongly is found by known answers, before anything is computed."""

import numpy as np
import pytest
from gmpy2 import mpz

from fedapp.crypto import lanes, psi
from fedapp.crypto.lanes import has_lanes, ring, ristretto
from fedapp.crypto.psi import draw_scalar, mask, mask_ids
from fedapp.errors import MachineError, PartyError
from fedapp.runs.local import run_local

needs_lanes = pytest.mark.skipif(not has_lanes(), reason="needs AVX-512 IFMA")
RESIDUES = (
    r"residues of \d+ bits must be those of gmpy2, got others: this machine's processor or memory "
    r"is faulty, or its AVX-512 code, which NUMBA_ENABLE_AVX=0 in its environment switches off$"
)
POINTS = "points of ristretto255 must be those of {}, got others: .* NUMBA_ENABLE_AVX=0"
# A kernel, and which of its arguments it writes to.
KERNELS = {
    "read_words": 1,
    "write_words": 2,
    "carry_over": 0,
    "products": 0,
    "power": 0,
    "squares": 0,
    "table_products": 0,
}


@pytest.fixture
def broken(monkeypatch):
    """``broken(kernel, rows)``: from now on the lowest limb of these rows has a wrong bit."""

    def break_kernel(kernel, rows=slice(None)):
        right, written = getattr(ring, kernel), KERNELS[kernel]

        def wrong(*arguments):
            returned = right(*arguments)
            arguments[written][rows, 0] ^= np.uint64(1 << 40)
            return returned

        monkeypatch.setattr(ring, kernel, wrong)

    return break_kernel


@pytest.fixture
def at_the_start():
    """As in a process that has checked nothing yet."""
    checks = [ring.check_known_answers, ristretto.check_known_answers, psi._check_expander]
    [check.cache_clear() for check in checks]
    yield
    [check.cache_clear() for check in checks]


@needs_lanes
@pytest.mark.parametrize(
    ("kernel", "rows"), [*((kernel, slice(None)) for kernel in KERNELS), ("products", slice(5, 6))]
)
def test_a_kernel_with_a_wrong_bit_is_caught_before_it_is_used(kernel, rows, broken, at_the_start):
    broken(kernel, rows)
    for _ in range(2):  # and stays caught
        with pytest.raises(MachineError, match=f"^{RESIDUES}"):
            lanes.ring_of(mpz(2**255 - 19))


def scaling(monkeypatch, change):
    """From now on points that are scaled, and whether they are valid, are changed."""
    right = ristretto.scale_words
    monkeypatch.setattr(ristretto, "scale_words", lambda *given: change(*right(*given)))


@needs_lanes
@pytest.mark.parametrize("flipped", [np.uint64(1 << 17), np.uint64(0)], ids=["bit", "no point"])
def test_points_that_are_not_those_of_the_rfc_are_caught_before_any_is_masked(
    monkeypatch, at_the_start, flipped
):
    """Without a bit that is wrong, an encoding that must be refused is not."""
    scaling(monkeypatch, lambda out, valid: (out ^ flipped, valid if flipped else np.array([True])))
    with pytest.raises(MachineError, match=f"^{POINTS.format('RFC 9496')}"):
        mask_ids(["a"], draw_scalar())


def test_bytes_of_ids_that_are_not_those_of_the_rfc_are_caught(monkeypatch, at_the_start):
    monkeypatch.setattr(psi, "expander", lambda dst, n_bytes: lambda message: bytes(n_bytes))
    with pytest.raises(MachineError, match=r"^uniform bytes of ids must be those of RFC 9380, got"):
        mask_ids(["a"], draw_scalar())


@needs_lanes
def test_a_point_that_only_this_machine_refuses_is_not_blamed_on_who_sent_it(monkeypatch):
    points = mask_ids(["a", "b", "c"], draw_scalar())
    scaling(monkeypatch, lambda out, valid: (out, np.array([True, False, True])))
    with pytest.raises(MachineError, match=f"^{POINTS.format('libsodium')}"):
        mask(points, draw_scalar())


@needs_lanes
def test_a_run_at_a_site_that_computes_wrongly_stops_and_names_the_site(
    settings, broken, at_the_start
):
    broken("squares")
    small = {"secureboost__key_bits": 256, "secureboost__insecure_small_key": True}
    given = settings(strategy="secureboost", num_boost_round=1, parties=2, **small)
    with pytest.raises(PartyError, match=rf"^party-\d \(step \d+\): .*{RESIDUES}"):
        run_local(given)
