"""The documentation: what it generates is whole, its commands exist, its words are plain."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer.main
import yaml

from fedapp.commands import cli
from fedapp.commands.json_documents import DOCUMENTS
from fedapp.errors import DataError
from fedapp.home import app_folder
from fedapp.messages.methods import all_methods, module_of_group
from fedapp.run_files import Message, RoundInfo, Summary
from fedapp.sections import declared
from fedapp.settings import defaults
from fedapp.site.settings import SiteConfig
from tests.docs.first import BLOCK, PAGES, printed
from tests.pages import blocks, commands_in
from tests.test_layout import TEXTS

ROOT = app_folder()
DOCS = ROOT / "docs"
GENERATED = (
    *("run-settings", "node-config", "json", "command-line", "messages"),
    "what-each-method-reveals",
)
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="a wheel has no documentation")


def pages():
    """Written pages: of the documentation, beside it, and beside the studies."""
    texts = [path for path in DOCS.rglob("*.md") if path.stem not in GENERATED]
    texts = [path for path in texts if not {"_build", "gallery"} & {*path.parts}]
    return sorted([*texts, *ROOT.glob("*.md"), *(ROOT / "simulations").rglob("*.md")])


@pytest.fixture(scope="module")
def generated():
    """Text of the pages that the code writes."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        import reference
    finally:
        sys.path.remove(str(DOCS / "_ext"))
    return {Path(path).stem: "\n".join(page()) for path, page in reference.PAGES.items()}


def test_every_setting_and_every_key_of_the_node_config_has_one_line(generated):
    settings, keys = (
        re.findall(r"^\| `([\w.-]+)` \|", generated[page], re.MULTILINE)
        for page in ("run-settings", "node-config")
    )
    assert sorted(settings) == sorted(defaults())
    assert keys == [about.name for about in declared(SiteConfig).values()]


def test_every_field_of_a_document_has_a_type_and_a_sentence(generated):
    line = re.compile(r"^\| `(\w+)` \| (.+) \| (yes|) \| (.+) \|$", re.MULTILINE)
    lines = line.findall(generated["json"])
    whole = (text.partition("\n### ")[0] for text in generated["json"].split("\n## ")[1:])
    named = [[name for name, *_ in line.findall(text)] for text in whole]
    kinds = Summary, RoundInfo, Message, *DOCUMENTS.values()
    assert named == [list(kind.__annotations__) for kind in kinds]
    assert not [name for name, kind, _, text in lines if kind == "value" or not text.endswith(".")]
    assert ("bytes", "object of integer", "yes") in [line[:3] for line in lines]


def test_every_command_with_json_has_its_document():
    root = typer.main.get_command(cli)
    named = {
        f"{name} {of_group}".strip(): command
        for name, group in root.commands.items()
        for of_group, command in getattr(group, "commands", {"": group}).items()
    }
    options = {name: [text for one in named[name].params for text in one.opts] for name in named}
    assert {name for name in named if "--json" in options[name]} == set(DOCUMENTS)


def test_every_module_of_messages_reveals_something(generated):
    modules = {path.stem for path in (ROOT / "fedapp" / "messages").glob("*.py")}
    shown = set(re.findall(r"^`fedapp\.messages\.(\w+)`$", generated[GENERATED[-1]], re.MULTILINE))
    assert shown == modules - {"__init__", "cuts", "fields", "methods", "reveals", "wire"}


def test_pages_about_methods_name_all_of_them():
    chosen, drawn = DOCS / "how-to" / "choose-a-method.md", ROOT / "ARCHITECTURE.md"
    texts = chosen.read_text(), drawn.read_text()
    for name, method in all_methods().items():
        module = module_of_group(name.replace("-", "_")).__name__.rpartition(".")[2]
        assert f"`{name}`" in texts[0] or not method.trains, name
        assert f"messages/{module}.py" in texts[1], name
    (line,) = re.findall(r"^- A table larger than memory: (.*) read it by parts", texts[0], re.M)
    by_parts = {name for name, of in all_methods().items() if of.trains and not of.memory}
    assert {*re.findall(r"`([\w-]+)`", line)} == by_parts


# Commands


def commands():
    """Lines of pages that call ``fedapp``, with continued lines."""
    for page in pages():
        for line in (line for _, text in blocks(page) for line in commands_in(text)):
            for part in re.split(r"&&|\|(?!\|)|;(?= )", line.strip("()")):
                words = part.strip()
                if words.startswith("fedapp "):
                    yield page, words


def parsed(words):
    """Parse a command's arguments without running it; raises a UsageError."""
    command = typer.main.get_command(cli)
    rest = words[1:]
    while hasattr(command, "commands") and "--help" not in rest:
        name, *rest = rest or ["list"]
        if name not in command.commands:
            raise click.UsageError(f"no command {name}")
        command = command.commands[name]
    if "--help" not in rest:
        command.make_context(command.name, list(rest))


def test_every_command_of_a_page_exists_with_its_options():
    checked = 0
    for page, line in commands():
        words = shlex.split(line, comments=True)
        try:
            parsed(words)
        except DataError as error:
            if "run folder must be a folder, got none" not in str(error):  # it is elsewhere
                raise
        except click.UsageError as error:
            pytest.fail(f"{page.name}: {line}: {error.format_message()}")
        for name in re.findall(r"(?:-c|--config)[ =]?([\w.-]+)=", line):
            assert name in defaults(), f"{page.name}: {line}: no setting {name}"
        checked += 1
    assert checked > 20


# Links and words


def test_links_between_pages_lead_to_files():
    missing = []
    for page in pages():
        for target in re.findall(r"\]\(([^)#\s]+?)(?:#[\w-]+)?\)", page.read_text()):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = page.parent / target
            if not path.exists() and path.stem not in GENERATED and "gallery" not in path.parts:
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


def test_words_of_pages_are_plain():
    texts = {page: re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages()}
    words = {page.name: [one.group() for one in TEXTS.finditer(texts[page])] for page in texts}
    assert not {name: of_page for name, of_page in words.items() if of_page}


def test_the_readme_and_the_documentation_are_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 30
    assert sum(len(prose(page).split()) for page in pages() if DOCS in page.parents) <= 15_360


def prose(page):
    """Text of a page without code, printed output and what has no letters."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return " ".join(word for word in text.split() if re.search("[A-Za-z]", word))


# Files beside the documentation


def test_every_file_has_the_same_version_and_pythons():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {citation["version"], changes[1]} == {project["version"]}
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    job = workflow["jobs"]["check"]
    form = r"Programming Language :: Python :: (\d\.\d+)"
    named = re.findall(form, "\n".join(project["classifiers"]))
    assert named == job["strategy"]["matrix"]["python"]
    first, last = named[0], named[-1]
    beyond = f"3.{int(last[2:]) + 1}"
    assert project["requires-python"] == f">={first},<{beyond}"
    for name in ("Makefile", "README.md", "docs/tutorials/two-commands.md"):
        told = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / name).read_text())
        assert told == [(first, last)], name
    compared = re.findall(r"\((3), (\d+)\)", (ROOT / "Makefile").read_text())
    assert [".".join(version) for version in compared] == [first, beyond]


def test_the_first_result_of_the_pages_is_that_of_the_first_command():
    # The interval is bootstrapped from bins, of which tests have fewer.
    interval = re.compile(r"\(95 % interval [\d.\s]+to[\d.\s]+\)")
    shown = printed()
    for page in PAGES:
        (block,) = BLOCK.findall((ROOT / page).read_text())
        assert interval.sub("", block).split() == interval.sub("", shown).split()
