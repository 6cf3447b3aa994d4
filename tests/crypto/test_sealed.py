"""A parcel opens for its receiver, at its address, unchanged; and in no other case."""

import hashlib
import hmac
from dataclasses import replace
from itertools import product

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedapp.crypto.sealed import (
    Address,
    Keys,
    agree,
    fingerprint_of,
    new_private_key,
    public_key,
    seal,
    unseal,
)

ADDRESS = Address("bank", "shop", 3, 1, 2)
OPENING = b"names, keys and settings"
BANK, SHOP, OTHER = (Keys(new_private_key(), new_private_key()) for _ in range(3))


def public(private):
    return Keys(public_key(private.static), public_key(private.run))


SECRET = agree(BANK, public(SHOP), OPENING)
# Points of order 1, 2, 4 and 8, and p, which is another way to write 0.
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
]


def sealed(content=b"margins", address=ADDRESS):
    """What the bank sends the shop."""
    return seal(SECRET, address, content)


def refused(secret, address, parcel):
    """Whether a parcel does not open, with the one message there is."""
    rule = "must be sealed for this address by its sender, got"
    message = f"^parcel {rule} {len(parcel)} bytes that are not$"
    with pytest.raises(ValueError, match=message):
        unseal(secret, address, parcel)
    return True


def secrets_of(pairs):
    return {agree(one, public(peer), OPENING) for one, peer in pairs}


# Secrets


def test_a_secret_is_of_all_keys_of_one_side_and_of_what_both_were_told():
    assert agree(BANK, public(SHOP), OPENING) == agree(SHOP, public(BANK), OPENING) == SECRET
    assert agree(SHOP, public(BANK), OPENING + b".") != SECRET
    for name in ("static", "run"):
        assert agree(replace(BANK, **{name: getattr(OTHER, name)}), public(SHOP), OPENING) != SECRET


def test_one_key_of_each_side_is_not_enough():
    """Whoever has one private key of each puts keys of his own in the place of the others."""
    for stolen in product(("static", "run"), repeat=2):
        bank, shop = (
            replace(OTHER, **{name: getattr(keys, name)})
            for keys, name in zip((BANK, SHOP), stolen, strict=True)
        )
        assert SECRET not in secrets_of([(bank, SHOP), (shop, BANK), (bank, shop), (shop, bank)])


def test_the_long_lived_keys_of_both_open_nothing_once_those_of_the_run_are_gone():
    bank, shop = Keys(BANK.static, new_private_key()), Keys(SHOP.static, new_private_key())
    for guess in secrets_of([(bank, SHOP), (shop, BANK), (bank, shop)]):
        assert refused(guess, ADDRESS, sealed())


def test_keys_are_32_bytes_that_differ_and_private_ones_are_in_no_repr():
    assert repr(BANK) == "Keys()"
    assert len(BANK.static) == len(public(BANK).static) == 32
    assert len({key for one in (BANK, SHOP, OTHER) for key in (one.static, one.run)}) == 6
    # SHA-256 of 32 zero bytes, in groups of four.
    assert fingerprint_of(bytes(32)) == "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"


@pytest.mark.parametrize("name", ["static", "run"])
def test_keys_of_low_order_or_another_length_are_refused(name):
    for peer in LOW_ORDER:
        with pytest.raises(ValueError, match=r"^public must be of full order, got one of low ord"):
            agree(BANK, replace(public(SHOP), **{name: peer}), OPENING)
    for size in (0, 31, 33):
        short = {name: bytes(size)}
        for kind, call in (
            ("private", lambda key: public_key(key[name])),
            ("private", lambda key: agree(replace(BANK, **key), public(SHOP), OPENING)),
            ("public", lambda key: agree(BANK, replace(public(SHOP), **key), OPENING)),
            ("public", lambda key: fingerprint_of(key[name])),
        ):
            with pytest.raises(ValueError, match=f"^{kind} must be 32 bytes, got {size}$"):
                call(short)


# Parcels


def test_a_parcel_opens_for_its_receiver():
    for content in (b"", 10_000 * b"m"):
        parcel = sealed(content)
        assert len(parcel) == len(content) + 28
        assert unseal(SECRET, ADDRESS, parcel) == content


def test_a_parcel_that_was_changed_or_is_of_a_third_party_is_refused():
    parcel = sealed()
    for bit in range(8 * len(parcel)):
        flipped = bytearray(parcel)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refused(SECRET, ADDRESS, bytes(flipped))
    for size in (0, 11, 12, 27, 34):
        assert refused(SECRET, ADDRESS, parcel[:size])
    assert refused(SECRET, ADDRESS, parcel + b"\0")
    assert refused(agree(OTHER, public(BANK), OPENING), ADDRESS, parcel)
    forged = seal(agree(OTHER, public(SHOP), OPENING), ADDRESS, b"margins")
    assert refused(SECRET, ADDRESS, forged)


def test_another_address_is_refused():
    for change in (
        {"sender": "bank2"},
        {"receiver": "shop2"},
        {"sender": "ban", "receiver": "kshop"},
        {"sender": "shop", "receiver": "bank"},
        {"step": 4},
        {"attempt": 0},
        {"since": 1},
        {"step": 1, "attempt": 3},
        {"last": True},
    ):
        assert refused(SECRET, replace(ADDRESS, **change), sealed()), change


def test_a_nonce_comes_again_only_with_the_same_content(monkeypatch):
    """A machine that was put back to an earlier state draws the same randomness again."""
    first, second = sealed(), sealed()
    assert first[:12] != second[:12]
    assert first[12:] != second[12:]
    monkeypatch.setattr("secrets.token_bytes", bytes)
    first, again, other = sealed(), sealed(), sealed(b"margin2")
    assert first == again
    assert first[:12] != other[:12]


def test_a_parcel_is_what_its_docstring_says():
    def prefixed(*parts):
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    def product(private, peer):
        public = X25519PublicKey.from_public_bytes(public_key(peer))
        return X25519PrivateKey.from_private_bytes(private).exchange(public)

    def hkdf(salt, secret, info):
        """RFC 5869: extract, then one block of expand."""
        return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\1", "sha256")

    a, b = sorted((BANK, SHOP), key=lambda keys: public_key(keys.static))
    pairs = [(a.run, b.run), (a.static, b.run), (a.run, b.static), (a.static, b.static)]
    products = b"".join(product(one, other) for one, other in pairs)
    secret = hkdf(hashlib.sha256(OPENING).digest(), products, b"fedapp parcel v2")
    info = prefixed(b"fedapp parcel v2", b"bank", b"shop", b"3", b"1", b"2", b"False")
    key = hmac.digest(secret, info + b"\1", "sha256")
    parcel = sealed()
    assert ChaCha20Poly1305(key).decrypt(parcel[:12], parcel[12:], None) == b"margins"
