"""Rows rebuilt from PAX's sums by bin; the attack is ``fedapp.audit.pax_rows``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fedapp.audit.listening import trained
from fedapp.audit.pax_rows import (
    CuriousPAX,
    Ints,
    Level,
    Row,
    all_rebuilt,
    common_sketch,
    rebuilt_of_senders,
)
from fedapp.errors import ConfigError
from fedapp.histograms.build import add_histograms
from fedapp.histograms.sketch import Sketch, fuse_sketches
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Settings, load_settings
from simulations.study import check_names


def pax_rows(
    data: str = "breast-cancer",
    parties: int = 3,
    rounds: int = 50,
    max_bin: int = 256,
    least_bin_rows: int = 0,
    aggregation: str = "both",
) -> Iterator[dict[str, Any]]:
    """How many training rows a coordinator rebuilds from what honest parties send it in PAX.

    A bin of one row gives itself away: its sums are the row's gradient g and hessian h, and for
    logistic loss h = |g| (1 - |g|) holds for one row and for hardly any sum of several. As g is the
    same in every column of a round, it links the bins of a row; g < 0 reveals its label. Nodes that
    are not sent follow as the difference of their parent and sibling. The contributions of known
    rows are subtracted from all sums, which isolates other rows in their bins, until no new row is
    found. Where parties merge bins of few rows (``least-bin-rows``), a node that is not sent is
    also read between the bins that its sibling has sent, where the difference of both is exact.

    ``python -m simulations attacks pax_rows`` trains, reads each party's sums, then only their sums
    over all parties; then it trains under secure aggregation and reads what is visible there: sums
    over all parties in bins of all parties. ``--data`` has two classes, ``--least-bin-rows`` sets
    the minimum of all parties, ``--aggregation plain`` or ``secure`` skips one of the runs. It
    prints a line for each: training rows known in all columns, up to the width of a bin, with their
    label; and rebuilt rows that do not exist.
    """
    check_names("aggregation", [aggregation], ("plain", "secure", "both"))
    config = {"data": data, "objective": "binary:logistic", "parties": parties, "max-bin": max_bin}
    config |= {"num-boost-round": rounds, "least-bin-rows": least_bin_rows, "preset": "xgboost"}
    with tempfile.TemporaryDirectory() as folder:
        if aggregation != "secure":
            plain = load_settings({**config, "run-dir": f"{folder}/run"})
            yield from ({**config, **line} for line in attack_plain_sums(plain))
        if aggregation != "plain":
            masked = {"pax.aggregation": "secure", "run-dir": f"{folder}/run-secure"}
            yield {**config, **attack_masked_sums(load_settings({**config, **masked}))}


def attack_plain_sums(settings: Settings) -> Iterator[dict[str, Any]]:
    """Rebuild training rows from each party's sums, and from their sums over all parties.

    Yields ``seen`` (whose sums), ``rows``, ``rebuilt`` and ``wrong``; raises ConfigError if
    gradients do not link the bins of a row, by the objective or a share of columns.
    """
    coordinator = _trained(settings)
    by_party = rebuilt_of_senders(coordinator, settings)
    yield {"seen": "each party's sums", **_count(by_party)}
    sketches, levels = coordinator.sketches, coordinator.levels
    cuts = fuse_sketches(tuple(sketches.values()), coordinator.n_bins)
    maps = coordinator.totals.state.places
    pooled = []
    for same_level in zip(*levels.values(), strict=True):
        # Add up the parties' sums in the layout of the common cuts.
        request = same_level[0].request
        total = np.zeros((len(request.wanted_nodes), len(cuts.edges), 2))
        for name, level in zip(levels, same_level, strict=True):
            add_histograms(total, level.histograms, maps[name])
        pooled.append(Level(request, total))
    rows = [
        _moved(row, sketches[name], maps[name], cuts.offsets)
        for name, (_, all_rows) in zip(sketches, by_party, strict=True)
        for row in all_rows
    ]
    rebuilt_rows = all_rebuilt(pooled, common_sketch(cuts), settings.least_bin_rows > 0)
    yield {"seen": "sums over all parties", **_count([(rebuilt_rows, rows)])}


def attack_masked_sums(settings: Settings) -> dict[str, Any]:
    """Rebuild training rows where sums are masked; returns what ``attack_plain_sums`` yields."""
    coordinator = _trained(settings)
    assert list(coordinator.levels) == [EVERYONE], "sums are of all parties"
    return {"seen": "sums under masks", **_count(rebuilt_of_senders(coordinator, settings))}


def _trained(settings: Settings) -> CuriousPAX:
    # Otherwise gradients do not link the bins of a row.
    if settings.objective != "binary:logistic" or settings.colsample_bytree < 1:
        raise ConfigError("the attacked run must have two classes and all columns, got another")
    coordinator = CuriousPAX.of_run(settings)
    with trained(settings, coordinator=coordinator):
        return coordinator


def _moved(row: Row, sketch: Sketch, common_bins: Ints, offsets: Ints) -> Row:
    """Translate a row from its party's bins to the common bins."""
    *bins, label = row
    party_bins = sketch.offsets[:-1] + np.array(bins)
    inside = party_bins < sketch.offsets[1:]  # a missing value has no bin
    common = common_bins[np.where(inside, party_bins, 0)] - offsets[:-1]
    return (*np.where(inside, common, -1).tolist(), label)


def _count(known_and_true: Iterable[tuple[set[Row], list[Row]]]) -> dict[str, int]:
    senders = list(known_and_true)
    return {
        "rows": sum(len(rows) for _, rows in senders),
        "rebuilt": sum(row in rebuilt_rows for rebuilt_rows, rows in senders for row in rows),
        "wrong": sum(len(rebuilt_rows - set(rows)) for rebuilt_rows, rows in senders),
    }
