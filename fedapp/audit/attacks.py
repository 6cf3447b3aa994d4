"""The attacks of an audit: which runs they fit, what they measure, and what lowers it.

Attackers keep to the protocol: they read what their seat gets, and compute. Attacks that break it
(``reverse_sums``, ``crafted_sums``) or that need predictions (``eini_paths``) are studies, in
``simulations/attacks``. Costs of settings are those that its ``results.md`` has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import beta, t
from sklearn.metrics import roc_auc_score

from fedapp.arrays import Doubles, Ints
from fedapp.audit import vertical as guessing
from fedapp.audit.listening import Listeners, Trained
from fedapp.audit.membership import (
    RARE,
    SHADOWS,
    ScoredRows,
    above_usual,
    catches_planted,
    caught,
    scored,
)
from fedapp.audit.pax_rows import CuriousPAX, senders_of, true_rows
from fedapp.audit.timberstrike import target_of
from fedapp.audit.vertical import STEPS, Active, largest_bins, solved
from fedapp.errors import FedappError
from fedapp.messages.methods import all_methods
from fedapp.run_files import Finding, Summary, Unmeasured
from fedapp.runs.baselines import join_tables
from fedapp.runs.tables import party_configs, stacked_tables
from fedapp.settings import Settings
from fedapp.site.table import read_columns

TAILS, DRAWS = (0.025, 0.975), 500  # of intervals, and their bootstrap samples
MOST_ROWS = 1500  # of a target of TimberStrike: to match them takes their third power
MOST_COLUMNS, MOST_EQUATIONS = 10, 1000  # of a passive party, that bins are solved for
FLOPS = 3e10  # a second, of one core
CLEAR = 0.95  # AUC of planted labels
COORDINATOR = "coordinator"
BOOTSTRAP = "rows (bootstrap)"
TWO_CLASSES = "it is for two classes"
IN_SCORES = "is in the scores"  # of a setting in force
FLAT = "federated-forest.max-depth=3"
NOISE = "privacy.epsilon=1: AUC 0.561 to 0.502 on default-credit", "test AUC 0.769 to 0.731"


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that is attacked; ``active`` and ``passive`` are parties of a vertical one."""

    settings: Settings  # with its objective
    summary: Summary
    quick: bool

    @property
    def is_vertical(self) -> bool:
        return all_methods()[self.settings.strategy].family == "vertical"

    @property
    def reason(self) -> str:
        """Why attacks for two classes do not fit; empty if they do."""
        return "" if self.settings.objective == "binary:logistic" else TWO_CLASSES

    @property
    def active(self) -> str:
        return str(self.summary["active"])

    @property
    def passive(self) -> list[str]:
        names = [str(party["name"]) for party in self.summary["parties"]]
        return [name for name in names if name != self.active]

    @property
    def n_train(self) -> int:
        return int((self.summary["rows"] or self.summary["matched_rows"])["train"])

    @property
    def seconds(self) -> float:
        """What a training took, and what surrounds it."""
        return float(self.summary["seconds"]["train"]) + 1.0


class Measured(NamedTuple):
    """A figure of an attack; the fields are those of a ``Finding``."""

    measure: str
    success: float
    span: tuple[float, float]
    chance: float
    interval: str = BOOTSTRAP
    case: str = ""  # behind the attack's name


@dataclass(frozen=True, slots=True, eq=False)
class Attack:
    """One attack from one seat of a run: it listens to a training, and then computes."""

    name: str
    seat: str
    lowered_by: str  # a setting
    cost: str  # of that setting
    seconds: float  # expected, beside the training that all attacks share
    results: Callable[[Trained], Iterable[Measured | str]]  # or why there is no figure
    # Whether it finds what is planted in what the seat has seen: an attack that does not, and is
    # no better than chance, has measured nothing.
    finds_planted: Callable[[Trained], bool]
    listeners: Listeners = ()
    coordinator: CuriousPAX | None = None
    plant: str = "row"

    def carried_out(self, run: Trained, failures: Mapping[str, str]) -> list[Finding | Unmeasured]:
        """Its figures, or why there are none; nothing that it raises ends the audit.

        ``failures`` are of listeners, by their seats.
        """
        try:
            results = list(self.results(run))
            measured = [result for result in results if isinstance(result, Measured)]
            if not np.isfinite([(of.success, *of.span, of.chance) for of in measured]).all():
                results = ["it gave no number"]
            elif any(of.span[0] <= of.chance for of in measured) and not self.finds_planted(run):
                results = [
                    f"it did not find its planted {self.plant}, so a low figure says nothing"
                ]
        except Exception as error:
            results = [f"it failed ({type(error).__name__}: {error})"]
        if self.seat in failures:
            results = [failures[self.seat]]
        return [
            Unmeasured(self.name, self.seat, result)
            if isinstance(result, str)
            else self.finding(result)
            for result in results
        ]

    def finding(self, of: Measured) -> Finding:
        """A figure of this attack, as the audit records it."""
        name = f"{self.name}, {of.case}" if of.case else self.name
        low, high = map(float, of.span)
        shares = float(of.success), low, high, of.chance
        texts = of.interval, self.lowered_by, self.cost
        return Finding(name, self.seat, of.measure, *shares, *texts)


Attacks = Iterator[Attack | Unmeasured]


def bootstrapped(figure: Callable[[Ints], float], *groups: Ints) -> tuple[float, float]:
    """Interval of a figure of row numbers, each group of which is drawn with replacement."""
    rng = np.random.default_rng(0)
    draws = [
        figure(np.concatenate([rng.choice(group, len(group)) for group in groups]))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(draws, TAILS)
    return float(low), float(high)


def of_mean(values: Doubles) -> tuple[float, tuple[float, float]]:
    """Mean of rows' values, and its interval."""
    rows = np.arange(len(values))
    return float(values.mean()), bootstrapped(lambda drawn: float(values[drawn].mean()), rows)


def of_auc(truth: npt.NDArray[Any], scores: npt.NDArray[Any]) -> tuple[float, tuple[float, float]]:
    """AUC of scores, and its interval."""

    def auc(rows: Ints) -> float:
        return float(roc_auc_score(truth[rows], scores[rows]))

    classes = [np.flatnonzero(truth == class_id) for class_id in (0, 1)]
    return auc(np.arange(len(truth))), bootstrapped(auc, *classes)


def rows_from_sums(subject: Subject) -> Attacks:
    """The coordinator of PAX rebuilds rows from sums by bin."""
    settings, name, why = subject.settings, "rows rebuilt from sums", subject.reason
    if settings.strategy == "horizontal-forest":
        why = "no attack on a forest's sums by bin is implemented; bins may be of single rows"
        yield Unmeasured(name, COORDINATOR, why)
    if settings.strategy != "pax":
        return
    if settings.colsample_bytree < 1:
        why = "it is for trees of all columns"
    if settings.sections["privacy"]["epsilon"]:
        why = "with privacy.epsilon no party sends sums by bin"
    if why:
        yield Unmeasured(name, COORDINATOR, why)
        return
    coordinator = CuriousPAX.of_run(settings)

    def results(run: Trained) -> Iterator[Measured]:
        senders = senders_of(coordinator)
        truth = true_rows(coordinator, senders)
        pairs = [(sender.rebuilt(), truth[name]) for name, sender in senders.items()]
        hits = [row in rebuilt for rebuilt, rows in pairs for row in rows]
        wrong = sum(len(rebuilt - set(rows)) for rebuilt, rows in pairs)
        usual = []
        for table in (np.array(rows) for _, rows in pairs):
            counted = (np.unique(column, return_counts=True) for column in table.T)
            usual.append((table == [values[counts.argmax()] for values, counts in counted]).all(1))
        n, count = len(hits), sum(hits)
        low = beta.ppf(TAILS[0], count, n - count + 1) if count else 0.0
        high = beta.ppf(TAILS[1], count + 1, n - count) if count < n else 1.0
        measure = f"share of {n:,} training rows rebuilt, each column to a bin, with the label"
        measure += f"; {wrong:,} further rows do not exist; chance: the most frequent values"
        chance = float(np.concatenate(usual).mean())
        yield Measured(measure, count / n, (low, high), chance, "rows (exact binomial)")

    def finds_planted(run: Trained) -> bool:
        weights = stacked_tables(settings)[0].weights
        weight = 1.0 if weights is None else float(weights.mean())
        senders = senders_of(coordinator).values()
        return all(sender.finds_planted(weight) for sender in senders)

    lowered_by, cost = "least-bin-rows=5: 0.912 to 0 on breast-cancer", "test AUC 0.989 to 0.992"
    n_senders = 1 if settings.sections["pax"]["aggregation"] == "secure" else settings.parties
    n_nodes = min(1 << settings.n_levels, subject.n_train / n_senders / 10)
    seconds = 0.01 * subject.summary["trees"] * n_senders * n_nodes
    how = lowered_by, cost, seconds, results, finds_planted
    yield Attack(name, COORDINATOR, *how, coordinator=coordinator)


# By method, what lowers the figure, and its cost; all on default-credit.
LOWERED = {
    "pax": ("least-bin-rows=5: 0.577 to 0.483", "test AUC 0.724 to 0.736"),
    "bagging": ("max-depth=2: 0.503 to 0.408", "test AUC 0.683 to 0.718"),
    "cyclic": ("max-depth=2: 0.498 to 0.429", "test AUC 0.649 to 0.677"),
    "fedxgbllr": ("fedxgbllr.max-depth=2: 0.518 to 0.474", "test AUC 0.732 to 0.712"),
}


def rows_from_trees(subject: Subject) -> Attacks:
    """Whoever has a party's trees, or PAX's model, rebuilds the rows that have grown them."""
    settings, name, why = subject.settings, "values rebuilt from trees", subject.reason
    if settings.strategy not in LOWERED:
        return
    parts = stacked_tables(settings)[1]
    first, n_rows = min(parts), subject.n_train
    seat = "whoever has the model: coordinator, each party"
    if settings.strategy != "pax":
        n_rows, seat = len(parts[first]["train"]), f"coordinator, each party but {first}"
    if not any(len(rows["test"]) for rows in parts.values()):
        why = "it knows the bounds of columns from test rows, and there are none"
    if n_rows > MOST_ROWS:
        why = f"it matches rows one to one, at most {MOST_ROWS:,}, and there are {n_rows:,}"
    if why:
        yield Unmeasured(name, seat, why)
        return

    def results(run: Trained) -> Iterator[Measured]:
        rng = np.random.default_rng(settings.seed)
        shares = target_of(run, True).shares(settings.reg_lambda, rng)
        measure = f"share of the values of {n_rows:,} rows within 0.319 deviations, rows matched"
        measure += "; chance: drawn between the bounds of the columns"
        yield Measured(measure, *of_mean(shares[0]), float(shares[1].mean()))

    def finds_planted(run: Trained) -> bool:
        rng = np.random.default_rng(settings.seed)
        return target_of(run, True).finds_planted(settings.reg_lambda, rng)

    seconds = 2e-4 * subject.summary["trees"] * n_rows
    yield Attack(name, seat, *LOWERED[settings.strategy], seconds, results, finds_planted)


def bins_solved(subject: Subject) -> Attacks:
    """The active party of SecureBoost solves for the bins of each passive party's rows."""
    settings, n_rows = subject.settings, subject.n_train
    if settings.strategy != "secureboost":
        return
    share = 4 if subject.quick else 1
    n_sums = min(MOST_EQUATIONS // share, n_rows, subject.summary["trees"] * settings.n_sums)
    cells = n_rows * min(settings.max_bin, n_rows) * (MOST_COLUMNS // share)
    seconds = 1 + 4 * STEPS * n_sums * cells / FLOPS
    lowered_by, cost = "max-depth=2: 0.617 to 0.355 on default-credit", "test AUC 0.748 to 0.758"
    for passive in subject.passive:
        solver = Active(passive, MOST_EQUATIONS // share)
        seat = f"{subject.active}, of {passive}'s rows"
        listeners = [(name, solver.note) for name in (subject.active, passive)]
        solving = partial(_solve, solver, MOST_COLUMNS // share), solver.finds_planted
        yield Attack("bins solved from sums", seat, lowered_by, cost, seconds, *solving, listeners)


def _solve(solver: Active, most_columns: int, run: Trained) -> Iterator[Measured | str]:
    if not solver.sums:
        yield "it decrypts no sums: no round is shared"
        return
    ends, n_columns = np.cumsum(solver.widths), len(solver.widths)
    drawn = np.random.default_rng(run.settings.seed).permutation(n_columns)
    columns = np.sort(drawn[:most_columns])
    bins = np.isin(np.searchsorted(ends, np.arange(ends[-1]), side="right"), columns)
    coefficients, sums = np.concatenate(solver.coefficients), np.concatenate(solver.sums)
    truth = solver.codes[:, columns]
    right = solved(coefficients, sums[:, bins], solver.widths[columns]) == truth
    measure = f"share of {truth.size:,} values in {len(columns)} of {n_columns} columns "
    measure += f"whose bin {len(sums):,} equations give; chance: the largest bin"
    yield Measured(measure, *of_mean(right.mean(axis=1)), largest_bins(truth.T))


def labels_guessed(subject: Subject) -> Attacks:
    """A passive party of SecureBoost, or of a forest with encrypted labels, guesses labels."""
    settings, name, why = subject.settings, "labels guessed from shared nodes", subject.reason
    is_forest = settings.strategy == "federated-forest"
    if not is_forest and settings.strategy != "secureboost":
        return
    lowered_by = "label-epsilon=1: 0.764 to 0.719 on default-credit"
    cost = "test AUC 0.748 to 0.672; bins are solved better (0.365 to 0.868 on breast-cancer)"
    if settings.label_epsilon:
        lowered_by, cost = "label-epsilon is in force", IN_SCORES
    if is_forest:
        lowered_by = f"{FLAT}: 0.772 to 0.736 on default-credit"
        cost = "test AUC 0.746 to 0.765"
        if settings.sections["federated-forest"]["labels"] != "paillier":
            why = "labels=encoded sends it which training rows share a label"
    for passive in subject.passive:
        if why:
            yield Unmeasured(name, passive, why)
            continue
        party = guessing.ForestParty() if is_forest else guessing.BoostedParty()
        seconds, results = 20 + 2e-4 * subject.n_train, partial(_guess, party, passive)
        how = results, partial(_finds_planted_nodes, party), [(passive, party.note)]
        yield Attack(name, passive, lowered_by, cost, seconds, *how, plant="labels")
        if isinstance(party, guessing.ForestParty):
            yield Attack(
                "labels grouped by unsplit nodes",
                passive,
                lowered_by=f"{FLAT}: 0.996 to 0.508 on default-credit",
                cost=cost,
                seconds=2.0,
                results=partial(_group, party),  # which listens for the attack before
                finds_planted=partial(_finds_planted_groups, party),
                plant="labels",
            )


def _guess(
    party: guessing.ForestParty | guessing.BoostedParty, passive: str, run: Trained
) -> Iterator[Measured | str]:
    table, seed = join_tables(run.settings)[0], run.settings.seed
    labels = table.labels[table.split.train]
    sizes = np.bincount(labels.astype(np.int64), minlength=2)
    if not party.nodes:
        yield "it sees the nodes of rows in no round"
        return
    if sizes.min() <= guessing.KNOWN // 2:
        yield f"a class has at most {guessing.KNOWN // 2} training rows"
        return
    scores = guessing.unguided(guessing.embedded(party.nodes), labels)
    measure = "AUC without a known label, which would only tell which side is which class"
    yield Measured(measure, *of_auc(labels, scores), 0.5, case="none known")
    aucs = np.array(guessing.guessed(guessing.by_nodes(party.nodes), labels, seed))
    half = t.ppf(TAILS[1], len(aucs) - 1) * aucs.std(ddof=1) / len(aucs) ** 0.5
    span = max(0.0, aucs.mean() - half), min(1.0, aucs.mean() + half)
    values = table.values[table.split.train][:, _columns_at(run.settings, passive)]
    chance = float(np.mean(guessing.guessed(guessing.by_columns(values), labels, seed)))
    measure = f"AUC with {guessing.KNOWN} known labels; chance: from its columns"
    interval, case = f"{len(aucs)} draws of the known rows", f"{guessing.KNOWN} known"
    yield Measured(measure, float(aucs.mean()), span, chance, interval, case)


def _group(party: guessing.ForestParty, run: Trained) -> Iterator[Measured]:
    labels, groups, auc = _train_labels(run), party.groups, guessing.label_auc
    classes = [np.flatnonzero(labels == class_id) for class_id in (0, 1)]
    span = bootstrapped(lambda rows: auc(groups[rows], labels[rows]), *classes)
    measure = "AUC with a known label of each of the two largest groups"
    yield Measured(measure, auc(groups, labels), span, 0.5)


def _finds_planted_nodes(party: guessing.ForestParty | guessing.BoostedParty, run: Trained) -> bool:
    """Whether labels are guessed where as many trees as the run's divide rows by their labels."""
    labels = _train_labels(run)
    rounds = [np.tile(labels.astype(np.int32), (len(nodes), 1)) for nodes in party.nodes]
    aucs = guessing.guessed(guessing.by_nodes(rounds), labels, run.settings.seed)
    scores = guessing.unguided(guessing.embedded(rounds), labels)
    return min(*aucs, float(roc_auc_score(labels, scores))) > CLEAR


def _finds_planted_groups(party: guessing.ForestParty, run: Trained) -> bool:
    """Whether labels are guessed where all rows of a class are joined."""
    labels, groups = _train_labels(run), np.arange(len(party.groups))
    for class_id in (0, 1):
        groups = guessing.joined(groups, np.flatnonzero(labels == class_id))
    return guessing.label_auc(groups, labels) > CLEAR


def _train_labels(run: Trained) -> guessing.Labels:
    table = join_tables(run.settings)[0]
    labels: guessing.Labels = table.labels[table.split.train]
    return labels


def _columns_at(settings: Settings, party: str) -> slice:
    """Where a vertical party's columns are in the joined table."""
    names = [config.name for config in party_configs(settings)]
    tables = [read_columns(config, settings.seed) for config in party_configs(settings)]
    ends = np.cumsum([0, *(len(table.columns) for table in tables)]).tolist()
    return slice(*ends[names.index(party) :][:2])


def against_membership(settings: Settings) -> tuple[str, str]:
    """What lowers the membership of a run, and its cost."""
    if settings.strategy != "pax":
        return "no known setting", "not known"
    is_noised = settings.sections["privacy"]["epsilon"]
    return ("privacy.epsilon is in force", IN_SCORES) if is_noised else NOISE


def membership(subject: Subject) -> Attacks:
    """Whoever has the model or its scores tells which labelled rows have trained it."""
    settings, name = subject.settings, "membership (LiRA)"
    seat = "whoever has the model or its scores, and labelled rows"
    if not (settings.folds or settings.test_fraction):
        yield Unmeasured(name, seat, "no rows are held back: test-fraction is 0")
        return
    n_shadows = SHADOWS // 4 if subject.quick else SHADOWS
    judged = list[ScoredRows]()  # the model, and shadow models

    def results(run: Trained) -> Iterator[Measured | str]:
        try:
            judged[:] = scored(run.settings, run.model, n_shadows, subject.is_vertical)
        except FedappError as error:  # such as noise that half of the rows cannot bear
            yield f"a shadow model of half of the rows could not be trained ({error})"
            return
        model = above_usual(judged[0], judged[1:])
        members, margins = model.members, model.margins
        groups = [np.flatnonzero(members == is_member) for is_member in (True, False)]
        # Of rows that are in all halves, or in none, no model of the other kind is known.
        of = f"of {len(groups[0]):,} training and {len(groups[1]):,} other rows, by {n_shadows} "
        of += "pooled shadow models" if subject.is_vertical else "shadow models"
        share = caught(model)
        span = bootstrapped(lambda rows: caught(ScoredRows(margins[rows], members[rows])), *groups)
        measure = f"share found while {RARE:.0%} of others are, {of}"
        yield Measured(measure, share, span, RARE, case=f"at {RARE:.0%} false alarms")
        yield Measured(f"AUC {of}", *of_auc(members, margins), 0.5, case="AUC")

    seconds = 0.5 + 5e-7 * subject.n_train * max(subject.summary["trees"], 1)
    seconds = 5 + n_shadows * (seconds if subject.is_vertical else subject.seconds)
    against = against_membership(settings)
    yield Attack(name, seat, *against, seconds, results, lambda _: catches_planted(*judged))


def attacks_on(subject: Subject) -> tuple[list[Attack], list[Unmeasured]]:
    """The attacks that fit a run, and what is not measured on it."""
    kinds = rows_from_sums, rows_from_trees, bins_solved, labels_guessed, membership
    chosen = list[Attack | Unmeasured]()
    for kind in kinds:
        try:
            chosen += kind(subject)
        except Exception as error:
            why = f"it could not begin ({type(error).__name__}: {error})"
            chosen.append(Unmeasured(kind.__name__.replace("_", " "), "every seat", why))
    missing = [attack for attack in chosen if isinstance(attack, Unmeasured)]
    if subject.is_vertical:
        why = "it passes on sealed letters, and no attack on its sizes and trees is implemented"
        missing.append(Unmeasured("rows and labels", COORDINATOR, why))
    return [attack for attack in chosen if isinstance(attack, Attack)], missing
