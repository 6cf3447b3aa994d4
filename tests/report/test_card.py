"""The model card tells what the run was."""

import pytest

from fedapp.report import write_report
from fedapp.report.card import CARD, model_card
from fedapp.report.documents import Blanks, documents
from fedapp.run_files import read_run


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
    assert "With ``survival:cox``" not in card
    assert "### handshake\n" in card
    assert "### inference" not in card
    assert "| max-bin | 16 |" in card
    assert "| seed |" not in card
    assert "| xgboost | 3." in card


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
