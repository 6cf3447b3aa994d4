"""How a run of horizontal parties opens: what their tables must have in common."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings
from fedapp.conversation import Checkpoint, Conversation, Parties, ask
from fedapp.data.categories import Categories
from fedapp.data.labels import (
    auto_objective,
    check_mean,
    check_spelling,
    merge_classes,
    note_on_untrained,
    positive_last,
    told_classes,
)
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.schema import listed
from fedapp.data.sources import party_sources
from fedapp.errors import ConfigError, DataError
from fedapp.messages.dictionary import pack_categories
from fedapp.messages.fields import fields_of
from fedapp.messages.hello import HelloReply, HelloRequest
from fedapp.messages.labels import LabelsReply, LabelsRequest, check_coded
from fedapp.messages.parameters import loss_fields
from fedapp.trees.base_score import base_score, check_base_margin
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import LossParameters, Objective, is_regression, n_outputs
from strategies.base import TreeStrategy
from strategies.dictionary import alike_names, joint_dictionary, joint_kinds
from strategies.settings import HELD_BACK, OWN_TABLES
from strategies.warm_start import Begun, read_init_model

log = logging.getLogger("fedapp")


@dataclass(frozen=True, slots=True)
class CommonTable:
    """What the tables of all parties have in common.

    Parameters
    ----------
    columns : names, in order.
    categories : names of the categories of each column, in the order of their codes.
    classes : names, in the order of their ids; none for regression.
    unseen : values that are not in the dictionary, and so missing, by column and party; none of 0.
    base_margin : column of the margins that rows start from; empty where they have none.
    n_valid : validation rows.
    """

    columns: tuple[str, ...]
    categories: Categories
    classes: tuple[str, ...]
    unseen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    base_margin: str = ""
    n_valid: int = 0

    @property
    def n_coded_columns(self) -> int:
        """Columns of which parties count unseen values: all, or none without categories."""
        return len(self.categories)

    def coding(self) -> dict[str, Any]:
        """The fields of a ``JointCoding``."""
        return {"classes": self.classes, **pack_categories(self.categories)}

    def coded(self, replies: Mapping[str, LabelsReply]) -> CommonTable:
        """With the values that the parties count as missing from now on."""
        counts = {
            column: {
                party: int(reply.unseen[place])
                for party, reply in replies.items()
                if reply.unseen[place]
            }
            for place, column in enumerate(self.columns[: self.n_coded_columns])
        }
        return replace(self, unseen={column: by for column, by in counts.items() if by})

    def facts(self) -> dict[str, Any]:
        """For a checkpoint: it must not depend on who is still there when a run is resumed."""
        names = ("classes", "categories", "unseen", "n_valid")
        return {name: getattr(self, name) for name in names}


class HorizontalStrategy(TreeStrategy[HelloReply]):
    """A strategy whose parties have the same columns of different rows, with labels."""

    introduction = HelloReply
    tells_sums_alone = False  # whether nothing that parties say of their rows is of one party alone
    reads = HELD_BACK | {"partition", "objective", "min-parties"}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.table = CommonTable((), (), ())
        self.begun = Begun()

    def greeting(self) -> HelloRequest:
        """Read the table, hold rows back."""
        return HelloRequest(
            objective=self.settings.objective,
            rounded=self.tells_sums_alone,
            **fields_of(self.settings, Holdout),
            **self.plan(),
        )

    def greeting_again(self) -> HelloRequest | None:
        """With the first party's order of the columns, where others have them in another."""
        (due, *others) = [hello.columns for hello in self.parties.values()]
        if not any(own != due and sorted(own) == sorted(due) for own in others):
            return None
        return replace(self.greeting(), columns=due)

    def suggested_objective(self) -> tuple[Objective, str]:
        """By the labels of all parties."""
        found = auto_objective([hello.classes for hello in self.parties.values()])
        self.check_classes(is_open=not is_regression(found[0]))
        return found

    def check_classes(self, is_open: bool) -> None:
        """See ``check_spelling``; shares of one table are never spelled differently."""
        data, n_parties = self.settings.data, self.settings.parties
        if not self.simulated or data == OWN_TABLES or party_sources(data, n_parties):
            check_spelling({name: hello.classes for name, hello in self.parties.items()}, is_open)

    def row_counts(self) -> dict[str, int]:
        """Sums over the parties."""
        return {
            subset: sum(getattr(hello, f"n_{subset}") for hello in self.parties.values())
            for subset in SUBSETS
        }

    def table_facts(self) -> dict[str, Any]:
        """Categories of each column, and by party how many values are not among them; the column of
        base margins; and what the run goes on from."""
        table = self.table
        found = {
            column: {"names": len(names), "unseen": dict(table.unseen.get(column, {}))}
            for column, names in zip(table.columns, table.categories, strict=False)
            if names
        }
        told: dict[str, Any] = {"categories": found} if found else {}
        if table.base_margin:
            told["base_margin"] = table.base_margin
        return told | self.begun.facts(self.settings)

    def agree(self, parties: Parties[HelloReply], saved: Checkpoint | None) -> CommonTable:
        """Settle what the tables have in common; see ``common_table``."""
        self.check_classes(is_open=False)
        self.table = common_table(parties, self.settings, saved)
        self.settings = self.settings.watching(self.table.n_valid)
        joint_kinds(parties)  # or refuse the run now, and not when its model is written
        for text in alike_names(parties, self.table.columns):
            self.warn_once(text)
        for text in self.callbacks.warnings(self.simulated):
            self.warn_once(text)
        if untrained := untrained_everywhere(parties):
            self.warn_once(note_on_untrained(untrained))
        return self.table

    def begin_with(self, trees_a_round: int) -> Ensemble | None:
        """The model that the run goes on from, once the tables are known; None without one.

        Parameters
        ----------
        trees_a_round : times the outputs of the model.

        Raises
        ------
        ConfigError, DataError : see ``read_init_model`` and ``Begun``.
        """
        table = self.table
        of_run = table.columns, table.classes, table.categories, table.base_margin
        model = read_init_model(self.settings, *of_run)
        if model is not None:
            self.begun = Begun.with_model(model, trees_a_round * model.n_outputs)
            log.info("goes on from %s: %d rounds", self.settings.init_model, self.begun.n_rounds)
        return model

    def note_coding(self, replies: Mapping[str, LabelsReply]) -> None:
        """Note which values became missing when the parties took up the common dictionary."""
        self.table = self.table.coded(replies)
        for column, counts in self.table.unseen.items():
            for party, count in counts.items():
                rule = "are not among its categories, and count as missing"
                self.warn_once(f"{party}: {count:,} values of {listed([column])} {rule}")

    @property
    def n_outputs(self) -> int:
        """Margins of a row."""
        return n_outputs(self.settings.objective, len(self.table.classes))

    def terms(self) -> dict[str, Any]:
        """The fields of ``Terms``."""
        return {**self.table.coding(), **loss_fields(self.settings)}

    def ask_for_labels(self, parties: Parties[HelloReply]) -> Conversation[dict[str, LabelsReply]]:
        """Have labels and categories coded; sums of the labels of each party's training rows."""
        table = self.table
        replies = yield from ask(
            parties.all(LabelsRequest(**self.terms())),
            LabelsReply,
            lambda party, reply: check_coded(
                party, reply, len(table.classes), self.n_outputs, table.n_coded_columns
            ),
        )
        self.note_coding(replies)
        return replies


def common_table(
    parties: Mapping[str, HelloReply], settings: Settings, saved: Checkpoint | None = None
) -> CommonTable:
    """What the tables of all parties have in common; once a run has begun, what they had then.

    Raises
    ------
    DataError : columns, categories, base margins or labels do not fit together.
    ConfigError : early stopping has no rows to look at, or the objective takes no base margins.
    """
    check_same_columns({name: hello.columns for name, hello in parties.items()})
    check_validation(parties, settings)
    columns, base_margin = next(iter(parties.values())).columns, common_base_margin(parties)
    if base_margin:
        try:
            check_base_margin(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if saved is not None:
        facts = saved.facts
        names = tuple(None if one is None else tuple(one) for one in facts["categories"])
        classes, unseen = tuple(facts["classes"]), facts["unseen"]
        return CommonTable(columns, names, classes, unseen, base_margin, facts["n_valid"])
    classes = check_labels(parties, settings)
    n_valid = sum(hello.n_valid for hello in parties.values())
    return CommonTable(columns, joint_dictionary(parties), classes, {}, base_margin, n_valid)


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


def untrained_everywhere(parties: Mapping[str, HelloReply]) -> tuple[str, ...]:
    """Classes that no training row of any party has."""
    trained = {
        name for hello in parties.values() for name in set(hello.classes) - set(hello.untrained)
    }
    found = merge_classes(hello.untrained for hello in parties.values())
    return tuple(name for name in found if name not in trained)


def untrained_by_class(
    parties: Mapping[str, HelloReply], classes: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Parties without a training row of a class, by class; without those that nobody trains."""
    nowhere = untrained_everywhere(parties)
    found = {
        name: tuple(
            party
            for party, hello in parties.items()
            if name not in hello.classes or name in hello.untrained
        )
        for name in classes
        if name not in nowhere
    }
    return {name: who for name, who in found.items() if who}


def common_base_margin(parties: Mapping[str, HelloReply]) -> str:
    """The column of base margins that all parties have; empty where none has one.

    Raises
    ------
    DataError : names a party whose column is not that of the first one.
    """
    (first, due), *others = [(party, hello.base_margin) for party, hello in parties.items()]
    for party, own in others:
        if own != due:
            found, wanted = (f"the column {name!r}" if name else "none" for name in (own, due))
            rule = f"base-margin must be that of {first} at all parties, {wanted}, got {found}"
            way = "a schema gives a column another name in the run"
            raise DataError(f"{rule}; {way}" if own and due else rule, party)
    return due


def check_labels(parties: Mapping[str, HelloReply], settings: Settings) -> tuple[str, ...]:
    """The classes of all parties in the order of their ids; none for regression.

    Raises
    ------
    DataError : all labels are the same, or there are too many classes.
    """
    hellos = parties.values()
    if is_regression(settings.objective):
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
            f"{', '.join(classes[:5])}; set objective=multi:softprob, or spell labels alike: "
            f"{told_classes({name: hello.classes for name, hello in parties.items()})}"
        )
    return positive_last(classes, _positive_label(parties, settings), settings.objective)


def _positive_label(parties: Mapping[str, HelloReply], settings: Settings) -> str:
    """Which of two classes counts as 1, as the run and the parties say, if any does."""
    said = {"the run": settings.positive_label}
    said |= {name: hello.positive_label for name, hello in parties.items()}
    found = {label: who for who, label in reversed(said.items()) if label}
    if len(found) > 1:
        who = ", ".join(f"{label!r} of {name}" for label, name in found.items())
        raise DataError(f"positive-label must be the same wherever it is said, got {who}")
    return next(iter(found), "")


def mean_label(
    replies: Mapping[str, LabelsReply], n_classes: int, settings: Settings
) -> npt.NDArray[np.float32]:
    """Prediction before the first tree: ``base_score`` of all parties' training rows.

    Raises
    ------
    DataError : see ``label_sums``; or no margin has this prediction.
    """
    parameters = LossParameters.of(settings)
    score = base_score(settings.objective, *label_sums(replies, n_classes), parameters)
    check_mean(settings.objective, score)
    return score


def label_sums(
    replies: Mapping[str, LabelsReply], n_classes: int = 0
) -> tuple[npt.NDArray[np.float64], float]:
    """Weighted sums of the labels, and sum of the weights, over all parties.

    Raises
    ------
    DataError : no training row of any party has a weight, or, of two classes, one has none.
    """
    weight_sum = sum(reply.weight_sum for reply in replies.values())
    if not weight_sum > 0:
        raise DataError("weight must be > 0 in some row of some party")
    sums = np.sum([reply.label_sums for reply in replies.values()], axis=0)
    if n_classes == 2 and not 0 < sums[-1] < weight_sum:
        raise DataError("label must have both classes among the training rows of weight > 0")
    return sums, weight_sum


def check_validation(parties: Mapping[str, HelloReply], settings: Settings) -> None:
    """Hold that early stopping has rows to look at.

    Raises
    ------
    ConfigError : no party has a validation row.
    """
    has_none = not any(hello.n_valid for hello in parties.values())
    if has_none and settings.watching(0).early_stopping_rounds:
        raise ConfigError(
            "valid-fraction must leave validation rows for early-stopping-rounds, "
            f"got {settings.valid_fraction}"
        )
