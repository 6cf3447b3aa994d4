"""Every error fedapp raises on purpose.

FedappError
├── ConfigError      a setting breaks its rule
│   └── DivergedError  gradients or leaf weights have left float32
├── DataError        a table breaks a rule; names the site once it is known
├── ProtocolError    a message breaks its type; names party, message and field
├── PartyError       a party failed or did not answer; names party and step
├── WaitingError     a run waits for a person at a site
├── StoppedError     a callback stopped a run, which can be resumed
├── MachineError     this machine computes something else than a well-kept library does
└── RunFailedError   a run in Flower's runtime failed; holds the last lines of its log

The text of an error may travel to the coordinator, so it never holds a label, a row or a site's
path. What a ``DataError`` says to the table's owner alone is removed by ``for_others``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WITHHELD = "[withheld]"
LONGEST = 300  # letters of what is told in words


def as_plain(text: str, longest: int = LONGEST) -> str:
    """A text as a terminal can show it: printable, and not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def in_words(error: OSError) -> str:
    """What the system says of a file, without its number."""
    if not error.strerror:
        return str(error)
    what = f"'{error.filename}' must be a path that can be used as asked, got: "
    return f"{what if error.filename else ''}{error.strerror.lower()}"


class FedappError(Exception):
    """Root of the tree: catch this at the edge of a program, and nowhere else."""


class ConfigError(FedappError):
    """A setting breaks its rule: ``eta must be > 0, got -1.0``."""


class DivergedError(ConfigError):
    """Training diverges: gradients or leaf weights have left float32."""


class DataError(FedappError):
    """A table breaks a rule: ``bank: label column 'y' must be in the table, got columns a, b``.

    Parameters
    ----------
    rule : what must hold, and what was found.
    site : name of the party whose table it is; empty where only one table is in play.
    outside : the rule for others than the site, without names of its columns; empty: the same.
    here : the rule for the site alone, with a value of the table and its place; empty: the same.
    """

    def __init__(self, rule: str, site: str = "", outside: str = "", here: str = "") -> None:
        told = here or rule
        super().__init__(f"{site}: {told}" if site else told)
        self.rule = rule
        self.site = site
        self.outside = outside or rule
        self.here = told

    @classmethod
    def naming(cls, rule: str, *columns: str, here: str = "") -> DataError:
        """Of columns, whose names fill the ``{}`` of a rule and stay at the site if it likes."""
        outside = rule.format(*[WITHHELD] * len(columns))
        return cls(rule.format(*columns), outside=outside, here=here)

    def at(self, site: str) -> DataError:
        """The same error with the name of its site."""
        return DataError(self.rule, site, self.outside, self.here)

    def for_others(self, shares_names: bool) -> DataError:
        """The same error as it may leave its site: without values, and names only if it likes.

        Parameters
        ----------
        shares_names : whether others may learn the names of the site's columns.
        """
        told = self.rule if shares_names else self.outside
        hint = "" if told == self.here else "; the site's own log says more"
        return DataError(told + hint, self.site)


class ProtocolError(FedappError):
    """A message does not have the form its class declares."""

    def __init__(self, party: str, message: str, field: str, rule: str) -> None:
        super().__init__(f"{party}: {message}.{field} {rule}")
        self.party, self.message, self.field, self.rule = party, message, field, rule


@contextmanager
def blaming(party: str, message: str, field: str) -> Iterator[None]:
    """Where a field of a party's message is read: a ValueError becomes its ``ProtocolError``."""
    try:
        yield
    except ValueError as error:
        raise ProtocolError(party, message, field, str(error).removeprefix(f"{field} ")) from error


class PartyError(FedappError):
    """A party failed, or did not answer in time.

    Parameters
    ----------
    refused : whether it refused what was asked, by a rule that the reason names.
    """

    def __init__(self, party: str, step: int, reason: str, refused: bool = False) -> None:
        super().__init__(f"{party} (step {step}): {reason}")
        self.party, self.step, self.reason, self.refused = party, step, reason, refused


class WaitingError(FedappError):
    """A run may begin only after a person at a site has approved it."""


class StoppedError(FedappError):
    """A callback stopped a run; says where it goes on."""


class MachineError(FedappError):
    """What this machine computed is not what a library computes; of which results, and whose."""

    def __str__(self) -> str:
        return (
            "{} must be those of {}, got others: this machine's processor or memory is faulty, or "
            "its AVX-512 code, which NUMBA_ENABLE_AVX=0 in its environment switches off"
        ).format(*self.args)


class RunFailedError(FedappError):
    """A run in Flower's runtime failed."""

    def __init__(self, cause: str, log_lines: list[str]) -> None:
        super().__init__(cause)
        self.log_lines = log_lines
