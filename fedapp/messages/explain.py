"""Explain predictions of some rows; every party writes what it may see to its disk only.

Reveals: which rows are to be explained, and nothing else.

- The server learns the ids of the rows, because the run's settings name them, and nothing else: a
  party gives the same answer whether it has such rows or not.
- A party learns which of the rows are to be explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Range, Reply, Request

GROUPS = {"explain": frozenset({"inference"})}

MOST_ROWS = 100


@dataclass(frozen=True, slots=True)
class ExplainRequest(Request):
    """Explain these rows as far as this party may see them."""

    kind: ClassVar[str] = "evaluate.explain_rows"
    doing: ClassVar[str] = "explaining rows"
    rows: Annotated[tuple[str, ...], Range(1, MOST_ROWS)]  # ids


@dataclass(frozen=True, slots=True)
class ExplainReply(Reply):
    """Confirms the request."""

    done: bool
