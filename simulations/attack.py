"""The harness of attacks: outcomes on data sets, and tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedapp.runs.series import other_code
from fedapp.settings import defaults, load_settings
from simulations.paper import series
from simulations.study import Row, check_names, mean_of, show

Overrides = Mapping[str, Any]
ATTACK_OUTPUT = Path("runs/attacks")
COLUMNS = "data; setting; success:.3f; unfinished:.3f; chance:.3f; test AUC=score:.3f; "
COLUMNS += "seconds:.1f"
PLAIN = "default"  # the setting that changes nothing
UNKNOWN = -1  # a bin that an attack did not find


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far an attack got on one run."""

    success: float  # in the attack's measure
    chance: float  # the same without the messages
    score: float  # test AUC of the model
    unfinished: float = 0.0  # share of the targets whose search ended without an answer


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, with the runs that it is tried on."""

    holder: str  # who attacks, and from what
    measure: str  # what ``success`` counts
    data: Mapping[str, Overrides]  # settings of each data set
    ways: Mapping[str, Overrides]  # settings that might stop the attack
    run: Callable[[Overrides], Outcome]


def attack_results(
    title: str,
    attack: Attack,
    seeds: int = 1,
    data: tuple[str, ...] = (),
    output: Path = ATTACK_OUTPUT,
) -> Iterator[Row]:
    """Run an attack on each data set with each setting, then print a table.

    Yields the means over the seeds of each ``Outcome`` and of the seconds of a run and its attack.

    Parameters
    ----------
    seeds : runs of each; every seed holds out other rows.
    data : names of the sets; empty: all.
    output : folder of the results, a file for each run.
    """
    check_names("data", data, attack.data)
    results = []
    for name, way in product(data or attack.data, attack.ways):
        outcomes = []
        for seed in range(seeds):
            overrides = {**attack.data[name], **attack.ways[way], "seed": seed}
            path = output / title / f"{name}, {way}, seed {seed}.json"
            outcomes.append(_outcome(attack, overrides, path))
        means = {part: mean_of(outcomes, part) for part in outcomes[0]}
        results.append({"data": name, "setting": way, **means})
        yield results[-1]
    show(f"{title}: {attack.holder}. Success: {attack.measure}.", results, COLUMNS, 2)
    if warning := other_code(output / title):
        print(warning)


def _outcome(attack: Attack, overrides: Overrides, path: Path) -> Row:
    """The outcome of one run, with its seconds, cached in a file."""

    def run() -> list[dict[str, float]]:
        start = time.perf_counter()
        outcome = asdict(attack.run(overrides))
        return [{**outcome, "seconds": time.perf_counter() - start}]

    # Other keys are options of the attack, and part of the file's name.
    settings = load_settings({key: overrides[key] for key in overrides if key in defaults()})
    (outcome,) = series(path.parent).rows(path.stem, settings, run)
    return outcome
