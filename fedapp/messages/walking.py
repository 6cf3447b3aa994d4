"""Letters for rows that traverse trees whose splits are at several parties.

Reveals: a passive party learns which of the rows reach which of its splits, and the active party
which of these rows go left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedapp.messages.fields import Array, Form, Letter


@dataclass(frozen=True, slots=True, eq=False)
class Questions(Letter):
    """Active to passive: which rows are at which of its splits."""

    records: Annotated[Array, Form("int64", "n_questions", low=0)]
    sizes: Annotated[Array, Form("int64", "n_questions", low=1)]  # rows of each
    rows: Annotated[Array, Form("int32", "n_asked", low=0)]  # questions in turn


@dataclass(frozen=True, slots=True, eq=False)
class Answers(Letter):
    """Passive to active: a bit a row of the questions, 1 for left."""

    part: Annotated[Array, Form("uint8", 32)]  # digest of the party's part of the model
    bits: Annotated[Array, Form("uint8", "n_bit_bytes")]
