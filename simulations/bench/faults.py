"""Kill processes of a deployment at random moments, and count how the runs end.

``python -m simulations.bench.faults --n 50`` trains PAX through three SuperNodes on this machine,
a run a fault, and compares every model with that of an undisturbed run in one process. A run ends
well with the same model, at once or after it was resumed, or with an error that names a party.
Prints a JSON line a run, then the tally; the exit status is 1 if a run ended in any other way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fedapp.config import load_settings
from simulations.deployment import (
    RUN_SECONDS,
    Deployment,
    ended,
    example_nodes,
    settings_of,
)
from simulations.engines import run_local, site_contexts

SITES = ("bank", "insurer", "shop")
ROWS, SEED = 200, 1
SETTINGS = {
    "parties": len(SITES),
    "num-boost-round": 3,
    "max-depth": 2,
    "max-bin": 32,
    "resend-after": 15,
    "exchange-deadline": 300,
}
FAULTS = (
    *((site, program) for site in SITES for program in ("flower-supernode", "flower-superexec")),
    *((site, "flwr-clientapp") for site in SITES),
    ("coordinator", "flower-superlink"),
    ("coordinator", "flower-superexec"),
    ("coordinator", "flwr-serverapp"),
)
GOOD = {"same model", "same model, resumed", "names a party"}


def main() -> int:
    """Run the faults and print the tally."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=10, help="runs")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments and the victims")
    given = parser.parse_args()
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng, tally = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDAPP_HOME"] = str(folder / "home")
        deployment = Deployment(folder, example_nodes(folder, SITES, ROWS))
        expected = _undisturbed(folder, deployment)
        try:
            deployment.start("coordinator", *SITES)
            deployment.register()
            seconds = _seconds_of_a_run(deployment)
            for number in range(given.n):
                run_dir = folder / f"run-{number}"
                tally[_disturbed(deployment, run_dir, rng, seconds, expected)] += 1
        finally:
            deployment.close()
    print(json.dumps({"runs": given.n, "seconds undisturbed": round(seconds, 1), **tally}))
    return int(not GOOD.issuperset(tally))


def _undisturbed(folder: Path, deployment: Deployment) -> bytes:
    """The model of the same tables, trained in this process."""
    contexts = site_contexts(deployment.node_config(name) for name in SITES)
    settings = load_settings({**SETTINGS, "run-dir": str(folder / "local")})
    return (run_local(settings, contexts).path / "model.json").read_bytes()


def _seconds_of_a_run(deployment: Deployment) -> float:
    """How long a run takes that nothing disturbs."""
    began = time.monotonic()
    ended(deployment.begin(*_command(deployment.folder / "undisturbed")))
    return time.monotonic() - began


def _disturbed(
    deployment: Deployment, run_dir: Path, rng: random.Random, seconds: float, expected: bytes
) -> str:
    """Kill a process during a run, print a line, and say how the run has ended."""
    place, program = rng.choice(FAULTS)
    moment, began = rng.uniform(0, seconds), time.monotonic()
    run = deployment.begin(*_command(run_dir))
    time.sleep(moment)
    killed = run.poll() is None and deployment.kill(place, program)
    try:
        shown, _ = run.communicate(timeout=RUN_SECONDS)
        outcome = _outcome(run_dir / "model.json", expected, run.returncode, shown)
    except subprocess.TimeoutExpired:
        run.kill()
        shown, _ = run.communicate()
        outcome = f"not done in {RUN_SECONDS} s"
    if outcome not in GOOD and place == "coordinator" and run.returncode:
        resume = settings_of({"resume": run_dir})
        ended(deployment.begin("run", "pax", "--engine", "federation", *resume))
        outcome = _outcome(run_dir / "model.json", expected, 0, "") + ", resumed"
    line = {
        "place": place,
        "program": program,
        "killed": killed,
        "after": round(moment, 1),
        "seconds": round(time.monotonic() - began, 1),
        "outcome": outcome,
    }
    if outcome not in GOOD:
        line["shown"] = shown[-1000:]
    print(json.dumps(line), flush=True)
    return outcome


def _command(run_dir: Path) -> list[str]:
    settings = settings_of({**SETTINGS, "run-dir": run_dir})
    return ["run", "pax", "--engine", "federation", *settings]


def _outcome(model: Path, expected: bytes, status: int | None, shown: str) -> str:
    """How a run has ended, in two words or three."""
    if status == 0:
        return "same model" if model.read_bytes() == expected else "another model"
    last = shown.splitlines()[-1] if shown else ""
    return "names a party" if any(site in last for site in SITES) else "unclear error"


if __name__ == "__main__":
    sys.exit(main())
