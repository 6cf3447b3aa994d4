"""Interactive inference: the predictions of the joined model, though nobody has it."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.store import PART_FILE
from tests.encrypted import inference, read_scores, scored, written
from tests.federated import model_of, summary_of
from tests.letters import raw_of
from tests.stored import seal
from tests.tables import made_columns, write_rows
from tests.tampering import rewrite_letters, set_last_bit
from tests.transcript import listen


@pytest.mark.by_default("multi:softprob-3")
@pytest.mark.parametrize(
    ("objective", "parties"),
    [("binary:logistic", 2), ("multi:softprob", 3), ("reg:squarederror", 2)],
)
def test_predictions_are_those_of_the_joined_model(divided, settings, tmp_path, objective, parties):
    columns = made_columns(objective, 300)
    columns["town"] = np.random.default_rng(0).choice(["Oslo", "Rome", "Bern", ""], 300)
    tens = np.nan_to_num(columns["a"], nan=40.0).astype(int) // 10
    columns["a"] = np.array([*"uvwx", ""])[tens]
    data = str(write_rows(tmp_path / "towns.csv", columns))
    how = {"data": data, "parties": parties, "allow_export": True}
    trained, folder = divided("secureboost", objective, **how)
    assert len(model_of(folder).sets) > 0
    predict_table(folder.path, data, "", tmp_path / "joined.csv")
    due = read_scores(tmp_path / "joined.csv")
    np.testing.assert_allclose(scored(settings, trained), due, rtol=1e-5, atol=1e-6)


def test_no_prediction_leaves_the_active_party(divided, settings):
    trained, _ = divided()
    folder, app = listen(inference(settings, trained, align="psi"))
    scores = written(folder.summary)[:, 0].astype(np.float32)
    sent = [raw_of(message) for _, *messages in app.heard for message in messages]
    assert not any(scores[:3].tobytes() in data for data in sent)
    assert "probability" not in (folder.path / "summary.json").read_text()


def test_trees_at_once_change_exchanges_and_no_prediction(divided, settings):
    trained, _ = divided("federated-forest", columns="random")
    own = {"columns": "random", "align": "ordered"}
    found = [
        run_local(inference(settings, trained, **own, interactive__trees_at_once=n)).summary
        for n in (0, 1, 100)
    ]
    together, one_by_one, more = (summary["exchanges"] for summary in found)
    assert together == more < one_by_one
    for summary in found:
        np.testing.assert_array_equal(written(summary), written(found[0]))


def test_a_table_without_a_column_of_the_model_is_refused(divided, settings):
    trained, _ = divided()
    with pytest.raises(PartyError, match=r"^party-1 \(step 1\): table must have the model's"):
        run_local(inference(settings, trained, data="diabetes"))


@pytest.mark.parametrize("change", [("0", "1"), ("{", ""), ("columns", "volumes"), "format"])
def test_a_part_that_was_changed_on_the_disk_is_not_read(divided, settings, change):
    trained, folder = divided()
    site = home() / "sites" / "party-2" / folder.summary["model_id"]
    text = (site / PART_FILE).read_text()
    rule = "model's part must be as fedapp wrote it, got a file that was"
    if change == "format":
        columns = json.loads(text)["columns"]
        seal(site, {"format": 1, "columns": columns, "records": [[0, 0.5, 1]]})
        rule = "model must be JSON .*, got another: format must be 3 .*, got 1"
    else:
        (site / PART_FILE).write_text(text.replace(*change, 1))
    with pytest.raises(PartyError, match=rf"^party-2 \(step 1\): {rule}"):
        run_local(inference(settings, trained))


def test_bits_of_rows_that_were_not_asked_about_are_refused_by_the_senders_name(
    divided, settings, monkeypatch
):
    trained, _ = divided(data="breast-cancer", label="")
    rewrite_letters(monkeypatch, "Answers", "bits", set_last_bit)
    match = r"^party-2 \(step \d\): Answers\.bits must be 0 past the \d+ rows$"
    with pytest.raises(PartyError, match=match):
        run_local(inference(settings, trained))


@pytest.mark.parametrize("n_rows", [0, 1])
def test_one_row_can_be_predicted_and_none_is_refused(divided, settings, tmp_path, n_rows):
    trained, _ = divided()
    lines = Path(trained.data).read_text().splitlines()
    data = tmp_path / "few.csv"
    data.write_text("\n".join(lines[: 1 + n_rows]) + "\n")
    run = inference(settings, trained, data=str(data))
    if n_rows:
        assert len(written(summary_of(run_local(run)))) == 1
        return
    with pytest.raises(PartyError, match="party-1"):
        run_local(run)
