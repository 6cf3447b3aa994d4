"""How attacks are described and run: what the attacker knows, and its success against chance.

An attack runs on data sets, under settings that might stop it. Each result compares its success
with what the attacker would reach without the messages (``chance``), and shows the test AUC of the
model, which is what a setting costs. Each attack is a command (``python -m
simulations.attacks.NAME``); ``python -m simulations.attacks`` runs all of them and prints one
table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedapp.runs.compare import Tell, cached_rows, other_code
from fedapp.settings import defaults, load_settings

Overrides = Mapping[str, Any]
OUTPUT = Path("runs/attacks")
PLAIN = "default"  # the setting that changes nothing


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

    name: str  # of the module and the command
    holder: str  # who attacks, and from what
    measure: str  # what ``success`` counts
    data: Mapping[str, Overrides]  # settings of each data set
    ways: Mapping[str, Overrides]  # settings that might stop the attack
    run: Callable[[Overrides], Outcome]
    quick: Overrides = field(default_factory=dict)  # further settings of ``--quick``


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the table: means over the seeds; seconds of one run and its attack."""

    attack: str
    data: str
    setting: str
    success: float
    chance: float
    score: float
    seconds: float
    unfinished: float = 0.0


def results(
    attack: Attack,
    seeds: int,
    quick: bool = False,
    data: Sequence[str] = (),
    output: Path = OUTPUT,
    tell: Tell = print,
) -> Iterator[Result]:
    """Run an attack on each data set with each setting; ``quick``: the first set and two settings.

    Parameters
    ----------
    seeds : runs of each; every seed holds out other rows.
    data : names of the sets; empty: all.
    output : folder of the results, a file for each run.
    tell : called with a line about each file that cannot be reused or is of other code.
    """
    sets = list(data or attack.data)[: 1 if quick else None]
    ways = list(attack.ways)[: 2 if quick else None]
    for name in sets:
        for way in ways:
            overrides = {**attack.data[name], **attack.ways[way]}
            overrides |= attack.quick if quick else {}
            line = f"{name}, {way}, quick" if quick else f"{name}, {way}"
            outcomes = []
            for seed in range(seeds):
                path = output / attack.name / f"{line}, seed {seed}.json"
                outcomes.append(_outcome(attack, {**overrides, "seed": seed}, path, tell))
            means = {part: statistics.mean(one[part] for one in outcomes) for part in outcomes[0]}
            yield Result(attack.name, name, way, **means)


def _outcome(attack: Attack, overrides: Overrides, path: Path, tell: Tell) -> dict[str, float]:
    """The outcome of one run, with its seconds, cached in a file."""

    def run() -> list[dict[str, float]]:
        start = time.perf_counter()
        outcome = asdict(attack.run(overrides))
        return [{**outcome, "seconds": time.perf_counter() - start}]

    # Other keys are options of the attack, and part of the file's name.
    settings = load_settings({key: overrides[key] for key in overrides if key in defaults()})
    (outcome,) = cached_rows(path, settings, run, tell)
    return outcome


def table(lines: Iterable[Result]) -> str:
    """Format results as a Markdown table."""
    rows = [
        f"| {one.attack} | {one.data} | {one.setting} | {one.success:.3f}"
        f"{f', {one.unfinished:.3f} unfinished' if one.unfinished else ''} | {one.chance:.3f} "
        f"| {one.score:.3f} | {one.seconds:.1f} |"
        for one in lines
    ]
    head = "| attack | data | setting | success | chance | test AUC | seconds |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def count(text: str) -> int:
    """Parse a number of runs.

    Raises
    ------
    argparse.ArgumentTypeError : it is not a whole number >= 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return int(text)


def command(*attacks: Attack) -> None:
    """Run attacks: a line of JSON for each result, then the table."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description="Attacks on runs of honest parties.")
    if len(attacks) > 1:
        names = [attack.name for attack in attacks]
        parser.add_argument("--only", nargs="+", choices=names, default=names)
    else:
        parser.add_argument("--data", nargs="+", choices=list(attacks[0].data), default=())
    parser.add_argument("--seeds", type=count, default=1)
    parser.add_argument("--quick", action="store_true", help="one data set, two settings")
    options = vars(parser.parse_args())
    chosen = [one for one in attacks if one.name in options.get("only", [one.name])]
    lines = []
    for attack in chosen:
        for line in results(attack, options["seeds"], options["quick"], options.get("data", ())):
            print(json.dumps(asdict(line)), flush=True)
            lines.append(line)
    print()
    for attack in chosen:
        print(f"{attack.name}: {attack.holder}. Success: {attack.measure}.")
    print(f"\n{table(lines)}")
    folders = [OUTPUT / attack.name for attack in chosen]
    shown_folders = ", ".join(map(str, folders))
    print(f"\n{time.perf_counter() - start:.0f} seconds; each run is kept in {shown_folders}")
    for warning in filter(None, map(other_code, folders)):
        print(warning)
