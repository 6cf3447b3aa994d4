"""What nobody honest sends ends in an answer or a named error: a few cases of each class."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("methods", "n_cases"),
    [
        ("pax,secureboost", 1),
        pytest.param("", 40, marks=pytest.mark.slow),
    ],
    ids=["two methods", "all methods"],
)
def test_changed_messages_and_models_end_in_an_answer_or_a_named_error(
    methods: str, n_cases: int
) -> None:
    command = [sys.executable, "-m", "simulations", "bench", "fuzz", "--methods", methods]
    done = subprocess.run(
        [*command, "--cases", str(n_cases)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    n_classes, _, n_run = done.stdout.splitlines()[-1].split()[:3]
    assert int(n_classes) >= 50
    assert int(n_run) == int(n_classes) * n_cases
