"""Interactive inference: the predictions of the joined model, though nobody has it."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.messages import inference as messages
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.store import PART_FILE
from fedapp.trees.model import LEAF
from fedapp.trees.objective import transform
from fedapp.trees.predict import goes_left, predict_margins
from fedapp.trees.queue import without_padding
from tests.encrypted import inference, read_scores, scored, written
from tests.federated import model_of, summary_of
from tests.forests import joined, part_of, read_part_of
from tests.letters import raw_of
from tests.pooled import Pooled
from tests.random_tables import differences
from tests.stored import seal
from tests.tables import made_columns, write_rows
from tests.tampering import rewrite_letters, set_last_bit
from tests.transcript import ALIGNED, check_declared, listen

KINDS = {
    **ALIGNED,
    "evaluate.interactive_walk": (messages.WalkRequest, messages.WalkReply),
    "evaluate.interactive_answer": (messages.AnswerRequest, messages.AnswerReply),
}


@pytest.mark.by_default("multi:softprob-3-interactive")
@pytest.mark.parametrize("way", ["interactive", "eini"])
@pytest.mark.parametrize(
    ("objective", "parties"),
    [("binary:logistic", 2), ("multi:softprob", 3), ("reg:squarederror", 2)],
)
def test_predictions_are_those_of_the_joined_model(
    divided, settings, tmp_path, objective, parties, way
):
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
    np.testing.assert_allclose(scored(settings, trained, way), due, rtol=1e-5, atol=1e-6)


def test_no_prediction_leaves_the_active_party_which_asks_max_depth_times(divided, settings):
    trained, _ = divided()
    folder, app = listen(inference(settings, trained, align="psi"))
    check_declared(app, KINDS)
    assert folder.summary["matched_rows"] == {"predicted": 300}
    assert len(app.of_kind("interactive_answer")) <= trained.max_depth + 1  # the last: forget
    n_opening = 2 + 2 + 2  # greeting, hello, alignment of two parties
    assert folder.summary["exchanges"] <= n_opening + 2 + 2 * trained.max_depth
    scores = written(folder.summary)[:, 0].astype(np.float32)
    sent = [raw_of(message) for _, *messages in app.heard for message in messages]
    assert not any(scores[:3].tobytes() in data for data in sent)
    assert "probability" not in (folder.path / "summary.json").read_text()


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
@pytest.mark.parametrize("strategy", ["secureboost", "federated-forest"])
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_trees_at_once_change_exchanges_and_no_prediction(divided, settings, strategy, objective):
    trained, folder = divided(strategy, objective, columns="random", allow_export=True)
    trees = (joined(folder) if strategy == "federated-forest" else model_of(folder)).trees
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
def test_the_command_predicts_a_new_table_read_as_that_of_the_training(
    divided, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    made, _ = divided()
    lines = Path(made.data).read_text().replace(".", "#").replace(",", ";").replace("#", ",")
    rows = [f"{line};c{row}" for row, line in enumerate(lines.splitlines()[1:])]
    for name, written_rows in (("own", rows), ("new", rows[:39])):
        Path(f"{name}.csv").write_text("\n".join(written_rows) + "\n")
    table = {"header": False, "decimal": ",", "label": "f7", "id": "f8"}
    _, folder = divided(data=str(tmp_path / "own.csv"), max_depth=2, **table)
    words = ["predict", str(folder.path), "--data", "new.csv", "--id", "f8"]
    slowly = ["--output", "scores.csv", "-cinteractive.trees-at-once=1"]
    result = CliRunner().invoke(cli, [*words, *slowly])
    assert result.exit_code == 0, result.output
    assert "39 rows written to scores.csv" in result.output
    found = [line.split(",") for line in Path("scores.csv").read_text().splitlines()]
    assert [name.strip('"') for name in found[0]] == ["f8", "probability_1"]
    assert [row[0].strip('"') for row in found[1:]] == [f"c{number}" for number in range(39)]


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


# Leaves limited by gain: parts have splits that the model drops

BY_GAIN = {"grow_policy": "lossguide", "max_leaves": 5, "max_depth": 0}


def trained(vertical, tmp_path, objective, **more):
    """Settings of a finished run."""
    # Deep splits gain more than those above them: labels are by the parity of three columns.
    rng = np.random.default_rng(1)
    values = rng.integers(0, 6, (240, 4))
    odd = (values[:, :3] > 2).sum(axis=1) % 2
    labels = {"binary:logistic": odd, "multi:softprob": odd + 2 * (values[:, 3] > 3)}[objective]
    columns = dict(zip("abcd", values.T, strict=True))
    data = write_rows(tmp_path / "rows.csv", {**columns, "y": labels})
    given = {"data": str(data), "label": "y", "objective": objective, "num_boost_round": 4}
    run = vertical(**{**given, "min_child_weight": 0.5, "columns": "even", **BY_GAIN, **more})
    run_local(run)
    return run


@pytest.mark.by_default("binary:logistic")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_parts_predict_what_the_model_without_dropped_splits_does(
    vertical, settings, tmp_path, objective
):
    run = trained(vertical, tmp_path, objective)
    folder = RunFolder(Path(run.run_dir))
    part, model = read_part_of("party-1", folder.summary["model_id"]), model_of(folder)
    pairs = zip(part.model.trees, model.trees, strict=True)
    sizes = [(len(ours), len(tree)) for ours, tree in pairs]
    assert max(size for _, size in sizes) == 9
    assert sum(ours > size for ours, size in sizes) > 0
    for ours, tree in zip(part.model.trees, model.trees, strict=True):
        for name in ("left", "column", "gain", "value", "default_left"):
            np.testing.assert_array_equal(without_padding(ours)[name], tree[name])
    assert differences(run, folder) == []
    table = load_table(Path(run.data), Roles(label="y"))
    order = [table.columns.index(name) for name in model.columns]
    expected = transform(objective, predict_margins(model, table.values[:, order]))
    shown = expected[:, 0] if objective == "binary:logistic" else expected
    for way in ("one-round", "interactive", "eini"):
        ours = scored(settings, run, way)
        np.testing.assert_allclose(ours[:, : expected.shape[1]].squeeze(), shown, atol=1e-6)
