"""Labels of a site: class names, class ids, and checks against the objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedapp.data.convert import (
    BITS_OF_WORDS,
    INEXACT,
    ONE_WAY,
    is_nearly_distinct,
    number_name,
)
from fedapp.data.csv_errors import (
    CODE,
    THOUSANDS_WAY,
    WITH_THOUSANDS,
    is_finite,
    is_number,
    is_number_somehow,
    quoted,
)
from fedapp.data.notes import Note
from fedapp.data.schema import listed, plain_text
from fedapp.data.scratch import batches
from fedapp.errors import DataError
from fedapp.trees.losses import LOSSES, REGRESSION, Objective
from fedapp.trees.objective import AUTO, check_base_score, is_ranking, is_regression, is_survival
from fedapp.trees.ranking import paired_rows

Labels = npt.NDArray[np.float64] | npt.NDArray[np.str_]

TWO_CLASSES: Final = "binary:logistic"
MULTI_CLASS: Final = "multi:softprob"
MOST_CLASSES = 1000
# Whole numbers with more distinct values count as a measure, not as classes: grades and class codes
# have fewer, and softmax grows a tree per class.
FEW_VALUES = 20
FEWEST_IN_DOUBT = 6  # whole numbers that may be a measure after all
# Which labels suggest an objective.
SUGGESTED: Final[dict[Objective, str]] = {
    TWO_CLASSES: "two values",
    MULTI_CLASS: f"texts, or at most {FEW_VALUES} whole numbers",
    REGRESSION: "many values, numbers",
}
MOST_SHOWN = 5


def class_names(labels: Labels, objective: str) -> tuple[str, ...]:
    """Sorted names of the classes among the labels; none for regression.

    With the objective ``auto``, labels are classes if they are text, have at most 2 values, or are
    whole numbers of at most 20 distinct values. Text that is mostly numbers or nearly all distinct
    may be meant for regression and is refused. Raises DataError if labels do not fit the objective.
    """
    numbers = numbers_of(labels)
    if objective == AUTO:
        if numbers is None:
            _check_texts(labels)
        is_classes = numbers is None or is_few(np.unique(numbers))
        objective = MULTI_CLASS if is_classes else REGRESSION
    if is_regression(objective):
        if numbers is None:
            rule = f"label must be numbers for {objective}, got"
            raise DataError(f"{rule} text", here=f"{rule} {_not_numbers(labels)}{_way_out(labels)}")
        _check_numbers(numbers, objective)
        return ()
    if labels.dtype.kind == "f" and np.abs(labels).max() >= INEXACT:
        rule = (
            "label must be texts or whole numbers where they name classes, got floats beyond 2^53"
        )
        raise DataError(f"{rule}, which are not exact")
    values = np.unique(labels)
    most = 2 if objective == TWO_CLASSES else MOST_CLASSES
    if len(values) > most:
        rule = f"label must have at most {most} different values for {objective}, got {len(values)}"
        way = "set objective=multi:softprob or reg:squarederror"
        shown = ", ".join(repr(name) for name in _written(values[:MOST_SHOWN]))
        raise DataError(f"{rule}; {way}", here=f"{rule}, as {shown}; {way}")
    names = tuple(_written(values))
    if len({*map(plain_text, names)}) < len(names):
        rule = "label must name a class in one way, got one number written as 1 and as 1.0"
        raise DataError(f"{rule}: {ONE_WAY}")
    return names


def numbers_of(labels: Labels) -> npt.NDArray[np.float64] | None:
    """Labels as numbers, True and False as 1 and 0; None if some are none.

    Texts that are numbers keep the names of classes.
    """
    if labels.dtype.kind != "U":
        return labels.astype(np.float64)
    names, name_ids = np.unique(labels, return_inverse=True)
    words = [name.lower() for name in names.tolist()]
    if {*words} <= BITS_OF_WORDS.keys():
        return np.array([BITS_OF_WORDS[word] for word in words], np.float64)[name_ids]
    if not all(map(is_finite, words)):
        return None
    return names.astype(np.float64)[name_ids]


def _check_texts(labels: Labels) -> None:
    """Check that text labels are class names, if no objective says so."""
    names, counts = np.unique(labels, return_counts=True)
    are_numbers = np.array([is_number_somehow(name) for name in names.tolist()])
    most = max(are_numbers.mean(), counts[are_numbers].sum() / len(labels)) > 1 / 2
    rule = f"label must be numbers, or names of classes, with objective={AUTO}, got"
    classes = f"; where they are names of classes, set objective={MULTI_CLASS} or {TWO_CLASSES}"
    if most and not all(map(is_number, names.tolist())):
        content = "numbers with commas" if are_numbers.all() else "numbers and other text"
        others = [name for name in names.tolist() if not is_number(name)]
        ways = (_way_out(labels), classes)
        if any(map(CODE.fullmatch, others)):
            ways = ways[::-1]
        here = f"{rule} {content}: {_not_numbers(labels)}{''.join(ways)}"
        raise DataError(f"{rule} {content}{classes}", here=here)
    if is_nearly_distinct(len(names), len(labels)):
        content = f"{len(names):,} different texts in {len(labels):,} rows"
        raise DataError(
            f"{rule} texts nearly all different{classes}", here=f"{rule} {content}{classes}"
        )


def _not_numbers(labels: Labels) -> str:
    """How many labels are not numbers, and the first of them."""
    others = [label for label in labels.tolist() if not is_number(str(label))]
    if not others:
        return "text"
    return f"{len(others):,} of {len(labels):,} that are none, as {others[0]!r}"


def _way_out(labels: Labels) -> str:
    """Suggest how to make text the numbers it was meant to be; empty if it has none."""
    others = [label for label in map(str, labels.tolist()) if not is_number(label)]
    if others and is_number_somehow(others[0]):
        if all(map(WITH_THOUSANDS.fullmatch, others)):
            return f"; {THOUSANDS_WAY}"
        return f"; set decimal=, for decimal commas; {THOUSANDS_WAY}"
    if not others or (len(others) == len(labels) and not any(map(is_number_somehow, others))):
        return ""
    value = quoted(others[0]).replace("'", '"')
    way = f"; correct them, or list them in a schema as missing = [{value}]"
    return f"{way} (missing-label=drop drops these rows)"


def _check_numbers(labels: npt.NDArray[np.float64], objective: str) -> None:
    """Check labels against the range of the objective and of float32."""
    if np.abs(labels).max() > np.finfo(np.float32).max:
        raise DataError("label must be finite as float32")
    loss = LOSSES[objective]
    if not (fits := loss.allows(labels)).all():
        others = labels[~fits]
        rule = f"label must be {loss.label_rule} for {objective}, got"
        way = "correct or drop these rows, or set another objective, as reg:squarederror"
        count = f"{len(others):,} of {len(labels):,} that are not"
        shown = number_name(float(others[0]))
        raise DataError(f"{rule} {count}; {way}", here=f"{rule} {count}, as {shown}; {way}")


def is_few(values: npt.NDArray[np.float64]) -> bool:
    """Whether the distinct numbers are few enough to be classes."""
    if len(values) <= 2:
        return True
    return len(values) <= FEW_VALUES and bool((values == np.floor(values)).all())


def auto_objective(classes: Sequence[Sequence[str]]) -> tuple[Objective, str]:
    """Choose the objective that the labels of all parties suggest, and say why.

    `classes` has an entry per party, from ``class_names`` with ``auto``. Raises DataError if labels
    are text at one party and numbers of many values at another.
    """
    names = merge_classes(classes)
    are_numbers = all(map(is_finite, names)) and len({*map(float, names)}) == len(names)
    if not all(classes) and not are_numbers:
        raise DataError("label must be of one type at all parties, got text and numbers")
    if all(classes) and (not are_numbers or is_few(np.array([float(name) for name in names]))):
        kind = "texts" if not are_numbers else "numbers, few and whole"
        if len(names) == 2:
            return objective_of(2), f"the label has {SUGGESTED[TWO_CLASSES]}"
        return objective_of(len(names)), f"the label has {len(names)} values, {kind}"
    return REGRESSION, f"the label has {SUGGESTED[REGRESSION]}"


def note_on_measure(classes: Sequence[str]) -> str:
    """Warning about whole numbers that `auto` takes for classes; empty where they are none."""
    if len(classes) < FEWEST_IN_DOUBT or not all(map(is_finite, classes)):
        return ""
    rule = f"the {len(classes)} whole numbers of the label are trained as classes (objective=auto)"
    return f"{rule}: if they are a measure, set objective={REGRESSION}"


def check_spelling(classes: Mapping[str, Sequence[str]], is_open: bool) -> None:
    """Refuse classes that the parties seem to spell differently, such as yes/no and 1/0.

    Names must not differ only in case, spaces or how a number is written (1 and 01). If the labels
    choose the objective (``is_open``), shared classes must also link all parties, and parties of
    two classes each must have the same two (not 0/1 and 1/2) unless a party has all of them. A
    party may lack classes: {a} and {a, b} pass, and so do {a} and {b} if a third party has {a, b}.
    """
    sets = dict.fromkeys(map(frozenset, classes.values()))  # in the order of the parties
    fault = ""
    groups = list[frozenset[str]]()
    for one, other in combinations(sets, 2):
        only = one - other, other - one
        names, other_names = ({*map(_sense, class_set)} for class_set in only)
        if names & other_names:
            fault = "names that differ only in case or spaces, or as 1 and 01"
            is_open = False
        elif is_open and len(one) == len(other) == 2 and not any(one | other <= s for s in sets):
            fault = "classes that overlap only in part"
    for class_set in sets:
        joined = class_set.union(*(group for group in groups if group & class_set))
        groups = [joined, *(group for group in groups if not group & class_set)]
    if is_open and len(groups) > 1:
        fault = "classes that have no value in common"
    if fault:
        rule = (
            f"label must be spelled alike at all parties, got {fault}: {format_classes(classes)}; "
        )
        rule += "write the classes alike, or map them by codes of the label column in a schema"
        objective = objective_of(len(frozenset().union(*sets)))
        raise DataError(rule + is_open * f"; if they do differ, set objective={objective}")


def _sense(name: str) -> object:
    """What a name of a class means however it is written."""
    number = number_written(name)
    return " ".join(name.casefold().split()) if number is None else number


def number_written(name: str) -> str | None:
    """The number that a name is, exactly and however it is written, in one spelling; or None."""
    plain = name.replace(",", "") if WITH_THOUSANDS.fullmatch(name) else name
    if not is_finite(plain):
        return None
    # A text, as other parties' names are keys: they could choose numbers of one hash.
    sign, digits, exponent = Decimal(plain).as_tuple()
    written = "".join(map(str, digits))
    significant = written.strip("0")
    shift = int(exponent) + len(written) - len(written.rstrip("0"))
    return f"{'-' * sign}{significant}e{shift}" if significant else "0"


def format_classes(classes: Mapping[str, Sequence[str]]) -> str:
    """Format the classes of each party."""
    return "; ".join(f"{listed(names, MOST_SHOWN)} at {who}" for who, names in classes.items())


def objective_of(n_classes: int) -> Objective:
    """The objective for `n_classes` classes; 0 is regression."""
    if not n_classes:
        return REGRESSION
    return TWO_CLASSES if n_classes == 2 else MULTI_CLASS


def class_ids(labels: Labels, classes: Sequence[str]) -> npt.NDArray[np.float32]:
    """Index of each label among the classes; without classes the labels themselves.

    Raises DataError if a label is not one of the classes.
    """
    if not classes:
        numbers = numbers_of(labels)
        assert numbers is not None
        return numbers.astype(np.float32)
    names = np.unique(labels)
    written = _written(names)
    if not set(written) <= set(classes):
        raise DataError(f"label must be one of the {len(classes)} classes of the run")
    ids = np.array([classes.index(name) for name in written], dtype=np.float32)
    coded = np.empty(len(labels), dtype=np.float32)
    for rows in batches(len(labels), labels.itemsize):
        coded[rows] = ids[np.searchsorted(names, labels[rows])]
    return coded


def untrained_classes(classes: Sequence[str], labels: Labels) -> tuple[str, ...]:
    """Classes that no training label (`labels`) has."""
    trained = set(_written(np.unique(labels)))
    return tuple(name for name in classes if name not in trained)


def note_on_untrained(classes: Sequence[str]) -> str:
    """Warning about classes that occur only in validation or test rows."""
    shown = listed(classes, MOST_SHOWN)
    return (
        f"classes of the label in no training row, which the model cannot know: {shown}; correct "
        "them, drop their rows (a schema lists them as missing of the label column, with "
        "missing-label=drop), or hold other rows back (seed)"
    )


def positive_last(classes: Sequence[str], positive: str, objective: str) -> tuple[str, ...]:
    """Order the two classes so that the positive one has id 1; an empty name leaves them.

    Raises DataError if there are not two classes, or if `positive` is neither.
    """
    if not positive:
        return tuple(classes)
    if objective != TWO_CLASSES:
        rule = f"positive-label must be empty for {objective}, got a name; it is for two classes"
        raise DataError(rule)
    if positive not in classes:
        rule = "positive-label must be one of the two classes, got another name"
        names = f"{' or '.join(map(repr, classes))}, got {positive!r}"
        raise DataError(rule, here=f"positive-label must be one of the two classes, {names}")
    return (*(name for name in classes if name != positive), positive)


def number_labels(
    labels: Labels, objective: str, n_train: int, positive: str = ""
) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
    """Return the class names, and the labels as numbers; the first `n_train` rows train.

    Raises DataError if the labels do not fit the objective, or are equal in every training row.
    """
    classes = positive_last(class_names(labels, objective), positive, objective)
    ids = class_ids(labels, classes)
    if len(np.unique(ids[:n_train])) < 2:
        raise DataError("label must not be the same in every training row")
    return classes, ids


def check_weights(weights: npt.NDArray[np.float32]) -> None:
    """Check that some training row has a weight above 0."""
    if not weights.sum(dtype=np.float64) > 0:
        raise DataError("weight must be > 0 in some training row")


def check_events(objective: str, label_sums: npt.NDArray[np.float64]) -> None:
    """Check that a training row is an event, or ranks differ, by the label sums of all of them."""
    if is_ranking(objective) and not label_sums[1] > 0:
        raise DataError(
            "label must differ between training rows of some query (qid), got one value a query: "
            "there is nothing to rank"
        )
    if is_survival(objective) and not label_sums[0] > 0:
        raise DataError(
            "label must be the time of an event in some training row of weight > 0, got only "
            "censored times"
        )


def notes_on_queries(labels: npt.NDArray[Any]) -> list[Note]:
    """Note queries of ranked rows from which nothing can be learned."""
    n_queries, n_paired = paired_rows(labels)
    if n_paired == n_queries:
        return []
    rule = f"{n_queries - n_paired:,} of {n_queries:,} queries have one row, or one label in all"
    return [Note(f"{rule} rows, so they train nothing")]


def check_mean(objective: Objective, mean: npt.NDArray[np.float32]) -> None:
    """Check that a margin predicts the mean label of the training rows, before the first tree."""
    try:
        check_base_score(objective, mean)
    except ValueError as error:
        rule = str(error).removeprefix("base_score ")
        raise DataError(f"mean label of the training rows {rule}") from error


def label_texts(labels: Labels) -> npt.NDArray[np.str_]:
    """The class name of each label."""
    names, name_ids = np.unique(labels, return_inverse=True)
    return np.array(_written(names), dtype=np.str_)[name_ids]


def merge_classes(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Distinct class names, in numerical order if all are numbers, otherwise sorted as text."""
    merged = sorted({name for classes in names for name in classes})
    return tuple(sorted(merged, key=float) if all(map(is_finite, merged)) else merged)


def _written(values: npt.NDArray[Any]) -> list[str]:
    is_text = values.dtype.kind == "U"
    return [str(value) if is_text else number_name(float(value)) for value in values]
