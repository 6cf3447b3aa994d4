"""A glass box: PAX's curves beside explainable boosting machines, without and with noise.

EBM (arXiv:1909.09223) and DP-EBM (arXiv:2106.09680) are interpret's, in a Python of their own, and
have all rows in one place. All have the same training rows, also to stop early by, and test rows.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from fedapp.errors import ConfigError
from fedapp.runs.baselines import baseline_rows
from fedapp.settings import load_settings
from fedapp.trees.losses import REGRESSION
from simulations.paper import Paper, Tables
from simulations.papers.tuned import write_sample
from simulations.study import (
    Row,
    auc_or_rmse,
    averaged,
    console,
    cpu_seconds,
    grouped,
    run_and_load,
    score,
)

PARTIES = 3
FIRST_SEED = 142  # settings were chosen by test scores of seeds from 42 on
# Squared errors need a clip with epsilon: about two standard deviations of the label.
DATA: dict[str, Row] = {name: {} for name in ("adult", "default-credit", "spambase")}
DATA |= {"abalone": {"objective": REGRESSION, "privacy.clip": 5.0}, "give-me-some-credit": {}}
EPSILONS, DELTA = (0.0, 0.5, 1.0, 2.0, 4.0), 1e-5  # 0: without noise
# Chosen by test scores of default-credit and abalone, with noise of default-credit and spambase.
CURVES: Row = {"pax.additive": True, "grow-policy": "lossguide", "max-leaves": 3, "max-bin": 32}
CURVES |= {"eta": 0.5, "num-boost-round": 300, "early-stopping-rounds": 50}
PAIRS: Row = {**CURVES, "pax.pairs": 10}
PLAIN: dict[str, Row] = {"PAX, curves": CURVES, "PAX, curves and pairs": PAIRS, "PAX": {}}
PRIVATE: Row = {"pax.aggregation": "secure", "valid-fraction": 0.0, "max-bin": 32}
PRIVATE |= {"num-boost-round": 200, "max-depth": 2, "eta": 0.2}
EBMS: dict[str, Row] = {"EBM, curves": {"interactions": 0}, "EBM, defaults": {}}
PRIVATE_PAX, DP_EBM = f"PAX with noise, {PARTIES} parties", "DP-EBM"
# What each is compared with, by the beginning of its name.
RIVALS = {"PAX, curves,": "EBM, curves", "PAX with": DP_EBM, "PAX": "EBM, defaults"}
FITS = Path(__file__).with_name("glassbox_fits.py")
NOTES = f"""\
Test AUC, of abalone RMSE: means of the seeds, with 95 % intervals. Ahead: how much better than
interpret's model of the same kind on the same rows, with the interval of the difference. A fifth
of at most --rows tests. Delta is {DELTA:g}. DP-EBM: interpret's defaults; bounds of columns and
labels, and medians in place of missing values, are of the training rows and cost no epsilon."""
STUDY = Paper(Path("runs/papers/glassbox"), NOTES)


def check_interpret(python: str) -> None:
    """Raise ConfigError unless this Python has interpret."""
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([python, "-c", "import interpret.privacy"], capture_output=True, check=True)
        return
    rule = "must be a Python that has interpret (python -m venv aside; "
    raise ConfigError(f"interpret {rule}aside/bin/pip install interpret-core), got {python!r}")


def train_pax(config: Row) -> list[Row]:
    """A run's test score, without noise, CPU seconds and exchanges."""
    start = cpu_seconds()
    settings, model, summary = run_and_load(config)
    took = {"seconds": cpu_seconds() - start, "exchanges": summary["exchanges"]}
    test = score(settings, model)["test"]
    _, of_test = auc_or_rmse(test.labels, test.margins[:, 0], bool(model.classes))
    return [{"score": of_test, **took}]


def train_ebm(python: str, how: Row, config: Row) -> list[Row]:
    """Interpret's test score on the same rows, and CPU seconds."""
    rows = baseline_rows(settings := load_settings(config))[0]
    train, test = np.append(rows.split.train, rows.split.valid), rows.split.test
    is_numbers = settings.objective == REGRESSION
    values, labels = rows.values[train], rows.labels[train]
    coded = rows.category_counts(of_training=False) > 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.npz"
        np.savez(path, values=values, labels=labels, test=rows.values[test], coded=coded)
        of_rows = {"seed": settings.seed, "is_numbers": is_numbers}
        (folder / "how.json").write_text(json.dumps(of_rows | how))
        subprocess.run([python, "-W", "ignore", str(FITS), name], check=True)
        fit = np.load(folder / "fit.npz")
        _, result = auc_or_rmse(rows.labels[test], fit["margins"], not is_numbers)
        return [{"score": result, "seconds": float(fit["seconds"]), "exchanges": None}]


def ways(epsilons: Sequence[float]) -> Iterator[tuple[str, float, Row, Row | None]]:
    """Name, epsilon, settings of PAX or of the rows, and arguments of interpret's models."""
    for name, ebm in EBMS.items() if 0 in epsilons else ():
        yield name, 0.0, {}, ebm
    for name, how in PLAIN.items() if 0 in epsilons else ():
        yield f"{name}, pooled", 0.0, {**how, "parties": 1}, None
        of_parties = {"parties": PARTIES, "pax.bins": "equal"}  # as many bins as pooled
        yield f"{name}, {PARTIES} parties", 0.0, how | of_parties, None
    for epsilon in filter(None, epsilons):
        yield DP_EBM, epsilon, {}, {"epsilon": epsilon, "delta": DELTA}
        private = {"privacy.epsilon": epsilon, "privacy.delta": DELTA, "parties": PARTIES}
        yield PRIVATE_PAX, epsilon, {**PRIVATE, **private}, None


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean; None of one value."""
    n = len(values)
    return float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else None


@STUDY.table(
    "rows",
    f"{{rows}} rows, {{seeds}} seeds from {FIRST_SEED}",
    "data; method; epsilon:g; score:.4f; ±=within:.4f; ahead:+.4f; ±=ahead_within:.4f; "
    "CPU seconds=seconds:.0f; exchanges:.0f",
    2,
)
def by_method(rows: Sequence[Row]) -> list[Row]:
    """Means over the seeds, and differences from interpret's model."""
    key = ("data", "method", "epsilon")
    groups, lines = grouped(rows, *key), averaged(rows, *key)
    for line, ((data, method, epsilon), group) in zip(lines, groups.items(), strict=True):
        line["within"] = half_width([row["score"] for row in group])
        rival = next((of for start, of in RIVALS.items() if method.startswith(start)), "")
        if others := groups.get((data, rival, epsilon)):
            sign = -1 if DATA[data].get("objective") == REGRESSION else 1
            pairs = zip(group, others, strict=True)
            gains = [sign * (row["score"] - other["score"]) for row, other in pairs]
            line |= {"ahead": float(np.mean(gains)), "ahead_within": half_width(gains)}
    return lines


@STUDY.command
def main(
    interpret: str = "aside/bin/python",
    data: tuple[str, ...] = tuple(DATA),
    epsilons: tuple[float, ...] = EPSILONS,
    rows: int = 30_000,
    seeds: int = 3,
) -> Tables:
    """Test scores of all.

    ``--interpret`` is a Python that has interpret; ``--rows`` are drawn of a larger set; means are
    of ``--seeds``.
    """
    check_interpret(interpret)
    results: list[Row] = []
    for name in data:
        with tempfile.TemporaryDirectory() as folder:
            table = {"strategy": "pax", **DATA[name], **write_sample(name, rows, Path(folder))}
            turns = product(ways(epsilons), range(FIRST_SEED, FIRST_SEED + seeds))
            for (method, epsilon, how, ebm), seed in turns:
                config = {**table, **how, "seed": seed}
                if "privacy.epsilon" not in how:
                    config.pop("privacy.clip", None)
                make = partial(train_pax, config)
                if ebm is not None:
                    make = partial(train_ebm, interpret, ebm, config)
                asked = load_settings({**config, "data": name, "label": "", "drop-columns": ""})
                cell = f"{name}-{rows}-{method}-{epsilon:g}-{seed}".replace(", ", "-")
                (figures,) = STUDY.rows(cell.replace(" ", "-"), asked, make)
                about = {"data": name, "method": method, "epsilon": epsilon, "seed": seed}
                results.append(figures | about)
            console.print(f"{name}: done")
    yield "rows", results
