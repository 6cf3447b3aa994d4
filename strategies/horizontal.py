"""How a run of horizontal parties opens: what their tables must have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedapp.config import Settings
from fedapp.conversation import Conversation, Parties, ask
from fedapp.data.labels import merge_classes
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, DataError
from fedapp.messages.hello import HelloReply, HelloRequest
from fedapp.messages.labels import LabelsReply, LabelsRequest, check_label_sum
from fedapp.trees.objective import REGRESSION
from strategies.base import TreeStrategy


class HorizontalStrategy(TreeStrategy[HelloReply]):
    """A strategy whose parties have the same columns of different rows, with labels."""

    introduction = HelloReply
    reads = frozenset(("partition", "objective", "test-fraction", "valid-fraction", "min-parties"))

    def greeting(self) -> HelloRequest:
        """Read the table, hold rows back."""
        settings = self.settings
        return HelloRequest(
            settings.objective, settings.test_fraction, settings.valid_fraction, settings.seed
        )

    def row_counts(self) -> dict[str, int]:
        """Sums over the parties."""
        return {
            subset: sum(getattr(hello, f"n_{subset}") for hello in self.parties.values())
            for subset in SUBSETS
        }


def common_table(
    parties: Mapping[str, HelloReply], settings: Settings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the columns, which all parties have, and of the classes; none for regression.

    Raises
    ------
    DataError : columns or labels do not fit together.
    ConfigError : early stopping has no rows to look at.
    """
    check_same_columns({name: hello.columns for name, hello in parties.items()})
    check_validation(parties, settings)
    classes = check_labels(parties, settings)
    return next(iter(parties.values())).columns, classes


def ask_for_labels(
    parties: Parties[HelloReply], classes: tuple[str, ...]
) -> Conversation[dict[str, LabelsReply]]:
    """Sums of the labels of each party's training rows."""
    return (
        yield from ask(
            parties.all(LabelsRequest(classes)),
            LabelsReply,
            lambda party, reply: check_label_sum(party, reply, len(classes)),
        )
    )


def check_same_columns(columns: Mapping[str, Sequence[str]]) -> None:
    """Hold that all parties have the same columns in the same order.

    Parameters
    ----------
    columns : names of the columns, by party.

    Raises
    ------
    DataError : names the party and the first column that differs from the first party's.
    """
    for party, own in columns.items():
        if len(set(own)) < len(own):
            raise DataError("columns must have a name of their own each", party)
    (first, due), *others = columns.items()
    known = set(due)
    for party, own in others:
        there = set(own)
        missing = [name for name in due if name not in there]
        added = [name for name in own if name not in known]
        if missing or added:
            found = [f"{name!r} is missing" for name in missing[:3]]
            found += [f"{name!r}, which {first} does not have" for name in added[:3]]
            raise DataError(f"columns must be those of {first}, got {', '.join(found)}", party)
        for place, (here, wanted) in enumerate(zip(own, due, strict=True), start=1):
            if here != wanted:
                raise DataError(
                    f"columns must be in the order of {first}'s, "
                    f"got {here!r} as column {place} in place of {wanted!r}",
                    party,
                )


def check_labels(parties: Mapping[str, HelloReply], settings: Settings) -> tuple[str, ...]:
    """The classes of all parties in the order of their ids; none for regression.

    Raises
    ------
    DataError : all labels are the same, or there are too many classes.
    """
    hellos = parties.values()
    if settings.objective == REGRESSION:
        if min(hello.label_low for hello in hellos) == max(hello.label_high for hello in hellos):
            raise DataError("label must not be the same in every row of every party")
        return ()
    classes = merge_classes(hello.classes for hello in hellos)
    if len(classes) < 2:
        raise DataError(
            f"label must not be the same in every row of every party, got only {classes[0]!r}"
        )
    if settings.objective == "binary:logistic" and len(classes) != 2:
        raise DataError(
            f"label must have 2 values for binary:logistic, the parties have {len(classes)}: "
            f"{', '.join(classes[:5])}; set objective=multi:softprob"
        )
    return classes


def label_sums(replies: Mapping[str, LabelsReply], n_classes: int = 0) -> tuple[float, float]:
    """Weighted sum of the labels, and sum of the weights, over all parties.

    Raises
    ------
    DataError : no training row of any party has a weight, or, of two classes, one has none.
    """
    weight_sum = sum(reply.weight_sum for reply in replies.values())
    if not weight_sum > 0:
        raise DataError("weight must be > 0 in some row of some party")
    label_sum = sum(reply.label_sum for reply in replies.values())
    if n_classes == 2 and not 0 < label_sum < weight_sum:
        raise DataError("label must have both classes among the training rows of weight > 0")
    return label_sum, weight_sum


def check_validation(parties: Mapping[str, HelloReply], settings: Settings) -> None:
    """Hold that early stopping has rows to look at.

    Raises
    ------
    ConfigError : no party has a validation row.
    """
    if settings.early_stopping_rounds and not any(hello.n_valid for hello in parties.values()):
        raise ConfigError(
            "valid-fraction must leave validation rows for early-stopping-rounds, "
            f"got {settings.valid_fraction}"
        )
