"""The Paillier key of a run or of an inference, which the active party draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedapp.crypto.keys import PrivateKey, PublicKey, generate_key
from fedapp.crypto.sums import self_test
from fedapp.errors import ConfigError
from fedapp.site.answer import Site


class KeyOrder(Protocol):
    """A request that says how large a key it wants."""

    @property
    def key_bits(self) -> int: ...
    @property
    def insecure_small_key(self) -> bool: ...


def draw_key(
    site: Site, request: KeyOrder, section: str, fits: Callable[[PublicKey], object]
) -> PrivateKey:
    """A key, tried out, that holds what is to be encrypted.

    Parameters
    ----------
    section : of the run config, for errors.
    fits : raises a ValueError where the key is too small.

    Raises
    ------
    ConfigError : it is too small, or there is no such key.
    """
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
