"""Horizontal runs: parties with different rows of the same columns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.conversation import Conversation, ask
from fedapp.data import labels
from fedapp.data.columns import agreed, in_words
from fedapp.data.datasets import party_sources
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.schema import listed
from fedapp.errors import ConfigError, DataError, as_plain, did_you_mean_path
from fedapp.home import RUNS
from fedapp.messages import handshake as messages
from fedapp.messages.fields import Reply, fields_of, loss_fields
from fedapp.messages.scoring import BalanceReply, BalanceRequest, EvaluateReply, EvaluateRequest
from fedapp.metrics.survival import Cells
from fedapp.records.document import from_text, model_bytes
from fedapp.sections import setting_names
from fedapp.settings import HorizontalSettings, Settings
from fedapp.trees.losses import LossParameters, Objective
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import balance, base_score, is_regression, n_label_sums, n_outputs
from fedapp.trees.xgboost import Warn, is_xgboost, stock_classes, stock_ensemble, way_of_objective
from strategies import scoring
from strategies.common_table import CommonTable, classes_without_rows, common_table, similar_names
from strategies.handshake import Hellos, InitialModel
from strategies.method import LOCAL_TABLES, SPLIT_SETTINGS, Outcome, TreeStrategy

log = logging.getLogger("fedapp")


@dataclass(slots=True, eq=False)
class HorizontalState:
    """What all horizontal runs have at a checkpoint; a method's state adds to it."""

    table: CommonTable  # does not depend on who is present in a resumed run
    initial: InitialModel
    history: scoring.History


class HorizontalStrategy(TreeStrategy[messages.HelloReply]):
    """A strategy whose parties have different rows of the same columns, with labels."""

    introduction = messages.HelloReply
    reads = SPLIT_SETTINGS | setting_names(HorizontalSettings) | {"objective"}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.table = CommonTable((), (), ())
        self.initial = InitialModel()

    @property
    def sees_only_sums(self) -> bool:
        """Whether the server sees only sums over all parties."""
        return getattr(self.section, "aggregation", "plain") == "secure"

    def greeting(self) -> messages.HelloRequest:
        """Ask for the table's description; the parties hold rows back."""
        return messages.HelloRequest(
            objective=self.settings.objective,
            rounded=self.sees_only_sums,
            least_rows_per_name=self.settings.least_rows_per_name,
            **fields_of(self.settings, Holdout),
            **self.plan(),
        )

    def plan(self) -> dict[str, Any]:
        fewest = self.settings.min_parties
        if self.sees_only_sums:
            return {**super().plan(), "aggregation": "secure", "threshold": fewest}
        may_lose = 0 < fewest < self.settings.parties
        return {**super().plan(), "restarts": messages.MOST_RESTARTS * may_lose}

    def greeting_again(self) -> messages.HelloRequest | None:
        """Ask for the first party's order of the columns, where others differ from it."""
        (first, *others) = [hello.columns for hello in self.parties.values()]
        if not any(other != first and sorted(other) == sorted(first) for other in others):
            return None
        return replace(self.greeting(), columns=first)

    def suggested_objective(self) -> tuple[Objective, str]:
        classes = [hello.classes for hello in self.parties.values()]
        suggestion = labels.auto_objective(classes)
        if suggestion[0] == labels.MULTI_CLASS and (
            note := labels.note_on_measure(labels.merge_classes(classes))
        ):
            self.warn_once(note)
        self.check_classes(is_open=not is_regression(suggestion[0]))
        return suggestion

    def check_classes(self, is_open: bool) -> None:
        """See ``check_spelling``; parts of one table always spell classes alike."""
        data, n_parties = self.settings.data, self.settings.parties
        if not self.simulated or data == LOCAL_TABLES or party_sources(data, n_parties):
            labels.check_spelling(
                {name: hello.classes for name, hello in self.parties.items()}, is_open
            )

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
        classes = () if saved else classes_of_init_model(self.settings)
        if {*self.table.classes} < {*classes}:
            self.table = replace(self.table, classes=classes)
        self.initial = saved.initial if saved else self.initial
        settings = self.settings.watching(self.table.n_valid)
        self.settings = settings.splitting(self.table.category_counts.tolist())
        self.check_held_out(self.row_counts()["test"])
        if scale := self.table.scale_pos_weight:
            self._set_scale(scale)
        for text in similar_names(parties, self.table.columns):
            self.warn_once(text)
        for text in self.table_warnings(self.simulated):
            self.warn_once(text)
        if untrained := classes_without_rows(parties):
            self.warn_once(labels.note_on_untrained(untrained))
        return self.table

    def load_initial_model(self, trees_a_round: int) -> Ensemble | None:
        """The run's initial model, or None; a round has ``trees_a_round`` trees of each output.

        See ``read_init_model`` and ``InitialModel`` for what is refused.
        """
        run = self.bare_model(np.zeros(self.n_outputs, np.float32))
        model = read_init_model(self.settings, run, self.warn_once)
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
            num_parallel_tree=self.settings.num_parallel_tree,
        )

    def store_unseen(self, replies: Mapping[str, messages.LabelsReply]) -> None:
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
        scored = {"eval_metrics": self.settings.scored_metrics}
        return {**self.table.coding(), **loss_fields(self.settings), **scored}

    def ask_for_labels(self, parties: Hellos) -> Conversation[dict[str, messages.LabelsReply]]:
        """Have labels and categories coded; replies are sums of each party's training labels."""
        table = self.table
        replies = yield from ask(
            parties.all(messages.LabelsRequest(**self.terms())),
            messages.LabelsReply,
            lambda party, reply: messages.check_coded(
                party,
                reply,
                len(table.classes),
                n_label_sums(self.settings.objective, len(table.classes)),
                table.n_coded_columns,
            ),
        )
        self.store_unseen(replies)
        yield from self.balance(parties, replies)
        return replies

    def balance(
        self, parties: Hellos, replies: Mapping[str, messages.LabelsReply]
    ) -> Conversation[None]:
        """Resolve ``scale-pos-weight=balanced`` by the sums of the labels, and send the factor."""
        if not self.settings.scale_pos_weight:
            (positives,), weight = label_sums(replies, len(self.table.classes))
            self._set_scale(balance(float(positives), weight))
            log.info("scale-pos-weight balanced: %r", self.settings.scale_pos_weight)
            request = BalanceRequest(self.settings.scale_pos_weight)
            yield from ask(parties.all(request), BalanceReply)

    def check_scores(self, party: str, reply: Reply, subsets: Sequence[str] = SUBSETS) -> None:
        """Check a party's score sums of these subsets; see ``strategies.scoring.check_scores``."""
        objective, names = self.settings.objective, self.settings.scored_metrics
        scoring.check_scores(party, reply, objective, self.n_outputs, names, subsets)

    def evaluate(
        self,
        parties: Hellos,
        model: scoring.Scored,
        asks: scoring.AskToScore = scoring.ask_to_score,
        kind: Callable[..., Any] = EvaluateRequest,
        cells: Cells = scoring.UNDIVIDED,
    ) -> Conversation[tuple[Mapping[str, EvaluateReply], Outcome]]:
        """Write the finished model and have all parties score it; replies, the summary's part."""
        files = scoring.model_files(model)
        yield files
        spread = scoring.label_spread(parties)
        request = kind(**scoring.score_order(files.files["model.json"], spread, cells))
        replies = yield from asks(parties, request, self.check_scores)
        return replies, scoring.score_summary(model, replies, spread, self.settings.scored_metrics)

    def _set_scale(self, scale: float) -> None:
        self.settings = self.settings.model_copy(update={"asked_scale_pos_weight": scale})
        self.table = replace(self.table, scale_pos_weight=scale)


def read_init_model(settings: Settings, run: Ensemble, warn: Warn) -> Ensemble | None:
    """The initial model of a run, whose model without trees is ``run``; None without one.

    It must be in one piece, of fedapp or of XGBoost, and have the run's objective, columns, in any
    order, classes and categories; columns must be of the same kinds.
    """
    if not settings.init_model:
        return None
    content = _init_content(settings)
    if is_xgboost(content):
        model = stock_ensemble(content, run, warn)
    else:
        model = from_text(content.decode(errors="replace"), Ensemble)
    model = model.in_order(run.columns)
    fields = "objective", "columns", "classes", "categories", "parameters", "margin_column"
    for name in (*fields, "num_parallel_tree", "multi_strategy"):
        wanted, got = getattr(run, name), getattr(model, name)
        if wanted != got:
            name = "base-margin" if name == "margin_column" else name
            way = way_of_objective(got) if name == "objective" else ""
            rule = f"{name} of init-model must be the run's, {_difference(wanted, got)}{way}"
            raise ConfigError(rule)
    every = [ensemble.kinds or ("number",) * len(run.columns) for ensemble in (run, model)]
    for name, kind, due in zip(run.columns, *every, strict=True):
        if agreed((kind, due)) is None:
            rule = f"column '{name}' must be {in_words(due)}, as in init-model"
            raise ConfigError(as_plain(f"{rule}, got {in_words(kind)}"))
    return model


def classes_of_init_model(settings: Settings) -> tuple[str, ...]:
    """Classes of an initial model of several; the run's rows may lack some."""
    if not settings.init_model or settings.objective != labels.MULTI_CLASS:
        return ()
    content = _init_content(settings)
    if is_xgboost(content):
        return stock_classes(content)
    return from_text(content.decode(errors="replace"), Ensemble).classes


def _init_content(settings: Settings) -> bytes:
    """The initial model's file; ConfigError if there is none."""
    source = Path(settings.init_model)
    path = source / "model.json" if source.is_dir() else source
    if not path.is_file():
        rule = "must be a run's folder, its model.json, or a JSON or UBJ file of XGBoost"
        raise ConfigError(f"init-model {rule}, got {source}{did_you_mean_path(source, RUNS)}")
    return model_bytes(path)


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if len(wanted) != len(got):
            return f"{len(wanted)} in number, got {len(got)}"
        pairs = enumerate(zip(wanted, got, strict=True), start=1)
        number, (wanted, got) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        return as_plain(f"number {number} being {wanted!r}, got {got!r}")
    return f"{wanted!r}, got {got!r}"


def mean_label(
    replies: Mapping[str, messages.LabelsReply], n_classes: int, settings: Settings
) -> npt.NDArray[np.float32]:
    """Prediction before the first tree: ``base_score`` of all parties' training rows."""
    parameters = LossParameters.of(settings)
    sums = label_sums(replies, n_classes)
    labels.check_events(settings.objective, sums[0])
    score = base_score(settings.objective, *sums, parameters)
    labels.check_mean(settings.objective, score)
    return score


def label_sums(
    replies: Mapping[str, messages.LabelsReply], n_classes: int = 0
) -> tuple[npt.NDArray[np.float64], float]:
    """Weighted sums of the labels, and sum of the weights, over all parties."""
    weight_sum = sum(reply.weight_sum for reply in replies.values())
    if not weight_sum > 0:
        raise DataError("weight must be > 0 in some row of some party")
    sums = np.sum([reply.label_sums for reply in replies.values()], axis=0)
    if n_classes == 2 and not 0 < sums[-1] < weight_sum:
        raise DataError("label must have both classes among the training rows of weight > 0")
    return sums, weight_sum
