"""The Paillier key of a run or an inference, drawn by the active party."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedapp.crypto.paillier import PrivateKey, PublicKey, generate_key
from fedapp.crypto.sums import self_test
from fedapp.errors import ConfigError
from fedapp.site.answer import Site


class KeyOrder(Protocol):
    """A request that sets the key's size."""

    @property
    def key_bits(self) -> int: ...
    @property
    def insecure_small_key(self) -> bool: ...


def draw_key(
    site: Site, request: KeyOrder, section: str, fits: Callable[[PublicKey], object]
) -> PrivateKey:
    """Draw a key and test it; ``fits`` raises a ValueError if it is too small."""
    try:
        key = generate_key(
            request.key_bits,
            insecure_small_key=request.insecure_small_key,
            full_masks=site.config.full_masks,
        )
        fits(key.public)
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from error
    self_test(key)
    return key
