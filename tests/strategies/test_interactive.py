"""Interactive inference: the predictions of the joined model, though nobody has it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.messages import inference
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.store import PART_FILE
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import goes_left
from tests.federated import summary_of
from tests.forests import joined, part_of
from tests.letters import raw_of
from tests.pooled import Pooled
from tests.stored import seal
from tests.tables import made_table
from tests.tampering import rewrite_letters, set_last_bit
from tests.texts import adult
from tests.transcript import ALIGNED, check_declared, listen

SMALL_KEY = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
KINDS = {
    **ALIGNED,
    "evaluate.interactive_walk": (inference.WalkRequest, inference.WalkReply),
    "evaluate.interactive_answer": (inference.AnswerRequest, inference.AnswerReply),
}


@pytest.fixture
def train(settings, tmp_path, trained_once):
    """A trained model of 3 trees of depth 3, and its settings; joined too where it is asked for."""

    def make(objective="binary:logistic", **more):
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=300)
        given = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        given |= {"max_depth": 3, "num_boost_round": 3, "align": "ordered", **SMALL_KEY, **more}
        run = settings(**{"strategy": "secureboost", **given})
        return run, trained_once(run)

    return make


def inference(settings, trained, **more):
    """Settings of a run that predicts the rows the model was trained on."""
    return settings(**{"strategy": "interactive", **inference_of(trained), **more})


def inference_of(trained):
    """What every run has that predicts the rows a model was trained on."""
    model = summary_of(RunFolder(Path(trained.run_dir)))["model_id"]
    return {"data": trained.data, "parties": trained.parties, "model": model}


def written(summary):
    """Predictions as the active party has them."""
    path = home() / "sites" / summary["active"] / summary["model_id"] / "predictions.csv"
    with path.open() as file:
        return np.array([list(map(float, row[1:])) for row in list(csv.reader(file))[1:]])


@pytest.mark.by_default("3-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
@pytest.mark.parametrize("parties", [2, 3])
def test_predictions_are_those_of_the_joined_model(train, settings, tmp_path, objective, parties):
    trained, folder = train(objective, parties=parties, allow_export=True)
    summary = summary_of(run_local(inference(settings, trained)))
    predict_table(folder.path, trained.data, "", tmp_path / "joined.csv")
    with (tmp_path / "joined.csv").open() as file:
        joined = np.array([list(map(float, row[1:])) for row in list(csv.reader(file))[1:]])
    np.testing.assert_allclose(written(summary), joined, rtol=1e-5, atol=1e-6)
    assert summary["matched_rows"] == {"predicted": 300}


@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("strategy", ["interactive", "eini"])
def test_rows_with_text_are_predicted_as_by_the_joined_model(
    settings, real_data, tmp_path, strategy
):
    data = adult(tmp_path, real_data, 400)
    given = {"data": str(data), "label": "income", "parties": 2, "align": "ordered", **SMALL_KEY}
    given |= {"strategy": "secureboost", "max_bin": 8, "max_depth": 3, "allow_export": True}
    trained = settings(**given)
    folder = run_local(trained)
    assert len(load(folder.path / "model.json", Ensemble).sets) > 0
    more = {"eini__unguarded": True, "eini__key_bits": 512, "eini__insecure_small_key": True}
    run = settings(**inference_of(trained), strategy=strategy, **more)
    found = written(summary_of(run_local(run)))
    predict_table(folder.path, trained.data, "", tmp_path / "joined.csv")
    with (tmp_path / "joined.csv").open() as file:
        joined = np.array([list(map(float, row[1:])) for row in list(csv.reader(file))[1:]])
    np.testing.assert_allclose(found, joined, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_party_is_asked_max_depth_times_at_most(train, settings):
    trained, _ = train(data="breast-cancer", label="")
    folder, app = listen(inference(settings, trained, align="psi"))
    check_declared(app, KINDS)
    assert len(app.of_kind("interactive_answer")) <= trained.max_depth + 1  # the last: forget
    n_opening = 2 + 2 + 2  # greeting, hello, alignment of two parties
    assert summary_of(folder)["exchanges"] <= n_opening + 2 + 2 * trained.max_depth


def n_asked(trees, values, n_own, at_once):
    """Passive splits on the longest path of each lot of trees, summed: a question each."""
    longest = []
    for tree in trees:
        nodes, passive = np.zeros(len(values), int), np.zeros(len(values), int)
        while (rows := np.flatnonzero(tree["left"][nodes] != LEAF)).size:
            at = tree[nodes[rows]]
            passive[rows] += at["column"] >= n_own
            cells = values[rows, at["column"]]
            nodes[rows] = at["left"] + ~goes_left(cells, at["threshold"], at["default_left"])
        longest.append(int(passive.max()))
    lots = [longest[first:][:at_once] for first in range(0, len(longest), at_once)]
    return sum(map(max, lots))


@pytest.mark.slow
@pytest.mark.by_default("binary:logistic-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("strategy", ["secureboost", "federated-forest"])
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_trees_at_once_change_the_exchanges_and_no_prediction(train, settings, strategy, objective):
    more = {"federated_forest__trees": 5, "federated_forest__max_depth": 4, "columns": "random"}
    trained, folder = train(objective, strategy=strategy, allow_export=True, **more)
    is_forest = strategy == "federated-forest"
    trees = joined(folder).trees if is_forest else load(folder.path / "model.json", Ensemble).trees
    n_own = len(part_of("party-1", summary_of(folder)["model_id"])["columns"])
    found = {}
    for at_once in (0, 1, 2, 100):
        own = {"columns": "random", "align": "ordered", "interactive__trees_at_once": at_once}
        summary = summary_of(run_local(inference(settings, trained, **own)))
        found[at_once] = written(summary)
        n_questions = n_asked(trees, Pooled(trained).values, n_own, at_once or len(trees))
        assert summary["exchanges"] == 5 + 2 + 2 * n_questions
    for predictions in found.values():
        np.testing.assert_array_equal(predictions, found[0])


@pytest.mark.slow
def test_no_prediction_and_no_leaf_leaves_the_active_party(train, settings):
    trained, _ = train()
    folder, app = listen(inference(settings, trained))
    scores = written(summary_of(folder))[:, 0].astype(np.float32)
    sent = [raw_of(message) for _, *messages in app.heard for message in messages]
    assert not any(scores[:3].tobytes() in data for data in sent)
    assert "probability" not in (folder.path / "summary.json").read_text()


@pytest.mark.slow
def test_the_command_predicts_a_new_table(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, folder = train()
    lines = Path(trained.data).read_text().splitlines()
    new = tmp_path / "new.csv"
    names = [*lines[0].split(","), "customer"]
    rows = [f"{line},c{number}" for number, line in enumerate(lines[1:40])]
    new.write_text("\n".join([",".join(names), *rows]) + "\n")
    arguments = ["predict", str(folder.path), "--data", str(new), "--id", "customer"]
    slowly = ["--output", "scores.csv", "-cinteractive.trees-at-once=1"]
    result = CliRunner().invoke(cli, [*arguments, *slowly])
    assert result.exit_code == 0, result.output
    assert "39 rows written to scores.csv" in result.output
    with Path("scores.csv").open() as file:
        found = list(csv.reader(file))
    assert found[0] == ["customer", "probability_1"]
    assert [row[0] for row in found[1:]] == [f"c{number}" for number in range(39)]


@pytest.mark.slow
def test_a_table_is_read_as_that_of_the_training(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, _ = train()
    lines = Path(made.data).read_text().replace(".", "#").replace(",", ";").replace("#", ",")
    own = tmp_path / "own.csv"
    own.write_text("\n".join(lines.splitlines()[1:]) + "\n")
    label = 1 + lines.splitlines()[0].split(";").index("y")
    _, folder = train(data=str(own), label=f"f{label}", header=False, decimal=",", max_depth=2)
    words = ["predict", str(folder.path), "--data", str(own), "--output", "scores.csv"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "300 rows written to scores.csv" in result.output


def test_a_table_without_a_column_of_the_model_is_refused(train, settings):
    trained, _ = train()
    with pytest.raises(PartyError, match=r"^party-1 \(step 1\): table must have the model's"):
        run_local(inference(settings, trained, data="diabetes"))


@pytest.mark.parametrize("change", [("0", "1"), ("{", ""), ("columns", "volumes")])
def test_a_part_that_was_changed_on_the_disk_is_not_read(train, settings, change):
    trained, folder = train()
    path = home() / "sites" / "party-2" / summary_of(folder)["model_id"] / PART_FILE
    path.write_text(path.read_text().replace(*change, 1))
    match = r"party-2 \(step 1\): model's part must be as fedapp wrote it, got a file that was"
    with pytest.raises(PartyError, match=match):
        run_local(inference(settings, trained))


def test_a_part_of_another_format_is_refused(train, settings):
    trained, folder = train()
    site = home() / "sites" / "party-2" / summary_of(folder)["model_id"]
    part = json.loads((site / PART_FILE).read_text())
    seal(site, {"format": 1, "columns": part["columns"], "records": [[0, 0.5, 1]]})
    match = r"^party-2 \(step 1\): model must be JSON .*, got another: format must be 3 .*, got 1"
    with pytest.raises(PartyError, match=match):
        run_local(inference(settings, trained))


def test_bits_of_rows_that_were_not_asked_about_are_refused_by_the_senders_name(
    train, settings, monkeypatch
):
    trained, _ = train(data="breast-cancer", label="")
    rewrite_letters(monkeypatch, "Answers", "bits", set_last_bit)
    match = r"^party-2 \(step \d\): Answers\.bits must be 0 past the \d+ rows$"
    with pytest.raises(PartyError, match=match):
        run_local(inference(settings, trained))


@pytest.mark.parametrize("n_rows", [0, 1])
def test_one_row_can_be_predicted_and_none_is_refused(train, settings, tmp_path, n_rows):
    trained, _ = train()
    lines = Path(trained.data).read_text().splitlines()
    data = tmp_path / "few.csv"
    data.write_text("\n".join(lines[: 1 + n_rows]) + "\n")
    run = inference(settings, trained, data=str(data))
    if n_rows:
        assert len(written(summary_of(run_local(run)))) == 1
        return
    with pytest.raises(PartyError, match="party-1"):
        run_local(run)
