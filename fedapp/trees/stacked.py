"""A model of several ensembles under one head, and the head's mathematics.

Source: Ma et al. 2023, "Gradient-less Federated Gradient Boosting Trees with Learnable Learning
Rates", section 3.3 and the ablation of section 4.3. All three heads are one formula::

    hidden[p, c] = relu(patch[p] @ first[c] + bias[c])        p a patch of the tree outputs
    margin[o]    = hidden.ravel() @ second[o] + bias[o]

A patch is all trees of one party (``cnn``; a convolution whose kernel and stride are a party's
trees), each boosting round with its two neighbours (``cnn3``; kernel 3, stride 1), or everything
(``fcnn``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats
from fedapp.trees.categories import NO_SETS, Categories, CategorySets, CodedSets, category_counts
from fedapp.trees.losses import Objective
from fedapp.trees.model import (
    STACKED,
    Ensemble,
    KindsOfColumns,
    Model,
    Tree,
    pack_trees,
    trees_with_sets,
    unpack_trees,
)
from fedapp.trees.objective import base_margin, check_base_score
from fedapp.trees.predict import add_outputs

Kind = Literal["cnn", "cnn3", "fcnn"]
Layers: TypeAlias = tuple[Floats, Floats, Floats, Floats]  # first, its bias, second, its bias

FCNN_WIDTH = 256  # as in the paper's section 4.3
KERNEL = 3  # of cnn3, in boosting rounds
BATCH_NUMBERS = 2**22  # size of the arrays of a batch of predictions
PREDICT_NUMBERS = 2**23  # tree outputs in memory at once


def tree_outputs(
    ensembles: Sequence[Sequence[Tree]],
    n_trees: int,
    values: Floats,
    sets: CategorySets = NO_SETS,
) -> Floats:
    """Leaf value of every tree for every row; float32, shape (n_rows, n_ensembles * n_trees).

    ::

        columns   | ensemble 0                  | ensemble 1      ...
                  | round 0      | round 1 ...  |
                  | class 0, 1 . |              |

    Parameters
    ----------
    ensembles : trees of each party, as XGBoost orders them: one per class per round.
    n_trees : columns of each ensemble; one with fewer trees is padded with zeros.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    """
    outputs = np.zeros((len(values), len(ensembles) * n_trees), dtype=np.float32)
    trees = [tree for ensemble in ensembles for tree in ensemble]
    places = [party * n_trees + np.arange(len(each)) for party, each in enumerate(ensembles)]
    add_outputs(trees, np.concatenate(places), values, outputs, sets)
    return outputs


# The head


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of a head."""

    kind: Kind  # see the module
    n_parties: int  # ensembles under the head
    n_rounds: int  # boosting rounds of each; with k outputs a round has k trees
    n_outputs: int  # margins per row
    channels: Annotated[int, ">= 1"]  # of the convolution; ignored for ``fcnn``

    @classmethod
    def over(cls, kind: Kind, counts: Sequence[int], n_outputs: int, channels: int) -> HeadShape:
        """The head over padded ensembles; ValueError unless all have whole rounds, one at least."""
        if not len(counts) or max(counts) < 1 or any(count % n_outputs for count in counts):
            raise ValueError(f"trees of a party must be a positive multiple of {n_outputs}")
        return cls(kind, len(counts), int(max(counts)) // n_outputs, n_outputs, channels)

    @property
    def n_trees(self) -> int:
        """Columns of one party in the tree outputs."""
        return self.n_rounds * self.n_outputs

    @property
    def n_columns(self) -> int:
        """Columns of the tree outputs."""
        return self.n_parties * self.n_trees

    @property
    def n_patches(self) -> int:
        """Number of patches."""
        counts = {"cnn": self.n_parties, "cnn3": self.n_parties * self.n_rounds, "fcnn": 1}
        return counts[self.kind]

    @property
    def patch_size(self) -> int:
        """Tree outputs in a patch."""
        sizes = {"cnn": self.n_trees, "cnn3": KERNEL * self.n_outputs, "fcnn": self.n_columns}
        return sizes[self.kind]

    @property
    def n_hidden(self) -> int:
        """Size of the hidden layer."""
        return self.n_patches * self.width

    @property
    def width(self) -> int:
        """Hidden units per patch."""
        return FCNN_WIDTH if self.kind == "fcnn" else self.channels

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of first, its bias, second and its bias, in the order of the flat weights."""
        first = (self.width, self.patch_size)
        return first, first[:1], (self.n_outputs, self.n_hidden), (self.n_outputs,)

    @property
    def n_weights(self) -> int:
        """Number of parameters."""
        return sum(prod(shape) for shape in self.layers)


def split_weights(shape: HeadShape, weights: Floats) -> Layers:
    """Views of the flat weights, float32, shape (n_weights,), one per layer."""
    sizes = [prod(layer) for layer in shape.layers]
    pieces = np.split(weights, np.cumsum(sizes)[:-1])
    first, bias, second, last = (
        piece.reshape(layer) for piece, layer in zip(pieces, shape.layers, strict=True)
    )
    return first, bias, second, last


def initial_weights(shape: HeadShape, seed: int) -> Floats:
    """Kaiming initialisation: variance 2 / fan-in, biases 0 (arXiv:1502.01852, Eq. 10)."""
    rng = np.random.default_rng(seed)
    weights = np.zeros(shape.n_weights, dtype=np.float32)
    for layer in split_weights(shape, weights):
        if layer.ndim == 2:
            deviation = np.float32(np.sqrt(2 / layer.shape[1]))
            layer[:] = rng.standard_normal(layer.shape, dtype=np.float32) * deviation
    return weights


@np.errstate(over="ignore", invalid="ignore")  # scores of what leaves float32 are refused
def weights_in_unit(shape: HeadShape, weights: Floats, unit: np.float32) -> Floats:
    """Weights of ``outputs -> unit * head(outputs / unit)``: only the biases change."""
    scaled = weights.copy()
    for layer in split_weights(shape, scaled):
        if layer.ndim == 1:
            layer *= unit
    return scaled


@np.errstate(over="ignore", invalid="ignore")
def head_margins(shape: HeadShape, weights: Floats, outputs: Floats) -> Floats:
    """Margins of tree outputs, float32, shape (n_rows, n_columns) to (n_rows, n_outputs)."""
    _, _, second, last = split_weights(shape, weights)
    margins = np.empty((len(outputs), shape.n_outputs), dtype=np.float32)
    for rows in _batches(shape, len(outputs)):
        margins[rows] = _hidden(shape, weights, outputs[rows]) @ second.T + last
    return margins


@np.errstate(over="ignore", invalid="ignore")
def learned_rates(shape: HeadShape, weights: Floats, outputs: Floats) -> Doubles:
    """How much the head amplifies each tree: mean over rows of d margin / d tree output.

    A tree of class k counts for margin k; a plain sum of trees has 1 everywhere. ReLU switches
    channels off by row, so a rate is a sum over channels: (share of rows with the channel on) x
    (its weight at the party) x (weight of the tree in it). Returns float64, shape (n_parties,
    n_trees).
    """
    active = np.zeros(shape.n_hidden)
    for rows in _batches(shape, len(outputs)):
        active += (_hidden(shape, weights, outputs[rows]) > 0).sum(axis=0)
    active /= max(1, len(outputs))
    first, _, second, _ = split_weights(shape, weights.astype(np.float64))
    by_patch = (second * active).reshape(shape.n_outputs, shape.n_patches, shape.width) @ first
    # The column, from 1, of each place in a patch; 0 beyond the first round and the last.
    columns = np.arange(shape.n_columns)
    places = _patches(shape, columns[None].astype(np.float32) + 1).astype(np.int64).ravel()
    sums = [np.bincount(places, rows.ravel(), shape.n_columns + 1) for rows in by_patch]
    rates = np.array(sums, dtype=np.float64)[:, 1:]
    return rates[columns % shape.n_outputs, columns].reshape(shape.n_parties, shape.n_trees)


def _batches(shape: HeadShape, n_rows: int) -> Iterator[slice]:
    """Slices of rows that fit in memory."""
    size = max(1, BATCH_NUMBERS // max(shape.n_hidden, shape.n_patches * shape.patch_size))
    return (slice(start, start + size) for start in range(0, n_rows, size))


def _hidden(shape: HeadShape, weights: Floats, outputs: Floats) -> Floats:
    """Hidden layer: float32, shape (n_rows, n_hidden)."""
    first, bias, _, _ = split_weights(shape, weights)
    patches = _patches(shape, outputs).reshape(-1, shape.patch_size)
    hidden = patches @ first.T
    hidden += bias
    np.maximum(hidden, 0, out=hidden)
    return hidden.reshape(len(outputs), shape.n_hidden)


def _patches(shape: HeadShape, outputs: Floats) -> Floats:
    """Tree outputs by patch: float32, shape (n_rows, n_patches, patch_size)."""
    if shape.kind != "cnn3":
        return outputs.reshape(len(outputs), shape.n_patches, shape.patch_size)
    padded = np.pad(outputs, ((0, 0), (shape.n_outputs, shape.n_outputs)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, shape.patch_size, axis=1)
    return windows[:, :: shape.n_outputs]


# The model


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """Trees as ``pack_trees`` has them, without gains and sets."""

    sizes: npt.NDArray[np.int32]
    lefts: npt.NDArray[np.uint16]
    values: Floats
    columns: Annotated[npt.NDArray[np.int32], ">= 0"]
    defaults: Annotated[npt.NDArray[np.uint8], "<= 1"]


def packed(trees: tuple[Tree, ...]) -> PackedTrees:
    """Trees as a document has them."""
    arrays = pack_trees(trees)
    return PackedTrees(**{name: arrays[name] for name in PackedTrees.__slots__})


def unpacked(packed: PackedTrees) -> tuple[Tree, ...]:
    """Undo ``packed``, without sets; raises ValueError if the arrays are no trees."""
    arrays = {name: getattr(packed, name) for name in PackedTrees.__slots__}
    no_sets = np.broadcast_to(np.int64(0), (1 + int(packed.columns.max(initial=0)),))
    return unpack_trees({**arrays, "sets": NO_SETS.bits}, no_sets).trees


@dataclass(frozen=True, slots=True, eq=False)
class StackedModel(Model):
    """Ensembles with a head that turns tree outputs into margins.

    ``margin = base_margin + unit * head(tree outputs / unit)``
    """

    KIND = STACKED
    # objective, base_score, columns, classes, categories, kinds: as in ``Ensemble``
    objective: Objective
    base_score: Annotated[Floats, "n_outputs"]
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    unit: Annotated[np.float32, "> 0"]  # scale of the margins; 1 for classification
    # Trees of each party, by party name; a document has no gains.
    ensembles: tuple[Annotated[tuple[Tree, ...], packed, unpacked], ...]
    shape: HeadShape
    weights: Annotated[Floats, "shape.n_weights"]
    sets: CodedSets = NO_SETS  # of all trees, one party after the other
    categories: Categories = ()
    kinds: KindsOfColumns = ()

    def completed(self) -> StackedModel:
        """The model as a document has it, with numbered sets; ValueError if it is none."""
        Model.completed(self)
        check_base_score(self.objective, self.base_score)
        kind, channels = self.shape.kind, self.shape.channels
        if self.shape != HeadShape.over(kind, self.counts.tolist(), self.n_outputs, channels):
            raise ValueError("shape must be that of a head over the ensembles")
        widths = category_counts(self.categories, len(self.columns))
        grown = trees_with_sets(self.trees, self.sets, widths)
        return replace(self, ensembles=split_ensembles(grown.trees, self.counts), sets=grown.sets)

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Trees of all parties, one party after the other."""
        return tuple(tree for trees in self.ensembles for tree in trees)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Number of trees of each party."""
        return np.array([len(trees) for trees in self.ensembles], dtype=np.int32)

    @property
    def bare(self) -> Ensemble:
        """The trees without the head, for statistics over trees."""
        return Ensemble(
            self.objective,
            self.base_score,
            self.columns,
            self.classes,
            self.trees,
            self.sets,
            self.categories,
        )

    def predict_margins(self, values: Floats) -> Floats:
        """Margins of rows, in batches; ``values`` is float32, NaN where missing."""
        size = max(1, PREDICT_NUMBERS // self.shape.n_columns)
        batches = [
            self.margins(
                tree_outputs(
                    self.ensembles, self.shape.n_trees, values[start : start + size], self.sets
                )
            )
            for start in range(0, len(values), size)
        ]
        return np.concatenate([*batches, np.empty((0, self.n_outputs), dtype=np.float32)])

    def margins(self, outputs: Floats) -> Floats:
        """Margins of tree outputs, float32, shape (n_rows, shape.n_columns)."""
        weights = weights_in_unit(self.shape, self.weights, self.unit)
        base = base_margin(self.objective, self.base_score)
        return base + head_margins(self.shape, weights, outputs)


def rates_by_party(
    model: StackedModel, names: Sequence[str], rates: Doubles
) -> dict[str, dict[str, Any]]:
    """The learned rate of each tree, and the weight Z of each party.

    Source: Ma et al. 2023, section 3.3 and Figure 3, where a tree counts Z times W. A network has
    only these products; Z is taken as their mean over the party's trees. ``rates`` come from
    ``learned_rates``. Returns ``{"trees": {name: [Z W of each tree]}, "parties": {name: Z}}``.
    """
    rows = zip(names, rates, model.counts, strict=True)
    by_party = {name: tree_rates[:count] for name, tree_rates, count in rows}
    return {
        "trees": {name: tree_rates.tolist() for name, tree_rates in by_party.items()},
        "parties": {name: float(tree_rates.mean()) for name, tree_rates in by_party.items()},
    }


def split_ensembles(
    trees: Sequence[Tree], counts: npt.NDArray[np.int32]
) -> tuple[tuple[Tree, ...], ...]:
    """Divide trees by party; raises ValueError if the counts do not match."""
    ends = np.cumsum(counts, dtype=np.int64)
    if not len(ends) or (counts < 0).any() or ends[-1] != len(trees):
        raise ValueError(f"counts must divide {len(trees)} trees")
    return tuple(tuple(trees[end - n : end]) for end, n in zip(ends, counts, strict=True))
