"""Levels of trees at the active party: sums, splits, and where its rows go by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from clients.scoring import compare_with_local
from clients.secureboost.claims import Rows
from clients.secureboost.joint import Ints
from clients.secureboost.model import Boosted
from clients.secureboost.round import Bools, Floats, Round, Sums, sets_of
from clients.secureboost.start import Started
from fedapp import metrics
from fedapp.data.partition import SUBSETS
from fedapp.histograms.build import build_all_histograms
from fedapp.histograms.vector_splits import build_vector_histograms
from fedapp.messages.secureboost import PartKept
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import role
from fedapp.trees.calibration import Curve
from fedapp.trees.grow import Growth, Routes
from fedapp.trees.model import Ensemble, Tree
from fedapp.trees.objective import gradients, is_of_rows
from fedapp.trees.sets import CategorySets


@role
class Splitting(Started):
    """State of the active party while trees grow."""

    round: Round | None = None  # in progress
    curve: Curve | None = None  # of the finished model, if it is calibrated

    @property
    def current(self) -> Round:
        """The round in progress."""
        assert self.round is not None
        return self.round

    @property
    def _grows(self) -> bool:
        """Whether nodes of the round's trees wait for sums."""
        growth = self.round.growth if self.round is not None else None
        return growth is not None and len(growth.open_nodes) > 0

    def growing(self) -> Growth:
        """Trees of the round in progress."""
        return self.current.growing(self.joint, self.settings)

    def rows(self) -> Rows:
        """Training rows of the round in progress, in their nodes."""
        return self.current.rows(self.nodes[:, : self.n_train], self.n_parallel)

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.current.drawn(self.joint, party)

    def _gradients(self) -> Floats:
        """Gradients and hessians of the training rows, shape (n_rows, n_pairs, 2)."""
        margins, numbers, weights = (
            of_all[: self.n_train] for of_all in (self.boosted.margins, self.numbers, self.weights)
        )
        pairs = gradients(self.objective, margins, numbers, weights, self.parameters)
        # Else the others would see which rows have no pair, or are censored before all events.
        if not is_of_rows(self.objective):
            pairs[..., 1] = np.maximum(pairs[..., 1], np.finfo(np.float32).tiny)
        return np.tile(pairs, (1, self.n_parallel, 1))

    def _begin_trees(self, number: int, pairs: Floats, allowed: Bools) -> None:
        """Start a round of trees with these gradients, all rows at the roots."""
        self.round = Round(number, np.ascontiguousarray(pairs.transpose(1, 0, 2)), allowed)
        growth = self.growing()
        growth.set_roots(pairs.sum(axis=0, dtype=np.float64).reshape(-1, *growth.cell))
        self.round = replace(self.round, growth=growth.state)
        self.begin_trees(self.width)

    def _grow_locally(self) -> None:
        """Grow all levels of the round, in which only this party has columns."""
        growth = self.growing()
        while growth.growing:
            self._send_splits(growth, *self._choose(growth, {}))
            self.apply_splits(Mail(self.name, []))

    def _choose(self, growth: Growth, sums: Mapping[str, Sums]) -> tuple[Routes, CategorySets]:
        """Splits of a level from the sums of all parties, and their category sets."""
        wanted_trees, wanted_nodes = growth.wanted.T
        build = build_vector_histograms if self.has_one_tree else build_all_histograms
        local = build(
            self.codes,
            self.missing_code,
            np.arange(len(self.columns)),
            self.cuts.widths,
            self.current.gradients,
            self.nodes[:, : self.n_train],
            wanted_trees,
            wanted_nodes,
        )
        return self.current.choose(self.joint, growth, {**sums, self.name: Sums(*local)}, self.name)

    def _send_splits(self, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
        """Make the local splits of a level; returns the letters for the others."""
        owners, columns = self.joint.owners(routes["column"])
        chosen = self.structure.split(routes["tree"], routes["node"], owners).last
        is_local = owners == self.number
        local = routes[is_local]
        partition = self.make_splits(
            chosen,
            columns[is_local],
            local["threshold"].astype(np.int64),
            local["default_left"].astype(np.uint8),
            sets_of(local, sets),
        )
        self.round = replace(self.current, growth=growth.state, chosen=chosen)
        letters: Letters = []
        for name in self.others:
            receiver = self.peers.index(name)
            splits = Round.splits_for(receiver, self.joint, growth, routes, sets)
            if len(splits.trees):
                letters.append((name, splits))
            # After the last level, only this party moves its rows.
            if growth.growing and len(local):
                letters.append((name, partition))
        return letters

    def apply_splits(self, mail: Mail) -> None:
        """Move all rows to the children, once the sides of every split have come."""
        chosen = self.current.chosen
        assert chosen is not None
        self.keep_partitions(mail)
        self.round = replace(self.current, chosen=None)
        self.take_splits(chosen)
        if self.current.claims is not None:
            self.current.claims.check_sides(self.peers, self.rows())

    def _scores(self, margins: Floats) -> dict[str, dict[str, float]]:
        """Scores by subset; none for a subset without rows."""
        rows = self._rows_to_score(margins)
        return metrics.pooled_subsets(self.objective, rows, self.settings.eval_metrics)

    def _rows_to_score(self, margins: Floats) -> dict[str, tuple[Floats, Floats, Floats]]:
        """Margins, labels and weights by subset."""
        rows_by_subset = {subset: self.rows_of(subset) for subset in SUBSETS}
        return {
            subset: (margins[rows], self.numbers[rows], self.weights[rows])
            for subset, rows in rows_by_subset.items()
        }

    def _scored(self, boosted: Boosted, scores: Mapping[str, Mapping[str, float]]) -> Boosted:
        """The model with its last round as the best, if none before has this score."""
        name = metrics.stopping_metric(self.objective, self.settings.eval_metrics)
        score = scores["valid"].get(name, float("nan"))
        return boosted.scored(score if metrics.larger_is_better(name) else -score)

    def _store_model(
        self, trees: Sequence[Tree], records: Sequence[Ints], margins: Floats, mail: Mail
    ) -> tuple[Ensemble, dict[str, dict[str, float]]]:
        """Score the finished model and store this party's part; returns the model, its scores."""
        model = Ensemble(
            self.objective,
            self.boosted.base_score,
            self.joint.column_names,
            self.classes,
            tuple(trees),
            parameters=self.parameters,
            margin_column=self.config.base_margin if self.base_margins is not None else "",
            multi_strategy=self.multi_strategy,
            num_parallel_tree=self.n_parallel,
            curve=self.curve,
        )
        scores = self._scores(margins)
        test_margins = margins[self.rows_of("test")]
        compare_with_local(self, self.numbers, self.objective, test_margins, self.parameters)
        n_columns = {name: len(widths) for name, widths in self.joint.widths.items()}
        digests = {name: mail.one(PartKept, name).digest for name in self.others}
        threshold = scores["train"].get("threshold")
        self.store_active_part(model, records, n_columns, digests, threshold)
        return model, scores
