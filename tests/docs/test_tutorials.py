"""The tutorials on one machine, word by word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp.settings import app_folder

TUTORIALS = app_folder() / "docs" / "tutorials"
pytestmark = pytest.mark.skipif(not TUTORIALS.is_dir(), reason="a wheel has no documentation")


def script_of(name: str) -> str:
    """The page's files, commands and lines of Python, in their order."""
    page = (TUTORIALS / f"{name}.md").read_text()
    saved = re.findall(r"[Ss]ave\s+this\s+as\s+`(\w+\.py)`", page)
    lines = []
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if kind == "python":
            target = f"cat > {saved.pop(0)}" if saved else "python -"
            lines.append(f"{target} <<'END'\n{text}END")
        elif kind == "console":
            commands = text.replace("\\\n", "").splitlines()
            lines += [line[2:] for line in commands if line.startswith("$ ")]
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["own-table", "bank-and-insurer"])
def test_a_tutorials_commands_are_a_script(name: str) -> None:
    script = script_of(name)
    assert script.count("fedapp run") >= 1
    assert script.count("fedapp predict") >= 1
    subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own-table", "bank-and-insurer"])
def test_a_tutorial_works_word_by_word(name: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "FEDAPP_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        ["bash", "-ec", script_of(name)], cwd=tmp_path, env=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '"customer","probability_1"' in done.stdout
