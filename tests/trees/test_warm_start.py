"""Runs that go on from the model of a finished one.

Models of stock XGBoost are in ``test_stock_models``.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from clients.secureboost.passive import Passive
from fedapp.errors import ConfigError, DataError, PartyError, ProtocolError
from fedapp.home import home
from fedapp.records.document import to_text
from fedapp.runs.compare import check_comparable
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.model import LEAF, NODE, Ensemble, pack_trees
from fedapp.trees.sets import NO_SET
from strategies import pax
from strategies.handshake import InitialModel
from strategies.horizontal import read_init_model
from strategies.local_boosting import last_turn, next_turn
from tests.federated import lines_of, model_bytes, model_of, summary_of
from tests.network import die, resumed, run
from tests.tables import made_columns, write_rows

DRAWS = {"subsample": 0.7, "colsample_bytree": 0.7, "colsample_bynode": 0.8}
BINARY, CLASSES, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"
log = logging.getLogger("fedapp")
NO_MODEL = Ensemble(NUMBERS, np.zeros(1, np.float32), (), (), ())


@pytest.fixture
def continued(made):
    """``continued(strategy, objective, **more)``: a short run over rows with names and margins,
    which draws rows and columns."""

    def make(strategy="pax", objective=BINARY, **more):
        columns = made_columns(objective)
        rng = np.random.default_rng(5)
        labels = np.asarray(columns["y"])
        columns["town"] = [f"t{rng.integers(4)}{label}" for label in labels.round().astype(int)]
        columns["m"] = rng.normal(size=len(labels)).round(3)
        dropped = ",".join({"m", "town"} - {more.get("base_margin"), more.pop("text", "")})
        parties = {"pax": 3, "bagging": 3, "cyclic": 3}.get(strategy, 2)
        given = {"parties": parties, "drop_columns": dropped, **DRAWS, **more}
        return made(strategy, objective, columns=columns, **given)

    return make


TEXTS, MARGINS, PARALLEL = {"text": "town"}, {"base_margin": "m"}, {"num_parallel_tree": 2}
SMALL = {"max_bin": 8, "max_depth": 2}
ALONE = {**SMALL, "secureboost__first_trees": 1}
CONTINUED = {
    "pax": ("pax", CLASSES, {}),
    "pax, numbers": ("pax", NUMBERS, {}),
    "pax, texts and margins": ("pax", BINARY, TEXTS | MARGINS),
    "pax, parallel": ("pax", BINARY, PARALLEL),
    "bagging": ("bagging", CLASSES, {}),
    "cyclic": ("cyclic", BINARY, {}),
    "secureboost": ("secureboost", NUMBERS, ALONE),
    "secureboost, classes": ("secureboost", CLASSES, SMALL),
    "secureboost, texts and margins": ("secureboost", BINARY, TEXTS | MARGINS | SMALL),
    "secureboost, parallel": ("secureboost", BINARY, PARALLEL | SMALL),
}


@pytest.mark.by_default("pax", "pax, texts*", "cyclic", "secureboost", "secureboost, parallel")
@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_that_goes_on_ends_in_the_model_of_all_rounds_at_once(continued, name):
    strategy, objective, how = CONTINUED[name]
    in_parts = {"allow_export": False} if strategy == "secureboost" else {}
    n_more = 1 if strategy == "secureboost" else 3
    first = run_local(continued(strategy, objective, **{**how, **in_parts}))
    init = {"init_model": str(first.path), "num_boost_round": n_more}
    second = run_local(continued(strategy, objective, **how, **init))
    once = run_local(continued(strategy, objective, num_boost_round=2 + n_more, **how))
    assert model_bytes(second) == model_bytes(once)
    model = model_of(once)
    assert bool(len(model.sets.bits)) == ("texts" in name)
    n_trees = 2 * model.n_outputs * model.num_parallel_tree * (3 if name == "bagging" else 1)
    begun = summary_of(second)["init_model"]
    assert begun == {"path": str(first.path), "rounds": 2, "trees": n_trees}
    assert "init_model" not in summary_of(once)
    lines, of_once = (lines_of(each.rounds) for each in (second, once))
    assert [line["round"] for line in lines] == [*range(1, n_more + 1)]
    assert [line["valid"] for line in lines] == [line["valid"] for line in of_once[2:]]
    assert summary_of(second)["metrics"] == summary_of(once)["metrics"]


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "secureboost"])
def test_early_stopping_looks_at_the_new_rounds(continued, strategy):
    first = run_local(continued(strategy, **SMALL))
    given = {"early_stopping_rounds": 2, "valid_fraction": 0.3, "eta": 1.0, "num_boost_round": 20}
    second = run_local(continued(strategy, init_model=str(first.path), **given, **SMALL))
    best, begun = summary_of(second)["best_round"], summary_of(second)["init_model"]
    assert len(lines_of(second.rounds)) == best + 2 < 20
    added = best * begun["trees"] // begun["rounds"]
    assert len(model_of(second).trees) == begun["trees"] + added


@pytest.mark.by_default("pax")
@pytest.mark.parametrize(("strategy", "step"), [("pax", 5), ("cyclic", 5), ("secureboost", 14)])
def test_a_run_that_goes_on_can_be_resumed(continued, strategy, step):
    first = run_local(continued(strategy, num_boost_round=1, **SMALL))
    n_more = 1 if strategy == "secureboost" else 3
    init = {"init_model": str(first.path), "num_boost_round": n_more}
    settings = continued(strategy, **init, **SMALL)
    die(settings, dies_before_sending=step)
    folder = run(resumed(settings), simulated_contexts(settings))
    once = run_local(continued(strategy, num_boost_round=1 + n_more, **SMALL))
    assert model_bytes(folder) == model_bytes(once)
    assert summary_of(folder)["init_model"]["rounds"] == 1


# What fits by its names


@pytest.mark.parametrize("model", ["own", "xgboost"])
def test_columns_are_matched_by_name_in_any_order(made, model):
    columns = made_columns(BINARY)
    if model == "own":  # what fedapp exports has no names of categories
        columns["town"] = [
            f"t{row % 3}{label if row % 4 else 2}" for row, label in enumerate(columns["y"])
        ]
    first = run_local(made("pax", columns=columns, parties=2))
    path = first.path / {"own": "model.json", "xgboost": "model.xgb.json"}[model]
    backwards = {name: columns[name] for name in reversed(columns)}
    second = run_local(made("pax", columns=backwards, parties=2, init_model=str(path)))
    begun, longer = model_of(first), model_of(second)
    assert longer.columns == begun.columns[::-1]
    again = longer.first_rounds(len(begun.trees)).in_order(begun.columns)
    np.testing.assert_array_equal(again.sets.bits, begun.sets.bits)
    assert (len(again.sets.bits) > 0) == (model == "own")
    for tree, other in zip(again.trees, begun.trees, strict=True):
        for field in ("left", "column", "threshold", "default_left", "value", "set"):
            np.testing.assert_array_equal(tree[field], other[field])


@pytest.mark.parametrize("file", ["model.json", "model.xgb.json"])
def test_rows_that_lack_a_class_are_trained_on_where_the_objective_is_set(settings, tmp_path, file):
    columns = {name: np.asarray(each) for name, each in made_columns(CLASSES).items()}
    few = columns["y"] != 1
    whole, lacking = (
        write_rows(tmp_path / name, {key: each[rows] for key, each in columns.items()})
        for name, rows in (("all.csv", few | ~few), ("few.csv", few))
    )
    given = {"label": "y", "parties": 2, "num_boost_round": 1}
    first = run_local(settings(data=str(whole), objective="auto", **given))
    given |= {"data": str(lacking), "init_model": str(first.path / file)}
    rule = r"^objective of init-model must be .*; where the rows lack classes of it, set objective="
    with pytest.raises(ConfigError, match=rf"{rule}multi:softprob$"):
        run_local(settings(objective="auto", **given))
    begun, longer = model_of(first), model_of(run_local(settings(objective=CLASSES, **given)))
    assert longer.classes == begun.classes == ("0", "1", "2")
    assert len(longer.trees) == 2 * len(begun.trees) == 6


# What does not fit


LEAVES = np.zeros(1, NODE)
LEAVES["left"], LEAVES["parent"], LEAVES["set"] = LEAF, -1, NO_SET
STUMP = Ensemble(BINARY, np.float32([0.5]), tuple("abcdef"), ("0", "1"), (LEAVES,))


def of_model(**changes):
    return {"changes": changes}


@pytest.mark.parametrize(
    ("field", "given", "rule"),
    [
        (
            "objective",
            of_model(objective="reg:logistic", classes=()),
            ", 'binary:logistic', got 'reg:logistic'$",
        ),
        ("columns", of_model(columns=tuple("abcdeg")), ", number 6 being 'f', got 'g'$"),
        ("columns", of_model(columns=tuple("abcde")), ", 6 in number, got 5$"),
        ("classes", of_model(classes=("0", "2")), ", number 2 being '1', got '2'$"),
        ("categories", of_model(categories=(None,) * 5 + (("x",),)), ", 0 in number, got 6$"),
        ("parameters", {"scale_pos_weight": 2.0}, ""),
        ("base-margin", MARGINS, ", 'm', got ''$"),
        ("num_parallel_tree", PARALLEL, ""),
    ],
)
def test_a_model_that_is_not_of_the_run_is_refused_by_the_field(
    continued, tmp_path, field, given, rule
):
    path, given = tmp_path / "other.json", dict(given)
    path.write_text(to_text(replace(STUMP, **given.pop("changes", {}))))
    with pytest.raises(ConfigError, match=f"^{field} of init-model must be the run's{rule}"):
        run_local(continued(init_model=str(path), **given))


def test_bagging_goes_on_from_whole_rounds_of_single_trees(continued, tmp_path):
    path, two = tmp_path / "other.json", replace(STUMP, trees=(LEAVES,) * 2)
    for model, rule in (
        (two, "init-model must have whole rounds of 3 trees, got 2 tr"),
        (replace(two, num_parallel_tree=2), r"^num_parallel_tree of init-model must be the run's"),
    ):
        path.write_text(to_text(model))
        with pytest.raises(ConfigError, match=rule):
            run_local(continued("bagging", init_model=str(path)))


def test_a_file_that_is_not_there_is_named_and_a_model_in_parts_refused(settings, tmp_path):
    rule = r"init-model must be a run's folder, .*, got .*nowhere"
    with pytest.raises(ConfigError, match=rule):
        read_init_model(settings(init_model=str(tmp_path / "nowhere")), NO_MODEL, log.warning)
    (tmp_path / "model.json").write_text('{"format": 1, "kind": "divided"}')
    with pytest.raises(DataError, match=r"^model must be"):
        read_init_model(settings(init_model=str(tmp_path)), NO_MODEL, log.warning)


def test_a_comparison_begins_without_a_model(settings):
    with pytest.raises(ConfigError, match="init-model must be empty in a comparison"):
        check_comparable([settings(init_model="runs/pax")], 1)


def test_turns_go_on_where_they_stopped():
    names, turn = ["a", "b", "c"], ""
    for n_rounds in range(7):
        assert last_turn(names, n_rounds) == turn
        turn = next_turn(names, turn)


def test_rounds_are_counted_by_their_trees():
    model = replace(NO_MODEL, trees=(LEAVES,) * 6)
    assert InitialModel.with_model(model, 3) == InitialModel(2, 6)
    with pytest.raises(ConfigError, match="must have whole rounds of 4 trees, got 6 trees"):
        InitialModel.with_model(model, 4)


# At a party


def last(array, value):
    return np.append(array[:-1], np.array([value], array.dtype))


@pytest.mark.parametrize(
    ("objective", "change", "rule"),
    [
        (BINARY, lambda p: {**p, "columns": last(p["columns"], 6)}, r"\w* ?columns must be 0 to 5"),
        (BINARY, lambda p: {**p, "sets": last(p["sets"], 0)}, "trees .*"),
        (CLASSES, lambda p: None, r"trees must be a multiple of 3, got 2$"),
    ],
    ids=["columns", "sets", "half a round"],
)
def test_trees_that_do_not_fit_are_refused_by_a_party(
    continued, monkeypatch, objective, change, rule
):
    first = run_local(continued(objective=objective, num_boost_round=1))

    def packed(trees, *given, **more):
        whole = pack_trees(trees, *given, **more)
        return change(whole) or pack_trees(trees[:2], *given, **more)

    monkeypatch.setattr(pax, "pack_trees", packed)
    with pytest.raises(PartyError, match=f"InitRequest.{rule}"):
        run_local(continued(objective=objective, init_model=str(first.path)))


def change_part(folder):
    part = home() / "sites" / "party-2" / summary_of(folder)["model_id"] / "part.json"
    part.write_text(part.read_text().replace('"format": 3', '"format":  3'))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"objective": "reg:logistic"}, "objective of init-model must be the run's at party-1"),
        ({"asked_scale_pos_weight": 2.0}, "parameters of init-model must be the run's at party-1"),
        ({"num_parallel_tree": 3}, "num-parallel-tree of init-model must be the run's at party-1"),
        ({"base_margin": "", "drop_columns": "m"}, "base-margin of init-model must be the run's"),
        (
            {"asked_parties": 3},
            r"(parties must be those of init-model|must have a part|columns of init)",
        ),
        (
            {"seed": 7},
            "categories of init-model must be those of the training rows, .* same table and seed",
        ),
        (None, "model must be the one this run was trained with"),
    ],
    ids=["objective", "parameters", "parallel", "margins", "parties", "seed", "part"],
)
def test_parts_that_are_not_of_the_run_are_refused(continued, trained_once, changes, rule):
    how = {**TEXTS, **MARGINS, **SMALL, "num_boost_round": 1}
    first = trained_once(continued("secureboost", **how))
    if changes is None:
        change_part(first)
    run = continued("secureboost", init_model=str(first.path), **how)
    with pytest.raises(PartyError, match=rule):
        run_local(run.model_copy(update=changes or {}))


def test_a_model_to_go_on_from_is_named_by_its_id_alone():
    plain = {"multi_strategy": "one_output_per_tree", "calibration": "none"}
    request = SimpleNamespace(init_model="../../../../x", **plain)
    party = Passive.load(Site(SiteConfig("bank", "rows.csv"), Store(Path())))
    with pytest.raises(ProtocolError, match=r"^bank: SetupRequest.init_model must be 16 hex"):
        party.accept(request)


def test_models_of_other_methods_are_not_gone_on_from(continued, tmp_path, monkeypatch):
    first = run_local(continued(num_boost_round=1, **SMALL))
    for path, rule in (
        (first.path, "must be a run of secureboost, .*, got one of pax$"),
        (tmp_path / "no", f"must be the folder of a finished run, got {re.escape(str(tmp_path))}"),
    ):
        with pytest.raises(ConfigError, match=f"^init-model {rule}"):
            run_local(continued("secureboost", init_model=str(path)))
    forest = {"federated_forest__trees": 2, "allow_export": True, "align": "ordered"}
    usual = dict.fromkeys(("subsample", "colsample_bytree", "colsample_bynode"), 1.0)
    forest = run_local(continued("federated-forest", **forest, **usual))
    model_id = summary_of(forest)["model_id"]
    # No server makes a party go on from it, either.
    monkeypatch.setattr("strategies.secureboost.init_model_id", lambda _: model_id)
    with pytest.raises(PartyError, match="init-model must be a boosted model, got a forest"):
        run_local(continued("secureboost"))
