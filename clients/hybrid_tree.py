"""HybridTree at a party: the host grows upper layers of trees, guests the layers below.

Source: Li et al. 2024 (arXiv:2310.11865); see ``strategies.hybrid_tree``. Both parties of a pair
are SecureBoost's, except for where trees begin: the host's local trees are a guest's roots, with
one open node a leaf. A round, by message::

    BeginRequest      finish the last round; upper layers   -> leaves, encrypted gradients
    SumRequest        splits of the level above, if any     -> encrypted sums
    SplitRequest      sums of a level of every guest        -> its splits
    PartitionRequest  splits of a guest's last level        -> which rows go left

The host has trees of its columns only, and, for each guest, these with the guest's layers below.
Read ``clients.secureboost.levels`` and ``passive`` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from clients.scoring import interval_fields, score_arrays
from clients.secureboost.levels import Splitting
from clients.secureboost.model import Boosted
from clients.secureboost.passive import Passive
from clients.secureboost.round import Bools, Floats, Round, Unsent
from clients.vertical.growing import rows_after
from fedapp.crypto.packing import FixedPoint, PairLayout, grouped_layouts
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError
from fedapp.messages.encrypted_sums import block_rows
from fedapp.messages.hybrid_tree import (
    BeginReply,
    BeginRequest,
    EncryptedGradients,
    EncryptedSums,
    EncryptRequest,
    Entries,
    FinishReply,
    FinishRequest,
    HandOverRequest,
    MoreGradients,
    PartitionRequest,
    SetupRequest,
    SplitReply,
    SplitRequest,
    Splits,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.vertical import MatchRequest, OrderRequest, Partition, SentReply
from fedapp.site.account import check_within
from fedapp.site.mail import Letters, Mail
from fedapp.site.policy import check_sample_size
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.divided import mean_of_pairs
from fedapp.trees.grow import Growing, Growth
from fedapp.trees.model import check_range
from fedapp.trees.predict import Nodes
from fedapp.trees.rounds import n_leaves
from fedapp.trees.structure import Structure


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A round of the trees of the host and a guest, at the host."""

    round: Round
    nodes: Nodes  # of the rows that both have
    structure: Structure


@role
class Host(Splitting):
    """State of the host."""

    title = "the host"
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {BeginRequest},
            BeginRequest: {EncryptRequest, SplitRequest, BeginRequest, FinishRequest},
            EncryptRequest: {EncryptRequest, SplitRequest, FinishRequest},
            SplitRequest: {SplitRequest, BeginRequest},
        }
    )
    settings: SetupRequest
    pairs: Mapping[str, Pair] = {}  # the round in progress, by guest
    # The model of the host alone, by "", and of each pair; ``boosted`` has the first one's trees,
    # and the margins of all together.
    models: Mapping[str, Boosted] = {}

    def prepare(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """As in SecureBoost; a guest's key is for the rows of its pair."""
        letter = self._start(request, mail)
        rows = {name: self._n_train_of(name) for name in self.matched}
        return SentReply(), [(name, replace(letter, most_rows=n)) for name, n in rows.items()]

    def begin_round(self, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
        """Finish the round in progress, and begin another with its upper layers."""
        self.check_due(BeginRequest, not self._growing_pairs())
        if self.follows(SetupRequest):
            self.meet(mail)
            rows = {"": np.arange(len(self.ids)), **self.matched}
            start = {name: self.boosted.margins[of_pair] for name, of_pair in rows.items()}
            self.models = {name: replace(self.boosted, margins=start[name]) for name in rows}
        n_wanted = request.n_rounds
        check_within(self.config, self.site.store, "BeginRequest", "n_rounds", n_wanted, "rounds")
        scores = {name: dict[str, float]() for name in WATCHED}
        if self.round is not None:
            scores = self._finish_round(mail)
        begun = self.boosted.n_rounds < n_wanted
        letters = self._new_round() if begun else []
        trees = [model.trees for model in self.models.values()]
        blocks = [
            pair.round.unsent.n_blocks(self._layouts_of(name), self._block_rows())
            for name, pair in self.pairs.items()
            if pair.round.unsent
        ]
        reply = BeginReply(
            **score_arrays(scores),
            begun=begun,
            guests=tuple(self.pairs),
            n_blocks=max(blocks, default=0),
            n_trees=sum(map(len, trees)),
            n_leaves=sum(n_leaves(of_model[-self.width :]) for of_model in trees),
        )
        return reply, letters

    def send_on(self, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """The next block of the gradients of each guest."""
        letters: Letters = []
        for name, pair in self.pairs.items():
            if (unsent := pair.round.unsent) is not None:
                block, left = unsent.next_block(
                    self.private_key, self._layouts_of(name), self._block_rows()
                )
                letters.append((name, MoreGradients(pair.round.number, unsent.n_sent, block)))
                sent = replace(pair, round=replace(pair.round, unsent=left))
                self.pairs = {**self.pairs, name: sent}
        self.check_due(EncryptRequest, bool(letters))
        return SentReply(), letters

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Decrypt the sums of every guest that has a level to split, and choose its splits."""
        waiting = self._growing_pairs()
        sent = all(self.pairs[name].round.unsent is None for name in waiting)
        self.check_due(SplitRequest, bool(waiting) and sent)
        letters, growing, splitting = Letters(), list[str](), list[str]()
        for name in waiting:
            pair = self._moved(name, mail)
            growth = pair.round.growing(self.joint, self.settings)
            letter, keys = mail.one(EncryptedSums, name), (self.private_key, self._layouts_of(name))
            sums = pair.round.party_sums(letter, name, self.joint, growth, *keys)
            routes, sets = pair.round.choose(self.joint, growth, {name: sums}, self.name)
            owners, _ = self.joint.owners(routes["column"])
            structure = pair.structure.split(routes["tree"], routes["node"], owners)
            chosen = structure.last if len(routes) else None
            round_ = replace(pair.round, growth=growth.state, chosen=chosen)
            self.pairs = {**self.pairs, name: Pair(round_, pair.nodes, structure)}
            if len(routes):
                place = self.peers.index(name)
                letters.append((name, Round.splits_for(place, self.joint, growth, routes, sets)))
                (growing if growth.growing else splitting).append(name)
        return SplitReply(tuple(growing), tuple(splitting)), letters

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Truncate the model to its best round, score and store it."""
        margins = self.boosted.margins_after(request.best_round, self.name)
        n_trees, models = request.best_round * self.width, self.models.values()
        trees = [tree for each in models for tree in each.trees[:n_trees]]
        records = [ids for each in models for ids in each.records_by_tree()[:n_trees]]
        _, scores = self._store_model(trees, records, margins, mail)
        nothing = np.empty(0)
        reply = FinishReply(
            **score_arrays(scores),
            **interval_fields(
                self.objective, self._rows_to_score(margins)["test"], self.settings.eval_metrics
            ),
            column_names=(),
            column_gains=nothing,
            column_counts=nothing.astype(np.int64),
            n_trees=len(trees),
            scale_pos_weight=self.parameters.scale_pos_weight,
        )
        self.end()
        return reply, []

    # A round

    def growing(self) -> Growth:
        """The upper layers."""
        settings = replace(self.settings, max_depth=self.settings.host_depth)
        return self.current.growing(self.joint, settings)

    def _n_train_of(self, name: str) -> int:
        """Training rows of a pair; they are its first."""
        return int(np.searchsorted(self.matched[name], self.n_train))

    def _layouts_of(self, name: str) -> tuple[PairLayout, ...]:
        """Of gradients that are packed for a guest."""
        bits = self.private_key.public.bits
        return grouped_layouts(bits, self._n_train_of(name), self.width)

    def _block_rows(self) -> int:
        return block_rows(self.private_key.public.ciphertext_bytes, len(self.matched))

    def _growing_pairs(self) -> list[str]:
        """Guests with nodes that wait for sums."""
        return [name for name, pair in self.pairs.items() if pair.round.grows]

    def _new_round(self) -> Letters:
        """Grow the upper layers; letters with their leaves and the gradients of each pair."""
        settings, number, values = self.settings, self.boosted.n_rounds, self._gradients()
        if settings.subsample < 1:
            entropy = self.site.entropy(settings.seed, number, 1, share=settings.subsample)
            is_drawn = np.random.default_rng(entropy).random(len(values)) < settings.subsample
            n_rows, n_drawn = (int(rows.sum()) for rows in (values.any((1, 2)), is_drawn))
            if check_sample_size(self.config, n_rows, n_drawn) == n_drawn:
                values[~is_drawn] = 0
        allowed = self._allowed(number)
        owners, _ = self.joint.owners(np.arange(self.joint.cuts.n_columns))
        self._begin_trees(number, values, allowed & (owners == self.number))
        self._grow_locally()
        check_range(self.growing().grown().trees)
        letters: Letters = []
        self.pairs = {}
        for name, rows in self.matched.items():
            of_guest = allowed & (owners == self.peers.index(name))
            of_pair = values[rows[: self._n_train_of(name)]]
            if of_pair.any() and of_guest.any():
                letters += self._begin_pair(name, of_pair, of_guest)
        return letters

    def _begin_pair(self, name: str, values: Floats, allowed: Bools) -> Letters:
        """Open the leaves of the upper layers that have rows of a pair; letters to its guest."""
        drawn, rows = values.any(axis=(1, 2)), self.matched[name]
        nodes, upper = self.nodes[:, rows], self.current.growth
        assert upper is not None
        trained = nodes[:, : len(values)]
        entries, sums = _entries(trained[:, drawn], values[drawn])
        growth = Growing(upper.trees, entries, sums, self.settings.host_depth, upper.sets)
        scale = FixedPoint.covering(values[drawn])
        gradients = np.ascontiguousarray(values.transpose(1, 0, 2))
        round_ = Round(self.current.number, gradients, allowed, growth, scale.exponents)
        unsent, layouts = Unsent(scale.encode(values[drawn])), self._layouts_of(name)
        block, left = unsent.next_block(self.private_key, layouts, self._block_rows())
        pair = Pair(replace(round_, unsent=left), nodes, self.structure)
        self.pairs = {**self.pairs, name: pair}
        columns = round_.drawn(self.joint, name)
        letter = EncryptedGradients(round_.number, np.packbits(drawn), columns, block)
        return [(name, letter), (name, Entries(self.structure.n_nodes, nodes))]

    def _moved(self, name: str, mail: Mail) -> Pair:
        """A pair with its rows at the children of the last splits."""
        pair = self.pairs[name]
        if (chosen := pair.round.chosen) is None:
            return pair
        letter = mail.one(Partition, name)
        assert pair.round.growth is not None
        if letter.level != pair.round.growth.level - 1:
            raise ProtocolError(name, "Partition", "level", "must be the one being split")
        nodes = rows_after(pair.nodes, chosen, self.peers, {name: letter.bits})
        return replace(pair, nodes=nodes, round=replace(pair.round, chosen=None))

    def _finish_round(self, mail: Mail) -> dict[str, dict[str, float]]:
        """Add the trees of the host alone and of each pair; scores of all together."""
        local = self.growing().grown().trees
        trees = {"": (local, self.structure, self.nodes)}
        for name, rows in self.matched.items():
            trees[name] = local, self.structure, self.nodes[:, rows]
            if name in self.pairs:
                pair = self._moved(name, mail)
                grown = pair.round.growing(self.joint, self.settings).grown().trees
                check_range(grown)
                trees[name] = grown, pair.structure, pair.nodes
        models = dict[str, Boosted]()
        for name, (of_model, structure, nodes) in trees.items():
            ids = self.n_made[structure.splits.owners] + structure.splits.records
            by_tree = structure.splits.spread(ids, structure.n_nodes, -1)
            models[name] = self.models[name].plus(of_model, by_tree, nodes)
        owners = [structure.splits.owners for _, structure, _ in trees.values()]
        counts = [np.bincount(each, minlength=len(self.peers)) for each in owners]
        self.n_made = self.n_made + np.max(counts, axis=0)  # the host's are in all of them
        pairs = {name: (rows, models[name].margins) for name, rows in self.matched.items()}
        margins = mean_of_pairs(models[""].margins, pairs)
        self.models, self.pairs, self.round = models, {}, None
        scores = self._scores(margins)
        together = replace(models[""], margins=margins, best=self.boosted.best)
        self.boosted = self._scored(together, scores)
        return {name: scores[name] for name in WATCHED}


@role
class Guest(Passive):
    """State of a guest: SecureBoost's, with trees that begin at the host's leaves."""

    title = "a guest"
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {TakeRequest, SumRequest, HandOverRequest},
            TakeRequest: {TakeRequest, SumRequest, HandOverRequest},
            SumRequest: {TakeRequest, SumRequest, PartitionRequest, HandOverRequest},
            PartitionRequest: {TakeRequest, SumRequest, HandOverRequest},
        }
    )
    settings: SetupRequest

    def prepare(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns."""
        return SentReply(), [(self.active, self._start(request, mail))]

    def take_block(self, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Start a round with the first block of its gradients, or store another block."""
        self._take(mail)
        return SentReply(), []

    def sum_entries(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Start the round if it is new, else make and apply the last level's splits; sum."""
        return SentReply(), self._sum(mail)

    def split_last(self, request: PartitionRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Make the splits of the last level."""
        return SentReply(), self._take_splits(mail.one(Splits, self.active))

    def keep_layers(self, request: HandOverRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Store the lookup table, drop the rows."""
        letter = self._keep_part()
        self.end()
        return SentReply(), [(self.active, letter)]

    def _take(self, mail: Mail) -> None:
        begins = not self.follows(TakeRequest)
        Passive._take(self, mail)
        if begins:
            self._enter(mail.one(Entries, self.active))

    def _enter(self, letter: Entries) -> None:
        """Put all rows at the host's leaves; those that have drawn rows are open."""
        shape, most = self.nodes.shape, 2**self.settings.host_depth
        fits = letter.nodes.shape == shape and (letter.nodes < letter.n_nodes[:, None]).all()
        # More leaves than the upper layers can have would show the host single rows.
        if not fits or max(len(np.unique(nodes)) for nodes in letter.nodes) > most:
            rule = (
                f"must be of shape {shape}, below n_nodes, and at most {most} different of a tree"
            )
            raise ProtocolError(self.active, "Entries", "nodes", rule)
        entries = [
            (tree, node)
            for tree, nodes in enumerate(letter.nodes[:, self.drawn])
            for node in np.unique(nodes).tolist()
        ]
        self.nodes = letter.nodes
        opened: npt.NDArray[np.int32] = np.array(entries, dtype=np.int32).reshape(-1, 2)
        self.structure = Structure(letter.n_nodes, (), self.settings.host_depth, opened)
        self.wanted_trees, self.wanted_nodes = self.structure.open_nodes


def _entries(
    nodes: Nodes, gradients: Floats
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Nodes that have rows: tree and node, in order; and the sums of their rows.

    Of drawn rows: ``nodes``, shape (n_outputs, n_rows); ``gradients``, (n_rows, n_outputs, 2).
    """
    places, sums = list[tuple[int, int]](), list[npt.NDArray[np.float64]]()
    for tree, of_tree in enumerate(nodes):
        for node in np.unique(of_tree).tolist():
            places.append((tree, node))
            sums.append(gradients[of_tree == node, tree].sum(axis=0, dtype=np.float64))
    return np.array(places, dtype=np.int32), np.array(sums)


HANDLERS = handlers(Host, Guest)
