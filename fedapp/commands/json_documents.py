"""What commands print with ``--json``: a document's fields, by command.

A field's comment is its line on the page of JSON documents. ``comparison.json``, ``tune.json``,
``description.json`` and ``audit.json`` have these fields too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from fedapp.data.describe import TableColumn
from fedapp.run_files import Finding, ListedRun, Summary, Unmeasured
from fedapp.runs.run_groups import Trial

Figures = dict[str, float | None]  # by name; null if undefined
Given = str | bool | int | float  # value of a setting
Spans = dict[str, list[float]]  # a difference, and the ends of its 95 % interval


class RunDocument(TypedDict):
    """A finished run."""

    folder: str | None  # the run's folder; null where another machine has it
    summary: Summary | None  # its `summary.json`, see below
    remains: NotRequired[list[str]]  # of `runs retrain`: what still has the rows, in words


class ComparedLine(TypedDict):
    name: str  # the method, or the baseline in words
    scores: list[float | None]  # watched score on the test rows, by seed and fold
    seconds: float | None  # mean seconds of training; null of a baseline, as the next two
    exchanges: float | None  # mean number of exchanges
    n_bytes: float | None  # mean bytes sent both ways
    others: dict[str, list[float | None]]  # all scores on the test rows, by seed and fold
    runs: list[str]  # folders of the runs below the comparison's, by seed and fold
    alone: str  # kind of baseline of a party alone; empty of others


@with_config(ConfigDict(extra="allow"))
class ComparedRow(TypedDict):
    strategy: str  # the method, or the baseline in words
    sd: float | None  # standard deviation of the watched score; null of one run
    difference: float | None  # mean difference to the best method, of the watched score
    difference_sd: float | None  # its standard deviation
    runs_low: float | None  # Student's 95 % interval of the mean difference; null of one run
    runs_high: float | None  # its upper end
    rows_low: float | None  # 95 % interval of the difference over test rows, if models are whole
    rows_high: float | None  # its upper end
    ties: bool | None  # whether the interval over runs, or of one run that over rows, has 0 in it
    is_best: bool  # whether it is the best method
    seconds: float | None  # mean seconds of training; null of a baseline, as the next two
    exchanges: float | None  # mean number of exchanges
    bytes: float | None  # mean bytes sent both ways


class Comparison(TypedDict):
    metric: str  # the watched score
    lines: list[ComparedLine]  # best first
    data: str  # the setting
    objective: str  # the objective, also where it was chosen
    engine: str  # `local` or `simulation`
    seeds: list[int]  # of the runs
    n_parties: int  # number of parties
    n_rows: dict[str, int]  # rows that train, validate and test
    methods: dict[str, list[str]]  # methods by what their parties share: `rows` or `columns`
    changed: dict[str, Given]  # settings that are not defaults
    unread: dict[str, list[str]]  # changed settings that a method does not read, by method
    folds: int  # folds of the cross-validation; 0: none
    orders: list[float] | None  # lowest and highest score of pooled XGBoost over row orders
    differences: dict[str, Spans]  # of the score by method and line, on the same rows
    verdict: str  # what the intervals show of the best method
    table: list[ComparedRow]  # a record a line, also with the means of scores by their names


class ComparisonDocument(TypedDict):
    """A finished comparison."""

    folder: str  # folder of the comparison
    summary: Comparison  # its `comparison.json`


class TunedBaseline(TypedDict):
    settings: dict[str, Given]  # those that were searched
    valid: float | None  # watched score on the validation rows
    test: Figures  # all scores on the test rows


class TunedBaselines(TypedDict):
    pooled: TunedBaseline  # of all rows in one place
    alone: dict[str, TunedBaseline]  # of each party's rows


class Search(TypedDict):
    strategy: str  # the method
    data: str  # the setting
    metric: str  # the watched score
    search: str  # `random` or `optuna`
    engine: str  # `local` or `simulation`
    trials: int  # number of finished trials
    best: int  # number of the best trial
    settings: dict[str, Given]  # of the best trial, with those given for all
    valid: float  # its watched score on the validation rows
    test: Figures  # all scores of the last run on the test rows
    exchanges: int  # of all trials and the last run
    bytes: int  # sent both ways in all of them
    baselines: NotRequired[TunedBaselines]  # with `--baselines`


class SearchDocument(TypedDict):
    """A finished search."""

    folder: str  # folder of the search
    summary: Search  # its `tune.json`
    trials: list[Trial]  # best first


class OfParty(TypedDict):
    counts: list[int]  # rows by cell, missing values first
    drift: float | None  # population stability index to all other parties


class DescribedColumn(TypedDict):
    party: NotRequired[str]  # whose column it is, where parties have different ones
    name: str  # the column, or its number where names are not shared
    kind: NotRequired[str]  # as in `columns.json`; absent of the label and of different columns
    categories: list[str]  # names of categories, in the order of `counts`
    missing: int  # rows without a value
    counts: list[int]  # rows by bin or category
    label: Figures  # `explained` (share of variance), `iv`, `auc`, `correlation` (-1 to 1)
    is_whole: NotRequired[bool]  # whether all values are whole numbers
    quantiles: NotRequired[Figures]  # values by percent of the rows; absent of categories
    edges: NotRequired[list[float | None]]  # between the bins of `counts`, in the column's unit
    is_label: NotRequired[bool]  # true of the label
    by_party: NotRequired[dict[str, OfParty]]  # absent under masks and of different columns


class DescriptionDocument(TypedDict):
    """A description: `description.json`, and its folder."""

    folder: str  # folder of the run
    rows: int  # training rows of all parties
    columns: list[DescribedColumn]  # the label last, of each party where columns differ
    warnings: list[str]  # differences between sites, leaks, spellings
    facts: list[str]  # how the tables were read


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


class DataSet(TypedDict):
    name: str  # for the setting `data`
    task: str  # kind of label
    rows: int  # number of rows
    columns: int  # number of columns
    where: str  # `built-in`, `cache`, `folder` or `not here`


class DataSetsDocument(TypedDict):
    """Data sets."""

    data_sets: list[DataSet]  # by name


class LabelClass(TypedDict):
    label: float | str  # the value
    rows: int  # rows of the class
    share: float  # of all rows, 0 to 1


class Label(TypedDict, total=False):
    classes: list[LabelClass]  # most frequent first
    distinct: int  # distinct values of numbers
    min: float  # smallest value
    mean: float  # mean value
    max: float  # largest value


class TableDocument(TypedDict):
    """A table."""

    rows: int  # number of rows
    features: int  # columns that a run trains with
    columns: list[TableColumn]  # as in the table
    label: Label | None  # null without a label, and of a refused table
    facts: list[str]  # how the table was read
    warnings: list[str]  # what to look at before a run
    refused: str  # why a run refuses the table; empty otherwise


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


class RunsDocument(TypedDict):
    """Runs in ./runs."""

    runs: list[ListedRun]  # by their ends, or starts, latest first
    not_shown: int  # number of older ones, which `--all` adds


class AuditDocument(TypedDict):
    """An audit: `audit.json`."""

    format: int  # version of the format
    kind: str  # `audit`
    date: str  # day of the audit, ISO 8601
    seconds: float  # seconds that it took
    quick: bool  # with fewer models, columns and draws
    subject: str  # which run was attacked
    findings: list[Finding]  # by attack and seat
    unmeasured: list[Unmeasured]  # what the run's records do not allow


class SiteMethod(TypedDict):
    method: str  # its name
    takes_part: str  # `yes`, or why not
    coordinator_gets: str  # in words


@with_config(ConfigDict(extra="allow"))
class SiteDocument(TypedDict):
    """A site; beside these fields its policy: keys of the node config with `_` for `-`."""

    site: str  # its name
    rows: int  # rows of its table
    columns: list[str]  # names of the features
    label: str  # the label in words, or what is wrong
    ids: str  # the ids in words, or what is wrong
    versions: list[str]  # of packages that runs compare
    keys: str  # whether others can read keys here
    certificate: str  # how long it is valid
    align_ids_per_day: int  # ids that alignments may see in a day
    allow: list[str]  # methods
    rows_are_drawn: str  # how test rows are drawn
    app: list[str]  # hashes of allowed app bundles
    runs_today: int  # number of runs since midnight
    total_epsilon: float  # budget of all runs on these rows
    spent_epsilon: float  # of that budget
    label_holder_could_read: dict[str, int]  # rows a round, by method
    passive_party_could_read: dict[str, int]  # labels a round, by method
    others_could_read_labels: dict[str, int]  # rows, by method of descriptions
    cells_show: dict[str, float]  # share of the sides of rows at splits, 0 to 1, by model
    trusted: dict[str, str]  # fingerprints by site
    methods: list[SiteMethod]  # all methods
    warnings: list[str]  # on the table and the machine


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
    "runs retrain": RunDocument,
    "compare": ComparisonDocument,
    "tune": SearchDocument,
    "describe": DescriptionDocument,
    "predict": PredictionDocument,
    "audit": AuditDocument,
    "runs list": RunsDocument,
    "settings": SettingsDocument,
    "data list": DataSetsDocument,
    "data describe": TableDocument,
    "site check": SiteDocument,
    "site approve": WaitingDocument,
    "site log": LogDocument,
    "federation list": FederationDocument,
}
# Documents and their objects have no other fields, but for the policy of a site.
for _document in {*DOCUMENTS.values()} - {SiteDocument}:
    with_config(ConfigDict(extra="forbid"))(_document)
