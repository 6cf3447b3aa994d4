"""What a machine computes wrongly: known answers at the start, and samples of every batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gmpy2 import mpz

from fedapp.crypto import lanes, paillier_masks, psi
from fedapp.crypto.lanes import ring, ristretto, run_shared
from fedapp.crypto.lanes.registers import supported
from fedapp.crypto.lanes.ring import LaneRing
from fedapp.crypto.packing import PairLayout
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.psi import draw_scalar, mask, mask_ids
from fedapp.crypto.rings import run_call, sampled
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import Workers
from fedapp.errors import MachineError, PartyError
from fedapp.runs.local import run_local

needs_lanes = pytest.mark.skipif(not supported(), reason="needs AVX-512 IFMA")
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
    "multiply": 0,
    "power": 0,
    "squares": 0,
    "table_products": 0,
}


@pytest.fixture
def broken(monkeypatch):
    """``broken(kernel, rows)``: from now on the lowest limb of these rows has a wrong bit."""

    def break_kernel(kernel: str, rows: Any = slice(None)) -> None:
        right, written = getattr(ring, kernel), KERNELS[kernel]

        def wrong(*arguments: Any) -> Any:
            returned = right(*arguments)
            arguments[written][rows, 0] ^= np.uint64(1 << 40)
            return returned

        monkeypatch.setattr(ring, kernel, wrong)

    return break_kernel


@pytest.fixture
def at_the_start(monkeypatch):
    """As in a process that has checked nothing yet, and that takes no samples."""
    checks = [ring.check_known_answers, ristretto.check_known_answers, psi._check_expander]
    for module in ("fedapp.crypto.lanes.ring", "fedapp.crypto.psi"):
        monkeypatch.setattr(f"{module}.sampled", lambda operation, n_rows: [])
    for check in checks:
        check.cache_clear()
    yield
    for check in checks:
        check.cache_clear()


@pytest.fixture
def key(monkeypatch):
    """One that no tables are kept for, in a process whose known answers are right."""
    lanes.ring_of(mpz(3))
    monkeypatch.setattr(paillier_masks, "_owner_masks", paillier_masks.OwnerMasks)
    monkeypatch.setattr(paillier_masks, "_public_masks", paillier_masks.PublicMasks)
    return generate_key(256, insecure_small_key=True)


@needs_lanes
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_with_a_wrong_bit_is_caught_before_it_is_used(kernel, broken, at_the_start):
    broken(kernel)
    for _ in range(2):  # and stays caught
        with pytest.raises(MachineError, match=f"^{RESIDUES}"):
            lanes.ring_of(mpz(2**255 - 19))


@needs_lanes
def test_a_wrong_bit_in_one_lane_is_caught_before_it_is_used(broken, at_the_start):
    broken("multiply", rows=slice(5, 6))
    with pytest.raises(MachineError, match=f"^{RESIDUES}"):
        lanes.ring_of(mpz(2**255 - 19))


@needs_lanes
def test_points_that_are_not_those_of_the_rfc_are_caught_before_any_is_masked(
    monkeypatch, at_the_start
):
    _break_points(monkeypatch)
    with pytest.raises(MachineError, match=f"^{POINTS.format('RFC 9496')}"):
        mask_ids(["a"], draw_scalar())


@needs_lanes
def test_an_encoding_that_the_rfc_refuses_must_be_refused_before_any_is_read(
    monkeypatch, at_the_start
):
    right = ristretto.scale_words
    monkeypatch.setattr(
        ristretto, "scale_words", lambda words, given: (right(words, given)[0], np.array([True]))
    )
    with pytest.raises(MachineError, match=f"^{POINTS.format('RFC 9496')}"):
        mask_ids(["a"], draw_scalar())


def test_bytes_of_ids_that_are_not_those_of_the_rfc_are_caught(monkeypatch, at_the_start):
    monkeypatch.setattr(psi, "expander", lambda dst, n_bytes: lambda message: bytes(n_bytes))
    with pytest.raises(MachineError, match=r"^uniform bytes of ids must be those of RFC 9380, got"):
        mask_ids(["a"], draw_scalar())


def _break_points(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ristretto.scale_words

    def wrong(words: Any, given: Any) -> Any:
        out, valid = right(words, given)
        return out ^ np.uint64(1 << 17), valid

    monkeypatch.setattr(ristretto, "scale_words", wrong)


@needs_lanes
@pytest.mark.parametrize("n_rows", [3, 300])
@pytest.mark.parametrize(
    "kernel", ["read_words", "write_words", "carry_over", "multiply", "table_products"]
)
def test_a_batch_of_wrong_ciphertexts_is_caught_whatever_its_size(kernel, n_rows, broken, key):
    broken(kernel)
    with Workers(2) as workers, pytest.raises(MachineError, match=f"^{RESIDUES}"):
        encrypt(key, range(n_rows), workers)


@needs_lanes
def test_a_batch_of_wrong_plaintexts_or_sums_is_caught(broken, key):
    here = Workers(1)
    ciphertexts = encrypt(key, range(40), here)
    codes, nodes = np.zeros((40, 1), np.uint8), np.arange(40, dtype=np.int32)
    sums = sum_rows(key.public, ciphertexts, codes, np.array([0, 1]), nodes, 40, here)
    layout = PairLayout(256, 40)
    assert layout.n_slots > 1
    broken("power")
    with pytest.raises(MachineError, match=f"^{RESIDUES}"):
        decrypt(key, ciphertexts, here)
    broken("squares")
    with pytest.raises(MachineError, match=f"^{RESIDUES}"):
        pack_sums(key.public, sums, layout, here)
    broken("multiply")
    with pytest.raises(MachineError, match=f"^{RESIDUES}"):
        sum_rows(key.public, ciphertexts, codes, np.array([0, 1]), nodes % 2, 2, here)


def test_without_lanes_powers_are_compared_with_those_of_gmpy2(key, monkeypatch):
    for module in (lanes, paillier_masks):
        monkeypatch.setattr(module, "has_lanes", lambda: False)
    right, here = paillier_masks.square_base, Workers(1)
    assert decrypt(key, encrypt(key, range(40), here), here) == [*range(40)]

    def wrong(*arguments: Any) -> Any:
        made = right(*arguments)
        made.tables[3][1][:] = [term + 1 for term in made.tables[3][1]]
        return made

    monkeypatch.setattr(paillier_masks, "square_base", wrong)
    with pytest.raises(MachineError, match=r"^powers by a prime's square must be those of gmpy2"):
        encrypt(key, range(40), here)


@needs_lanes
@pytest.mark.parametrize("n_points", [1, 2000])
def test_a_batch_of_wrong_points_is_caught_whatever_its_size(n_points, monkeypatch):
    points = mask_ids([str(number) for number in range(n_points)], draw_scalar())
    _break_points(monkeypatch)
    with pytest.raises(MachineError, match=f"^{POINTS.format('libsodium')}"):
        mask(points, draw_scalar())
    with pytest.raises(MachineError, match=f"^{POINTS.format('libsodium')}"):
        mask_ids(["a"] * n_points, draw_scalar())


@needs_lanes
def test_a_point_that_only_this_machine_refuses_is_not_blamed_on_who_sent_it(monkeypatch):
    points, right = mask_ids(["a", "b", "c"], draw_scalar()), ristretto.scale_words
    monkeypatch.setattr(
        ristretto,
        "scale_words",
        lambda words, given: (right(words, given)[0], np.array([True, False, True])),
    )
    with pytest.raises(MachineError, match=f"^{POINTS.format('libsodium')}"):
        mask(points, draw_scalar())


@needs_lanes
def test_one_wrong_row_is_caught_when_it_is_drawn_and_any_may_be(broken, monkeypatch):
    ring = LaneRing(mpz(2**255 - 19))
    broken("multiply", rows=slice(3, 4))
    caught = []
    for row in range(8):
        monkeypatch.setattr(
            "fedapp.crypto.lanes.ring.sampled", lambda operation, n_rows, row=row: [row]
        )
        try:
            ring.multiply(ring.ones(8), ring.ones(8))
        except MachineError:
            caught.append(row)
    assert caught == [3]
    assert set(Counter(sampled("any", 8)[0] for _ in range(1000))) == set(range(8))


def _draws(n_rows: int) -> list[int]:
    return [len(sampled(name, n_rows)) for name in ("a", "a", "b")]


def test_one_call_of_a_batch_checks_each_operation_once():
    places = set()
    for _ in range(60):
        found = run_shared(Workers(1), _draws, [(5,), (9,), (2,)])
        assert sorted(found) == [[0, 0, 0], [0, 0, 0], [1, 0, 1]]
        places.add(found.index([1, 0, 1]))
    assert places == {0, 1, 2}
    assert run_shared(Workers(1), _draws, [(0,)]) == [[0, 0, 0]]
    assert run_shared(Workers(1), _draws, []) == []
    assert run_call(False, _draws, 5) == [0, 0, 0]
    assert _draws(5) == [1, 1, 1]  # outside of a batch each is one


@needs_lanes
def test_a_run_at_a_site_that_computes_wrongly_stops_and_names_the_site(settings, broken):
    lanes.ring_of(mpz(3))
    broken("squares")
    small = {"secureboost__key_bits": 256, "secureboost__insecure_small_key": True}
    given = settings(strategy="secureboost", num_boost_round=1, parties=2, **small)
    with pytest.raises(PartyError, match=rf"^party-\d \(step \d+\): .*{RESIDUES}"):
        run_local(given)
