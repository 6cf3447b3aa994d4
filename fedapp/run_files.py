"""What is in the files of a run's folder: their names, their fields, and what checks them.

`Summary` declares every field of ``summary.json``, `RoundInfo` and `Message` a line of
``rounds.jsonl`` and ``ledger.jsonl``, `Audit` those of ``audit.json``; the page on the files of a
run is made from them. ``run_folder`` reads and writes the files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired, TypeAlias, TypeVar, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from fedapp.errors import DataError, rule_of
from fedapp.messages.methods import method_of
from fedapp.metrics import OBJECTIVES
from fedapp.trees.objective import AUTO

STARTED = "started"  # holds the time at which the run began: ISO 8601, UTC
VERSION = 1  # of summary.json, also of the files of earlier versions of fedapp, which name none
SUMMARY, CONFIG, ROUNDS, LEDGER = "summary.json", "config.toml", "rounds.jsonl", "ledger.jsonl"
GAIN, TOTAL_GAIN = "gain", "total_gain"  # kinds of importance, by XGBoost's names
SERVER = "server"  # its name in the ledger
DOWN, UP = "server to party", "party to server"  # ways of a message
DOCUMENTED = ConfigDict(use_attribute_docstrings=True)  # the page shows the sentences below fields
AUDIT = "audit.json"
HEAD = ("attack", "seat", "success [95 % interval]", "chance", "lowered by (elsewhere)", "cost")
TITLE = "What attacks found"
BOUND = (
    "Every success is a lower bound: a better attack, or parties that act together, may reach more."
)
Scores: TypeAlias = Mapping[str, float | None]
R = TypeVar("R")


class Party(TypedDict):
    """A party of a run."""

    name: str  # of its site
    rows: int  # number of its rows


def _with(*names: str) -> AfterValidator:
    """Checks that an object has numbers of these names."""

    def check(values: dict[str, R]) -> dict[str, R]:
        if missing := set(names) - set(values):
            raise ValueError(f"an object with {', '.join(sorted(missing))}")
        return values

    return AfterValidator(check)


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError("a time in ISO 8601") from error
    return text


Moment: TypeAlias = Annotated[str, AfterValidator(_moment)]
Traffic: TypeAlias = Annotated[dict[str, int], _with("to_parties", "to_server")]


class LeftOut(TypedDict):
    """A party that was excluded."""

    party: str  # its name
    step: int  # number of the exchange, from 1
    reason: str  # in words


class Threshold(TypedDict, total=False):
    """The proposed probability of two classes; empty if none is proposed."""

    value: float  # probability from which a row is called positive
    rows: str  # `valid` or `train`: rows that chose it
    few: bool  # whether these are too few of a class, so that 0.5 is used


class InitialModel(TypedDict):
    """The model that a run has continued."""

    path: str  # its file
    rounds: int  # rounds of its training
    trees: int  # its trees


@with_config(DOCUMENTED)
class Summary(TypedDict):
    """``summary.json`` of a finished run; numbers that are not finite are null."""

    version: NotRequired[int]
    """Version of this format, 1; absent in runs of fedapp up to 0.2, which have it too."""
    strategy: str
    """The method."""
    engine: NotRequired[str]
    """`local`, `simulation` or `deployment`."""
    data: str
    """The setting `data`, or that the parties have brought their own tables."""
    objective: str
    """The objective, also where the run has chosen it; `auto` of a prediction."""
    objective_reason: NotRequired[str]
    """Why the run has chosen this objective; absent if it was given."""
    label: NotRequired[str]
    """Name of the label column; empty where the parties bring their own tables."""
    positive_label: NotRequired[str]
    """The setting; absent if it is empty."""
    eval_metrics: NotRequired[list[str]]
    """Further scores that were asked for."""
    weight: NotRequired[str]
    """Name of the column of weights, or empty."""
    settings_read: NotRequired[list[str]]
    """Names of the settings that the method reads."""
    boosting: NotRequired[dict[str, float]]
    """Settings of boosting after presets; empty for methods without presets."""
    round_name: NotRequired[str]
    """What a round is called: round, tree, level."""
    seed: NotRequired[int]
    """The setting."""
    model_id: NotRequired[str]
    """Random id of the model, which sites use too."""
    parties: list[Party]
    """Name and number of rows of each party."""
    rows: NotRequired[dict[str, int]]
    """Rows of all parties that train, validate and test; empty for vertical methods."""
    split: NotRequired[dict[str, Any]]
    """Which rows test and validate in words, and columns whose values stay together, by party."""
    categories: NotRequired[dict[str, Any]]
    """By column of categories: number of names, and unseen rows; absent without any."""
    base_margin: NotRequired[str]
    """Name of the column of base margins; absent without one."""
    init_model: NotRequired[InitialModel]
    """Path, rounds and trees of the model that the run continued; absent without one."""
    left_out: NotRequired[list[LeftOut]]
    """Excluded parties, with the step and the reason."""
    warnings: NotRequired[list[str]]
    """What people should read before they trust the scores."""
    facts: NotRequired[list[str]]
    """How the tables were read: what was dropped, removed or guessed."""
    classes: NotRequired[list[str]]
    """Names of the classes by id; absent for vertical methods, empty for a regression."""
    metrics: dict[str, dict[str, Any]]
    """Scores by subset (`test`, `valid`, `train`) and name; `by_party` has them of each party."""
    test_weight: NotRequired[float]
    """Sum of the weights of the test rows; absent for vertical methods."""
    rarer_class: NotRequired[float]
    """Share of the rarer of two classes in the validation rows; absent where it is not counted."""
    intervals: NotRequired[dict[str, list[float | None]]]
    """Ends of the 95 % interval of a test score; empty with weights and without test rows."""
    class_weights: NotRequired[dict[str, list[float]]]
    """Sum of weights of each class, by party; absent for vertical methods."""
    threshold: NotRequired[Threshold]
    """The proposed threshold, and the subset that chose it, or empty."""
    calibration: NotRequired[dict[str, Any]]
    """Method of the calibration, and number of rows that it has used; absent without one."""
    curves: NotRequired[dict[str, Any]]
    """Points of the curves on test rows, by curve and axis; confusion matrices, histograms."""
    binning_errors: NotRequired[dict[str, float | None]]
    """Most that a score from bins differs from that of the rows."""
    few: NotRequired[dict[str, int]]
    """Names, cuts and ends of columns in the model of few rows of a party; empty if not counted."""
    privacy: NotRequired[dict[str, Any]]
    """Terms of differential privacy: epsilon, delta, noise; absent without it."""
    importance: NotRequired[dict[str, dict[str, float]]]
    """`gain` (mean of a split), `total_gain` and `count` (splits) by column, if there are trees."""
    gain_by_party: NotRequired[dict[str, float]]
    """Share of the total gain by party, of divided models; absent across sites."""
    trees: int
    """Trees of the model; 0 for other models and for descriptions."""
    best_round: NotRequired[int | None]
    """Round, from 1, at which the model ends by early stopping, or null."""
    bins: NotRequired[str]
    """How columns were binned, in methods that agree on cuts."""
    head: NotRequired[dict[str, Any]]
    """Kind and number of parameters of the model above the trees of FedXGBllr."""
    learning_rates: NotRequired[dict[str, Any]]
    """Learned rates of FedXGBllr, by tree and by party."""
    oob: NotRequired[dict[str, float | None]]
    """Scores of a Federated Forest on the rows that did not train a tree."""
    active: NotRequired[str]
    """The party with the labels, in vertical methods."""
    matched_rows: NotRequired[dict[str, int]]
    """Rows that all parties have, by subset, in vertical methods."""
    matching: NotRequired[dict[str, dict[str, int]]]
    """Rows, and matched rows, of each party, in vertical methods."""
    tables: NotRequired[dict[str, Any]]
    """Rows and columns that each party has brought to a prediction."""
    standing_rows: NotRequired[int]
    """Rows of standing scores."""
    service: NotRequired[str]
    """Service of standing scores."""
    unreached: NotRequired[list[str]]
    """Parties whose standing processes do not answer that of the party with the labels yet."""
    entries: NotRequired[int]
    """Encrypted entries of a Fed-EINI prediction."""
    batches: NotRequired[int]
    """Batches of a Fed-EINI prediction."""
    exchanges: int
    """Finished exchanges: a request to parties, and all replies."""
    bytes: Traffic
    """Bytes sent to the parties and to the server."""
    seconds: Annotated[dict[str, float], _with("total")]
    """Seconds in all, and of training, of all attempts."""
    started: NotRequired[Moment]
    """When the first attempt began: ISO 8601, UTC; absent in runs of early versions."""
    ended: NotRequired[Moment]
    """When the last attempt had its scores, before baselines and report; absent likewise."""
    versions: NotRequired[dict[str, str]]
    """Versions of fedapp and of packages."""
    baselines: NotRequired[dict[str, Any]]
    """Scores of `pooled` and `alone` models, their intervals, curves and importance, equal nodes,
    and differences to the run's scores; absent without baselines."""
    missing: NotRequired[dict[str, float]]
    """Share of missing values by column with some; absent across sites and without a page."""
    contributions: NotRequired[dict[str, Any]]
    """Mean absolute SHAP value by column, and the number of test rows; absent like `missing`."""
    retrained: NotRequired[dict[str, Any]]
    """The earlier run, the rows left out, and digests of both models, after a retraining."""
    logs: NotRequired[dict[str, str]]
    """Where the run is logged, by kind of log; absent without a log."""


@with_config(DOCUMENTED)
class RoundInfo(TypedDict):
    """A finished round, as on its line of ``rounds.jsonl``."""

    round: int
    """From 1."""
    rounds: NotRequired[int]
    """Number of rounds of the run; absent in runs of early versions, as the next two."""
    trees: NotRequired[int]
    """Trees of the model so far."""
    leaves: NotRequired[float | None]
    """Leaves that the round has added."""
    train: dict[str, float | None]
    """Scores on the training rows by name; null if not finite."""
    valid: dict[str, float | None]
    """Scores on the validation rows."""
    exchanges: int
    """Exchanges since the run began."""
    bytes: Traffic
    """Bytes of this round."""
    seconds: float
    """Seconds of this round."""


Message = TypedDict(
    "Message",
    {
        "step": Annotated[int, Field(description="Number of the exchange, from 1.")],
        "type": Annotated[str, Field(description="Kind of the message.")],
        "from": Annotated[str, Field(description="`server`, or a party.")],
        "to": Annotated[str, Field(description="A party, or `server`.")],
        "bytes": Annotated[int, Field(description="With what encloses it on the way.")],
        "seconds": NotRequired[Annotated[float, Field(description="Since the run began.")]],
    },
)


class ListedRun(TypedDict):
    """A run, a comparison or a search, as it is listed."""

    run: str  # its folder
    state: str  # `running`, `finished`, `failed`, `interrupted` or `resumable`
    method: str  # empty if unknown, as the next two
    data: str  # the setting
    metric: str  # the watched score
    test_score: float | None  # of the metric; null without one
    bytes: int  # size on disk
    started: str | None  # ISO 8601, UTC; null if not recorded
    ended: str | None  # likewise; null of a run that runs or was killed


# Called after every round, in order. If it returns False the run stops, and can be resumed.
OnRound = Callable[[RoundInfo], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one attack got from one seat."""

    attack: str  # its name
    seat: str  # who attacks
    measure: str  # what ``success`` and ``chance`` count
    success: float  # share, 0 to 1
    low: float  # low end of the 95 % interval of ``success``
    high: float  # high end
    chance: float  # the same without what the seat sees
    interval: str  # what the interval is over
    lowered_by: str  # a setting
    cost: str  # of that setting

    @property
    def is_above_chance(self) -> bool:
        """Whether the interval of ``success`` is above chance."""
        return self.low > self.chance

    @property
    def cells(self) -> tuple[str, ...]:
        """A line below ``HEAD``."""
        success = f"{self.success:.3f} [{self.low:.3f}, {self.high:.3f}]"
        chance = f"{self.chance:.3f}"
        return self.attack, self.seat, success, chance, self.lowered_by, self.cost


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """What the records of a seat do not allow to measure."""

    attack: str  # its name
    seat: str  # who attacks
    why: str  # what is missing


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit of a run."""

    KIND: ClassVar[str] = "audit"
    date: str
    seconds: float
    quick: bool  # with fewer models, columns and draws
    subject: str  # which run was attacked
    findings: tuple[Finding, ...]
    unmeasured: tuple[Unmeasured, ...]

    @property
    def notes(self) -> Iterator[str]:
        """Sentences below the table."""
        notes = (
            f"{finding.attack}: {finding.measure}. Interval over {finding.interval}."
            for finding in self.findings
        )
        yield from dict.fromkeys(notes)
        for missing in self.unmeasured:
            yield f"not measured: {missing.attack} by {missing.seat}: {missing.why}."

    @property
    def summary(self) -> str:
        """The sentence above the table."""
        how = "fedapp audit --quick" if self.quick else "fedapp audit"
        return f"{how}, {self.date}: {self.subject}. {BOUND}"


@dataclass(slots=True)
class LedgerSums:
    """What a ledger adds up to."""

    received: Counter[str] = field(default_factory=Counter)  # bytes, by party
    sent: Counter[str] = field(default_factory=Counter)
    n_messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and way
    sizes: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes, by kind and way
    largest: int = 0  # bytes of a message
    steps: set[int] = field(default_factory=set)  # of the requests
    answered: set[int] = field(default_factory=set)  # of the replies

    @property
    def n_bytes(self) -> int:
        """Bytes in all."""
        return self.received.total() + self.sent.total()

    def add(self, message: Message) -> None:
        """Add a message."""
        is_up, n_bytes = message["to"] == SERVER, message["bytes"]
        (self.sent if is_up else self.received)[message["from" if is_up else "to"]] += n_bytes
        kind = message["type"], UP if is_up else DOWN
        self.n_messages[kind] += 1
        self.sizes[kind] += n_bytes
        self.largest = max(self.largest, n_bytes)
        (self.answered if is_up else self.steps).add(message["step"])


def sums_of_ledger(path: Path) -> LedgerSums:
    """Add up a ledger, also one that is being written, or none; its last line may be half."""
    if not path.is_file():
        return LedgerSums()
    state = path.stat()
    return _sums(path, state.st_size, state.st_ino)


@lru_cache(maxsize=64)
def _sums(path: Path, size: int, inode: int) -> LedgerSums:
    """Sums of a ledger, computed again once it has another size or is another file."""
    sums = LedgerSums()
    for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
        sums.add(json.loads(line))
    return sums


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a run or of several, of any version of fedapp; empty if there is none."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(content, dict):
        raise DataError(f"{path.name} must hold an object, got {type(content).__name__}")
    return content


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None, for JSON."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_text(value: Any, margin: str = "") -> str:
    """Like ``json.dumps`` with an indent, but plain lists take one line."""
    inner = margin + "  "
    if isinstance(value, dict) and value:
        lines = (f"{json.dumps(key)}: {json_text(entry, inner)}" for key, entry in value.items())
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        lines = (json_text(entry, inner) for entry in value)
        return f"[\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}]"
    return json.dumps(value)


def importance_kind(strategy: str) -> str:
    """The importance that everything shows of a method's model, by XGBoost's name.

    ``gain``, the mean over a column's splits, as ``feature_importances_`` of XGBoost's estimators;
    of a forest ``total_gain``, the sum over them, as scikit-learn's.
    """
    method = method_of(strategy)
    return TOTAL_GAIN if method and method.baseline == "forest" else GAIN


def importance_of(summary: Summary) -> dict[str, float]:
    """Importance by column, largest first; empty if it is not known."""
    values = (summary.get("importance") or {}).get(importance_kind(summary["strategy"])) or {}
    return dict(sorted(values.items(), key=lambda item: item[1], reverse=True))


def checked_summary(text: str) -> Summary:
    """A summary from its text; DataError if a field is absent or of another type."""
    summary = checked(text, SUMMARY, Summary)
    if (version := summary.get("version", VERSION)) != VERSION:
        rule = f"version of {SUMMARY} must be {VERSION}, got {version}"
        raise DataError(f"{rule}: another version of fedapp wrote this run, and can read it")
    # AUTO in a prediction run, whose objective is the model's.
    if summary["objective"] not in (*OBJECTIVES, AUTO):
        rule = f"objective of {SUMMARY} must be one of {', '.join(OBJECTIVES)}"
        raise DataError(f"{rule}, got {summary['objective']}")
    return summary


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What checks values of a type, made once."""
    return TypeAdapter(kind)


def checked(text: str | bytes, where: str, kind: type[R]) -> R:
    """An object of a declared type from its JSON; DataError if it is another."""
    try:
        value = json.loads(text)
    except ValueError as error:  # no JSON, or no UTF-8
        raise DataError(f"{where} must be JSON, got: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object, got {type(value).__name__}")
    for fault in faults_of(value, where, kind).values():
        raise DataError(fault)
    return cast(R, value)


def faults_of(value: Mapping[str, Any], where: str, kind: type[Any]) -> dict[str, str]:
    """The fields of an object that are absent or not of the declared type, each with the fault."""
    faults: dict[str, str] = {}
    try:
        adapter(cast(Any, kind)).validate_python(value, strict=True)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            name = ".".join(map(str, fault["loc"]))
            rule = rule_of(fault["type"], fault.get("ctx", {}))
            text = f"{name} of {where} must be {rule}, got {type(fault['input']).__name__}"
            if fault["type"] == "missing":
                text = f"{where} must have {name}, got no such field"
            faults.setdefault(str(fault["loc"][0]), text)
    return faults


def checked_lines(text: str, name: str, kind: type[R]) -> list[R]:
    """The objects of a declared type on the lines of a text; DataError if one is another."""
    lines = text.split("\n")  # splitlines() would also split at U+2028, which names may contain
    return [
        checked(line, f"{name} line {number}", kind)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
