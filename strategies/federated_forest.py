"""Federated Forest: a random forest over the columns of several parties, scikit-learn's rules.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 2 and 6: the server is
the master. It draws rows and columns, takes the largest improvement, notifies the winner, and
relays which rows go left, which it cannot read.

All trees grow together, level by level, in two exchanges a level: the best splits of all parties,
then the winners' partitions, which travel with the next level's request. With one exchange before
and one after, growing takes ``2 + 2 max_depth`` exchanges at most, whatever the number of trees.

``labels=paillier`` takes the paper's "encrypted label y" literally: passive parties sum encrypted
labels; the active party decrypts the sums, compares, and sends the server the winners. A level
takes an exchange for the sums, one for the choice, and with several passive parties a third for the
partitions; a single passive party sends its partitions with the next sums. So growing takes
``3 + 2 max_depth`` exchanges at most with one passive party, ``2 + 3 max_depth`` with several.

Departures: columns are drawn for a node, as in scikit-learn, in the paper for a tree. With
``labels=encoded`` improvements reach the server in clear, as the master compares them. Between
sites columns are drawn from the server's randomness instead of the run's seed, which every party
knows.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Progress, Saved, SavedModel
from fedapp.data.columns import check_kinds
from fedapp.errors import as_protocol_error
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    LevelReply,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    SetupRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.fields import Array, check_sizes, fields_of
from fedapp.messages.vertical import LevelSplits, SentReply, read_splits
from fedapp.records.document import to_text
from fedapp.settings import Section, Settings
from fedapp.trees.categories import Categories
from fedapp.trees.divided import NONE, Lookup, joint_names, whole_model
from fedapp.trees.forest.bagged import (
    BaggedForest,
    branches,
    column_seeds,
    count_drawn_columns,
    n_features,
    winners,
)
from fedapp.trees.structure import Structure
from strategies import vertical
from strategies.forest import FOREST_OBJECTIVES, ForestSettings
from strategies.method import LABEL_PRIVACY, SPLIT_SETTINGS, Outcome

Parts = dict[str, PartitionReply | FinishReply]
OF_CATEGORIES = "must be those of the categories of each split's column"
Won = tuple[Array, Array, Array]  # trees, nodes and owners of a level's splits
WARNINGS = {
    ENCODED: "labels=encoded: every party learns which training rows share a label (so two classes "
    "up to a swap), or labels up to scale, sign and offset",
    PAILLIER: "labels=paillier: no party gets a label, but which rows end together above "
    "max-depth: over many trees most of them can be grouped by label",
}


class FederatedForestSettings(ForestSettings, vertical.KeySettings, Section):
    """``[federated-forest]`` of the run config; see ``FederatedForest``."""

    table = "federated-forest"

    labels: Literal["encoded", "paillier"]
    """How labels leave the active party; `paillier`: encrypted, at many times the cost."""
    key_bits: Annotated[int, Field(ge=256, le=8192)]
    """Bits of Paillier's modulus, for `labels=paillier`."""
    master_keeps_model: bool
    """Whether the coordinator gets the whole forest, if every party's `allow-export` agrees."""


@dataclass(slots=True, eq=False)
class ForestState:
    """What a run has at a checkpoint."""

    mailbox: vertical.Mailbox
    rows: Mapping[str, int]  # matched, by subset
    draws: int  # seed of the columns' draws
    structure: Structure


class FederatedForest(vertical.VerticalStrategy):
    """Federated Forest: a random forest over the columns of several parties; the paper's master."""

    method = "federated-forest"
    reads = SPLIT_SETTINGS | LABEL_PRIVACY | {"objective", "max-bin", "allow-export"}
    round_name = "level"
    objectives = FOREST_OBJECTIVES
    section: FederatedForestSettings

    @classmethod
    def section_settings(cls, settings: Settings) -> FederatedForestSettings:
        return FederatedForestSettings.fitting(settings)

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        return cls.section_settings(settings).max_depth

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """Sums, with encrypted labels splits, and partitions."""
        return 3

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """Encrypted labels of ``align-most-rows`` rows are sent in blocks."""
        section, around = cls.section_settings(settings), super().exchanges_around(settings)
        if section.labels != PAILLIER:
            return around
        n_receivers = (settings.asked_parties or vertical.MANY_PARTIES) - 1
        return around + settings.align_most_rows // section.block_rows(n_receivers)

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        section = cls.section_settings(settings)
        names = "trees", "max_depth", "bootstrap", "labels"
        forest = {name: getattr(section, name) for name in names}
        return {**super().planned(settings), "rounds": 0, **forest}

    def conversation(self, parties: vertical.Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Algorithm 2, for all nodes of a level at once."""
        if saved is None:
            self.warn(WARNINGS[self.section.labels])
            run = yield from self._begin(parties)
        else:
            run = saved.read(ForestState)
        search = self._search_encrypted if self.encrypted else self._search
        while not self._is_grown(run):
            yield Checkpoint(run)
            won = yield from search(parties, run)
            run.structure = run.structure.split(*won)
            owners = run.structure.last.owners
            won_by = [name for i, name in enumerate(parties) if (owners == i).any()]
            if self.encrypted:
                # The active party's partitions came with its choice; those of a single passive
                # party come with its next sums.
                is_single = len(parties) == vertical.MIN_PARTIES
                won_by = [name for name in won_by if name != run.mailbox.active and not is_single]
            if won_by and not self._is_grown(run):
                yield from self._partition(won_by, run)
        yield Checkpoint(run)
        return (yield from self._finish(parties, run))

    @property
    def encrypted(self) -> bool:
        """Whether only the active party can read labels."""
        return self.section.labels == PAILLIER

    def _is_grown(self, run: ForestState) -> bool:
        """Whether the last level has been searched."""
        level, last = run.structure.level, run.structure.last
        return level == self.section.max_depth or (level > 0 and not len(last.trees))

    def _begin(self, parties: vertical.Hellos) -> Conversation[ForestState]:
        """Match the rows, bin the columns, encode the labels."""
        section, settings = self.section, self.settings
        mailbox, rows = yield from self.match_rows(parties)
        # Every site knows the run's seed, which would disclose how many columns others draw.
        draws = settings.seed if self.simulated else secrets.randbits(63)
        seeds, owners = _column_seeds(parties, draws)
        fields = {name: value for name, value in section if name in SetupRequest.forms}
        fields["criterion"] = section.criterion_for(settings.objective)
        # Only for the active party: for regression it would disclose the labels' scale.
        passive = fields | {"min_impurity_decrease": 0.0}
        requests = {
            party: SetupRequest(
                objective=settings.objective,
                max_bin=settings.max_bin,
                rows_seed=settings.seed,
                column_seeds=seeds[owners == owner],
                **(fields if party == mailbox.active else passive),
            )
            for owner, party in enumerate(parties)
        }
        yield from mailbox.relay_each(requests, SentReply)
        if self.encrypted:
            n_more = (rows["train"] - 1) // self.section.block_rows(len(mailbox.passive))
            yield from mailbox.relay_blocks(EncryptRequest, TakeRequest, n_more)
        return ForestState(mailbox, rows, draws, Structure.roots(section.trees))

    def _search(self, parties: vertical.Hellos, run: ForestState) -> Conversation[Won]:
        """Splits of this level: the largest improvement wins."""
        trees, nodes = run.structure.open_nodes
        requests = {
            party: LevelRequest(**fields_of(run.structure.last, LevelSplits), n_drawn=drawn)
            for party, drawn in self._drawn(parties, run).items()
        }
        check = partial(check_sizes, n_open=len(trees))
        replies = yield from run.mailbox.relay_each(requests, LevelReply, check)
        if run.structure.level:
            yield self._progress(run, replies[run.mailbox.active])
        best = winners(list(replies.values()))
        won = np.flatnonzero(best >= 0)
        return trees[won], nodes[won], best[won]

    def _search_encrypted(self, parties: vertical.Hellos, run: ForestState) -> Conversation[Won]:
        """The same: the passive parties sum, and the active one chooses."""
        drawn, fields = self._drawn(parties, run), fields_of(run.structure.last, LevelSplits)
        active = run.mailbox.active
        requests = {
            party: SumRequest(**fields, n_drawn=drawn[party]) for party in run.mailbox.passive
        }
        yield from run.mailbox.relay_each(requests, SentReply)

        def check_reply(party: str, reply: SplitReply) -> None:
            with as_protocol_error(party, "SplitReply", "nodes"):
                run.structure.places(reply.trees, reply.nodes, reply.owners, len(parties))

        fields |= {"n_drawn": drawn[active]}
        is_last = run.structure.level + 1 == self.section.max_depth
        reply = yield from run.mailbox.ask_active(
            SplitRequest, SplitReply, check_reply, **fields, last=is_last
        )
        if run.structure.level:
            yield self._progress(run, reply)
        return reply.trees, reply.nodes, reply.owners

    def _drawn(self, parties: vertical.Hellos, run: ForestState) -> dict[str, Array]:
        """Number of columns of each party that are drawn for each open node."""
        seeds, owners = _column_seeds(parties, run.draws)
        n_drawn = n_features(self.section.max_features, len(seeds))
        per, nodes = self.section.max_features_per, run.structure.open_nodes
        drawn = count_drawn_columns(seeds, owners, len(parties), n_drawn, nodes, per)
        return dict(zip(parties, drawn, strict=True))

    def _progress(self, run: ForestState, reply: LevelReply | SplitReply | FinishReply) -> Progress:
        names, n_trees = reply.score_names, self.section.trees
        return Progress(
            run.structure.level,
            n_trees,
            n_leaves=n_trees + len(run.structure.splits.trees),
            train=vertical.named_scores(names, reply.train_scores),
            valid=vertical.named_scores(names, reply.valid_scores),
        )

    def _partition(
        self, winners: Iterable[str], run: ForestState, last: bool = False
    ) -> Conversation[dict[str, PartitionReply]]:
        """Have the winners send which rows go left."""
        fields = {**fields_of(run.structure.last, LevelSplits), "last": last}
        return (yield from run.mailbox.relay(PartitionRequest, winners, PartitionReply, **fields))

    def _finish(self, parties: vertical.Hellos, run: ForestState) -> Conversation[Outcome]:
        active = run.mailbox.active
        parts: Parts = {**(yield from self._partition(run.mailbox.passive, run, last=True))}
        fields = fields_of(run.structure.last, LevelSplits)
        reply = yield from run.mailbox.ask_active(FinishRequest, FinishReply, **fields)
        if len(run.structure.last.trees):
            yield self._progress(run, reply)
        if self.section.master_keeps_model:
            model = self._whole_model(parties, run, reply, parts | {active: reply})
            yield SavedModel({"model.json": to_text(model)})
        else:
            yield vertical.parts_file(self.model_id, self.settings, active, run.mailbox.passive)
        few = [part.few for part in (*parts.values(), reply)]
        return {
            **vertical.final_summary(reply, run.mailbox, run.rows, few),
            "oob": vertical.named_scores(reply.score_names, reply.oob_scores),
            "trees": self.section.trees,
            "best_round": None,
        }

    def _whole_model(
        self, parties: vertical.Hellos, run: ForestState, reply: FinishReply, parts: Parts
    ) -> BaggedForest:
        """Join the parties' parts: their splits, in the order of the parties, to whole trees."""
        widths = [hello.n_columns for hello in parties.values()]
        splits, n_nodes = run.structure.splits, run.structure.n_nodes
        n_splits = np.bincount(splits.owners, minlength=len(parties))
        cuts = list[tuple[Lookup, Categories]]()
        for i, party in enumerate(parties):
            part = parts[party]
            check_sizes(party, part, n_records=int(n_splits[i]))
            with as_protocol_error(party, type(part).__name__, "kinds"):
                check_kinds(part.kinds, widths[i])
            cuts.append(read_splits(party, part, widths[i], OF_CATEGORIES))
        trees, _ = branches(run.structure)
        values = tuple(np.split(reply.leaf_values, np.cumsum(n_nodes)[:-1]))
        objective = self.settings.objective
        return whole_model(
            BaggedForest(objective, tuple(parties), reply.classes, trees, values),
            splits.spread(splits.records, n_nodes, NONE),
            splits.spread(splits.owners, n_nodes, NONE),
            cuts,
            widths,
            joint_names({party: parts[party].names for party in parties}),
            tuple(kind for party in parties for kind in parts[party].kinds),
        )


STRATEGIES = {FederatedForest.method: FederatedForest}


def _column_seeds(
    parties: vertical.Hellos, draws: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A seed for each column's draws, and the index of each column's party."""
    sizes = [hello.n_columns for hello in parties.values()]
    return column_seeds(draws, sum(sizes)), np.repeat(np.arange(len(sizes)), sizes)
