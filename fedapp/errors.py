"""Every error fedapp raises on purpose.

FedappError
├── ConfigError      a setting breaks its rule
│   ├── DivergedError  gradients or leaf weights have left float32
│   └── ClusterError   a Ray cluster is not as it must be
├── DataError        a table breaks a rule; names the site if known
├── ProtocolError    a message breaks its type; names party, message and field
├── PartyError       a party failed or did not answer; names party and step
├── WaitingError     a run waits for a person at a site
├── StoppedError     a callback stopped a run, which can be resumed
├── MachineError     this machine computes something else than a reference library
└── RunFailedError   a run in Flower's runtime failed; has the last lines of its log

The text of an error may be sent to the coordinator, so it never contains a label or a row, and
``without_folders`` shortens its paths where it leaves a site. ``for_others`` removes what only the
table's owner may see of a ``DataError``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WITHHELD = "[withheld]"
LONGEST = 400  # characters of a text
# Control characters, those that end a line or turn the direction of writing, and lone surrogates.
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

# The folders of a path from the root or a home folder: in quotes, and of one without blanks.
FOLDERS = re.compile(r"(?<=')~?/(?:[^'/]*/)*(?=[^'/]*')|(?<![\w/.'~])~?/(?:[^\s'\"/,;]+/)+")


def as_plain(text: str, longest: int = LONGEST) -> str:
    """A printable text of limited length, for terminals."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def without_passwords(text: str) -> str:
    """Remove user names and passwords from the addresses in a text, which may be in brackets."""
    return re.sub(r"(\(|//)[^\s/@]*@", r"\1", text)


def without_folders(text: str, paths: Iterable[str] = ()) -> str:
    """Shorten paths to the names of their files, in a text that leaves this machine.

    ``paths`` are those that the text may have, as typed or as ``Path`` spells them; others are
    found if they are absolute.
    """
    spelled = {form for path in paths for form in (path, str(Path(path)))}
    for path in sorted(spelled, key=len, reverse=True):
        if name := Path(path).name:
            text = text.replace(path, name)
    return FOLDERS.sub("", text)


def in_words(error: OSError) -> str:
    """The system's message about a file, without the error number."""
    if not error.strerror:
        return str(error)
    what = f"'{error.filename}' must be a path that can be used as asked, got: "
    return f"{what if error.filename else ''}{error.strerror.lower()}"


NEW_RUN = "begin a new run"  # the way out where the run cannot be resumed


class FedappError(Exception):
    """Base class: catch this only at the outermost level of a program.

    ``way_on`` is how the run that failed is resumed, the end of the text.
    """

    way_on = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (super().__str__(), self.way_on)))


class ConfigError(FedappError):
    """A setting breaks its rule: ``eta must be > 0, got -1.0``."""


class DivergedError(ConfigError):
    """Training diverges: gradients or leaf weights have left float32.

    ``rounds`` is the number of rounds that were finished before.
    """

    def __init__(self, text: str, rounds: int = 0) -> None:
        super().__init__(text)
        self.rounds = rounds


class ClusterError(ConfigError):
    """A Ray cluster is not as it must be; ``outside``, without addresses, is what leaves a site."""

    outside = (
        "workers must be a Ray cluster that works until the run has ended, got another; the "
        "site's own log says more"
    )


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
        self.outside = outside or rule
        self.here = here or rule
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
def as_protocol_error(party: str, message: str, field: str) -> Iterator[None]:
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
    """A callback stopped a run."""


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


# Pydantic's kinds of errors, and prefixes of them.
SIGNS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
TYPES = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_": "a number",
    "bool_": "true or false",
    "string_too_short": "a text that is not empty",
    "string_": "a text",
    "list_": "a list",
    "dict_": "a table",
    "model_": "a table",
}


def rule_of(kind: str, context: Mapping[str, Any]) -> str:
    """The rule of a Pydantic error, in words."""
    if kind == "value_error":
        return str(context["error"])
    if kind in SIGNS:
        return f"{SIGNS[kind]} {next(iter(context.values()))}"
    if kind == "literal_error":
        expected = context["expected"]
        return f"one of {expected}" if " or " in expected else expected
    if kind == "too_long":
        return f"at most {context['max_length']} values"
    if kind == "string_pattern_mismatch":
        return f"a text that matches {context['pattern']}"
    return next((rule for begin, rule in TYPES.items() if kind.startswith(begin)), "a setting")


# Suggest the intended name for a misspelled one.

MIN_SIMILARITY = 0.6  # difflib's ratio, which is 1 for equal names
MIN_STEM = 4  # characters that suggest a longer name which begins so


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas; none for an empty text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the most similar name or one that begins so, or an empty text.

    ``prefix`` may be omitted from a name.
    """
    suggestion = nearest(name, known, prefix)
    return f"; did you mean {suggestion}?" if suggestion else ""


def did_you_mean_path(path: Path, *folders: Path) -> str:
    """``did_you_mean`` for a missing path, by the files of its folder and of others.

    Only for texts shown to people who may see these folders.
    """
    searched = [folder for folder in (*folders, path.parent) if folder.is_dir()]
    paths = {file.name: file for folder in searched for file in folder.iterdir()}
    meant = "" if path.exists() else nearest(path.name, paths)
    return f"; did you mean {paths[meant]}?" if meant else ""


def nearest(
    name: str, known: Iterable[str], prefix: str = "", least: float = MIN_SIMILARITY
) -> str:
    """The most similar name or one that begins so, or an empty text; see ``did_you_mean``."""
    spelled = {_kebab(word).removeprefix(prefix): word for word in known}
    asked = _kebab(name).removeprefix(prefix)
    matches = difflib.get_close_matches(asked, spelled, n=1, cutoff=least)
    stem = asked.rstrip("s")
    if not matches and len(stem) >= MIN_STEM:
        longer = (word for word in spelled if word.startswith(stem))
        matches = sorted(longer, key=lambda word: (len(word), word))
    return spelled[matches[0]] if matches else ""


def _kebab(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def check_package(package: str, why: str, extra: str) -> None:
    """Raise ConfigError if a package, by its name on the index, is not installed.

    ``why`` is the purpose for the error text, such as ``for log=mlflow``, or empty; ``extra`` of
    fedapp installs it.
    """
    if find_spec(package.replace("-", "_")) is None:
        rule = " ".join(filter(None, ("must be installed", why)))
        raise ConfigError(f"{package} {rule} (pip install 'fedapp[{extra}]'), got none")


Rule = tuple[str, object, str, object]  # name, whether it holds, the rule, and the value


def check_rules(*rules: Rule) -> None:
    """Raise ConfigError for the first rule that does not hold."""
    for name, holds, rule, value in rules:
        if not holds:
            raise ConfigError(f"{name} must {rule}, got {value}")
