"""Error texts for what Flower's commands print when they fail, with the way out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from fedapp.errors import RunFailedError

LOG_LINES = 20
# Patterns of Flower 1.41's output, and our texts; {name} is the SuperLink, {0} the first group.
LOST_RUN = "Run ID not found"
SENTENCES: tuple[tuple[str, str], ...] = (
    (
        r"SuperLink connection '\S+' not found in the\s+Flower configuration file \((\S+)\)",
        "engine must be a SuperLink in {0}, got '{name}'; a coordinator first sources its own: "
        ". FOLDER/env.sh",
    ),
    (
        r"Using SuperLink: \S+ \((\S+)\)(?s:.*)Connection to the SuperLink is unavailable",
        "the SuperLink '{name}' must answer at {0}, got no connection; at the coordinator: "
        "FOLDER/start-superlink.sh",
    ),
    (
        r"Using SuperLink: \S+ \((\S+)\)(?s:.*)Authentication failed",
        "the SuperLink '{name}' at {0} must know the user, got a name or a password that it does "
        "not; at the coordinator: fedapp federation user FOLDER NAME",
    ),
    (
        r"Using SuperLink: \S+ \((\S+)\)(?s:.*)502 Bad Gateway",
        "the SuperLink '{name}' must answer behind {0}, got its nginx alone (502): it is starting, "
        "or is gone; at the coordinator: FOLDER/start-superlink.sh",
    ),
    (
        r"Using SuperLink: \S+ \((\S+)\)(?s:.*)" + LOST_RUN,
        "the SuperLink '{name}' at {0} must have the database that the run began with, got another "
        "or an empty one; at the coordinator: put FOLDER/flower/superlink.db back, or run again",
    ),
    (
        r"Using SuperLink: \S+ \((\S+)\)(?s:.*)Internal server error",
        "the SuperLink '{name}' at {0} must be able to use its database, got an internal error, "
        "which its own log names; at the coordinator: put FOLDER/flower/superlink.db back, and "
        "FOLDER/start-superlink.sh",
    ),
    (
        r"Failed to read certificate file `([^`]+)`",
        "the certificate of the SuperLink '{name}' must be readable, got {0}",
    ),
    (
        r"attempting to bind on address \('([^']+)', (\d+)\): address already in use",
        "port {1} of {0} must be free for Flower, got one in use; the same command takes another",
    ),
)
GONE = (
    "the SuperLink '{name}' must answer until the run has ended, got no status for {seconds:.0f} "
    "s; started again, by FOLDER/start-superlink.sh at the coordinator, it resumes the run"
)
SILENT = "the SuperLink '{name}' gives no status of the run; it is asked again for {seconds:.0f} s"


def sentence_for(printed: str, name: str) -> str:
    """The meaning of a failed Flower command's output (JSON or a log); empty if unknown."""
    text = printed.replace("\\n", "\n")
    for pattern, sentence in SENTENCES:
        if match := re.search(pattern, text):
            return sentence.format(*match.groups(), name=name)
    return ""


def without_passwords(printed: str) -> str:
    """Remove user names and passwords from the addresses in a text."""
    return re.sub(r"(\(|//)[^\s()/@]+@", r"\1", printed)


def failed(printed: str, name: str, otherwise: str) -> RunFailedError:
    """The error for a failed command: its meaning, or ``otherwise`` and the last lines."""
    printed = without_passwords(printed)
    if sentence := sentence_for(printed, name):
        return RunFailedError(sentence, [])
    return RunFailedError(otherwise, printed.splitlines()[-LOG_LINES:])


def check_programs(environment: Mapping[str, str], *programs: str) -> None:
    """Raise RunFailedError if one of Flower's programs is not installed."""
    for program in programs:
        if shutil.which(program, path=environment["PATH"]) is None:
            rule = "must be installed beside Python (pip install 'flwr[simulation]')"
            raise RunFailedError(f"{program} {rule}, got none on the PATH", [])
