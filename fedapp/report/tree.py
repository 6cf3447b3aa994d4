"""One tree of a model, drawn as nested boxes for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.report.canvas import plain
from fedapp.report.markup import escaped
from fedapp.trees import stacked
from fedapp.trees.forest import model as bagged
from fedapp.trees.model import KIND as BOOSTED
from fedapp.trees.model import LEAF, NODE, Tree, from_json, kind_of
from fedapp.trees.objective import LOG, LOGIT, LOSSES
from fedapp.trees.sets import NO_SET, NO_SETS, Categories, CategorySets, names_of

DEEPEST = 4  # levels below the root that are drawn
_LONGEST_NAME = 18
_MOST_NAMES = 4  # categories in a box
_ROUNDING = 1e-6  # leaves below this share of the largest are shown as 0

Leaf = Callable[[int], tuple[str, float]]  # node -> text; sign, or -1 to 1, for its colour


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTree:
    """A tree and the text of its leaves."""

    nodes: Tree  # fields left, column, threshold and default_left; perhaps gain and hessian
    columns: Sequence[str]
    leaf: Leaf
    caption: str
    sets: CategorySets = NO_SETS  # of the model's categorical columns
    categories: Categories = ()


def first_tree(text: str) -> DrawnTree | None:
    """The first tree of a model's text, or None if it has none; DataError if it is no model."""
    kind = kind_of(text)
    if kind == bagged.KIND:
        return _of_forest(bagged.from_json(text))
    if kind not in (BOOSTED, stacked.KIND):
        return None
    is_stacked = kind == stacked.KIND
    model = stacked.from_json(text).bare if is_stacked else from_json(text)
    if not model.trees:
        return None
    tree, has_several = model.trees[0], len(model.trees) > 1
    caption = f"The first of {len(model.trees):,} trees" if has_several else "The only tree"
    if is_stacked:
        caption += ", one of the first party's; the head learns how much each counts"
    elif model.objective == "multi:softprob":
        caption += f"; it adds to the margin of class {model.classes[0]}"
    elif len(model.classes) == 2:
        caption += f"; its leaves add to the log odds of class {model.classes[1]}"
    elif LOSSES[model.objective].link is LOG:
        caption += "; its leaves add to the logarithm of the prediction"
    elif LOSSES[model.objective].link is LOGIT:
        caption += "; its leaves add to the log odds of the prediction"
    else:
        caption += "; its leaves add to the prediction"

    least = _ROUNDING * float(np.abs(tree["value"]).max())

    def leaf(node: int) -> tuple[str, float]:
        value = float(tree["value"][node])
        return (f"{value:+.4g}", float(np.sign(value))) if abs(value) > least else ("0", 0.0)

    return DrawnTree(tree, model.columns, leaf, caption, model.sets, model.categories)


def tree_html(drawn: DrawnTree) -> str:
    """The tree as nested lists, down to ``DEEPEST`` levels below its root."""
    cut = f" Drawn down to level {DEEPEST}; +n: so many nodes below. "
    # Children of a node are at left and left + 1.
    level, depth = [0], -1
    while level:
        lefts, depth = [int(drawn.nodes["left"][node]) for node in level], depth + 1
        level = [left + side for left in lefts if left != LEAF for side in (0, 1)]
    cut = cut if depth > DEEPEST else " "
    note = (
        f"{drawn.caption}.{cut}A value equal to the threshold goes no; missing values go "
        "where it says so."
    )
    body = _item(drawn, 0, 0, "")
    return (
        f'<figure class="wide full"><ul class="tree">{body}</ul>'
        f"<figcaption>{escaped(note)}</figcaption></figure>\n"
    )


def _of_forest(model: bagged.BaggedForest) -> DrawnTree | None:
    if not model.trees:
        return None
    values, classes = model.values[0], model.classes

    def leaf(node: int) -> tuple[str, float]:
        shares = values[node]
        if not classes:
            return f"{shares[0]:.5g}", 0.0
        if len(shares) > 1:
            best = int(np.argmax(shares))
            return f"{plain(classes[best], _LONGEST_NAME)}: {shares[best]:.0%}", 0.0
        return f"{plain(classes[1], _LONGEST_NAME)}: {shares[0]:.0%}", float(2 * shares[0] - 1)

    caption = f"The first of {len(model.trees):,} trees; the forest is the mean of their leaves"
    return DrawnTree(model.trees[0], model.columns, leaf, caption)


def _item(drawn: DrawnTree, node: int, depth: int, branch: str) -> str:
    label = f'<span class="branch">{branch}</span>' if branch else ""
    left = int(drawn.nodes["left"][node])
    if left == LEAF:
        text, sign = drawn.leaf(node)
        side = "up" if sign > 0 else "down" if sign < 0 else "even"
        return f'<li>{label}<span class="leaf {side}">{escaped(text)}</span></li>'
    nodes = drawn.nodes[node]
    name = drawn.columns[int(nodes["column"])]
    facts = [f"missing {'yes' if nodes['default_left'] else 'no'}"]
    # Trees that were sent without their gains have zeros.
    if drawn.nodes.dtype == NODE and nodes["gain"] > 0:
        facts.insert(0, f"gain {_short(float(nodes['gain']))}")
    rule, full_rule = f"< {float(nodes['threshold']):.5g}", ""
    if len(drawn.sets) and nodes["set"] != NO_SET:
        rule, full_rule = _categories(drawn, node)
    title = f' title="{escaped(full_rule)}"' if full_rule else ""
    box = (
        f'<span class="split"><span title="{escaped(name)}">'
        f"{escaped(plain(name, _LONGEST_NAME))}</span> <span{title}>{escaped(rule)}"
        f"</span> <small>{escaped(' · '.join(facts))}</small></span>"
    )
    if depth == DEEPEST:
        more = f'<span class="more" title="nodes below">+{_n_below(drawn.nodes, node)}</span>'
        return f"<li>{label}{box}{more}</li>"
    sides = zip((left, left + 1), ("yes", "no"), strict=True)
    children = "".join(_item(drawn, child, depth + 1, side) for child, side in sides)
    return f"<li>{label}{box}<ul>{children}</ul></li>"


def _categories(drawn: DrawnTree, node: int) -> tuple[str, str]:
    """The categories a split sends left, short and in full; if fewer, those sent right."""
    split = drawn.nodes[node]
    names = names_of(drawn.categories, int(split["column"])) or ()
    right = drawn.sets.members(int(split["set"]))
    is_short = 2 * int(right.sum()) < len(names)
    word = "not in" if is_short else "in"
    chosen = [name for name, is_right in zip(names, right, strict=True) if is_right == is_short]
    shown = [plain(name, _LONGEST_NAME) for name in chosen[:_MOST_NAMES]]
    more = [f"+{len(chosen) - _MOST_NAMES}"] if len(chosen) > _MOST_NAMES else []
    return f"{word} {{{', '.join([*shown, *more])}}}", f"{word} {{{', '.join(chosen)}}}"


def _short(value: float) -> str:
    """About three digits: ``0.0123``, ``27.2k``, ``6.18M``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _n_below(nodes: Any, node: int) -> int:
    waiting, n = [node], -1
    while waiting:
        left, n = int(nodes["left"][waiting.pop()]), n + 1
        waiting += [] if left == LEAF else [left, left + 1]
    return n
