"""Kill processes of a deployment at random moments, and count how the runs end.

``python -m simulations.bench.faults --n 50`` trains PAX through three SuperNodes on this machine,
one fault a run, and compares every model with that of an undisturbed run in one process. A run ends
well with the same model, at once or after it was resumed (or restarted, if it had not begun), or
with an error that names a party. Prints a JSON line a run, then the tally, in which runs that ended
before their fault are counted separately; the exit status is 1 if a run ended in any other way.
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
from contextlib import suppress
from pathlib import Path

from simulations.bench.exchange import ROWS, SITES
from simulations.deployment import (
    RUN_SECONDS,
    SUPEREXEC,
    SUPERLINK,
    SUPERNODE,
    WORKER,
    Deployment,
    example_nodes,
    settings_of,
)

SEED = 1
SETTINGS = {
    "strategy": "pax",
    "parties": len(SITES),
    "num-boost-round": 2,
    "max-depth": 2,
    "max-bin": 32,
    "resend-after": 15,
    "exchange-deadline": 300,
}
FAULTS = (
    *((site, program) for site in SITES for program in (SUPERNODE, SUPEREXEC, WORKER)),
    ("coordinator", SUPERLINK),
    ("coordinator", "fedapp.deploy.coordinator"),
    ("coordinator", "flwr-serverapp"),
)
RUN = ("run", "pax", "--engine", "federation")
SAME, UNDISTURBED = "same model", "nothing killed"
GOOD = {SAME, f"{SAME}, resumed", f"{SAME}, begun again", "names a party", UNDISTURBED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=10, help="runs")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments and the victims")
    options = parser.parse_args()
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng, tally = random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDAPP_HOME"] = str(folder / "home")
        # A run that is restarted counts twice.
        limit = {"runs-per-day": 2 * options.n + 1}
        nodes = example_nodes(folder, SITES, ROWS)
        deployment = Deployment(folder, {name: {**node, **limit} for name, node in nodes.items()})
        expected = (deployment.locally(folder / "local", SETTINGS).path / "model.json").read_bytes()
        with deployment.running():
            start = time.monotonic()
            deployment.train(folder / "undisturbed", SETTINGS)
            seconds = time.monotonic() - start
            for number in range(options.n):
                run_dir, start = folder / f"run-{number}", time.monotonic()
                outcome = _disturbed(deployment, run_dir, rng, seconds, expected)
                tally[outcome] += 1
                if outcome == UNDISTURBED:  # the load of the machine may have changed
                    seconds = time.monotonic() - start
    print(json.dumps({"runs": options.n, "seconds undisturbed": round(seconds, 1), **tally}))
    return int(not GOOD.issuperset(tally))


def _disturbed(
    deployment: Deployment, run_dir: Path, rng: random.Random, seconds: float, expected: bytes
) -> str:
    """Kill a process during a run, print a line, and return the outcome."""
    place, program = rng.choice(FAULTS)
    moment, start = rng.uniform(0, seconds), time.monotonic()
    run = deployment.begin(*RUN, *(arguments := settings_of({**SETTINGS, "run-dir": run_dir})))
    with suppress(subprocess.TimeoutExpired):
        run.wait(moment)
    killed = False  # stays so if the run ends before the process is there
    while not killed and run.poll() is None:
        if process := deployment.process(place, program):
            process.kill()
            killed = True
        else:
            time.sleep(0.02)
    outcome, shown = _outcome(run, run_dir / "model.json", expected)
    if outcome not in GOOD and place == "coordinator" and run.returncode:
        has_begun = (run_dir / "config.toml").exists()
        again = settings_of({"resume": run_dir}) if has_begun else arguments
        run = deployment.begin(*RUN, *again)
        outcome, shown = _outcome(run, run_dir / "model.json", expected)
        outcome += ", resumed" if has_begun else ", begun again"
    if outcome == SAME and not killed:
        outcome = UNDISTURBED
    line = {
        "place": place,
        "program": program,
        "killed": killed,
        "after": round(moment, 1),
        "seconds": round(time.monotonic() - start, 1),
        "outcome": outcome,
    }
    if outcome not in GOOD:
        line["shown"] = shown[-1000:]
    print(json.dumps(line), flush=True)
    return outcome


def _outcome(run: subprocess.Popen[str], model: Path, expected: bytes) -> tuple[str, str]:
    """How a run ends, and what it has printed."""
    try:
        shown, _ = run.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        return f"not done in {RUN_SECONDS} s", run.communicate()[0]
    if run.returncode == 0:
        return (SAME if model.read_bytes() == expected else "another model"), shown
    last = shown.splitlines()[-1] if shown else ""
    return ("names a party" if any(site in last for site in SITES) else "unclear error"), shown


if __name__ == "__main__":
    sys.exit(main())
