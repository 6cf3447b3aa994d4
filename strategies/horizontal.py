"""Horizontal runs: what the parties' tables have in common, and what each category code means."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.conversation import Conversation, ask
from fedapp.data.columns import ALIKE, agreed, check_kinds, in_words
from fedapp.data.datasets import party_sources
from fedapp.data.labels import (
    MULTI_CLASS,
    auto_objective,
    check_mean,
    check_spelling,
    format_classes,
    merge_classes,
    note_on_measure,
    note_on_untrained,
    number_written,
    positive_last,
)
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.schema import first, listed
from fedapp.errors import (
    ConfigError,
    DataError,
    ProtocolError,
    as_plain,
    as_protocol_error,
    did_you_mean_path,
)
from fedapp.home import RUNS
from fedapp.messages.fields import fields_of, loss_fields
from fedapp.messages.handshake import (
    NUMBERS,
    HelloReply,
    HelloRequest,
    LabelsReply,
    LabelsRequest,
    check_coded,
    dictionary_digest,
    pack_categories,
    read_categories,
)
from fedapp.messages.scoring import BalanceReply, BalanceRequest
from fedapp.records.document import load
from fedapp.settings import HorizontalSettings, Settings, setting_names
from fedapp.trees.categories import MOST_CATEGORIES, Categories, joint_categories, names_of
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import (
    LossParameters,
    Objective,
    balance,
    base_score,
    check_base_margin,
    is_regression,
    n_outputs,
)
from fedapp.trees.sets import Ints, category_counts
from strategies.handshake import Hellos, InitialModel
from strategies.method import LOCAL_TABLES, SPLIT_SETTINGS, TreeStrategy
from strategies.scoring import History

log = logging.getLogger("fedapp")

DIGEST = re.compile(r"([0-9a-f]{64})?")
# Blanks and marks beside a letter within a name; A+ and A-, or 1-5 and 15, mean different things.
WITHIN_WORDS = re.compile(r"(?<=[^\W\d])[\s_.,-]+(?=\w)|(?<=\w)[\s_.,-]+(?=[^\W\d])|\s+$")
Names = tuple[str, ...]
Digests = dict[int, str]  # column index -> digest of the names that a schema lists


@dataclass(frozen=True, slots=True)
class CommonTable:
    """What the tables of all parties have in common."""

    columns: tuple[str, ...]
    categories: Categories  # names of each column's categories, in the order of their codes
    classes: tuple[str, ...]  # in the order of their ids; none for regression
    # Column -> party -> number of values that the dictionary lacks, which become missing.
    unseen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    base_margin: str = ""  # column of the margins that rows start from
    n_valid: int = 0
    kinds: Names = ()  # of the columns, see ``fedapp.data.columns``
    scale_pos_weight: float = 0.0  # of ``balanced``, once the labels are summed

    @property
    def category_counts(self) -> Ints:
        """Categories of each column, 0 for one of numbers."""
        return category_counts(self.categories, len(self.columns))

    @property
    def n_coded_columns(self) -> int:
        """Columns in which parties count unseen values: all, or none without categories."""
        return len(self.categories)

    def coding(self) -> dict[str, Any]:
        """The fields of a ``JointCoding``."""
        return {"classes": self.classes, **pack_categories(self.categories)}

    def coded(self, replies: Mapping[str, LabelsReply]) -> CommonTable:
        """The same table with the numbers of values that the parties report as unseen."""
        unseen: dict[str, dict[str, int]] = {}
        for i, column in enumerate(self.columns[: self.n_coded_columns]):
            counts = {party: int(reply.unseen[i]) for party, reply in replies.items()}
            if any(counts.values()):
                unseen[column] = {party: count for party, count in counts.items() if count}
        return replace(self, unseen=unseen)


@dataclass(slots=True, eq=False)
class HorizontalState:
    """What all horizontal runs have at a checkpoint; a method's state adds to it."""

    table: CommonTable  # does not depend on who is present in a resumed run
    initial: InitialModel
    history: History


class HorizontalStrategy(TreeStrategy[HelloReply]):
    """A strategy whose parties have different rows of the same columns, with labels."""

    introduction = HelloReply
    sees_only_sums = False  # whether the server sees only sums over all parties
    reads = SPLIT_SETTINGS | setting_names(HorizontalSettings) | {"objective"}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.table = CommonTable((), (), ())
        self.initial = InitialModel()

    def greeting(self) -> HelloRequest:
        """Ask for the table's description; the parties hold rows back."""
        return HelloRequest(
            objective=self.settings.objective,
            rounded=self.sees_only_sums,
            **fields_of(self.settings, Holdout),
            **self.plan(),
        )

    def plan(self) -> dict[str, Any]:
        # A party that is lost and comes back with a resumed run makes a round begin again twice.
        may_restart = self.settings.min_parties and not self.sees_only_sums
        n_spare = self.settings.parties - self.settings.min_parties if may_restart else 0
        return {**super().plan(), "restarts": 2 * n_spare}

    def greeting_again(self) -> HelloRequest | None:
        """Ask for the first party's order of the columns, where others differ from it."""
        (first, *others) = [hello.columns for hello in self.parties.values()]
        if not any(other != first and sorted(other) == sorted(first) for other in others):
            return None
        return replace(self.greeting(), columns=first)

    def suggested_objective(self) -> tuple[Objective, str]:
        classes = [hello.classes for hello in self.parties.values()]
        suggestion = auto_objective(classes)
        if suggestion[0] == MULTI_CLASS and (note := note_on_measure(merge_classes(classes))):
            self.warn_once(note)
        self.check_classes(is_open=not is_regression(suggestion[0]))
        return suggestion

    def check_classes(self, is_open: bool) -> None:
        """See ``check_spelling``; parts of one table always spell classes alike."""
        data, n_parties = self.settings.data, self.settings.parties
        if not self.simulated or data == LOCAL_TABLES or party_sources(data, n_parties):
            check_spelling({name: hello.classes for name, hello in self.parties.items()}, is_open)

    def row_counts(self) -> dict[str, int]:
        return {
            subset: sum(getattr(hello, f"n_{subset}") for hello in self.parties.values())
            for subset in SUBSETS
        }

    def table_facts(self) -> dict[str, Any]:
        """Categories and unseen values by column, the column of base margins, the initial model."""
        table = self.table
        categories = {
            column: {"names": len(names), "unseen": dict(table.unseen.get(column, {}))}
            for column, names in zip(table.columns, table.categories, strict=False)
            if names
        }
        facts: dict[str, Any] = {"categories": categories} if categories else {}
        if table.base_margin:
            facts["base_margin"] = table.base_margin
        return facts | self.initial.facts(self.settings)

    def agree(self, parties: Hellos, saved: HorizontalState | None) -> CommonTable:
        """Find the ``CommonTable`` and warn about it; a resumed run's is the saved one."""
        self.check_classes(is_open=False)
        self.table = common_table(parties, self.settings, saved.table if saved else None)
        self.initial = saved.initial if saved else self.initial
        self.settings = self.settings.watching(self.table.n_valid)
        if scale := self.table.scale_pos_weight:
            self._set_scale(scale)
        for text in similar_names(parties, self.table.columns):
            self.warn_once(text)
        for text in self.table_warnings(self.simulated):
            self.warn_once(text)
        if untrained := classes_without_rows(parties):
            self.warn_once(note_on_untrained(untrained))
        return self.table

    def load_initial_model(self, trees_a_round: int) -> Ensemble | None:
        """The run's initial model, or None; a round has ``trees_a_round`` trees of each output.

        See ``read_init_model`` and ``InitialModel`` for what is refused.
        """
        model = read_init_model(self.settings, self.table)
        if model is not None:
            self.initial = InitialModel.with_model(model, trees_a_round * model.n_outputs)
            log.info("continues %s: %d rounds", self.settings.init_model, self.initial.n_rounds)
        return model

    def bare_model(self, base_score: npt.NDArray[np.float32]) -> Ensemble:
        """The run's model without trees."""
        table = self.table
        return Ensemble(
            self.settings.objective,
            base_score,
            table.columns,
            table.classes,
            (),
            categories=table.categories,
            margin_column=table.base_margin,
            parameters=LossParameters.of(self.settings),
            kinds=table.kinds,
        )

    def store_unseen(self, replies: Mapping[str, LabelsReply]) -> None:
        """Store and warn about values that the joint dictionary lacks."""
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

    def ask_for_labels(self, parties: Hellos) -> Conversation[dict[str, LabelsReply]]:
        """Have labels and categories coded; replies are sums of each party's training labels."""
        table = self.table
        replies = yield from ask(
            parties.all(LabelsRequest(**self.terms())),
            LabelsReply,
            lambda party, reply: check_coded(
                party, reply, len(table.classes), self.n_outputs, table.n_coded_columns
            ),
        )
        self.store_unseen(replies)
        yield from self.balance(parties, replies)
        return replies

    def balance(self, parties: Hellos, replies: Mapping[str, LabelsReply]) -> Conversation[None]:
        """Resolve ``scale-pos-weight=balanced`` by the sums of the labels, and send the factor."""
        if not self.settings.scale_pos_weight:
            (positives,), weight = label_sums(replies, len(self.table.classes))
            self._set_scale(balance(float(positives), weight))
            log.info("scale-pos-weight balanced: %r", self.settings.scale_pos_weight)
            request = BalanceRequest(self.settings.scale_pos_weight)
            yield from ask(parties.all(request), BalanceReply)

    def _set_scale(self, scale: float) -> None:
        self.settings = self.settings.model_copy(update={"asked_scale_pos_weight": scale})
        self.table = replace(self.table, scale_pos_weight=scale)


def read_init_model(settings: Settings, table: CommonTable) -> Ensemble | None:
    """The initial model of a run; None without one.

    It must be in one piece, and have the run's objective, columns, classes and categories; columns
    must be of the same kinds.
    """
    if not settings.init_model:
        return None
    place = Path(settings.init_model)
    path = place / "model.json" if place.is_dir() else place
    if not path.is_file():
        rule = "must be a run's folder or its model.json"
        raise ConfigError(f"init-model {rule}, got {place}{did_you_mean_path(place, RUNS)}")
    model = load(path, Ensemble)
    pairs = {
        "objective": (settings.objective, model.objective),
        "columns": (table.columns, model.columns),
        "classes": (table.classes, model.classes),
        "categories": (table.categories, model.categories),
        "parameters": (LossParameters.of(settings), model.parameters),
        "base-margin": (table.base_margin, model.margin_column),
    }
    for name, (wanted, got) in pairs.items():
        if wanted != got:
            raise ConfigError(f"{name} of init-model must be the run's, {_difference(wanted, got)}")
    every = [one or ("number",) * len(table.columns) for one in (table.kinds, model.kinds)]
    for name, kind, due in zip(table.columns, *every, strict=True):
        if agreed((kind, due)) is None:
            rule = f"column '{name}' must be {in_words(due)}, as in init-model"
            raise ConfigError(as_plain(f"{rule}, got {in_words(kind)}"))
    return model


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if len(wanted) != len(got):
            return f"{len(wanted)} in number, got {len(got)}"
        pairs = enumerate(zip(wanted, got, strict=True), start=1)
        place, (wanted, got) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        return as_plain(f"number {place} being {wanted!r}, got {got!r}")
    return f"{wanted!r}, got {got!r}"


def common_table(
    parties: Mapping[str, HelloReply], settings: Settings, saved: CommonTable | None = None
) -> CommonTable:
    """What the tables of all parties have in common; in a resumed run, as it was at the start."""
    check_same_columns({name: hello.columns for name, hello in parties.items()})
    has_validation = any(hello.n_valid for hello in parties.values())
    if not has_validation and settings.watching(0).early_stopping_rounds:
        rule = "must leave validation rows for early-stopping-rounds"
        raise ConfigError(f"valid-fraction {rule}, got {settings.valid_fraction}")
    first, hello = next(iter(parties.items()))
    columns, base_margin = hello.columns, hello.base_margin
    for party, other in parties.items():
        if other.base_margin != base_margin:
            names = other.base_margin, base_margin
            got, expected = (f"the column {name!r}" if name else "none" for name in names)
            rule = f"base-margin must be that of {first} at all parties, {expected}, got {got}"
            remedy = "; a schema gives a column another name in the run" if all(names) else ""
            raise DataError(rule + remedy, party)
    if base_margin:
        try:
            check_base_margin(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if saved is not None:
        return saved
    classes, kinds = check_labels(parties, settings), joint_kinds(parties)
    n_valid = sum(hello.n_valid for hello in parties.values())
    joint = joint_dictionary(parties)
    return CommonTable(columns, joint, classes, {}, base_margin, n_valid, kinds)


def check_same_columns(columns: Mapping[str, Sequence[str]]) -> None:
    """Check that all parties have the same columns in the same order."""
    for party, names in columns.items():
        if len(set(names)) < len(names):
            raise DataError("columns must have different names", party)
    (first, expected), *others = columns.items()
    for party, names in others:
        missing_names, added_names = set(expected) - set(names), set(names) - set(expected)
        missing = [name for name in expected if name in missing_names]
        added = [name for name in names if name in added_names]
        if missing or added:
            faults = [f"{name!r} is missing" for name in missing[:3]]
            faults += [f"{name!r}, which {first} does not have" for name in added[:3]]
            raise DataError(f"columns must be those of {first}, got {', '.join(faults)}", party)
        for place, (here, wanted) in enumerate(zip(names, expected, strict=True), start=1):
            if here != wanted:
                raise DataError(
                    f"columns must be in the order of {first}'s, "
                    f"got {here!r} as column {place} in place of {wanted!r}",
                    party,
                )


def classes_without_rows(parties: Mapping[str, HelloReply]) -> tuple[str, ...]:
    """Classes that no training row of any party has."""
    trained = {
        name for hello in parties.values() for name in set(hello.classes) - set(hello.untrained)
    }
    untrained = merge_classes(hello.untrained for hello in parties.values())
    return tuple(name for name in untrained if name not in trained)


def parties_without_class(
    parties: Mapping[str, HelloReply], classes: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Parties without a training row of a class, by class; omits classes that nobody trains."""
    nowhere = classes_without_rows(parties)
    lacking = {
        name: tuple(
            party
            for party, hello in parties.items()
            if name not in hello.classes or name in hello.untrained
        )
        for name in classes
        if name not in nowhere
    }
    return {name: parties_lacking for name, parties_lacking in lacking.items() if parties_lacking}


def check_labels(parties: Mapping[str, HelloReply], settings: Settings) -> tuple[str, ...]:
    """Classes of all parties in the order of their ids; none for regression."""
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
            f"{format_classes({name: hello.classes for name, hello in parties.items()})}"
        )
    # Which of two classes counts as 1, if the run or a party says so.
    labels = {"the run": settings.positive_label}
    labels |= {name: hello.positive_label for name, hello in parties.items()}
    sources = {label: source for source, label in reversed(labels.items()) if label}
    if len(sources) > 1:
        got = ", ".join(f"{label!r} of {source}" for label, source in sources.items())
        raise DataError(f"positive-label must be the same wherever it is set, got {got}")
    return positive_last(classes, next(iter(sources), ""), settings.objective)


def mean_label(
    replies: Mapping[str, LabelsReply], n_classes: int, settings: Settings
) -> npt.NDArray[np.float32]:
    """Prediction before the first tree: ``base_score`` of all parties' training rows."""
    parameters = LossParameters.of(settings)
    score = base_score(settings.objective, *label_sums(replies, n_classes), parameters)
    check_mean(settings.objective, score)
    return score


def label_sums(
    replies: Mapping[str, LabelsReply], n_classes: int = 0
) -> tuple[npt.NDArray[np.float64], float]:
    """Weighted sums of the labels, and sum of the weights, over all parties."""
    weight_sum = sum(reply.weight_sum for reply in replies.values())
    if not weight_sum > 0:
        raise DataError("weight must be > 0 in some row of some party")
    sums = np.sum([reply.label_sums for reply in replies.values()], axis=0)
    if n_classes == 2 and not 0 < sums[-1] < weight_sum:
        raise DataError("label must have both classes among the training rows of weight > 0")
    return sums, weight_sum


def joint_dictionary(parties: Mapping[str, HelloReply]) -> Categories:
    """The category names of each column, in the order of their codes.

    Where a schema lists a column's names they are its dictionary; else it is the union of the
    parties' names, sorted by text.

    Raises
    ------
    DataError : a column is of another type at one party, schemas list different names, no party
        discloses the names that one lists, or there are too many.
    ProtocolError : a party's counts, names and digests do not fit together.
    """
    columns = next(iter(parties.values())).columns
    disclosed = {party: _disclosed(party, hello) for party, hello in parties.items()}
    if not any(disclosed.values()):
        return ()
    digests = {party: _digests(party, hello, disclosed[party]) for party, hello in parties.items()}
    listed_names = {
        place: _schema_names(place, columns[place], disclosed, digests)
        for place in sorted({place for by_place in digests.values() for place in by_place})
    }
    tables = {
        party: tuple(
            listed_names[place] if place in digests[party] else names_of(disclosed[party], place)
            for place in range(len(columns))
        )
        for party in parties
    }
    for place, column in enumerate(columns):
        if place in listed_names:  # as schemas say
            continue
        _check_spelling(column, {party: table[place] or () for party, table in tables.items()})
    union = joint_categories(tables.values())
    joint = tuple(listed_names.get(place, names or None) for place, names in enumerate(union))
    for column, names in zip(columns, joint, strict=True):
        if names and len(names) > MOST_CATEGORIES:
            rule = f"categories of column {listed([column])} must be {MOST_CATEGORIES:,} at most, "
            rule += f"the parties have {len(names):,}: drop-columns excludes it"
            raise DataError(rule)
    return joint if any(joint) else ()


def joint_kinds(parties: Mapping[str, HelloReply]) -> Names:
    """The kind of each column, which must be that of all parties' values; see ``agreed``."""
    columns, by_party = next(iter(parties.values())).columns, dict[str, Sequence[str]]()
    for party, hello in parties.items():
        counts = hello.category_counts.tolist() or [NUMBERS] * len(columns)
        coded = ["category" if count > 0 else "" if count == 0 else "number" for count in counts]
        with as_protocol_error(party, "HelloReply", "kinds"):
            check_kinds(hello.kinds, len(columns))
            kinds = by_party[party] = hello.kinds or coded
            for kind, by_count in zip(kinds, coded, strict=False):
                if (kind == "category") != (by_count == "category"):
                    raise ValueError("kinds must be of categories where there are names")
    joint = []
    for column, entries in zip(columns, zip(*by_party.values(), strict=False), strict=False):
        if (of_all := agreed(entries)) is None:
            users = {kind: party for party, kind in zip(by_party, entries, strict=True) if kind}
            got = ", ".join(f"{in_words(kind)} at {party}" for kind, party in users.items())
            rule = f"column {listed([column])} must be of one kind at all parties, got {got}"
            raise DataError(f"{rule}: {ALIKE}")
        joint.append(of_all or "number")
    return tuple(joint)


def _check_spelling(column: str, names: Mapping[str, Sequence[str]]) -> None:
    """Check that parties do not write the number of a category differently, as 1 and 01."""
    written: dict[Any, dict[str, list[str]]] = {}  # number -> its spellings -> who uses them
    for party, of_party in names.items():
        for name in of_party:
            if (number := number_written(name)) is not None:
                written.setdefault(number, {}).setdefault(name, []).append(party)
    for spellings in written.values():
        users = [party for each in spellings.values() for party in each]
        # A party that has both spellings means two different categories.
        if len(spellings) > 1 and len({*users}) == len(users):
            got = " and ".join(f"{listed([name])} at {who[0]}" for name, who in spellings.items())
            rule = f"categories of column {listed([column])} must be written alike at all parties"
            way = "write them alike, map them by codes, or list them as categories in schemas"
            raise DataError(as_plain(f"{rule}, got {got}: {way}"))


def _disclosed(party: str, hello: HelloReply) -> Categories:
    # With share-categories=false only digests of a schema's names come, no names.
    if not hello.categories:
        hello = replace(hello, category_counts=np.minimum(hello.category_counts, 0))
    return read_categories(party, hello, len(hello.columns))


def _digests(party: str, hello: HelloReply, disclosed: Categories) -> Digests:
    """The digests of a party, checked against the names that it discloses."""
    places = np.flatnonzero(hello.category_counts > 0).tolist()
    fits = len(hello.digests) == len(places) and all(map(DIGEST.fullmatch, hello.digests))
    digests = {place: text for place, text in zip(places, hello.digests, strict=False) if text}
    if hello.categories:
        fits = fits and all(
            digest == dictionary_digest(names_of(disclosed, place) or ())
            for place, digest in digests.items()
        )
    else:
        fits = fits and len(digests) == len(places)
    if not fits:
        rule = "must be of the names that a schema gives, one a column with categories"
        raise ProtocolError(party, "HelloReply", "digests", rule)
    return digests


def _schema_names(
    place: int, column: str, disclosed: Mapping[str, Categories], digests: Mapping[str, Digests]
) -> Names:
    """The names of a column, from any party that discloses those of its schema."""
    (first, digest), *others = [
        (party, by_place[place]) for party, by_place in digests.items() if place in by_place
    ]
    for party, other in others:
        if other != digest:
            rule = "must be the same in all schemas, in the same order"
            got = f"got others than at {first}"
            raise DataError(f"categories of column {listed([column])} {rule}, {got}", party)
    for party in (first, *(party for party, _ in others)):
        if names := names_of(disclosed[party], place):
            return names
    rule = f"categories of column {listed([column])} must be sent by a party whose schema gives "
    rule += "them, got none but such with share-categories = false"
    raise DataError(rule, first)


def similar_names(parties: Mapping[str, HelloReply], columns: Sequence[str]) -> list[str]:
    """Warnings about names that differ only in capitals, blanks or marks, or of which none fits."""
    tables = {party: _disclosed(party, hello) for party, hello in parties.items()}
    notes = []
    for place, column in enumerate(columns):
        # A name without capitals and marks -> its spellings -> the parties that use them.
        spellings: dict[str, dict[str, list[str]]] = {}
        for party, table in tables.items():
            for name in names_of(table, place) or ():
                letters = WITHIN_WORDS.sub("", name.casefold())
                spellings.setdefault(letters, {}).setdefault(name, []).append(party)
        names_by_party = ((party, names_of(table, place)) for party, table in tables.items())
        users_of = [(party, {*names}) for party, names in names_by_party if names]
        for (one, here), (other, there) in pairwise(users_of):
            if not here & there:
                notes.append(f"categories of {listed([column])}: {one} and {other} share no name")
        pairs = list[str]()
        for letters, users in spellings.items():
            everyone = [party for parties_of in users.values() for party in parties_of]
            # A party that has both spellings means two different categories.
            if letters and len(users) > 1 and len(set(everyone)) == len(everyone):
                texts = [f"{listed([name])} ({users[name][0]})" for name in users]
                pairs.append(" and ".join(texts))
        if pairs:
            rule = f"categories of {listed([column])} differ only in spelling"
            notes.append(as_plain(f"{rule}: {first(pairs, 3)}"))
    return notes
