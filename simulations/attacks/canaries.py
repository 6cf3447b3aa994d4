"""One-run audits of epsilon: what a run discloses of canaries, beside what it promises."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from scipy import sparse
from scipy.optimize import brentq
from scipy.stats import binom

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.audit.pax_rows import CuriousPAX
from fedapp.crypto.masking import unmasked_sum
from fedapp.histograms.fixed_point import Bounds, Whole
from fedapp.histograms.sketch import BASE, DIGIT_BITS, N_DIGITS, Descent, ordered, values_of
from fedapp.messages.fields import Reply, Request
from fedapp.messages.pax_secure import PrivateCountRequest, PrivateOpenRequest, PrivateTreesRequest
from fedapp.messages.secagg import MaskedReply
from fedapp.runs.local import run_local, site_contexts
from fedapp.runs.predict import model_of_text, predict
from fedapp.settings import Settings, load_settings
from fedapp.site import answer
from fedapp.site.sums import Noise, add_noise
from fedapp.trees.losses import PLAIN
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.objective import row_bounds, row_pairs
from fedapp.trees.predict import find_leaves, predict_margins
from simulations.study import check_names
from strategies.secagg import arrays_of

GUESSES, CONFIDENCE = (0.1, 1.0), 0.95  # shares of the canaries, fixed for all audits
HONEST, ACCOMPLICE = "bank", "shop"
FAULTS = (0.25, 0.1, 0.0)  # noise as a share of what epsilon asks for
SHARED: dict[str, Any] = {"parties": 2, "test-fraction": 0.0, "valid-fraction": 0.0}

KNOWN_ROWS, ACCOMPLICE_ROWS, COLUMNS = 90_000, 100, 16
DIGITS = np.arange(16, 240, 30)  # first and second digits of values: a bin for each pair
COIN_PRECISION = 4.0  # one over the variance of a fair coin
PAX_RUN: dict[str, Any] = {
    **SHARED,
    "strategy": "pax",
    "pax.aggregation": "secure",
    "objective": "binary:logistic",
    "num-boost-round": 2 * COLUMNS,
    "max-depth": 8,
    "max-bin": len(DIGITS) ** 2,
    "eta": 0.01,  # so that gradients of canaries stay the largest
}
LABEL_COLUMNS = 4  # of each party
LABEL_RUN: dict[str, Any] = {  # trees that separate all rows
    **SHARED,
    "strategy": "secureboost",
    "align": "ordered",
    "allow-export": True,
    "num-boost-round": 3,
    "max-depth": 15,
    "max-bin": 32,
    "eta": 1.0,
    "min-child-weight": 0.0,
    "gamma": 1e-6,
    "reg-lambda": 0.0,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": True,
}
OBJECTIVES = {"classes": "binary:logistic", "measures": "reg:squarederror"}


def canaries(
    audit: tuple[str, ...] = ("rows", "classes", "measures"),
    epsilon: tuple[float, ...] = (1.0, 4.0, 8.0),
    canaries: int = 1000,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Lower bounds of epsilon, from one run each.

    Source: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run"
    (arXiv:2305.08846). A fair coin decides on each canary; an attacker, who knows everything else,
    guesses some coins from what the run discloses. Under an epsilon below the
    bound, guesses are that often right in less than 5 % of runs, for both numbers of guesses.

    - ``rows``: PAX with ``privacy.epsilon``. A canary has weight 1 or 0, which is what its promise
      is about. The coordinator and a party attack, from all sums.
    - ``classes``, ``measures``: SecureBoost with ``label-epsilon``. A canary has one of two
      classes, or the lower or upper end of ``label-range``. Whoever has the model attacks.

    Sites are not simulated, so noise is drawn as in a deployment. ``noise`` is its share of what
    epsilon asks for: all, then for the first epsilon a quarter and a tenth (for labels, 4 and 10
    times the epsilon), as faults might leave, and none, where the bound is the highest possible.
    """
    check_names("audit", audit, ("rows", *OBJECTIVES))
    cases = [*((promised, 1.0) for promised in epsilon), *((epsilon[0], part) for part in FAULTS)]
    for kind in audit:
        for promised, noise in cases:
            start, rng = time.perf_counter(), np.random.default_rng(seed)
            coins = rng.integers(0, 2, canaries)
            if kind == "rows":
                scores, delta = row_scores(promised, noise, coins, rng)
            else:
                scores, delta = label_scores(OBJECTIVES[kind], promised, noise, coins, rng), 0.0
            bound = audited(scores, coins, delta)
            promise = {"epsilon": promised, "delta": delta, "noise": noise, "canaries": canaries}
            seconds = round(time.perf_counter() - start)
            yield {"audit": kind, **promise, **bound, "seconds": seconds}


def p_value(epsilon: float, delta: float, n_canaries: int, n_guesses: int, n_correct: int) -> float:
    """Largest probability of ``n_correct`` guesses or more, with this epsilon and delta.

    Source: Steinke, Nasr and Jagielski 2023, main theorem and Appendix D.
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(n_correct - 1, n_guesses, accuracy))
    fewer = np.cumsum(binom.pmf(np.arange(n_correct)[::-1], n_guesses, accuracy))
    steepest = float((fewer / np.arange(1, n_correct + 1)).max(initial=0))
    return min(1.0, tail + 2 * n_canaries * delta * steepest)


def lower_bound(
    delta: float, n_canaries: int, n_guesses: int, n_correct: int, error: float
) -> float:
    """The smallest epsilon that is not refuted, at this probability of an error."""

    def excess(epsilon: float) -> float:
        return p_value(epsilon, delta, n_canaries, n_guesses, n_correct) - error

    return 0.0 if excess(0.0) >= 0 else float(brentq(excess, 0.0, 50.0))


def audited(scores: Doubles, coins: Ints, delta: float) -> dict[str, Any]:
    """Guess the coins whose scores differ most from 1/2; the bound holds for all ``GUESSES``."""
    order, is_correct = np.argsort(-np.abs(scores - 0.5)), (scores > 0.5) == coins
    bounds = []
    for share in GUESSES:
        n_guesses = round(share * len(coins))
        n_correct = int(is_correct[order[:n_guesses]].sum())
        error = (1 - CONFIDENCE) / len(GUESSES)
        bound = lower_bound(delta, len(coins), n_guesses, n_correct, error)
        bounds.append({"guesses": n_guesses, "correct": n_correct, "bound": bound})
    return max(bounds, key=lambda line: line["bound"])


def trained_at_sites(
    settings: Settings,
    tables: Mapping[str, Mapping[str, Any]],
    nodes: Mapping[str, Mapping[str, Any]],
    coordinator: CuriousPAX | None = None,
) -> str:
    """Train at sites that are not simulated, in this process; the text of the model."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FEDAPP_HOME=folder):
        contexts = []
        for name, columns in tables.items():
            data = f"{folder}/{name}.parquet"
            ids = [*map(str, range(len(next(iter(columns.values())))))]
            pa.parquet.write_table(pa.table({"id": ids, **columns}), data)
            contexts.append({"name": name, "data": data, "id": "id", **nodes[name]})
        placed = settings.model_copy(update={"run_dir": f"{folder}/run"})
        run = run_local(placed, site_contexts(contexts), strategy=coordinator)
        return Path(run.path, "model.json").read_text()


# Rows of PAX


@dataclass(frozen=True, slots=True, eq=False)
class Disclosed:
    """A request, and one party's noised sums that answer it."""

    request: Request
    arrays: Sequence[Whole]
    noise: Sequence[Noise]  # of each array


class AuditingPAX(CuriousPAX):
    """The server's side of PAX, which records masked answers by party."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.masked: dict[str, list[Any]] = {HONEST: [], ACCOMPLICE: []}

    def listen(self, party: str, request: Request, reply: Reply) -> None:
        if isinstance(reply, MaskedReply):
            self.masked[party].append(reply.masked)


def row_scores(
    epsilon: float, noise: float, coins: Ints, rng: np.random.Generator
) -> tuple[Doubles, float]:
    """Estimates of the coins from all sums of a run of PAX, and its delta.

    All canaries are at one party. The other subtracts what it has sent, noise included, from what
    the coordinator sees.
    """
    n_canaries, first = len(coins), len(coins) + KNOWN_ROWS
    digits = rng.choice(DIGITS, size=(2, first + ACCOMPLICE_ROWS, COLUMNS))
    values = values_of(digits[0] * BASE**3 + digits[1] * BASE**2)
    labels = np.arange(len(values)) < n_canaries  # a rare class has the largest gradients
    weights = np.append(coins, np.ones(len(values) - n_canaries))
    columns = {**_columns(values, 0), "y": labels.astype(int), "w": weights}
    parties = {HONEST: slice(first), ACCOMPLICE: slice(first, None)}
    node: dict[str, Any] = {"allow": "pax", "label": "y", "weight": "w"}
    node |= {"run-epsilon": epsilon, "least-parties": 2}
    settings = load_settings({**PAX_RUN, "privacy.epsilon": epsilon})
    coordinator, sent = AuditingPAX(settings), list[Disclosed]()

    def add_part(
        name: str, store: Any, request: Request, arrays: Sequence[Whole], drawn: Sequence[Noise]
    ) -> list[Whole]:
        noised = add_noise(name, store, request, arrays, drawn)
        if noise != 1:
            pairs = zip(arrays, noised, strict=True)
            noised = [clear + ((whole - clear) * noise).astype(np.int64) for clear, whole in pairs]
        if name == ACCOMPLICE:
            sent.append(Disclosed(request, noised, drawn))
        return noised

    with patch.object(answer, "add_noise", add_part):
        text = trained_at_sites(
            settings,
            {
                name: {column: values[rows] for column, values in columns.items()}
                for name, rows in parties.items()
            },
            dict.fromkeys(parties, node),
            coordinator,
        )
    disclosed = []
    for accomplice, vectors in zip(
        sent, zip(*coordinator.masked.values(), strict=True), strict=True
    ):
        summed = unmasked_sum(vectors, len(vectors[0]))
        both = arrays_of(summed, [array.shape for array in accomplice.arrays])
        arrays = [whole - array for whole, array in zip(both, accomplice.arrays, strict=True)]
        disclosed.append(Disclosed(accomplice.request, arrays, accomplice.noise))
    model = model_of_text(text)
    assert isinstance(model, Ensemble)
    bounds = coordinator.totals.state.bounds
    scores = estimated_coins(disclosed, bounds, model, values[:first], n_canaries)
    return scores, float(settings.sections["privacy"]["delta"])


def estimated_coins(
    disclosed: Sequence[Disclosed], bounds: Bounds, model: Ensemble, values: Floats, n_canaries: int
) -> Doubles:
    """The best linear estimate of the weights of the first rows; the others' are 1."""
    expected = np.where(np.arange(len(values)) < n_canaries, 0.5, 1.0)
    normal, right, unit = COIN_PRECISION * np.eye(n_canaries), np.zeros(n_canaries), 0.0
    for answered in disclosed:
        request, sums = answered.request, answered.arrays[-1].ravel()
        if isinstance(request, PrivateTreesRequest):
            cells, amounts = in_leaves(model, request.round_id, values, n_canaries, bounds)
        elif isinstance(request, PrivateOpenRequest | PrivateCountRequest) and len(sums):
            cells = in_prefixes(request, values)
            amounts = np.where(cells < 0, 0.0, math.ldexp(1.0, bounds.exponent(0)))
        else:
            continue  # scores are of other rows
        rows = np.repeat(np.arange(len(values)), cells.shape[1])
        places = np.maximum(cells.ravel(), 0), rows
        table = sparse.csr_array((amounts.ravel(), places), shape=(len(sums), len(values)))
        deviations = np.resize(np.sqrt(answered.noise[-1].variances), len(sums))
        residuals = (sums - table @ expected) / deviations
        # Sums over no row show how much noise there is, as a share of what is promised.
        unit = unit or max(float(residuals[table.sum(axis=1) == 0].std()), 1e-4)
        scaled = sparse.diags_array(1 / (deviations * unit)) @ table[:, :n_canaries]
        normal += (scaled.T @ scaled).toarray()
        right += scaled.T @ (residuals / unit)
    return 0.5 + np.asarray(np.linalg.solve(normal, right))


def in_prefixes(request: PrivateOpenRequest | PrivateCountRequest, values: Floats) -> Ints:
    """The count that each value is in, of a request's; -1: in none."""
    digit, (prefixes, offsets) = 0, Descent(np.ones(values.shape[1], dtype=bool), n_bins=2).wanted()
    if isinstance(request, PrivateCountRequest):
        digit, prefixes, offsets = request.digit, request.prefixes, request.offsets
    cells = np.full(values.shape, -1, dtype=np.int64)
    for column, keys in enumerate(ordered(values).astype(np.int64).T):
        of_column = prefixes[offsets[column] : offsets[column + 1]].astype(np.int64)
        heads, digits = np.divmod(keys >> DIGIT_BITS * (N_DIGITS - 1 - digit), BASE)
        places = np.searchsorted(of_column, heads)
        is_counted = np.isin(heads, of_column)
        cells[:, column] = np.where(is_counted, (offsets[column] + places) * BASE + digits, -1)
    return cells


def in_leaves(
    model: Ensemble, round_id: int, values: Floats, n_canaries: int, bounds: Bounds
) -> tuple[Ints, Whole]:
    """Places of each row's gradient and hessian in a round's sums, and both, of weight 1."""
    tree = model.trees[round_id]
    (nodes,) = find_leaves([tree], values)
    leaves = np.searchsorted(np.flatnonzero(tree["left"] == LEAF), nodes)
    margins = predict_margins(model.first_rounds(round_id), values)
    labels = (np.arange(len(values)) < n_canaries).astype(np.float32)
    pairs = row_pairs(model.objective, margins, labels, PLAIN)
    whole = row_bounds(model.objective, PLAIN, clip=0.0).whole(pairs, np.ones_like(labels), bounds)
    return leaves[:, None] * 2 + np.arange(2), whole[:, 0]


# Labels of SecureBoost


def label_scores(
    objective: str, epsilon: float, noise: float, coins: Ints, rng: np.random.Generator
) -> Doubles:
    """Predictions for rows whose randomised labels trees have learned one by one."""
    values = rng.normal(size=(len(coins), 2 * LABEL_COLUMNS)).astype(np.float32)
    active, passive = values[:, :LABEL_COLUMNS], values[:, LABEL_COLUMNS:]
    node = {"allow": "secureboost", "allow-export": True, "allow-insecure": True}
    labelled = {**node, "label": "y", "label-epsilon": epsilon / noise if noise else 0.0}
    labelled |= {} if objective == OBJECTIVES["classes"] else {"label-range": "0,1"}
    tables: dict[str, dict[str, Any]] = {
        HONEST: {**_columns(active, 0), "y": coins},
        ACCOMPLICE: _columns(passive, LABEL_COLUMNS),
    }
    settings = load_settings({**LABEL_RUN, "objective": objective})
    text = trained_at_sites(settings, tables, {HONEST: labelled, ACCOMPLICE: node})
    model = model_of_text(text)
    return np.asarray(predict(model, values)[:, 0], dtype=np.float64)


def _columns(values: Floats, first: int) -> dict[str, Floats]:
    return {f"x{number:02}": column for number, column in enumerate(values.T, first)}
