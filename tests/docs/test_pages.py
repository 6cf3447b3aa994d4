"""Files and lines that pages show: each loads, and does what its page says of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp.errors import ConfigError
from fedapp.home import app_folder
from fedapp.messages.handshake import HelloRequest
from fedapp.site.policy import check_leaving, check_policy
from fedapp.site.settings import read_node_config, site_config
from tests.pages import blocks, files_in

HOSPITAL = Path(__file__).parent / "hospital.toml"
DOCS = app_folder() / "docs"
THREATS = DOCS / "explanation" / "threat-model.md"
METHODS = DOCS / "how-to"
PARTIES = ("clinic", "hospital", "lab")


@pytest.fixture
def hospital():
    return site_config(read_node_config(HOSPITAL), {})


def opening(**plan):
    return HelloRequest("binary:logistic", 0.2, 0.1, 42, False, **plan)


def test_the_hospital_takes_part_only_in_a_masked_run_within_its_epsilon(
    hospital,
):
    check_policy(hospital, "query.hello", "pax")
    private = opening(aggregation="secure", epsilon=1.0, delta=1e-5, parties=PARTIES)
    check_leaving(hospital, "pax", private)
    with pytest.raises(ConfigError, match="strategy must be one that the site allows"):
        check_policy(hospital, "query.hello", "fedxgbllr")


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        ({"parties": PARTIES}, "aggregation must be secure for hospital"),
        ({"aggregation": "secure", "parties": PARTIES}, "privacy.epsilon must be > 0 and <= 1"),
        ({"aggregation": "secure", "epsilon": 2.0, "parties": PARTIES}, "<= 1 for hospital"),
        ({"aggregation": "secure", "epsilon": 1.0, "parties": PARTIES[:2]}, "must be >= 3"),
    ],
)
def test_the_hospital_refuses_plain_sums_and_larger_promises(hospital, plan, refused):
    with pytest.raises(ConfigError, match=re.escape(refused)):
        check_leaving(hospital, "pax", opening(**plan))


@pytest.mark.skipif(not THREATS.is_file(), reason="a wheel has no documentation")
def test_epsilon_under_colluders_is_what_the_page_says(capsys):
    page = THREATS.read_text()
    pytest.importorskip("dp_accounting")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert code
    assert len(shown) == 3
    exec(code[1], {})
    computed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert computed == [list(row) for row in shown]


# A method of one's own: a copy of the app with the files of a page.


@pytest.mark.skipif(not METHODS.is_dir(), reason="a wheel has no documentation")
@pytest.mark.parametrize(
    ("page", "method"), [("add-a-method", "equal-bagging"), ("add-a-vertical-method", "stumps")]
)
def test_a_method_as_the_page_adds_it_is_one(tmp_path, page, method):
    """Its style, layout and types, its own tests, and the contract's on exactness, messages, rows
    and real sites."""
    app = tmp_path / "app"  # with what is compiled of it
    others = shutil.ignore_patterns(".*", "_build", "gallery", "*.egg-info")
    shutil.copytree(app_folder(), app, ignore=others)
    files = files_in(METHODS / f"{page}.md")
    for path, code in files.items():
        before = (app / path).read_text() + "\n\n" if (app / path).exists() else ""
        (app / path).write_text(before + code)
    for kind, text in blocks(METHODS / f"{page}.md"):
        if kind == "diff":
            subprocess.run(["git", "apply", "-"], cwd=app, input=text, text=True, check=True)
    python = [sys.executable, "-m"]
    for words in (["check"], ["format", "--check"]):
        subprocess.run([*python, "ruff", *words, *files], cwd=app, check=True)
    tests = [path for path in files if path.startswith("tests/strategies/")]
    which = "pooled_reference or is_known_for or declared_fields or nothing_of_rows or at_sites"
    chosen = f"{' or '.join(Path(path).stem for path in tests)} or test_layout or every_method_has"
    chosen = f"{chosen} or ({method} and ({which}))"
    paths = [*tests, "tests/test_layout.py", "tests/contract"]
    command = [*python, "pytest", "-n0", "-p", "no:cacheprovider", *paths, "-k", chosen]
    where = {**os.environ, "PYTHONPATH": str(app)}
    done = subprocess.run(command, cwd=app, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 40 + 2 + 5
