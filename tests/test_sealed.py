"""A parcel opens for its receiver, at its address, unchanged; and in no other case."""

from __future__ import annotations

import hmac
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedapp.crypto.sealed import (
    LARGEST_STEP,
    Address,
    fingerprint_of,
    new_private_key,
    public_key,
    seal,
    unseal,
)

ADDRESS = Address("0123456789abcdef", "bank", "shop", 3)
BANK, SHOP, OTHER = new_private_key(), new_private_key(), new_private_key()
# Points of order 1, 2, 4 and 8, and p, which is another way to write 0.
LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
]


def sealed(content: bytes = b"margins", address: Address = ADDRESS) -> bytes:
    """What the bank sends the shop."""
    return seal(BANK, public_key(SHOP), address, content)


def refused(private: bytes, peer: bytes, address: Address, parcel: bytes) -> bool:
    """Whether a parcel does not open, with the one message there is."""
    rule = "must be sealed for this address by its sender, got"
    message = f"^parcel {rule} {len(parcel)} bytes that are not$"
    with pytest.raises(ValueError, match=message):
        unseal(private, peer, address, parcel)
    return True


@pytest.mark.parametrize("content", [b"", b"margins", 10_000_000 * b"m"], ids=len)
def test_a_parcel_opens_for_its_receiver(content: bytes) -> None:
    parcel = sealed(content)
    assert len(parcel) == len(content) + 28
    assert unseal(SHOP, public_key(BANK), ADDRESS, parcel) == content


def test_every_flipped_bit_is_refused() -> None:
    parcel = sealed()
    for bit in range(8 * len(parcel)):
        flipped = bytearray(parcel)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refused(SHOP, public_key(BANK), ADDRESS, bytes(flipped))


@pytest.mark.parametrize("size", [0, 11, 12, 27, 34])
def test_a_parcel_cut_short_is_refused(size: int) -> None:
    assert refused(SHOP, public_key(BANK), ADDRESS, sealed()[:size])


def test_a_parcel_with_more_behind_it_is_refused() -> None:
    assert refused(SHOP, public_key(BANK), ADDRESS, sealed() + b"\0")


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "0123456789abcdee"},
        {"sender": "bank2"},
        {"receiver": "shop2"},
        {"sender": "ban", "receiver": "kshop"},
        {"sender": "shop", "receiver": "bank"},
        {"step": 4},
    ],
    ids=str,
)
def test_another_address_is_refused(change: dict[str, str | int]) -> None:
    assert refused(SHOP, public_key(BANK), replace(ADDRESS, **change), sealed())


def test_model_ids_that_hmac_takes_for_the_same_key_are_told_apart() -> None:
    parcel = sealed(address=replace(ADDRESS, model_id="a"))
    assert refused(SHOP, public_key(BANK), replace(ADDRESS, model_id="a\0"), parcel)


def test_a_parcel_does_not_open_for_a_third_party() -> None:
    assert refused(OTHER, public_key(BANK), ADDRESS, sealed())


def test_a_parcel_of_a_third_party_is_refused() -> None:
    forged = seal(OTHER, public_key(SHOP), ADDRESS, b"margins")
    assert refused(SHOP, public_key(BANK), ADDRESS, forged)


def test_a_parcel_sent_back_to_its_sender_is_refused() -> None:
    there = sealed()
    back = replace(ADDRESS, sender="shop", receiver="bank")
    assert refused(BANK, public_key(SHOP), back, there)
    assert refused(BANK, public_key(SHOP), ADDRESS, there)


def test_two_seals_of_the_same_content_differ() -> None:
    first, second = sealed(), sealed()
    assert first[:12] != second[:12]
    assert first[12:] != second[12:]


@pytest.mark.parametrize("peer", LOW_ORDER, ids=bytes.hex)
def test_a_key_of_low_order_is_refused(peer: bytes) -> None:
    with pytest.raises(ValueError, match=r"^peer_public must be of full order, got one of low"):
        seal(BANK, peer, ADDRESS, b"margins")
    assert refused(SHOP, peer, ADDRESS, sealed())


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_of_another_length_are_refused(size: int) -> None:
    short = bytes(size)
    with pytest.raises(ValueError, match=f"^private must be 32 bytes, got {size}$"):
        public_key(short)
    with pytest.raises(ValueError, match=f"^private must be 32 bytes, got {size}$"):
        unseal(short, public_key(BANK), ADDRESS, sealed())
    with pytest.raises(ValueError, match=f"^peer_public must be 32 bytes, got {size}$"):
        seal(BANK, short, ADDRESS, b"margins")
    with pytest.raises(ValueError, match=f"^public must be 32 bytes, got {size}$"):
        fingerprint_of(short)
    assert refused(SHOP, short, ADDRESS, sealed())


@pytest.mark.parametrize("step", [-1, LARGEST_STEP + 1])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"^step must be 0 to 18446744073709551615, got {step}$"):
        replace(ADDRESS, step=step)


def test_keys_are_32_bytes_and_differ() -> None:
    assert len(BANK) == len(public_key(BANK)) == 32
    assert len({BANK, SHOP, OTHER}) == 3


def test_a_fingerprint_is_the_hash_of_the_key_in_groups_of_four() -> None:
    # SHA-256 of 32 zero bytes.
    assert fingerprint_of(bytes(32)) == "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"


def test_a_parcel_is_what_its_docstring_says() -> None:
    def prefixed(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    shared = X25519PrivateKey.from_private_bytes(SHOP).exchange(
        X25519PublicKey.from_public_bytes(public_key(BANK))
    )
    info = prefixed(b"bank", b"shop", public_key(BANK), public_key(SHOP))
    # RFC 5869: extract, then one block of expand.
    secret = hmac.digest(b"0123456789abcdef", shared, "sha256")
    key = hmac.digest(secret, b"fedapp parcel v1" + info + b"\1", "sha256")
    bound = (3).to_bytes(8, "little") + prefixed(b"0123456789abcdef", b"bank", b"shop")
    parcel = sealed()
    assert ChaCha20Poly1305(key).decrypt(parcel[:12], parcel[12:], bound) == b"margins"
