"""What the active party of a SecureBoost run reads from its store, once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.crypto.packing import PairLayout, grouped_layouts
from fedapp.crypto.paillier import PrivateKey
from fedapp.histograms.build import JointColumns
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.grow import Growth, Limits, Shape
from fedapp.trees.objective import LossParameters, Objective, n_outputs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Constants of a run, and access to the state of its round."""

    name: str  # of the active party
    passive: list[str]
    store: Store
    boost: Mapping[str, Any]  # settings, by the names of ``SetupRequest``
    objective: Objective
    parameters: LossParameters
    eval_metrics: tuple[str, ...]  # besides the objective's
    n_train: int  # training rows are the first ones
    width: int  # trees per round
    joint: JointColumns
    key: PrivateKey
    layouts: tuple[PairLayout, ...]  # of packed gradients, one per group of trees

    @classmethod
    def read(cls, site: Site) -> View:
        """The view, from the first round on."""
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
        """Owner of each joint column, and its number there."""
        return [self.joint.owner(int(column)) for column in columns]

    def growth(self) -> Growth:
        """The round in progress."""
        allowed = self.store["allowed"].astype(bool)
        shape = Shape.of(self.boost)
        return Growth.restored(
            lambda name: self.store[f"growth.{name}"], self.joint.cuts, allowed, shape, self.limits
        )

    @property
    def limits(self) -> Limits:
        """Column draws of the round in progress, constraints, and whether a party merges bins."""
        boost, facts = self.boost, self.store.facts
        shares = boost["colsample_bylevel"], boost["colsample_bynode"]
        monotone = np.array(facts["monotone"], dtype=np.int8)
        interactions = tuple(map(frozenset, facts["interactions"]))
        limits = Limits(boost["seed"], facts["n_rounds"], *shares, monotone, interactions)
        return replace(limits, both_children=facts["merged"])

    def keep(self, growth: Growth) -> None:
        """Store the round in progress."""
        for name, array in growth.arrays().items():
            self.store[f"growth.{name}"] = array

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.joint.own(party, np.flatnonzero(self.store["allowed"].any(axis=0)))
