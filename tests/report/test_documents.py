"""The model card and documents that people sign: they state what the run has, and mark the rest."""

import hashlib
import re
import subprocess
import sys

import pytest

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.report import write_report
from fedapp.report.card import CARD, Blanks, in_short, model_card
from fedapp.report.documents import CONTROLS, DOCUMENTS, configuration_of, documents
from fedapp.report.template import TEMPLATES
from fedapp.run_folder import read_run
from fedapp.runs.local import run_local
from fedapp.settings import defaults, load_settings
from fedapp.site.bundle import app_folder
from tests.deploy_folders import invoke

MARK = "TO FILL IN"
PAX = {"strategy": "pax", "num-boost-round": 2, "max-depth": 2, "parties": 2}
SUMS = {**PAX, "pax.aggregation": "secure"}
ORDERED = {"parties": 2, "align": "ordered"}
KEY = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
SECUREBOOST = {**PAX, "strategy": "secureboost", **KEY, **ORDERED}
FOREST = {"strategy": "federated-forest", "federated-forest.trees": 2, **ORDERED}
RUNS = {
    "plain": PAX,
    "sums": SUMS,
    "private": {**SUMS, "privacy.epsilon": 1.0},
    "vertical": SECUREBOOST,
    "vertical, randomised labels": {**SECUREBOOST, "label-epsilon": 1.0},
    "plain, bagging": {**PAX, "strategy": "bagging"},
    "vertical, forest": FOREST,
}


@pytest.fixture
def trained(request):
    return run_local(load_settings(RUNS[request.param])).path


@pytest.mark.by_default("sums")
@pytest.mark.parametrize("trained", RUNS, indirect=True, ids=str)
def test_documents_state_what_the_run_has(trained, request, tmp_path):
    printed = invoke(cli, "documents", str(trained))
    run, folder = read_run(trained), trained / "documents"
    configuration = request.node.callspec.params["trained"]
    table, _, _ = configuration.partition(",")
    assert configuration_of(run) == table
    texts = {name: (folder / f"{name}.md").read_text() for name in DOCUMENTS}
    digest = hashlib.sha256((trained / "model.json").read_bytes()).hexdigest()
    for name, text in texts.items():
        n_blanks = text.count(MARK)
        assert n_blanks
        assert f"{name}.md  {n_blanks} blanks" in printed
        assert (digest if run.summary.get("active") is None else "The model is divided") in text
        assert "None" not in text.replace("None in this run", "")
        page = (folder / f"{name}.html").read_text()
        assert page.count(MARK) == n_blanks
        assert "{{" not in text + page
    few = (run.summary.get("threshold") or {}).get("few", False)
    assert ("no threshold was chosen: " in texts["validation-report"]) == few
    assert not (few and "the threshold was chosen" in texts["validation-report"])
    leaves = in_short(run)
    for text in (texts["threat-model"], texts["dpia"], (trained / "model-card.md").read_text()):
        assert leaves in text
    assert ("only sums over all parties" in leaves) == (table == "sums")
    assert ("can rebuild most rows" in leaves) == (configuration == "plain")
    threats = (TEMPLATES / f"threats-{table}.md").read_text()
    assert threats in texts["threat-model"]
    for message in run.ledger:
        assert message["type"].replace("_", "\\_") in texts["threat-model"]
    for party in run.summary["parties"]:
        assert f"| {party['name']} | {party['rows']:,} |" in texts["validation-report"]
    if epsilon := run.settings.get("privacy.epsilon"):
        assert f"| privacy.epsilon | {epsilon} |" in texts["dpia"]
    weak = "NOT FIT FOR REAL ROWS: a Paillier key of 512 bits can be broken"
    for text in texts.values():
        assert (weak in text) == ("secureboost" in run.summary["strategy"])
        assert "ONE MACHINE: all parties of this run were simulated" in text
    assert ("label-epsilon 1 bounds" in texts["threat-model"]) == ("labels" in configuration)
    assert (trained / "model-card.md").read_text().count(MARK) == 2
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, check=False)
    assert checked.returncode == 0
    listed = (folder / "SHA256SUMS").read_text()
    for path in (*trained.glob("[a-z]*.*"), *folder.glob("*.*")):
        assert path.name in listed


@pytest.mark.parametrize("trained", ["plain"], indirect=True)
def test_packages_are_listed_where_cyclonedx_is_installed(trained, tmp_path, monkeypatch):
    folder = trained / "documents"
    monkeypatch.setitem(sys.modules, "cyclonedx_py", None)
    printed = invoke(cli, "documents", str(trained))
    assert "sbom.cdx.json is not written: pip install cyclonedx-bom" in printed
    assert not (folder / "sbom.cdx.json").exists()
    monkeypatch.delitem(sys.modules, "cyclonedx_py")
    (package := tmp_path / "cyclonedx_py").mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "pip install" not in invoke(cli, "documents", str(trained))
    assert (folder / "sbom.cdx.json").read_text() == "['environment', '--no-validate']\n"
    assert "  sbom.cdx.json\n" in (folder / "SHA256SUMS").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["plain"], indirect=True)
def test_answers_fill_the_blanks_and_stay_texts(trained, tmp_path):
    invoke(cli, "documents", str(trained))
    texts = [(trained / "documents" / f"{name}.md").read_text() for name in DOCUMENTS]
    names = sorted({each for text in texts for each in re.findall(rf"{MARK} ([a-z-]+):", text)})
    odd = "<script>alert(1)</script> | *all* [x](y)"
    answers = tmp_path / "answers.toml"
    answers.write_text("\n".join(f"{name} = '{odd}'" for name in names))
    words = ("--answers", str(answers), "--output", str(tmp_path / "signed"))
    assert "to fill in" not in invoke(cli, "documents", str(trained), *words)
    card = (trained / "model-card.md").read_text()
    for text in (card, *((tmp_path / "signed" / f"{each}.html").read_text() for each in DOCUMENTS)):
        assert MARK not in text
        assert "<script>" not in text
        assert "<em>all" not in text
    answers.write_bytes(b"purpose = '\xff'")
    with pytest.raises(ConfigError, match=r"answers.toml must be TOML: 'utf-8' codec"):
        invoke(cli, "documents", str(trained), "--answers", str(answers))
    answers.write_text("purpos = 'credit'")
    with pytest.raises(ConfigError, match=r"answers must be to one of .*did you mean purpose"):
        invoke(cli, "documents", str(trained), "--answers", str(answers))


def test_controls_are_settings_and_the_threat_models_page_shows_the_documents_tables():
    assert CONTROLS.keys() <= defaults().keys()
    page = app_folder() / "docs" / "explanation" / "threat-model.md"
    if not page.is_file():
        pytest.skip("a wheel has no documentation")
    shown = re.findall(r"\{include\} (\S+)", page.read_text())
    assert {(page.parent / each).resolve() for each in shown} == {*TEMPLATES.glob("threats-*.md")}


@pytest.mark.usefixtures("undrawn")
def test_the_card_tells_scores_by_party_and_what_was_revealed(settings, trained_once):
    folder = trained_once(settings(parties=2, num_boost_round=1))
    run = read_run(folder.path)
    run.summary["parties"][0]["name"] = "<b>|[x](y)`"
    assert "| &lt;b>\\|\\[x\\](y)\\` | 205 |" in model_card(run)  # no markup
    write_report(folder.path)
    card = (folder.path / CARD).read_text()
    assert card.startswith("# pax on breast-cancer\n")
    assert "- method: PAX: party-adaptive histogram boosting.\n" in card
    assert "| party, its test rows |" in card
    assert "## Who learned what\n\n- The server can rebuild most rows of a small table" in card
    assert "### pax\n\nIn full, with ``pax.aggregation=plain``: nothing is encrypted" in card
    assert "Nothing hides a rare one" in card
    assert "everything except ``hello`` and keys is masked" not in card
    assert "### inference" not in card
    assert "| max-bin | 16 |" in card
    assert "| seed |" not in card


@pytest.mark.parametrize(("engine", "is_shown"), [("local", False), ("deployment", True)])
def test_a_card_hides_nothing_that_a_site_decides(vertical, trained_once, engine, is_shown):
    """The run config has no say in what node configs have, such as ``label-epsilon``."""
    run = read_run(trained_once(vertical(num_boost_round=1)).path)
    run.summary["engine"] = engine
    card = model_card(run)
    assert all(f"### {name}\n" in card for name in ("secureboost", "vertical"))
    assert "### inference" not in card
    assert ("- With ``label-epsilon`` at the active party" in card) == is_shown
    assert "- With ``multi-strategy=multi_output_tree``" not in card
    threats = documents(run, Blanks({}))["threat-model.md"]
    assert (
        "label-epsilon" in threats.partition("Off in this run:")[2].partition("\n")[0]
    ) != is_shown
