"""What every attack tells of itself: what the attacker holds, and how far it gets against chance.

An attack is run on data sets, under settings that might stop it. Its success stands beside what the
attacker would reach without the messages (``chance``), and beside the test AUC of the model, which
is what a setting costs. Each attack is a command (``python -m simulations.attacks.NAME``), and
``python -m simulations.attacks`` runs all of them and prints one table.
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

from fedapp.config import defaults, load_settings
from simulations.kept import Tell, kept, other_code

Overrides = Mapping[str, Any]
OUTPUT = Path("runs/attacks")
PLAIN = "default"  # the setting that changes nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far an attack got on one run.

    Parameters
    ----------
    success, chance : in the attack's measure; with the messages, and without them.
    score : AUC of the model's test rows.
    unfinished : share of what is attacked whose search ended without an answer.
    """

    success: float
    chance: float
    score: float
    unfinished: float = 0.0


@dataclass(frozen=True, slots=True)
class Attack:
    """What is attacked, and how.

    Parameters
    ----------
    name : of the module and the command.
    holder : who attacks, and from what.
    measure : what ``success`` counts.
    data : what a run config says for each data set.
    ways : what it says for each setting that is tried.
    run : the attack on a run of these settings.
    quick : what ``--quick`` changes.
    """

    name: str
    holder: str
    measure: str
    data: Mapping[str, Overrides]
    ways: Mapping[str, Overrides]
    run: Callable[[Overrides], Outcome]
    quick: Overrides = field(default_factory=dict)


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
    """The attack on each data set under each setting; ``quick``: the first set and two settings.

    Parameters
    ----------
    seeds : runs of each; every seed holds other rows back.
    data : the sets; empty: all.
    output : folder of what is found, a file for each run.
    tell : told of files that cannot serve again, or are of other code.
    """
    sets = list(data or attack.data)[: 1 if quick else None]
    ways = list(attack.ways)[: 2 if quick else None]
    for name in sets:
        for way in ways:
            given = {**attack.data[name], **attack.ways[way], **(attack.quick if quick else {})}
            line = f"{name}, {way}, quick" if quick else f"{name}, {way}"
            found = []
            for seed in range(seeds):
                path = output / attack.name / f"{line}, seed {seed}.json"
                found.append(_found(attack, {**given, "seed": seed}, path, tell))
            means = {part: statistics.mean(one[part] for one in found) for part in found[0]}
            yield Result(attack.name, name, way, **means)


def _found(attack: Attack, given: Overrides, path: Path, tell: Tell) -> dict[str, float]:
    """The outcome of one run, with its seconds, from where it is kept or by running it."""

    def run() -> list[dict[str, float]]:
        start = time.perf_counter()
        outcome = asdict(attack.run(given))
        return [{**outcome, "seconds": time.perf_counter() - start}]

    # What else a setting says is for the attack alone, and in the name of the file.
    settings = load_settings({key: given[key] for key in given if key in defaults()})
    (found,) = kept(path, settings, run, tell)
    return found


def table(lines: Iterable[Result]) -> str:
    """Results as a table of Markdown."""
    rows = [
        f"| {one.attack} | {one.data} | {one.setting} | {one.success:.3f}"
        f"{f', {one.unfinished:.3f} unfinished' if one.unfinished else ''} | {one.chance:.3f} "
        f"| {one.score:.3f} | {one.seconds:.1f} |"
        for one in lines
    ]
    head = "| attack | data | setting | success | chance | test AUC | seconds |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def count(text: str) -> int:
    """A number of runs.

    Raises
    ------
    argparse.ArgumentTypeError : it is no whole number of 1 or more.
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
    given = vars(parser.parse_args())
    chosen = [one for one in attacks if one.name in given.get("only", [one.name])]
    lines = []
    for attack in chosen:
        for line in results(attack, given["seeds"], given["quick"], given.get("data", ())):
            print(json.dumps(asdict(line)), flush=True)
            lines.append(line)
    print()
    for attack in chosen:
        print(f"{attack.name}: {attack.holder}. Success: {attack.measure}.")
    print(f"\n{table(lines)}")
    folders = [OUTPUT / attack.name for attack in chosen]
    kept_in = ", ".join(map(str, folders))
    print(f"\n{time.perf_counter() - start:.0f} seconds; each run is kept in {kept_in}")
    for told in filter(None, map(other_code, folders)):
        print(told)
