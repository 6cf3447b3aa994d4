"""What a dishonest party sends, and that the run ends by its name."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedapp.errors import FedappError
from fedapp.messages.wire import from_bytes, to_bytes, with_parcels
from fedapp.site.mail import write_letters
from strategies.flower import FlowerStrategy
from tests.network import run


def refuses(match, settings, contexts=None, **how):
    """Hold that a run ends with this error, and without a model."""
    with pytest.raises(FedappError) as caught:
        run(settings, contexts, **how)
    text = str(caught.value).removesuffix(f"; {caught.value.way_on}")
    assert re.search(match, text), text
    assert not (Path(settings.run_dir) / "model.json").exists()


def rewrite_letters(monkeypatch, letter, field, change):
    """Have the parties change a field of their letters of one class before these are sealed."""

    def of_class(each):
        is_it = type(each).__name__ == letter
        return replace(each, **{field: change(getattr(each, field))}) if is_it else each

    def changed(sender, letters):
        return [(receiver, of_class(each)) for receiver, each in letters]

    rewrite_all_letters(monkeypatch, changed)


def rewrite_all_letters(monkeypatch, change):
    """Have the parties send others than the handlers wrote; ``change`` gets sender and letters."""
    monkeypatch.setattr(
        "fedapp.site.answer.write_letters",
        lambda name, letters: write_letters(name, change(name, letters)),
    )


def keep_letters_back(monkeypatch, request, receiver, first=0):
    """Have the server carry nothing to a party by requests of this class.

    Parameters
    ----------
    first : number of requests that still bring what they should.
    """
    honest, n_seen = FlowerStrategy._laid_out, itertools.count()

    def laid_out(self, party, sent, known):
        found = honest(self, party, sent, known)
        if isinstance(sent, request) and party == receiver and next(n_seen) >= first:
            return to_bytes(with_parcels(from_bytes(found, party), []))
        return found

    monkeypatch.setattr(FlowerStrategy, "_laid_out", laid_out)


def set_last_bit(packed):
    """Bits with the last one set, which stands for no row unless their number is whole bytes."""
    changed = packed.copy()
    changed[-1] |= 1
    return changed


def first_row(value):
    """Overwrites the first ciphertext, byte by byte."""

    def change(rows):
        changed = rows.copy()
        changed[0] = value
        return changed

    return change


FALSE = {  # how ciphertexts change; the rule they break
    "zero": (first_row(0), r"must be > 0 and < n\^2, got 1 that are not"),
    "too large": (first_row(255), r"must be > 0 and < n\^2, got 1 that are not"),
    "truncated": (lambda rows: rows[:, :-1].copy(), "must be uint8 of shape"),
    "one too few": (lambda rows: rows[:-1].copy(), r"must be \d+"),
    "one too many": (lambda rows: np.concatenate((rows, rows[:1])), r"must be \d+"),
    "none": (lambda rows: rows[:0].copy(), r"must be \d+"),
}
