"""SecureBoost at the active party before its first round: labels, key, columns, first margins.

With an initial model the rows walk down its trees first, as in interactive inference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.inference import Traversal
from clients.secureboost.joint import BOTH, Ints, Joint, check_bins
from clients.secureboost.model import Boosted
from clients.secureboost.shared import Party
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, PairLayout, grouped_layouts
from fedapp.crypto.paillier_keys import PrivateKey
from fedapp.data.labels import check_events, check_mean, check_weights
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.messages.fields import Request
from fedapp.messages.secureboost import (
    MOST_PAIRS,
    ColumnBins,
    PublicKey,
    SetupRequest,
    WalkReply,
    WalkRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import role
from fedapp.trees.calibration import Calibration, check_both_classes
from fedapp.trees.categories import auto_child_weight
from fedapp.trees.losses import Doubles, LossParameters, Objective
from fedapp.trees.model import NODE, Ensemble, node_of, stack_trees
from fedapp.trees.objective import (
    balance,
    base_margin,
    base_score,
    check_base_margin,
    check_objective,
    has_quantile_leaves,
    label_sums,
    n_outputs,
)
from fedapp.trees.quantiles import quantile_score
from fedapp.trees.size import ONE_TREE

Floats = npt.NDArray[np.float32]


@role
class Started(Party):
    """What the active party has when its first round begins."""

    missing_code: int
    numbers: Floats  # (n_rows,): label of each row, a class id or number
    classes: tuple[str, ...]
    key: npt.NDArray[np.uint8]  # the private key
    is_walking: bool  # whether rows are on their way down the initial model
    traversal: Traversal | None = None  # where they are
    joint: Joint
    n_made: Ints  # (n_parties,): splits of each in the rounds before, by which records are numbered
    boosted: Boosted

    @property
    def objective(self) -> Objective:
        """Of the run."""
        return cast(Objective, self.settings.objective)

    @property
    def parameters(self) -> LossParameters:
        """Of the objective."""
        return LossParameters.of(self.settings)

    @property
    def n_outputs(self) -> int:
        """Margins of a row."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def n_pairs(self) -> int:
        """Gradients and hessians of a row: of each output for each parallel tree."""
        return self.n_parallel * self.n_outputs

    @property
    def calibration(self) -> Calibration:
        """Of the run."""
        return cast(Calibration, self.settings.calibration)

    @property
    def width(self) -> int:
        """Trees per round."""
        return 1 if self.has_one_tree else self.n_pairs

    @property
    def private_key(self) -> PrivateKey:
        """Key of this run."""
        return PrivateKey.from_array(self.key)

    @property
    def layouts(self) -> tuple[PairLayout, ...]:
        """Of packed gradients, one per group of trees."""
        return grouped_layouts(self.private_key.public.bits, self.n_train, self.n_pairs)

    @property
    def column_weights(self) -> Floats | None:
        """Weights of the training rows, None without a column of them: quantiles then differ."""
        return self.weights[: self.n_train] if self.config.weight else None

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns, code the labels, draw and test the key."""
        self.accept(request)
        self.check_order(mail)
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(request.objective)
        with as_protocol_error(self.name, "SetupRequest", "eval_metrics"):
            metrics.check_metrics(request.objective, request.eval_metrics, self.parameters)
        self._code_labels()
        self.codes, self.missing_code = digitise(self.cut_columns(), self.cuts)
        self.begin_lookup()
        self.wanted_constraints()  # raises for malformed texts before anything is sent
        if self.n_pairs > MOST_PAIRS:
            rule = f"must be at most {MOST_PAIRS // self.n_outputs} with this number of classes"
            raise ConfigError(f"num-parallel-tree {rule}, got {self.n_parallel}")
        key = self.draw_key(
            request, lambda public: grouped_layouts(public.bits, self.n_train, self.n_pairs)
        )
        self.key, self.is_walking = key.to_array(), bool(request.init_model)
        letter = PublicKey(key.public.to_array(), self.n_pairs, self.n_train, PRECISION)
        return SentReply(), self.to_others(letter)

    def _code_labels(self) -> None:
        """Code labels, set the initial model and margins."""
        objective, n_train = self.objective, self.n_train
        self.classes, self.numbers = self.number_labels(objective)
        self.labels = None
        weights = self.weights[:n_train]
        check_weights(weights)
        labels = self.numbers[:n_train]
        sums = label_sums(objective, labels, weights, len(self.classes), self.parameters)
        check_events(objective, sums)
        weight_sum = float(weights.sum(dtype=np.float64))
        if not self.settings.scale_pos_weight:
            scale = balance(float(sums[0]), weight_sum)
            self.settings = replace(self.settings, scale_pos_weight=scale)
        score = base_score(objective, sums, weight_sum, self.parameters)
        if has_quantile_leaves(objective):
            score = quantile_score(objective, labels, self.column_weights, self.parameters)
        check_mean(objective, score)
        if self.calibration != "none":
            check_both_classes(self.calibration, *self.validation_weights().sum(axis=1))
        node = node_of(self.n_outputs) if self.has_one_tree else NODE
        trees, records = stack_trees((), node), np.empty(0, dtype=np.int64)
        if self.settings.init_model:
            model, ids = self._initial_model()
            trees, records, score = stack_trees(model.trees), np.concatenate(ids), model.base_score
        if self.base_margins is not None:
            try:
                check_base_margin(objective)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            margins = self.base_margins[:, None]
        else:
            margins = np.tile(base_margin(objective, score), (len(self.numbers), 1))
        self.boosted = Boosted(score, margins, *trees, records, n_parallel=self.n_parallel)

    def validation_weights(self) -> Doubles:
        """Weights of the validation rows by class, 0 in the other one; shape (2, n_valid)."""
        rows = self.rows_of("valid")
        is_positive = self.numbers[rows] == 1
        return np.where([~is_positive, is_positive], self.weights[rows].astype(float), 0.0)

    def _initial_model(self) -> tuple[Ensemble, tuple[Ints, ...]]:
        """The initial model, checked to fit the run, and the record ids of its nodes."""
        part = self.active_part(self.settings.init_model)
        model = part.model
        if not isinstance(model, Ensemble):
            raise ConfigError("init-model must be a boosted model, got a forest")
        parties = sorted(part.n_columns)
        if parties != sorted(self.peers):
            raise DataError(f"parties must be those of init-model ({', '.join(parties)})")
        margins = self.config.base_margin if self.base_margins is not None else ""
        settings = {
            "objective": (self.objective, model.objective),
            "classes": (self.classes, model.classes),
            "parameters": (self.parameters, model.parameters),
            "multi-strategy": (self.settings.multi_strategy, model.multi_strategy),
            "num-parallel-tree": (self.n_parallel, model.num_parallel_tree),
            "base-margin": (margins, model.margin_column),
        }
        for field, (wanted, of_model) in settings.items():
            if wanted != of_model:
                # Without the values: class and column names stay at the party.
                raise ConfigError(f"{field} of init-model must be the run's at {self.name}")
        return model, part.records

    def check_due(self, kind: type[Request], is_due: bool) -> None:
        """Check that a request is due now, beyond what the order says."""
        if not is_due:
            rule = "must be due: blocks of gradients and levels of trees come one after the other"
            raise ProtocolError(self.name, kind.__name__, "step", rule)

    def walk(self, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
        """Route the rows down the initial model as far as answers and local splits allow."""
        self.check_due(WalkRequest, self.is_walking)
        part = self.active_part(self.settings.init_model)
        if self.follows(SetupRequest):
            self.meet(mail)
            for name in self.others:
                part.check(name, mail.one(ColumnBins, name).part)
            traversal = Traversal.of(part, len(self.ids), 0)
        else:
            assert self.traversal is not None
            traversal = self.traversal.answered(part, mail)
        self.traversal, letters = traversal.ask_on(part, self.values, 0)
        self.is_walking = bool(letters)
        if not letters:
            # Leaf values of the initial model are the first margins.
            leaves, margins = self.traversal.reached(), np.array(self.boosted.margins)
            assert isinstance(part.model, Ensemble)
            for number, (tree, reached) in enumerate(zip(part.model.trees, leaves, strict=True)):
                margins[:, part.model.outputs_of(number)] += tree["value"][reached]
            self.boosted, self.traversal = replace(self.boosted, margins=margins), None
        return WalkReply(not letters, self.boosted.n_rounds, len(part.model.trees)), letters

    def meet(self, mail: Mail) -> None:
        """Check and join the parties' descriptions of their columns."""
        letters = {self.name: self.column_bins(np.empty(0, dtype=np.uint8))}
        wanted, limits = self.wanted_constraints(), self.config.limits
        for name in self.others:
            letters[name] = mail.one(ColumnBins, name)
            most_columns = limits["most-columns"]
            check_bins(name, letters[name], wanted, self.settings.max_bin, most_columns, self.name)
        ordered = {name: letters[name] for name in self.peers}
        self.joint = Joint.of(ordered, wanted)
        if self.settings.auto_child_weight:
            weight = auto_child_weight(self.joint.cuts.categories.tolist())
            self.settings = replace(self.settings, min_child_weight=weight)
        if has_quantile_leaves(self.objective) and self.joint.monotone.any():
            rule = f"must be empty in all node configs for {self.objective}"
            raise ConfigError(f"monotone-constraints {rule}: quantiles have no bounds")
        if self.has_one_tree and (self.joint.monotone.any() or self.joint.interactions):
            rule = f"must be empty in all node configs with multi-strategy={ONE_TREE}"
            raise ConfigError(f"{BOTH} {rule}, as in XGBoost")
        if self.has_one_tree and self.joint.cuts.by_category.any():
            owners = [name for name, flags in self.joint.categorical.items() if flags.any()]
            way = "drop-columns excludes them; one_output_per_tree splits them"
            raise ConfigError(
                f"columns must be numbers with multi-strategy={ONE_TREE}, as in XGBoost, got "
                f"categories at {', '.join(owners)}: {way}"
            )
        self.n_made = np.array(list(self.joint.n_records.values()))
