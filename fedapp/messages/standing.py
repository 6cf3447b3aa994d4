"""Activate a divided model: agree on rows and addresses once, so that the sites can score alone.

A run matches the ids of all parties (``fedapp.messages.vertical``). Then the parties tell each
other, in sealed letters, where their standing processes answer, and by which certificates; and they
number the common rows in an order that no coordinator can compute, which gives each row a
pseudonym. Once all have stored that, they switch. Afterwards the sites talk to each other directly,
over TLS with both certificates pinned; the server takes no part (``fedapp.serve``).

Reveals, in short:

- After this run the sites score by themselves, until the version ends or a site takes standing out
  of ``allow``; then cells sent ahead are deleted.
- The label holder then learns, of each row that it asks about, which way it goes at all splits of a
  passive party that its splits above leave open.
- It may ask about any common row, as often as ``standing-rows-per-second`` and
  ``standing-rows-per-day`` allow.
- A passive party learns which rows are asked about, when, and for what stated purpose; no score.
- The server takes no part; in this run it learns sizes of letters.

In full: by the run, what the alignment reveals, and:

- The server learns when a version is activated, refreshed or ended, its name, and sizes of letters;
  and which parties the active party's process does not reach then.
- A party learns where the others answer, and their certificates; which of its rows all have, even
  if it is a passive one; and of a refresh how many rows are new.
- Whoever knows all ids cannot compute the pseudonyms without a letter: every party adds 32 random
  bytes to the key of their order.

By the standing processes, which answer until the version is ended or the site withdraws:

- The server learns nothing.
- A passive party learns which of the common rows are asked about, by whose certificate, when, and
  for what stated purpose. It learns no score. Nothing shows whether the purpose is the true one.
- The active party learns of each row asked about what ``one-round`` prediction shows: which way it
  goes at every split of a passive party that the party's splits above leave open to the row. With
  10 trees of depth 4 these are 42 % of all sides of HIGGS and 71 % of those of default-credit. An
  active party that breaks the rules learns no more, but can ask about any common row, as often as
  the limits of the site allow: ``standing-rows-per-second``, ``standing-rows-per-day``.
- From refusals the active party learns the limits of a site, and how many of the rows asked about
  have left its table. Nobody else is answered, also not other passive parties.
- With nightly vectors the active party learns the same of all rows that it names, or of all, at
  once; the passive party then does not learn which of them are scored.
- If a site takes ``standing`` out of ``allow``, the active party's process deletes the cells that
  the site has sent ahead, unless it breaks the rules.
- A passive party that breaks the rules chooses the leaf of a row among those that others' splits
  leave open. Cells that contradict each other are refused, others are not detected.
- Whoever watches the network sees when the sites talk, and how much.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages.fields import Array, Form, Letter, Range, Reply, Request, message, request
from fedapp.messages.methods import Method

Name = Annotated[str, Range(0, 64)]


@request("evaluate.standing_prepare", "exchanging addresses")
class PrepareRequest(Request, letters=True):
    """Check the order of the rows; tell the other parties where this one answers."""


@message
class PrepareReply(Reply, letters=True):
    """Addresses for the other parties."""


@request("evaluate.standing_store", "storing the version")
class StoreRequest(Request, letters=True):
    """Check the addresses, number the rows and store the version, without using it."""

    service: Name  # by which callers know it


@message
class StoreReply(Reply):
    """The version is stored."""

    n_rows: Annotated[int, Range(1, 2**40)]


@request("evaluate.standing_switch", "switching")
class SwitchRequest(Request):
    """Answer by the stored version from now on; without one, by none."""


@message
class SwitchReply(Reply):
    """The version answers; the one before does so only for requests that name it."""

    before: Name  # id of the version before; or empty
    # Of the active party: which parties do not answer its process yet, or itself, without one.
    unreached: Annotated[tuple[str, ...], Range(0, 1000)]


@message
class Address(Letter):
    """To every other party: where the sender's standing process answers."""

    address: Annotated[str, Range(3, 300)]  # HOST:PORT
    certificate: Annotated[Array, Form("uint8", "n_bytes")]  # PEM
    part: Annotated[Array, Form("uint8", 32)]  # digest of the party's part of the model
    drawn: Annotated[Array, Form("uint8", 32)]  # the sender's share of the key of the order
    refreshed: Name  # id of the version whose rows stay as they are; or empty
    current: Name  # id of the version that the sender answers by; or empty


GROUPS = {
    "standing": Method(
        "inference",
        {"": "sizes"},
        memory=None,
        stands=True,
        title="Sites score rows among themselves, in milliseconds, by what they agree on once",
    ),
}
