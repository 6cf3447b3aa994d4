"""What a dishonest party sends, and that the run ends by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from fedapp.config import Settings
from fedapp.errors import FedappError
from fedapp.site.answer import Site
from fedapp.site.mail import write_mail
from tests.network import run


def refuses(
    match: str, settings: Settings, contexts: Iterable[Context] | None = None, **how: Any
) -> None:
    """Hold that a run ends with this error, and without a model."""
    with pytest.raises(FedappError, match=match):
        run(settings, contexts, **how)
    assert not (Path(settings.run_dir) / "model.json").exists()


def rewrite_letters(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    letter: str,
    field: str,
    change: Callable[[Any], Any],
) -> None:
    """Have the parties change a field of their letters of one class before these are sealed."""

    def changed(site: Site, letters: Any) -> dict[str, Any]:
        told = (
            replace(each, **{field: change(getattr(each, field))})
            if type(each).__name__ == letter
            else each
            for _, each in letters
        )
        return write_mail(site, zip((name for name, _ in letters), told, strict=True))

    monkeypatch.setattr(f"{module}.write_mail", changed)


def set_last_bit(packed: Any) -> Any:
    """Bits with the last one set, which stands for no row unless their number is whole bytes."""
    changed = packed.copy()
    changed[-1] |= 1
    return changed


def first_row(value: int) -> Callable[[Any], Any]:
    """Overwrites the first ciphertext, byte by byte."""

    def change(rows: Any) -> Any:
        changed = rows.copy()
        changed[0] = value
        return changed

    return change


FALSE: dict[
    str, tuple[Callable[[Any], Any], str]
] = {  # how ciphertexts change; the rule they break
    "zero": (first_row(0), r"must be > 0 and < n\^2, got 1 that are not"),
    "too large": (first_row(255), r"must be > 0 and < n\^2, got 1 that are not"),
    "truncated": (lambda rows: rows[:, :-1].copy(), "must be uint8 of shape"),
    "one too few": (lambda rows: rows[:-1].copy(), r"must be \d+"),
    "one too many": (lambda rows: np.concatenate((rows, rows[:1])), r"must be \d+"),
    "none": (lambda rows: rows[:0].copy(), r"must be \d+"),
}
