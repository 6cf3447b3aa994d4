"""Paillier: packed plaintexts, keys, ciphertexts, masks and sums, beside phe and slow forms."""

import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from gmpy2 import legendre, mpz, powmod
from hypothesis import given, settings
from hypothesis import strategies as st
from phe.paillier import generate_paillier_keypair

from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import FixedPoint, Layout, grouped_layouts, readable_rows
from fedapp.crypto.paillier import (
    BASE_BYTES,
    OwnerMasks,
    PublicMasks,
    check_ciphertexts,
    decrypt,
    encrypt,
    fixed_bases,
    from_phe,
    from_phe_numbers,
    random_digits,
    rerandomise,
    short_bits,
    square_base,
    to_phe,
    to_phe_numbers,
)
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey, generate_key, read_public_key
from fedapp.crypto.rings import from_bytes_array, to_bytes_array
from fedapp.crypto.sums import pack_sums, read_jobs, self_test, sum_rows
from fedapp.crypto.workers import Workers, shared_workers
from fedapp.errors import ConfigError

RNG = np.random.default_rng(0)
HERE = Workers(1)
OFFSETS = np.array([0, 2, 7, 40])
UNIT = FixedPoint((0, 0))
FLOATS = st.floats(-1, 1, width=32)


@pytest.fixture(scope="module")
def key():
    return generate_key(512, insecure_small_key=True)


@pytest.fixture(scope="module")
def two():
    with closing(Workers(2)) as workers:
        yield workers


def some_codes(n_rows):
    return RNG.integers(0, np.diff(OFFSETS), (n_rows, 3)).astype(np.uint8)


def some_rows(n_rows, n_outputs=1):
    rows = RNG.normal(size=(n_rows, n_outputs, 2)).astype(np.float32)
    rows[..., 1] = np.abs(rows[..., 1])
    return rows


def numbers_of(key, residues):
    """Residues mod n^2 as integers."""
    return ring_of(key.public.n_squared).numbers(residues)


def naive_sums(fields, codes, nodes, n_nodes):
    """Sums of integers, one row after the other."""
    n_bins, flat = OFFSETS[-1], fields.reshape(len(fields), -1).tolist()
    sums = [[0] * len(flat[0]) for _ in range(n_nodes * n_bins)]
    for row, node in enumerate(nodes):
        for column in range(codes.shape[1]):
            if node >= 0:
                place = node * n_bins + OFFSETS[column] + codes[row, column]
                sums[place] = [a + b for a, b in zip(sums[place], flat[row], strict=True)]
    return sums


# Packed plaintexts


def side_by_side(layout, slots):
    """Slots in one plaintext, as ``pack_sums`` lays them under encryption."""
    return sum(slot << (layout.slot_bits * place) for place, slot in enumerate(slots))


@given(st.lists(st.tuples(FLOATS, st.floats(0, 1, width=32)), min_size=1, max_size=20))
def test_a_value_comes_back_within_half_a_multiple(pairs):
    rows = np.array(pairs, dtype=np.float32).reshape(-1, 1, 2)
    back = UNIT.decode(UNIT.encode(rows).reshape(-1, 2).tolist(), 1)
    assert (np.abs(back - rows) <= 2.0**-54).all()
    exact = np.abs(rows) >= 2.0**-30
    np.testing.assert_array_equal(back[exact], rows[exact])


@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(24, 62))
def test_the_scale_covers_the_largest_value_and_keeps_it_exact(largest, precision):
    rows = np.array([[[-largest, largest / 4]]], dtype=np.float32)
    scale = FixedPoint.covering(rows, precision)
    back = scale.decode(scale.encode(rows).reshape(1, 2).tolist(), 1)
    np.testing.assert_array_equal(back, rows)
    assert largest < 2.0 ** scale.exponents[0] <= 2 * largest


@given(st.integers(1, 4), st.integers(1, 30), st.sampled_from([512, 1024, 2048]))
def test_slots_come_back_in_their_order(n_outputs, n_sums, key_bits):
    layout = Layout(key_bits, 1, n_outputs, precision=30)
    fields = RNG.integers(-(2**30), 2**30, (n_sums, n_outputs, 2), endpoint=True)
    fields[..., 1] = np.abs(fields[..., 1])
    slots, size = layout.pack(fields), layout.n_slots
    plaintexts = [
        side_by_side(layout, slots[first : first + size]) for first in range(0, n_sums, size)
    ]
    assert layout.unpack(plaintexts, n_sums) == fields.reshape(n_sums, -1).tolist()


@given(st.integers(1, 2**24), st.integers(1, 62), st.sampled_from([-1, 1]))
def test_the_largest_sums_of_all_rows_fit_in_every_slot(n_rows, precision, sign):
    layout = Layout(2048, n_rows, precision=precision)
    largest = np.array([[[sign << precision, 1 << precision]]])
    slot = layout.pack(largest)[0] * n_rows
    plaintext = side_by_side(layout, [slot] * layout.n_slots)
    assert abs(plaintext) < 2**2046
    limit = n_rows << precision
    assert layout.unpack([plaintext], layout.n_slots) == [[sign * limit, limit]] * layout.n_slots


def test_sums_are_the_exact_sums_rounded_once():
    rows = some_rows(1000)
    scale, layout = FixedPoint.covering(rows), Layout(512, 1000)
    total = sum(layout.pack(scale.encode(rows)))
    found = scale.decode(layout.unpack([total], 1), 1)[0, 0]
    for place in range(2):
        unit = Fraction(2) ** (scale.exponents[place] - scale.precision)
        exact = sum(Fraction(float(value)) for value in rows[:, 0, place])
        assert abs(Fraction(float(found[place])) - exact) <= 500 * unit + abs(exact) * 2**-53


def test_a_2048_bit_key_holds_the_sums_of_14_bins_of_20000_rows():
    layout = Layout(2048, 20_000)
    assert (layout.field_bits, layout.slot_bits, layout.n_slots) == (69, 138, 14)
    assert layout.n_plaintexts(29) == 3


def test_rows_out_of_range_and_layouts_that_cannot_be_are_refused():
    rows, layout = some_rows(3), Layout(512, 3, precision=10)
    large = np.array([[[1025, 0]]])
    assert (FixedPoint.covering(0 * rows).encode(0 * rows) == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        rows[1, 0, 0] = bad
        with pytest.raises(ValueError, match="gradients must be finite, got 1 that are not"):
            FixedPoint.covering(rows)
    for rule, call in (
        (
            r"fields must be at most 2\^10, got 1 above",
            lambda: layout.pack(large),
        ),
        (r"shape \(n, 1, 2\), got \(1, 2, 2\)", lambda: layout.pack(np.zeros((1, 2, 2), int))),
        ("key-bits must be > 138 for 1 pairs of 69 bits, got 138", lambda: Layout(138, 20_000)),
        ("n_rows must be >= 1, got 0", lambda: Layout(2048, 0)),
        ("must be 0 past their last slot", lambda: layout.unpack([1 << layout.slot_bits], 1)),
    ):
        with pytest.raises(ValueError, match=rule):
            call()
    assert layout.unpack([], 0) == []


def test_a_sum_that_the_rows_cannot_have_is_refused():
    layout, most = Layout(512, 3, precision=10), 3 * 2**10
    for gradients, hessians in ((most + 1, 0), (-most - 1, 0), (0, most + 1), (0, -1)):
        with pytest.raises(ValueError, match="sums must be of at most 3 rows, got one beyond"):
            layout.unpack([(gradients << layout.field_bits) + hessians], 1)


def test_rows_that_a_round_can_show_are_the_bits_of_its_nodes_slots():
    # Of 20 outputs each of two ciphertexts has 10, a slot of 1,280 bits.
    for n_outputs, max_depth, n_rows in ((1, 1, 128), (1, 6, 4096), (20, 2, 2 * 10 * 2560)):
        assert readable_rows(grouped_layouts(2048, 1000, n_outputs), max_depth) == n_rows


# Keys, ciphertexts and masks


@settings(deadline=None, max_examples=20)
@given(values=st.lists(st.integers(-(2**510) + 1, 2**510 - 1), max_size=5))
def test_plaintexts_come_back(key, values):
    most = int(key.public.n) // 2
    for who in (key, key.public):
        ciphertexts = encrypt(who, [*values, most, -most], HERE)
        assert ciphertexts.shape == (len(values) + 2, 128)
        check_ciphertexts(key.public, ciphertexts)
        assert decrypt(key, ciphertexts, HERE) == [*values, most, -most]


def test_phe_and_fedapp_read_what_the_other_encrypts(key):
    theirs = to_phe(key)
    for who in (key, key.public):
        numbers = to_phe_numbers(key.public, encrypt(who, [123456789, -5], HERE))
        assert [theirs.decrypt(number) for number in numbers] == [123456789, -5]
        assert theirs.decrypt(numbers[0] + numbers[1]) == 123456784
    public, private = generate_paillier_keypair(n_length=512)
    ours = from_phe(private)
    assert PublicKey(mpz(public.n)) == ours.public
    numbers = [public.encrypt(value) for value in (42, -7, 0)]
    rows = from_phe_numbers(ours.public, [*numbers, numbers[0] + numbers[1]])
    assert decrypt(ours, rows, HERE) == [42, -7, 0, 35]
    assert decrypt(ours, encrypt(ours, [-3], HERE), HERE) == [-3]
    with pytest.raises(ValueError, match="numbers must be under the given key, got another at 0"):
        from_phe_numbers(key.public, numbers)
    with pytest.raises(ValueError, match=r"numbers must be integers, got exponent -\d+ at 1"):
        from_phe_numbers(ours.public, [public.encrypt(1), public.encrypt(0.1)])


@pytest.mark.parametrize("full_masks", [False, True])
def test_keys_survive_the_disk_and_the_way_to_phe_and_back(key, full_masks):
    stored, theirs = replace(key, full_masks=full_masks), to_phe(key)
    assert PrivateKey.from_array(stored.to_array()) == stored
    assert {key.p, key.q} == {mpz(theirs.p), mpz(theirs.q)}
    back = from_phe(theirs, full_masks=full_masks)
    assert (back.public, back.full_masks) == (key.public, full_masks)


def test_without_phe_its_keys_and_ciphertexts_say_what_to_install(key, monkeypatch):
    monkeypatch.setitem(sys.modules, "phe", None)
    way_out = r"\(pip install 'fedapp\[phe\]'\), got none$"
    with pytest.raises(ConfigError, match=f"^phe must be installed to write its keys {way_out}"):
        to_phe(key)
    with pytest.raises(ConfigError, match=f"^phe must be .* to write its ciphertexts {way_out}"):
        to_phe_numbers(key.public, encrypt(key, [7], HERE))


def test_a_key_has_the_bits_asked_for_and_keeps_them_from_its_repr(key):
    assert repr(key) == str(key) == "PrivateKey(bits=512)"
    assert repr(key.public) == "PublicKey(bits=512)"
    big = generate_key(2048)
    assert big.public.bits == 2048
    assert big.p.bit_length() == big.q.bit_length() == 1024
    assert read_public_key(big.public.to_array(), 2048) == big.public


def test_small_odd_and_wrong_keys_are_refused(key):
    rule = "key-bits must be >= 2048 unless insecure-small-key is set, got"
    with pytest.raises(ValueError, match=f"{rule} 2046"):
        generate_key(2046)
    with pytest.raises(ValueError, match=f"{rule} 512"):
        read_public_key(key.public.to_array(), 512)
    for bits, odd in ((64, "key-bits must be >= 128, got 64"), (513, "must be even, got 513")):
        with pytest.raises(ValueError, match=odd):
            generate_key(bits, insecure_small_key=True)

    def read(modulus, bits):
        return read_public_key(modulus, bits, insecure_small_key=True)

    largest = mpz(65521)  # prime below 2^16
    for n in (2 * key.p, key.p, key.p**2, key.p**3, largest * key.p * key.q):
        with pytest.raises(ValueError, match="n must be the product of two large primes"):
            read(PublicKey(n).to_array(), PublicKey(n).bits)
    modulus = key.public.to_array()
    assert read(modulus, 512) == key.public
    for bits, array, found in (
        (520, modulus, "64 bytes"),
        (511, modulus, "512"),
        # Before it is read: to try it as a prime would take hours.
        (512, np.full(2**26, 255, dtype=np.uint8), "67108864 bytes"),
    ):
        with pytest.raises(ValueError, match=f"n must be {bits} bits, got {found}$"):
            read(array, bits)


def test_table_powers_are_plain_powers():
    modulus, bases = mpz(10**40 + 121), [mpz(987654321), mpz(2)]
    own = ring_of(modulus)
    tables = fixed_bases(own, bases, 5)
    digits = RNG.integers(0, 256, (20, 10)).astype(np.uint8)
    wanted = []
    for row in digits:
        first, second = (int.from_bytes(half.tobytes(), "little") for half in np.split(row, 2))
        wanted.append(
            powmod(bases[0], first, modulus) * powmod(bases[1], second, modulus) % modulus
        )
    assert own.numbers(tables.powers(digits)) == wanted
    drawn = random_digits(50, tables.n_tables)
    assert len(set(own.numbers(tables.powers(drawn)))) == 50


def test_powers_mod_a_square_are_plain_powers(key):
    base, prime = mpz(3) ** 400 % key.p**2, key.p
    table = square_base(base, prime, 5)
    digits = RNG.integers(0, 256, (20, 6)).astype(np.uint8)
    digits[0] = 0
    exponents = [int.from_bytes(row.tobytes(), "little") for row in digits]
    assert list(table.powers(digits)) == [powmod(base, one, prime**2) for one in exponents]
    assert len(set(table.powers(random_digits(50, table.n_tables)))) == 50


def test_public_masks_are_encryptions_of_zero_and_all_differ(key):
    source = PublicMasks(key.public)
    assert source.n_bases == 27
    masks = [mask for _ in range(3) for mask in numbers_of(key, source.draw(20))]
    assert len(set(masks)) == 60
    assert decrypt(key, to_bytes_array(masks, 128), HERE) == [0] * 60


def test_masks_from_tables_fall_into_every_class_of_small_characters(key):
    """The owner sees whether a mask is a square mod p and mod q; all four answers are as likely."""
    source = PublicMasks(key.public)
    source.draw(source.n_bases)
    counts = {(left, right): 0 for left in (-1, 1) for right in (-1, 1)}
    for mask in numbers_of(key, source.draw(800)):
        counts[legendre(mask, key.p), legendre(mask, key.q)] += 1
    # 200 expected; past six standard deviations.
    assert min(counts.values()) > 120


@pytest.mark.parametrize("full_masks", [True, False])
def test_the_owners_masks_are_nth_residues_and_all_differ(key, full_masks):
    values = from_bytes_array(encrypt(replace(key, full_masks=full_masks), [0] * 200, HERE))
    assert len(set(values)) == 200
    for value in values:
        assert powmod(value, (key.p - 1) * (key.q - 1), key.public.n_squared) == 1


def test_no_small_prime_divides_the_index_of_the_owners_masks():
    small = generate_key(128, insecure_small_key=True, full_masks=True)
    masks = from_bytes_array(encrypt(small, [0] * 64, HERE))
    for prime in (small.p, small.q):
        assert not all(powmod(mask, (prime - 1) // 2, prime) == 1 for mask in masks)


def test_exponents_are_as_long_as_said():
    short = generate_key(2048)
    n_bases = PublicMasks(short.public).n_bases
    assert 8 * BASE_BYTES * n_bases >= 2048 + 128
    assert (5 * 2.0**-n_bases + 2.0**-128) ** 0.5 / 2 < 2.0**-45  # the docstring's distance
    # 225, 275, 325, 375 and 400 bits are RFC 7919's least for groups of these sizes.
    sizes = (2048, 3072, 4096, 6144, 8192)
    assert [short_bits(bits) for bits in sizes] == [256, 320, 384, 512, 640]
    assert [table.n_tables for table in OwnerMasks(short).tables] == [32, 32]
    full = OwnerMasks(replace(short, full_masks=True))
    assert [table.n_tables for table in full.tables] == [136, 136]


def test_short_masks_are_one_power_of_a_square_and_full_ones_of_any(key):
    short, full = OwnerMasks(key), OwnerMasks(replace(key, full_masks=True))
    for masks, signs in ((short, {(1, 1)}), (full, set(product((-1, 1), repeat=2)))):
        drawn = numbers_of(key, masks.draw(100))
        assert {(legendre(one, key.p), legendre(one, key.q)) for one in drawn} == signs


def test_a_short_mask_is_a_power_of_one_base_modulo_both_primes(key, monkeypatch):
    short = OwnerMasks(key)
    n_tables = short.tables[0].n_tables
    digits = np.zeros((3, n_tables), np.uint8)
    digits[0, 0], digits[1], digits[2, 3] = 1, random_digits(1, n_tables)[0], 7
    monkeypatch.setattr("fedapp.crypto.paillier.random_digits", lambda *_: digits)
    base, *powers = numbers_of(key, short.draw(3))
    exponents = [int.from_bytes(row.tobytes(), "little") for row in digits[1:]]
    assert powers == [powmod(base, one, key.public.n_squared) for one in exponents]


def test_a_rerandomised_ciphertext_differs_and_means_the_same(key):
    before = encrypt(key, [5, 5, -9, 0], HERE)
    after = rerandomise(key.public, before, HERE)
    assert decrypt(key, after, HERE) == [5, 5, -9, 0]
    assert len(set(from_bytes_array(before)) | set(from_bytes_array(after)) | {mpz(1)}) == 9


def test_what_is_no_plaintext_or_ciphertext_is_refused(key):
    public = key.public
    with pytest.raises(ValueError, match="plaintexts must be within n / 2, got 1 that are not"):
        encrypt(key, [0, int(public.n) // 2 + 1], HERE)
    for value, rule in (
        (mpz(0), r"> 0 and < n\^2"),
        (public.n_squared, r"> 0 and < n\^2"),
        (key.p * 12345, "prime to n"),
    ):
        rows = np.concatenate([encrypt(key, [1], HERE), to_bytes_array([value], 128)])
        with pytest.raises(ValueError, match=f"ciphertexts must be {rule}, got 1 that are not"):
            check_ciphertexts(public, rows)
    with pytest.raises(ValueError, match=r"uint8 of shape \(n, 128\), got uint8 of shape \(2, 127"):
        check_ciphertexts(public, np.ones((2, 127), np.uint8))
    with pytest.raises(ValueError, match="got int64 of shape"):
        check_ciphertexts(public, np.ones((2, 128), np.int64))


def sums_read(key, reply, layout, scale, n_sums, workers):
    (fields,) = read_jobs(key, reply, [(layout, np.ones(n_sums, dtype=bool))], workers)
    return scale.decode(fields, layout.n_outputs)


@pytest.mark.parametrize(
    ("n_rows", "n_nodes", "n_outputs"),
    [(1, 1, 1), (600, 3, 1), (30, 1, 2)],
)
def test_sums_equal_the_sums_row_by_row(key, two, n_rows, n_nodes, n_outputs):
    rows, codes = some_rows(n_rows, n_outputs), some_codes(n_rows)
    nodes = RNG.integers(-1, n_nodes, n_rows).astype(np.int32)
    scale, layout = FixedPoint.covering(rows), Layout(512, n_rows, n_outputs=n_outputs)
    fields = scale.encode(rows)
    ciphertexts = encrypt(key, layout.pack(fields), two)
    sums = sum_rows(key.public, ciphertexts, codes, OFFSETS, nodes, n_nodes, two)
    reply = pack_sums(key.public, sums, layout, two)
    found = sums_read(key, reply, layout, scale, len(sums), two)
    wanted = naive_sums(fields, codes, nodes, n_nodes)
    np.testing.assert_array_equal(found, scale.decode(wanted, n_outputs))
    assert [value != 1 for value in numbers_of(key, sums)] == [any(pair) for pair in wanted]


def test_no_rows_make_sums_without_ciphertexts(key, two):
    none, nodes = encrypt(key, [], two), np.zeros(0, np.int32)
    sums = sum_rows(key.public, none, some_codes(0), OFFSETS, nodes, 2, two)
    assert numbers_of(key, sums) == [1] * 80
    layout, scale = Layout(512, 1), FixedPoint((0, 0))
    reply = pack_sums(key.public, sums, layout, two)
    assert (sums_read(key, reply, layout, scale, 80, two) == 0).all()
    assert pack_sums(key.public, sums[:0], layout, two).shape == (0, 128)


def test_no_ciphertext_leaves_as_it_came_or_as_one(key):
    """Bins of a single row and without rows, one to a ciphertext."""
    n_rows, public = 3, key.public
    layout = Layout(130, n_rows)
    assert layout.n_slots == 1
    ciphertexts = encrypt(key, layout.pack(np.full((n_rows, 1, 2), 7)), HERE)
    codes, nodes = np.array([[0], [2], [4]], np.uint8), np.zeros(n_rows, np.int32)
    sums = sum_rows(public, ciphertexts, codes, np.array([0, 6]), nodes, 1, HERE)
    first, second = (from_bytes_array(pack_sums(public, sums, layout, HERE)) for _ in range(2))
    seen = [*from_bytes_array(ciphertexts), mpz(1), *first, *second]
    assert len(set(seen)) == n_rows + 1 + 6 + 6
    assert decrypt(key, to_bytes_array(first, 128), HERE)[1::2] == [0, 0, 0]


def test_a_reply_under_another_key_is_refused(key):
    other = generate_key(512, insecure_small_key=True)
    layout, scale = Layout(512, 3), FixedPoint((0, 0))
    # Under the smaller key, so that it may pass for a ciphertext under the other.
    small, large = sorted([key, other], key=lambda one: one.public.n)
    reply = pack_sums(small.public, ring_of(small.public.n_squared).ones(1), layout, HERE)
    with pytest.raises(ValueError, match=r"^(sums|plaintexts) must be"):
        sums_read(large, reply, layout, scale, 1, HERE)


def test_the_self_test_passes_and_finds_a_broken_key(key):
    self_test(key)
    with pytest.raises((ValueError, RuntimeError), match="must"):
        self_test(PrivateKey(key.p, key.q * 3))


def fail(value):
    raise ValueError(f"value must be 0, got {value}")


def _slow_pid(seconds):
    time.sleep(seconds)
    return os.getpid()


def _end_if_not(process_id):
    if os.getpid() != process_id:
        os._exit(3)
    time.sleep(0.05)


@pytest.mark.slow
def test_workers_share_the_work_raise_errors_here_and_are_replaced_when_they_die():
    with closing(Workers(2)) as workers:
        assert workers.run(pow, [(2, power) for power in range(50)]) == [2**n for n in range(50)]
        assert workers.run(pow, []) == []
        assert any(len(set(workers.run(_slow_pid, [(0.05,)] * 10))) == 2 for _ in range(60))
        with pytest.raises(ValueError, match="value must be 0, got 1"):
            workers.run(fail, [(1,)] * 5)
        (other,) = workers._others
        with pytest.raises(RuntimeError, match="worker must stay alive, got exit status"):
            workers.run(_end_if_not, [(os.getpid(),)] * 4)
        assert not other.alive
        # The one in its place may take a while to start.
        assert any(len(set(workers.run(_slow_pid, [(0.05,)] * 10))) == 2 for _ in range(60))
        process = workers._others[0]._process
    assert process.returncode == 0


def test_workers_are_shared():
    assert shared_workers() is shared_workers()
