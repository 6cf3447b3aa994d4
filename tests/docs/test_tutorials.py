"""The tutorials on one machine, word by word, and the guides that go on from their runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp.home import app_folder
from tests.pages import blocks, commands_in

DOCS = app_folder() / "docs"
TUTORIALS = DOCS / "tutorials"
# Guides whose commands use the run of a tutorial.
GUIDES = {
    "own-table": (
        *("tables", "use-the-model", "choose-a-method", "mlflow-and-tuning", "glass-box", "serve"),
    ),
    "bank-and-insurer": ("score-across-organisations",),
}
# Of a guide: what set-up has done, and what needs sites.
NOT_RUN = (
    "pip install",
    "fedapp predict together --engine federation",
    "fedapp describe -c data=north=north.csv",
)
pytestmark = pytest.mark.skipif(not TUTORIALS.is_dir(), reason="a wheel has no documentation")


def script_of(name):
    """The page's files, commands and lines of Python, in their order."""
    page = TUTORIALS / f"{name}.md"
    saved = re.findall(r"[Ss]ave\s+this\s+as\s+`(\w+\.py)`", page.read_text())
    lines = []
    for kind, text in blocks(page):
        if kind == "python":
            target = f"cat > {saved.pop(0)}" if saved else "python -"
            lines.append(f"{target} <<'END'\n{text}END")
        elif kind == "console":
            lines += commands_in(text)
    return "\n".join(lines)


def guide_of(name):
    """The commands of a guide; a server runs while those after it do."""
    shown = blocks(DOCS / "how-to" / f"{name}.md")
    lines = [f"set -v  # {name}"]
    for line in (line for _, text in shown for line in commands_in(text)):
        if line.startswith("fedapp serve"):
            lines.append(f"{line} & trap 'kill $!' EXIT")
            line = "until curl --silent --fail http://127.0.0.1:8000/health; do sleep 1; done"
        if not line.startswith(NOT_RUN):
            lines.append(line)
    return "\n".join(lines)


def printed(script, folder):
    """What a script prints that ends well, in a folder that is also the user's home."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    where = {**os.environ, "PATH": path, "HOME": str(folder)}
    where.pop("FEDAPP_HOME", None)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_a_tutorial_works_word_by_word(name, tmp_path):
    for script in (script_of(name), *map(guide_of, GUIDES[name])):
        assert printed(script, tmp_path)
    assert '"customer","probability_1"' in (tmp_path / "scores.csv").read_text()


@pytest.mark.slow
def test_a_customer_is_scored_at_the_counter_word_by_word(tmp_path):
    tables = script_of("bank-and-insurer").partition("\nhead ")[0]
    ending = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"
    shown = printed("\n".join((ending, tables, script_of("counter"))), tmp_path)
    form = r'"scores":({"probability_1":[\d.]+})'
    first, *_, last = re.findall(form, (TUTORIALS / "counter.md").read_text())
    assert re.findall(form, shown) == [first, first, first, last]
    assert re.search(r'"way":"nightly","away":"insurer must answer at', shown)
    assert shown.rstrip().endswith('got none: fedapp federation activate RUN begins one"}')
