"""Python code of pages, as it stands there, on the tables that the tutorials make.

``test_pages.py`` runs the files of a new method, ``test_tutorials.py`` (slow) commands and servers.
"""

import runpy
import shutil
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest

import fedapp
from fedapp.home import app_folder
from tests.pages import blocks

ROOT = app_folder()
DOCS = ROOT / "docs"
TABLES, DIVIDED = "tutorials/own-table.md", "tutorials/bank-and-insurer.md"
# Pages whose code needs no server: how many of their blocks are run, and a value that they make.
CODE = {
    "../README.md": (1, "scores"),
    "how-to/flower.md": (2, "client"),
    "how-to/mlflow-and-tuning.md": (1, "run"),
    "how-to/when-it-fails.md": (1, "reason"),
    TABLES: (2, "scores"),
    DIVIDED: (2, "scores"),
    "tutorials/three-sites.md": (1, "table"),
}
BRIEF = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16}
SMALL_KEY = {"key-bits": 512, "insecure-small-key": True}
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a wheel has no documentation")


def code_of(page):
    return [text for kind, text in blocks(DOCS / page) if kind == "python"]


def execute(code, file, values=None):
    """Run code of a page as a file, with values that lines before it have made."""
    file.write_text(code)
    return runpy.run_path(str(file), values)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The tutorials' tables, and their runs under the names that pages give them."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        execute(code_of(TABLES)[0], folder / "loans.py")
        fedapp.run(
            "pax", data="loans.csv", label="default", id="customer", run_dir="runs/loans", **BRIEF
        )
        shutil.copytree("runs/loans", "runs/20261121-101500-pax")
        execute(code_of(DIVIDED)[0], folder / "tables.py")
        fedapp.run(
            "secureboost",
            data={"bank": "bank.csv", "insurer": "insurer.csv"},
            label="default",
            id="customer",
            run_dir="together",
            secureboost=SMALL_KEY,
            **BRIEF,
        )
    return folder


@pytest.mark.parametrize("page", CODE)
def test_code_of_a_page_runs(page, tables, monkeypatch):
    monkeypatch.chdir(tables)
    monkeypatch.setenv("FEDAPP_HOME", str(tables / "home"))  # where parts of divided models are
    run = fedapp.run
    monkeypatch.setattr(fedapp, "run", lambda *words, **more: run(*words, **{**BRIEF, **more}))
    wandb, logged = ModuleType("wandb"), MagicMock(summary={})  # which is no dependency
    logged.__enter__.return_value = logged
    wandb.init = lambda project: logged
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    n_blocks, made = CODE[page]
    code = code_of(page)
    assert len(code) == n_blocks
    values = {}
    for block in code:
        values |= execute(block, tables / "page.py")
    assert values[made] is not None
    if page == "how-to/mlflow-and-tuning.md":
        assert [call.kwargs["step"] for call in logged.log.call_args_list] == [1, 2]
        assert logged.log_artifact.call_args.kwargs == {"type": "model"}
        assert "test/auc" in logged.summary


def test_every_page_with_code_is_run_by_some_test():
    """Those with servers, sites and other methods are in the modules that the first lines name."""
    pages = {
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if "_build" not in page.parts
    }
    with_code = {page for page in pages if code_of(page)} | {"../README.md"}
    elsewhere = {
        "how-to/use-the-model.md",
        "how-to/add-a-method.md",
        "how-to/add-a-vertical-method.md",
        "explanation/threat-model.md",
    }
    served = {"how-to/serve.md", "tutorials/counter.md", "tutorials/bank-and-insurer.md"}
    assert with_code == {*CODE, *elsewhere, *served}


def test_a_page_scores_rows_as_the_run_itself_does(tables, monkeypatch):
    """Both ways to score by XGBoost: rows encoded by the run, and by its file of columns."""
    monkeypatch.chdir(tables)
    monkeypatch.setenv("FEDAPP_HOME", str(tables / "home"))
    ours, by_hand = code_of("how-to/use-the-model.md")
    first = execute(ours, tables / "page.py")
    second = execute(by_hand, tables / "page.py")
    assert (first["same_scores"] == first["scores"][:, 1]).all()
    assert (second["scores"] == first["scores"][:, 1]).all()
    assert first["contributions"] is not None
