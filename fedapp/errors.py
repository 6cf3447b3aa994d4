"""Every error fedapp raises on purpose.

FedappError
├── ConfigError      a setting breaks its rule
│   └── DivergedError  gradients or leaf weights have left float32
├── DataError        a table breaks a rule; names the site if known
├── ProtocolError    a message breaks its type; names party, message and field
├── PartyError       a party failed or did not answer; names party and step
├── WaitingError     a run waits for a person at a site
├── StoppedError     a callback stopped a run, which can be resumed
├── MachineError     this machine computes something else than a reference library
└── RunFailedError   a run in Flower's runtime failed; has the last lines of its log

The text of an error may be sent to the coordinator, so it never contains a label, a row or a site's
path. ``for_others`` removes what only the table's owner may see of a ``DataError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WITHHELD = "[withheld]"
LONGEST = 300  # characters of a text


def as_plain(text: str, longest: int = LONGEST) -> str:
    """A printable text of limited length, for terminals."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def in_words(error: OSError) -> str:
    """The system's message about a file, without the error number."""
    if not error.strerror:
        return str(error)
    what = f"'{error.filename}' must be a path that can be used as asked, got: "
    return f"{what if error.filename else ''}{error.strerror.lower()}"


class FedappError(Exception):
    """Base class: catch this only at the outermost level of a program."""


class ConfigError(FedappError):
    """A setting breaks its rule: ``eta must be > 0, got -1.0``."""


class DivergedError(ConfigError):
    """Training diverges: gradients or leaf weights have left float32."""


class DataError(FedappError):
    """A table breaks a rule: ``bank: label column 'y' must be in the table, got columns a, b``.

    Parameters
    ----------
    rule : the rule and the actual value.
    site : name of the party whose table it is; empty if there is only one table.
    outside : the rule for other parties, without names of columns; empty: the same.
    here : the rule for the site only, with a value of the table and its place; empty: the same.
    """

    def __init__(self, rule: str, site: str = "", outside: str = "", here: str = "") -> None:
        self.rule, self.site = rule, site
        self.outside, self.here = outside or rule, here or rule
        super().__init__(f"{site}: {self.here}" if site else self.here)

    @classmethod
    def naming(cls, rule: str, *columns: str, here: str = "") -> DataError:
        """About columns, whose names fill the ``{}`` of a rule and may be withheld from others."""
        outside = rule.format(*[WITHHELD] * len(columns))
        return cls(rule.format(*columns), outside=outside, here=here)

    def at(self, site: str) -> DataError:
        """The same error with the name of its site."""
        return DataError(self.rule, site, self.outside, self.here)

    def for_others(self, shares_names: bool) -> DataError:
        """The error as it may leave its site: no values, and column names only if shared."""
        text = self.rule if shares_names else self.outside
        hint = "" if text == self.here else "; the site's own log says more"
        return DataError(text + hint, self.site)


class ProtocolError(FedappError):
    """A message does not have the form its class declares."""

    def __init__(self, party: str, message: str, field: str, rule: str) -> None:
        super().__init__(f"{party}: {message}.{field} {rule}")
        self.party, self.message, self.field, self.rule = party, message, field, rule


@contextmanager
def blaming(party: str, message: str, field: str) -> Iterator[None]:
    """Turn a ValueError about a field of a party's message into a ``ProtocolError``."""
    try:
        yield
    except ValueError as error:
        raise ProtocolError(party, message, field, str(error).removeprefix(f"{field} ")) from error


class PartyError(FedappError):
    """A party failed, did not answer in time, or ``refused`` by a rule that the reason names."""

    def __init__(self, party: str, step: int, reason: str, refused: bool = False) -> None:
        super().__init__(f"{party} (step {step}): {reason}")
        self.party, self.step, self.reason, self.refused = party, step, reason, refused


class WaitingError(FedappError):
    """A run may start only after a person at a site has approved it."""


class StoppedError(FedappError):
    """A callback stopped a run; the text says how to resume."""


class MachineError(FedappError):
    """This machine's results differ from a library's; args: which results, which library."""

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
