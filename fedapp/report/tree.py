"""A tree of a model, drawn as boxes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from markupsafe import Markup

from fedapp.data.convert import EPOCH
from fedapp.records.document import NAMED, from_text, kind_of, model_text
from fedapp.report.plots import plain
from fedapp.report.template import elements
from fedapp.run_folder import RunFolder
from fedapp.trees.categories import NO_SET, names_of
from fedapp.trees.divided import DividedModel
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.linear import LinearModel
from fedapp.trees.losses import LOG, LOGIT, LOSSES, STEP
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.stacked import StackedModel

Model = Ensemble | BaggedForest | StackedModel | LinearModel | DividedModel
MODELS: tuple[type[Model], ...] = Ensemble, BaggedForest, StackedModel, LinearModel, DividedModel
Leaf = Callable[[int], tuple[str, float]]  # node -> text; sign, or -1 to 1, for its colour
DEEPEST = 4  # levels below the root that are drawn
_LONGEST_NAME = 18
_MOST_NAMES = 4  # categories in a box
MINUTES = 24 * 60  # of a day, the unit of dates and times
_ROUNDING = 1e-6  # leaves below this share of the largest are shown as 0


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTree:
    """A tree of a model, drawn as nested boxes, and the text of its leaves."""

    model: Ensemble | BaggedForest | StackedModel
    nodes: Tree  # fields left, column, threshold and default_left; perhaps gain and hessian
    leaf: Leaf
    caption: str

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node: at left and left + 1; none of a leaf."""
        left = int(self.nodes["left"][node])
        return () if left == LEAF else (left, left + 1)

    def below(self, node: int) -> list[list[int]]:
        """Nodes below a node, level by level."""
        levels = [list(self.children(node))]
        while levels[-1]:
            levels.append([child for parent in levels[-1] for child in self.children(parent)])
        return levels[:-1]


def model_of(run: RunFolder) -> Model | None:
    """The model of a run, if it has one of its own."""
    path = run.path / "model.json"
    text = model_text(path) if path.is_file() else ""
    # A run that predicts names the model there.
    return from_text(text, *MODELS) if text and kind_of(text) != NAMED else None


def first_tree(model: Model | None) -> DrawnTree | None:
    """The first tree of a model, or None if it has none whose leaves are one number."""
    if model is None or isinstance(model, LinearModel | DividedModel) or not model.trees:
        return None
    if isinstance(model, Ensemble) and model.multi_strategy == ONE_TREE:
        return None
    tree, first = model.trees[0], f"The first of {len(model.trees):,} trees"
    if isinstance(model, BaggedForest):
        caption = f"{first}; the forest is the mean of their leaves"
        return DrawnTree(model, tree, _forest_leaf(model), caption)
    caption = first if len(model.trees) > 1 else "The only tree"
    if isinstance(model, StackedModel):
        caption += ", one of the first party's; the head learns how much each counts"
    elif model.objective == "multi:softprob":
        caption += f"; it adds to the margin of class {model.classes[0]}"
    else:
        caption += f"; its leaves add to {scale_of(model)}"

    least = _ROUNDING * float(np.abs(tree["value"]).max())

    def leaf(node: int) -> tuple[str, float]:
        value = float(tree["value"][node])
        return (f"{value:+.4g}", float(np.sign(value))) if abs(value) > least else ("0", 0.0)

    return DrawnTree(model, tree, leaf, caption)


def scale_of(model: Ensemble) -> str:
    """What a model's margins are, in words."""
    if model.objective == "multi:softprob":
        return "the margin of each class"
    if len(model.classes) == 2:
        return f"the log odds of class {model.classes[1]}"
    scales = {LOG: "the logarithm of the prediction", LOGIT: "the log odds of the prediction"}
    scales |= {STEP: "the margin, above 0 of which the prediction is 1"}
    return scales.get(LOSSES[model.objective].link, "the prediction, in the unit of the label")


def _forest_leaf(model: BaggedForest) -> Leaf:
    def leaf(node: int) -> tuple[str, float]:
        shares = model.values[0][node]
        if not model.classes:
            return f"{shares[0]:.5g}", 0.0
        is_binary = len(shares) == 1
        best = 1 if is_binary else int(np.argmax(shares))
        share = shares[0] if is_binary else shares[best]
        sign = float(2 * share - 1) if is_binary else 0.0
        return f"{plain(model.classes[best], _LONGEST_NAME)}: {share:.0%}", sign

    return leaf


def tree_html(drawn: DrawnTree) -> Markup:
    """The tree as nested lists, down to ``DEEPEST`` levels below its root."""
    is_cut = len(drawn.below(0)) > DEEPEST
    cut = f" Drawn down to level {DEEPEST}; +n: so many nodes below. " if is_cut else " "
    note = (
        f"{drawn.caption}.{cut}A value equal to the threshold goes no; missing values go "
        "where it says so."
    )
    return Markup(elements.tree(_box(drawn, 0, 0, ""), note))


def _box(drawn: DrawnTree, node: int, depth: int, branch: str) -> dict[str, Any]:
    """What the template draws of a node, and of the nodes below it."""
    if not drawn.children(node):
        text, sign = drawn.leaf(node)
        side = "up" if sign > 0 else "down" if sign < 0 else "even"
        return {"branch": branch, "leaf": text, "side": side}
    split, model = drawn.nodes[node], drawn.model
    column = int(split["column"])
    name = model.columns[column]
    facts = [f"missing {'yes' if split['default_left'] else 'no'}"]
    # Trees that were sent without their gains have zeros.
    if "gain" in (drawn.nodes.dtype.names or ()) and split["gain"] > 0:
        facts.insert(0, f"gain {short(float(split['gain']))}")
    rule = rule_text(float(split["threshold"]), model.kinds[column] if model.kinds else "")
    full_rule = ""
    if len(model.sets) and split["set"] != NO_SET:
        rule, full_rule = _categories(drawn, node)
    box = {"branch": branch, "leaf": "", "name": name, "short_name": plain(name, _LONGEST_NAME)}
    box |= {"rule": rule, "full_rule": full_rule, "facts": " · ".join(facts)}
    if depth == DEEPEST:
        return box | {"children": [], "n_below": sum(map(len, drawn.below(node)))}
    sides = zip(drawn.children(node), ("yes", "no"), strict=True)
    children = [_box(drawn, child, depth + 1, side) for child, side in sides]
    return box | {"children": children, "n_below": 0}


def rule_text(threshold: float, kind: str) -> str:
    """What goes left at a threshold on a column: ``= no``, ``< 2017-01-01``, ``< 3.5``."""
    if kind == "boolean" and 0 < threshold <= 1:
        return "= no"
    if kind == "time" and 0 < threshold <= 1:
        return f"< {time_text(threshold)}"
    if kind == "date":
        with suppress(OverflowError):  # a threshold that only separates missing values
            form = "%Y-%m-%d %H:%M" if threshold % 1 else "%Y-%m-%d"  # a day is whole
            return f"< {EPOCH + timedelta(threshold):{form}}"
    return f"< {threshold:.5g}" + " days" * (kind == "duration")


def time_text(days: float) -> str:
    """A time of day, whose unit is a day: ``12:30``."""
    minutes = round(days * MINUTES)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _categories(drawn: DrawnTree, node: int) -> tuple[str, str]:
    """The categories a split sends left, short and in full; if fewer, those sent right."""
    split = drawn.nodes[node]
    names = names_of(drawn.model.categories, int(split["column"])) or ()
    right = drawn.model.sets.members(int(split["set"]))
    is_short = 2 * int(right.sum()) < len(names)
    word = "not in" if is_short else "in"
    chosen = [name for name, is_right in zip(names, right, strict=True) if is_right == is_short]
    shown = [plain(name, _LONGEST_NAME) for name in chosen[:_MOST_NAMES]]
    more = [f"+{len(chosen) - _MOST_NAMES}"] if len(chosen) > _MOST_NAMES else []
    return f"{word} {{{', '.join([*shown, *more])}}}", f"{word} {{{', '.join(chosen)}}}"


def short(value: float) -> str:
    """About three digits of a number >= 0: ``0.0123``, ``27.2k``, ``6.18M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
