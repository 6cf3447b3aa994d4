"""Files beside the documentation: one version, valid forms, tools that are there."""

import re
import tomllib

import pytest
import yaml

from fedapp.home import app_folder

ROOT = app_folder()
pytestmark = pytest.mark.skipif(
    not (ROOT / "CITATION.cff").is_file(), reason="a wheel has no such files"
)


def project():
    """The section ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_file_has_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes
    assert {citation["version"], changes[1]} == {project()["version"]}


def test_the_citation_names_the_papers_of_all_five_methods():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    identifiers = [each["identifiers"] for each in citation["references"]]
    papers = [one["value"] for each in identifiers for one in each]
    assert len({*papers}) == 5
    assert all(re.fullmatch(r"arXiv:\d{4}\.\d{5}", paper) for paper in papers)


def test_every_python_that_the_project_names_is_checked():
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    job = workflow["jobs"]["check"]
    form = r"Programming Language :: Python :: (\d\.\d+)"
    named = re.findall(form, "\n".join(project()["classifiers"]))
    assert named == job["strategy"]["matrix"]["python"]
    first, last = named[0], named[-1]
    beyond = f"3.{int(last[2:]) + 1}"
    assert project()["requires-python"] == f">={first},<{beyond}"
    for name in ("Makefile", "README.md", "docs/tutorials/two-commands.md"):
        told = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / name).read_text())
        assert told == [(first, last)], name
    compared = re.findall(r"\((3), (\d+)\)", (ROOT / "Makefile").read_text())
    assert [".".join(version) for version in compared] == [first, beyond]
    assert job["steps"][-1] == {"run": "make check test"}


def test_hooks_before_a_commit_download_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}


def test_the_notes_for_newcomers_are_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 30
