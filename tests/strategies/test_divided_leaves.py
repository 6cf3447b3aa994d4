"""Divided models whose leaves are limited by gain: the parts have splits that the model drops."""

from pathlib import Path

import numpy as np
import pytest

from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.trees.divided import ActivePart
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.objective import transform
from fedapp.trees.predict import predict_margins
from fedapp.trees.queue import without_padding
from tests.encrypted import encrypted
from tests.federated import summary_of
from tests.forests import read_part_of
from tests.random_tables import differences
from tests.strategies.test_interactive import written
from tests.strategies.test_one_round import prediction
from tests.tables import write_rows

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


def parts(run):
    """What the active party has, and the exported model."""
    folder = RunFolder(Path(run.run_dir))
    summary = summary_of(folder)
    part = read_part_of(summary["active"], summary["model_id"])
    assert isinstance(part, ActivePart)
    return part, load(folder.path / "model.json", Ensemble)


@pytest.mark.slow
@pytest.mark.by_default("binary:logistic")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_parts_predict_what_the_model_without_dropped_splits_does(
    vertical, settings, tmp_path, objective
):
    run = trained(vertical, tmp_path, objective)
    part, model = parts(run)
    assert isinstance(part.model, Ensemble)
    pairs = zip(part.model.trees, model.trees, strict=True)
    sizes = [(len(ours), len(tree)) for ours, tree in pairs]
    assert max(size for _, size in sizes) == 9
    assert sum(ours > size for ours, size in sizes) > 0
    for ours, tree in zip(part.model.trees, model.trees, strict=True):
        for name in ("left", "column", "gain", "value", "default_left"):
            np.testing.assert_array_equal(without_padding(ours)[name], tree[name])
    assert differences(run, RunFolder(Path(run.run_dir))) == []
    table = load_table(Path(run.data), Roles(label="y"))
    order = [table.columns.index(name) for name in model.columns]
    expected = transform(objective, predict_margins(model, table.values[:, order]))
    for way in ("one-round", "interactive"):
        ours = written(summary_of(run_local(prediction(settings, run, strategy=way))))
        shown = expected[:, 0] if objective == "binary:logistic" else expected
        np.testing.assert_allclose(ours[:, : expected.shape[1]].squeeze(), shown, atol=1e-6)


def test_parts_predict_under_encryption_what_they_do_in_the_clear(vertical, settings, tmp_path):
    run = trained(vertical, tmp_path, "binary:logistic", num_boost_round=6)
    part, model = parts(run)
    assert sum(map(len, part.model.trees)) > sum(map(len, model.trees))
    plain = written(summary_of(run_local(prediction(settings, run, strategy="interactive"))))
    sealed = written(summary_of(run_local(encrypted(settings, run))))
    np.testing.assert_allclose(sealed, plain, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_continues_a_model_of_other_limits(vertical, settings, tmp_path):
    first = trained(vertical, tmp_path, "binary:logistic", num_boost_round=2)
    more = {"init_model": first.run_dir, "scale_pos_weight": 1.0}
    limits = {"max_leaves": 0, "max_depth": 3, "grow_policy": "depthwise"}
    run = trained(vertical, tmp_path, "binary:logistic", **more, **limits)
    before, (_, model) = parts(first)[1], parts(run)
    assert len(model.trees) == 6
    for tree, expected in zip(model.trees, before.trees, strict=False):
        np.testing.assert_array_equal(tree, expected)
    assert all(((tree["gain"] > 0) == (tree["left"] != LEAF)).all() for tree in model.trees)
    ways = ("one-round", "interactive")
    ours = [written(summary_of(run_local(prediction(settings, run, strategy=way)))) for way in ways]
    np.testing.assert_array_equal(*ours)
