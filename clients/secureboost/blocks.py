"""A round's encrypted gradients at a passive party, checked and stored block by block.

Each block is a file of the site's state, so no array holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fedapp.crypto.paillier import check_ciphertexts
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import EncryptedGradients, MoreGradients
from fedapp.site.store import Store

BLOCKS, ENDS, WANTED = "ciphertexts", "block_ends", "n_ciphertexts"  # in a store and its facts


def begin_blocks(store: Store, n_wanted: int) -> None:
    """Expect ``n_wanted`` ciphertexts, and drop those of the round before."""
    store.drop(BLOCKS)
    store.facts[ENDS], store.facts[WANTED] = [0], n_wanted


def keep_block(store: Store, key: Key, letter: EncryptedGradients | MoreGradients) -> None:
    """Check a block and store it."""
    active, kind = store.facts["active"], type(letter).__name__
    ends, wanted = store.facts[ENDS], store.facts[WANTED]
    n_left = wanted - ends[-1]
    if len(letter.ciphertexts) > n_left:
        rule = f"must be {n_left} at most, of {wanted}, got {len(letter.ciphertexts)}"
        raise ProtocolError(active, kind, "ciphertexts", rule)
    with as_protocol_error(active, kind, "ciphertexts"):
        check_ciphertexts(key, letter.ciphertexts)
    store[f"{BLOCKS}.{len(ends) - 1}"] = letter.ciphertexts
    store.facts[ENDS] = [*ends, ends[-1] + len(letter.ciphertexts)]


def check_whole(store: Store) -> None:
    """Check that all blocks have come."""
    n_received, wanted = store.facts[ENDS][-1], store.facts[WANTED]
    if n_received != wanted:
        rule = f"must be {wanted}, got {n_received}"
        raise ProtocolError(store.facts["active"], "EncryptedGradients", "ciphertexts", rule)


def blocks_of(store: Store, first: int, last: int) -> Iterator[Array]:
    """Ciphertexts ``first`` to ``last`` of the round, block by block."""
    for number, (start, end) in enumerate(pairwise(store.facts[ENDS])):
        low, high = max(first, start), min(last, end)
        if low < high:
            yield store[f"{BLOCKS}.{number}"][low - start : high - start]
