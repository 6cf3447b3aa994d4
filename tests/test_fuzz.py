"""What nobody honest sends ends in an answer or a named error: a few cases of each class."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("only", "n_cases"),
    [("at bank", 40), ("at shop", 40), ("to pax", 20), ("to secureboost", 20), ("model.json", 200)],
)
def test_changed_messages_and_models_end_in_an_answer_or_a_named_error(
    only: str, n_cases: int
) -> None:
    command = [sys.executable, "-m", "simulations.bench.fuzz", "--only", only]
    done = subprocess.run(
        [*command, "--cases", str(n_cases)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    n_classes, _, n_run = done.stdout.splitlines()[-1].split()[:3]
    assert int(n_classes) >= 3
    assert int(n_run) == int(n_classes) * n_cases
