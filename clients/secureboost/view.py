"""What the active party of a SecureBoost run reads of its state, once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.crypto.keys import PrivateKey
from fedapp.crypto.packing import PairLayout, grouped_layouts
from fedapp.histograms.joint import JointColumns
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.boosted.grow import Growth, Shape
from fedapp.trees.boosted.limits import Limits
from fedapp.trees.objective import LossParameters, Objective, n_outputs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What stays the same all through a run.

    Parameters
    ----------
    name : of the active party.
    passive : names of the others.
    store : where the rest lies, which changes.
    boost : settings of the run, by the names of ``SetupRequest``.
    objective, parameters : of the run, with what the objective reads.
    eval_metrics : scored beside the objective's own.
    n_train : training rows: the first ones.
    width : trees of a round.
    joint : columns of all parties.
    key : of this run.
    layouts : how gradients are packed, by group of trees.
    """

    name: str
    passive: list[str]
    store: Store
    boost: Mapping[str, Any]
    objective: Objective
    parameters: LossParameters
    eval_metrics: tuple[str, ...]
    n_train: int
    width: int
    joint: JointColumns
    key: PrivateKey
    layouts: tuple[PairLayout, ...]

    @classmethod
    def read(cls, site: Site) -> View:
        """As it is from the first round on."""
        store, facts = site.store, site.store.facts
        boost, n_train, key = facts["boost"], facts["n_train"], PrivateKey.from_array(store["key"])
        width = n_outputs(boost["objective"], len(facts["classes"]))
        return cls(
            name=site.name,
            passive=site.others,
            store=store,
            boost=boost,
            objective=boost["objective"],
            parameters=LossParameters(
                **{each.name: boost[each.name] for each in fields(LossParameters)}
            ),
            eval_metrics=tuple(facts["eval_metrics"]),
            n_train=n_train,
            width=width,
            joint=JointColumns(
                {name: np.array(w, np.int64) for name, w in facts["widths"].items()},
                {name: np.array(c, dtype=bool) for name, c in facts["categorical"].items()},
            ),
            key=key,
            layouts=grouped_layouts(key.public.bits, n_train, width),
        )

    def owners(self, columns: npt.NDArray[Any]) -> list[tuple[str, int]]:
        """Whose each of some joint columns is, and its number there."""
        return [self.joint.owner(int(column)) for column in columns]

    def growth(self) -> Growth:
        """The round that is under way."""
        allowed = self.store["allowed"].astype(bool)
        shape = Shape.of(self.boost)
        return Growth.restored(
            lambda name: self.store[f"growth.{name}"], self.joint.cuts, allowed, shape, self.limits
        )

    @property
    def limits(self) -> Limits:
        """Draws of columns for the levels and nodes of the round that is under way, the
        constraints of columns, and whether a party merges bins."""
        boost, facts = self.boost, self.store.facts
        shares = boost["colsample_bylevel"], boost["colsample_bynode"]
        monotone = np.array(facts["monotone"], dtype=np.int8)
        interactions = tuple(map(frozenset, facts["interactions"]))
        held = Limits(boost["seed"], facts["n_rounds"], *shares, monotone, interactions)
        return replace(held, both_children=facts["merged"])

    def keep(self, growth: Growth) -> None:
        """Keep how far the round is."""
        for name, array in growth.arrays().items():
            self.store[f"growth.{name}"] = array

    def drawn(self, party: str) -> Ints:
        """A party's columns that any tree of the round may split, under its own numbers."""
        return self.joint.own(party, np.flatnonzero(self.store["allowed"].any(axis=0)))
