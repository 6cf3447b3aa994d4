"""What commands print with ``--json``: a document's fields, by command.

A field's comment is its line on the page of JSON documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from fedapp.run_files import Summary

Figures = dict[str, float | None]  # by name; null if undefined
Given = str | bool | int | float  # value of a setting


class RunDocument(TypedDict):
    """A finished run."""

    folder: str | None  # the run's folder; null where another machine has it
    summary: Summary | None  # its `summary.json`, see below


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in words."""

    name: str  # as in files, with its section
    default: Given  # value where none is given
    values: str  # type and range, or the values in backquotes
    text: str  # what it does
    methods: tuple[str, ...]  # that read it


class SettingsDocument(TypedDict):
    """Settings of runs."""

    settings: list[Setting]  # of the method, or those that several share
    methods: list[str]  # all methods


class ReadTable(TypedDict):
    source: str | None  # where it is; null if unknown
    rows: int  # number of rows
    columns: int  # number of columns


class PredictionDocument(TypedDict):
    """A prediction, without ids; only `output`, null, if its rows are on another machine."""

    output: str | None  # file with the predictions
    rows: NotRequired[int]  # rows written
    unmatched_rows: NotRequired[int]  # rows not written, as some table lacks them
    tables: NotRequired[dict[str, ReadTable]]  # by party; empty for one table
    scores: NotRequired[Figures]  # of the rows with labels
    note: NotRequired[str]  # why there are no scores despite labels
    warnings: NotRequired[list[str]]  # on the tables


class ListedRun(TypedDict):
    run: str  # its folder
    state: str  # `running`, `finished`, `failed`, `interrupted` or `resumable`
    method: str  # empty if unknown, as the next two
    data: str  # the setting
    metric: str  # the watched score
    test_score: float | None  # of the metric; null without one
    bytes: int  # size on disk
    started: str | None  # ISO 8601, UTC; null if not recorded
    ended: str | None  # likewise; null of a run that runs or was killed


class RunsDocument(TypedDict):
    """Runs in ./runs."""

    runs: list[ListedRun]  # by their ends, or starts, latest first
    not_shown: int  # number of older ones, which `--all` adds


class WaitingRun(TypedDict):
    run: str  # id of its model
    site: str  # where it waits
    method: str  # its method
    data: str  # the site's table
    first_asked: str  # time, ISO 8601, UTC
    waits_because: list[str]  # reasons in words
    plan: dict[str, Any]  # settings of its opening, by field of the message


class WaitingDocument(TypedDict):
    """Runs that wait."""

    waiting: list[WaitingRun]  # of all sites of this home


class LogDocument(TypedDict):
    """A site's log."""

    lines: int  # number of lines
    signed: int  # number of the last signed line; 0: none
    key: str  # public key that signed, hex; empty without one
    faults: list[str]  # what is wrong, in words
    last: list[dict[str, Any]]  # chosen lines, the newest last


class Member(TypedDict):
    name: str  # of the site
    status: str  # Flower's: registered, online, offline; else none or unknown
    since: str | None  # when the status began
    fingerprint: str  # of its key; empty without one


class FederationDocument(TypedDict):
    """A federation."""

    sites: list[Member]  # by name
    users: list[str]  # who may start runs
    certificate_days: dict[str, int]  # days that a certificate is valid, by file
    fault: str  # why the SuperLink did not answer; empty otherwise


DOCUMENTS: dict[str, Any] = {
    "run": RunDocument,
    "predict": PredictionDocument,
    "runs list": RunsDocument,
    "settings": SettingsDocument,
    "site approve": WaitingDocument,
    "site log": LogDocument,
    "federation list": FederationDocument,
}
# Documents and their objects have no other fields.
for _document in DOCUMENTS.values():
    with_config(ConfigDict(extra="forbid"))(_document)
