"""Runs that go on from the model of a finished one."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from clients.secureboost.passive import Passive
from fedapp.errors import ConfigError, DataError, PartyError, ProtocolError
from fedapp.home import home
from fedapp.records.document import load, to_text
from fedapp.runs.compare import check_comparable
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.model import Ensemble, pack_trees
from strategies import pax
from strategies.handshake import InitialModel
from strategies.horizontal import read_init_model
from strategies.local_boosting import last_turn, next_turn
from strategies.run import check_read
from tests.federated import lines_of, summary_of
from tests.network import die, resumed, run
from tests.pooled import Pooled, assert_xgboosts
from tests.reference import compare_trees
from tests.tables import made_columns, write_rows
from tests.texts import adult
from tests.trees.test_exactness import assert_exact, pooled_booster

DRAWS = {"subsample": 0.7, "colsample_bytree": 0.7, "colsample_bynode": 0.8}
log = logging.getLogger("fedapp")
NO_MODEL = Ensemble("reg:squarederror", np.zeros(1, np.float32), (), (), ())
OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def made(settings, tmp_path):
    """Settings of a short run over a small table, which draws rows and columns."""

    def make(strategy="pax", objective="binary:logistic", **more):
        data = write_rows(tmp_path / f"{objective}.csv", made_columns(objective))
        given = {"num_boost_round": 2, "max_depth": 3, "max_bin": 32, **DRAWS, **more}
        return settings(
            strategy=strategy, data=str(data), label="y", objective=objective, parties=3, **given
        )

    return make


def text_of(folder):
    return (folder.path / "model.json").read_text()


@pytest.mark.slow
@pytest.mark.by_default("pax-*")
@pytest.mark.parametrize(
    ("strategy", "objective"),
    [
        pytest.param("pax", OBJECTIVES[0], marks=pytest.mark.slow),
        ("pax", OBJECTIVES[1]),
        pytest.param("pax", OBJECTIVES[2], marks=pytest.mark.slow),
        ("bagging", OBJECTIVES[1]),
        ("cyclic", ""),
    ],
)
def test_a_run_that_goes_on_ends_in_the_model_of_all_rounds_at_once(made, strategy, objective):
    objective = objective or "binary:logistic"
    first = run_local(made(strategy, objective, num_boost_round=2))
    more = {"num_boost_round": 3, "init_model": str(first.path)}
    second = run_local(made(strategy, objective, **more))
    once = run_local(made(strategy, objective, num_boost_round=5))
    assert text_of(second) == text_of(once)
    assert text_of(first) != text_of(once)
    trees = len(load(first.path / "model.json", Ensemble).trees)
    told = summary_of(second)["init_model"]
    assert told == {"path": str(first.path), "rounds": 2, "trees": trees}
    assert "init_model" not in summary_of(once)
    assert lines_of(second.rounds)[-1]["valid"] == lines_of(once.rounds)[-1]["valid"]
    assert [line["round"] for line in lines_of(second.rounds)] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.by_default("pax-abalone*")
@pytest.mark.parametrize(
    ("strategy", "data", "objective"),
    [
        ("pax", "default-credit", "binary:logistic"),
        pytest.param("bagging", "default-credit", "binary:logistic", marks=pytest.mark.slow),
        pytest.param("cyclic", "default-credit", "binary:logistic", marks=pytest.mark.slow),
        ("pax", "abalone", "reg:squarederror"),
        ("bagging", "abalone", "reg:squarederror"),
        ("cyclic", "abalone", "reg:squarederror"),
    ],
)
def test_one_party_goes_on_as_xgboost_does(settings, real_data, strategy, data, objective):
    """``xgb_model`` of ``xgboost.train``, on real rows."""
    given = {"strategy": strategy, "data": data, "objective": objective, "parties": 1}
    given |= {"max_depth": 4, "max_bin": 64, "lambda": 0.5, "min_child_weight": 5.0}
    begun = settings(num_boost_round=3, **given)
    first = run_local(begun)
    more = settings(num_boost_round=2, init_model=str(first.path), **given)
    second, theirs = run_local(more), pooled_booster(more, xgb_model=pooled_booster(begun))
    assert_exact(compare_trees(load(second.path / "model.json", Ensemble), theirs), 5)


@pytest.mark.slow
def test_columns_of_text_go_on_as_they_were(settings, real_data, tmp_path):
    short = {"data": str(adult(tmp_path, real_data, 600)), "label": "income", "max_depth": 3}
    first = run_local(settings(num_boost_round=1, **short))
    path = str(first.path / "model.json")
    second = run_local(settings(num_boost_round=1, init_model=path, **short))
    assert text_of(second) == text_of(run_local(settings(num_boost_round=2, **short)))
    assert load(second.path / "model.json", Ensemble).sets.codes


@pytest.mark.slow
@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging"])
def test_early_stopping_looks_at_the_new_rounds(made, strategy):
    first = run_local(made(strategy))
    given = {"early_stopping_rounds": 2, "valid_fraction": 0.3, "eta": 1.0, "num_boost_round": 20}
    second = run_local(made(strategy, init_model=str(first.path), **given))
    best, rounds = summary_of(second)["best_round"], lines_of(second.rounds)
    assert len(rounds) == best + 2 < 20
    begun = summary_of(second)["init_model"]
    added = best * begun["trees"] // begun["rounds"]
    model = load(second.path / "model.json", Ensemble)
    assert len(model.trees) == begun["trees"] + added


@pytest.mark.slow
@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "cyclic"])
def test_a_run_that_goes_on_can_be_resumed(made, strategy):
    first = run_local(made(strategy, num_boost_round=1))
    settings = made(strategy, num_boost_round=3, init_model=str(first.path))
    die(settings, dies_before_sending=5)
    folder = run(resumed(settings), simulated_contexts(settings))
    once = run_local(made(strategy, num_boost_round=4))
    assert text_of(folder) == text_of(once)
    assert summary_of(folder)["init_model"]["rounds"] == 1


# Columns at several parties


@pytest.fixture
def joined(vertical, tmp_path):
    """Settings of a short run of SecureBoost over a small table, which draws rows and columns."""

    def make(objective="binary:logistic", **more):
        data = write_rows(tmp_path / f"{objective[:5]}.csv", made_columns(objective))
        given = {"num_boost_round": 2, "max_depth": 3, "max_bin": 16, **DRAWS, **more}
        return vertical(data=str(data), label="y", objective=objective, **given)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "parties"),
    [
        pytest.param("binary:logistic", 3, marks=pytest.mark.slow),
        pytest.param("multi:softprob", 2, marks=pytest.mark.slow),
        ("reg:squarederror", 2),
    ],
)
def test_parts_that_are_gone_on_from_end_in_the_model_of_all_rounds_at_once(
    joined, objective, parties
):
    more = {"objective": objective, "parties": parties, "secureboost__first_trees": 1}
    first = run_local(joined(**more, allow_export=False))
    second = run_local(joined(**more, init_model=str(first.path)))
    once = run_local(joined(**{**more, "num_boost_round": 4}))
    assert text_of(second) == text_of(once)
    told, trees = summary_of(second)["init_model"], 6 if objective == "multi:softprob" else 2
    assert told == {"path": str(first.path), "rounds": 2, "trees": trees}
    lines = lines_of(once.rounds)
    assert [line["valid"] for line in lines_of(second.rounds)] == [
        line["valid"] for line in lines[2:]
    ]
    assert summary_of(second)["metrics"] == summary_of(once)["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    ["binary:logistic", pytest.param("reg:squarederror", marks=pytest.mark.slow)],
)
def test_parts_are_gone_on_from_as_xgboost_does(joined, objective):
    plain = {"objective": objective, **dict.fromkeys(DRAWS, 1.0)}
    begun = joined(**plain)
    first = run_local(begun)
    more = joined(**plain, init_model=str(first.path))
    second, whole = run_local(more), Pooled(more)
    assert_xgboosts(second, whole, whole.booster(xgb_model=Pooled(begun).booster()))


@pytest.mark.slow
def test_parts_of_columns_of_text_and_base_margins_go_on(vertical, real_data, tmp_path):
    few = {"label": "income", "max_depth": 3, "max_bin": 8, "base_margin": "age"}
    few |= {"data": str(adult(tmp_path, real_data, 600))}
    first = run_local(vertical(num_boost_round=1, **few))
    second = run_local(vertical(num_boost_round=1, init_model=str(first.path), **few))
    assert text_of(second) == text_of(run_local(vertical(num_boost_round=2, **few)))
    assert load(second.path / "model.json", Ensemble).sets.codes
    other = vertical(num_boost_round=1, init_model=str(first.path), seed=7, **few)
    rule = "categories of init-model must be those of the training rows, .* same table and seed"
    with pytest.raises(PartyError, match=rule):
        run_local(other)
    rule = "base-margin of init-model must be the run's at party-1"
    with pytest.raises(PartyError, match=rule):
        run_local(
            vertical(init_model=str(first.path), **few | {"base_margin": "", "drop_columns": "age"})
        )


@pytest.mark.slow
def test_parts_that_are_gone_on_from_are_stopped_early(joined):
    first = run_local(joined())
    given = {"early_stopping_rounds": 1, "valid_fraction": 0.3, "eta": 1.0, "num_boost_round": 9}
    second = run_local(joined(init_model=str(first.path), **given))
    best = summary_of(second)["best_round"]
    assert len(lines_of(second.rounds)) == best + 1 < 9
    assert len(load(second.path / "model.json", Ensemble).trees) == 2 + best


@pytest.mark.slow
def test_a_run_that_goes_on_from_parts_can_be_resumed(joined):
    few = {"max_depth": 2, "max_bin": 8}
    first = run_local(joined(**few, num_boost_round=1))
    settings = joined(num_boost_round=1, init_model=str(first.path), **few)
    die(settings, dies_before_sending=14)
    folder = run(resumed(settings), simulated_contexts(settings))
    assert text_of(folder) == text_of(run_local(joined(num_boost_round=2, **few)))


@pytest.mark.slow
def test_a_part_that_has_changed_is_not_gone_on_from(joined):
    first = run_local(joined())
    model = summary_of(first)["model_id"]
    part = home() / "sites" / "party-2" / model / "part.json"
    part.write_text(part.read_text().replace('"format": 3', '"format":  3'))
    with pytest.raises(PartyError, match="model must be the one this run was trained with"):
        run_local(joined(init_model=str(first.path)))


@pytest.mark.slow
@pytest.mark.by_default("change0-*", "change2-*")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"objective": "reg:logistic"}, "objective of init-model must be the run's at party-1"),
        ({"asked_scale_pos_weight": 2.0}, "parameters of init-model must be the run's at party-1"),
        (
            {"asked_parties": 3},
            r"(parties must be those of init-model|must have a part|columns of init)",
        ),
    ],
)
def test_parts_that_are_not_of_the_run_are_refused(joined, change, rule):
    first = run_local(joined(num_boost_round=1))
    run = joined(num_boost_round=1, init_model=str(first.path))
    with pytest.raises(PartyError, match=rule):
        run_local(run.model_copy(update=change))


def test_a_model_to_go_on_from_is_named_by_its_id_alone():
    plain = {"multi_strategy": "one_output_per_tree", "calibration": "none"}
    request = SimpleNamespace(init_model="../../../../x", **plain)
    party = Passive.load(Site(SiteConfig("bank", "rows.csv"), Store(Path())))
    with pytest.raises(ProtocolError, match=r"^bank: SetupRequest.init_model must be 16 hex"):
        party.accept(request)


def test_parts_of_another_method_are_not_gone_on_from(joined, made, tmp_path):
    first = run_local(made(num_boost_round=1))
    rule = "^init-model must be a run of secureboost, .*, got one of pax$"
    with pytest.raises(ConfigError, match=rule):
        run_local(joined(init_model=str(first.path)))
    with pytest.raises(ConfigError, match=r"^init-model must be the folder of a finished run, got"):
        run_local(joined(init_model=str(tmp_path / "nowhere")))


def test_no_server_makes_a_party_go_on_from_a_forest(joined, monkeypatch):
    forest = run_local(joined(strategy="federated-forest", federated_forest__trees=2))
    model_id = summary_of(forest)["model_id"]
    monkeypatch.setattr("strategies.secureboost.init_model_id", lambda _: model_id)
    with pytest.raises(PartyError, match="init-model must be a boosted model, got a forest"):
        run_local(joined())


# What fits by its names


@pytest.mark.by_default("pax-own", "pax-xgboost")
@pytest.mark.parametrize("model", ["own", "xgboost"])
@pytest.mark.parametrize("strategy", ["pax", "bagging"])
def test_columns_are_matched_by_name_in_any_order(settings, tmp_path, strategy, model):
    columns = made_columns("binary:logistic")
    if model == "own":  # what fedapp exports has no names of categories
        columns["town"] = [
            f"t{row % 3}{label if row % 4 else 2}" for row, label in enumerate(columns["y"])
        ]
    given = {"strategy": strategy, "label": "y", "parties": 2, "max_depth": 3, "max_bin": 16}
    data = [
        write_rows(tmp_path / f"{at}.csv", {name: columns[name] for name in order})
        for at, order in enumerate((columns, reversed(columns)))
    ]
    first = run_local(settings(data=str(data[0]), num_boost_round=2, **given))
    path = first.path / {"own": "model.json", "xgboost": "model.xgb.json"}[model]
    second = run_local(settings(data=str(data[1]), init_model=str(path), **given))
    begun, longer = (load(run.path / "model.json", Ensemble) for run in (first, second))
    assert longer.columns == begun.columns[::-1]
    again = longer.first_rounds(2).in_order(begun.columns)
    np.testing.assert_array_equal(again.sets.bits, begun.sets.bits)
    assert (len(again.sets.bits) > 0) == (model == "own")
    for tree, other in zip(again.trees, begun.trees, strict=True):
        for field in ("left", "column", "threshold", "default_left", "value", "set"):
            np.testing.assert_array_equal(tree[field], other[field])


@pytest.mark.parametrize("file", ["model.json", "model.xgb.json"])
def test_rows_that_lack_a_class_are_trained_on_where_the_objective_is_set(settings, tmp_path, file):
    columns = {name: np.asarray(each) for name, each in made_columns("multi:softprob").items()}
    few = columns["y"] != 1
    data = [
        write_rows(tmp_path / name, {key: each[rows] for key, each in columns.items()})
        for name, rows in (("all.csv", few | ~few), ("few.csv", few))
    ]
    given = {"label": "y", "parties": 2, "max_depth": 2, "max_bin": 16, "num_boost_round": 1}
    first = run_local(settings(data=str(data[0]), objective="auto", **given))
    given |= {"data": str(data[1]), "init_model": str(first.path / file)}
    rule = r"^objective of init-model must be .*; where the rows lack classes of it, set objective="
    with pytest.raises(ConfigError, match=rf"{rule}multi:softprob$"):
        run_local(settings(objective="auto", **given))
    second = run_local(settings(objective="multi:softprob", **given))
    begun, longer = (load(run.path / "model.json", Ensemble) for run in (first, second))
    assert longer.classes == begun.classes == ("0", "1", "2")
    assert len(longer.trees) == 2 * len(begun.trees) == 6


# What does not fit


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("objective", "reg:logistic", "'binary:logistic', got 'reg:logistic'"),
        ("columns", tuple("abcdeg"), "number 6 being 'f', got 'g'"),
        ("columns", tuple("abcde"), "6 in number, got 5"),
        ("classes", ("0", "2"), "number 2 being '1', got '2'"),
        ("categories", (None,) * 5 + (("x",),), "0 in number, got 6"),
    ],
)
def test_a_model_that_is_not_of_the_run_is_refused_by_the_field(made, tmp_path, field, value, rule):
    model = load(run_local(made(num_boost_round=1)).path / "model.json", Ensemble)
    trees = tuple(tree[:1].copy() for tree in model.trees)
    for tree in trees:
        tree["left"] = -1
    path = tmp_path / "other.json"
    classes = () if field == "objective" else model.classes
    path.write_text(to_text(replace(model, **{"trees": trees, "classes": classes, field: value})))
    with pytest.raises(ConfigError, match=f"^{field} of init-model must be the run's, {rule}$"):
        run_local(made(init_model=str(path)))


def test_parameters_of_the_objective_must_be_the_models(made):
    first = run_local(made(num_boost_round=1))
    with pytest.raises(ConfigError, match=r"^parameters of init-model must be the run's"):
        run_local(made(init_model=str(first.path), scale_pos_weight=2.0))


def test_a_file_that_is_not_there_is_named(made, tmp_path):
    settings = made(init_model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"init-model must be a run's folder, .*, got .*nowhere"):
        read_init_model(settings, NO_MODEL, log.warning)


def test_a_model_in_parts_is_refused(made, tmp_path):
    (tmp_path / "model.json").write_text('{"format": 1, "kind": "divided"}')
    with pytest.raises(DataError, match=r"^model must be"):
        read_init_model(made(init_model=str(tmp_path)), NO_MODEL, log.warning)


def test_bagging_goes_on_from_whole_rounds_of_as_many_parties(made):
    first = run_local(made("pax", num_boost_round=2))
    with pytest.raises(ConfigError, match="must have whole rounds of 3 trees, got 2 trees"):
        run_local(made("bagging", init_model=str(first.path)))


@pytest.mark.parametrize("strategy", ["federated-forest", "fedxgbllr", "fedavg-linear"])
def test_methods_that_cannot_go_on_say_so(settings, strategy):
    usual = dict.fromkeys(("eta", "early_stopping_rounds", "num_boost_round"), "auto")
    run = settings(strategy=strategy, init_model="runs/pax", **usual)
    with pytest.raises(ConfigError, match=f"init-model must be omitted for {strategy}"):
        check_read(run)


def test_a_comparison_begins_without_a_model(made):
    with pytest.raises(ConfigError, match="init-model must be empty in a comparison"):
        check_comparable([made(init_model="runs/pax")], 1)


def test_turns_go_on_where_they_stopped():
    names, turn = ["a", "b", "c"], ""
    for n_rounds in range(7):
        assert last_turn(names, n_rounds) == turn
        turn = next_turn(names, turn)


def test_rounds_are_counted_by_their_trees(made):
    model = load(run_local(made(objective="multi:softprob")).path / "model.json", Ensemble)
    assert InitialModel.with_model(model, 3) == InitialModel(2, 6)
    with pytest.raises(ConfigError, match="must have whole rounds of 4 trees, got 6 trees"):
        InitialModel.with_model(model, 4)


# At a party


@pytest.mark.by_default("columns-*")
@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("columns", 6, "columns must be 0 to 5|trees columns must be 0 to 5"),
        ("sets", 0, "trees .*"),
    ],
)
def test_trees_that_do_not_fit_the_table_are_refused_by_a_party(
    made, monkeypatch, field, value, rule
):
    first = run_local(made(num_boost_round=1))

    def changed(*given, **more):
        arrays = pack_trees(*given, **more)
        array = arrays[field]
        return {**arrays, field: np.append(array[:-1], np.array([value], array.dtype))}

    monkeypatch.setattr(pax, "pack_trees", changed)
    with pytest.raises(PartyError, match=f"InitRequest.({rule})"):
        run_local(made(init_model=str(first.path)))


def test_trees_of_half_a_round_are_refused_by_a_party(made, monkeypatch):
    first = run_local(made(objective="multi:softprob", num_boost_round=1))
    monkeypatch.setattr(pax, "pack_trees", lambda trees, sets: pack_trees(trees[:2], sets=sets))
    with pytest.raises(PartyError, match=r"InitRequest.trees must be a multiple of 3, got 2$"):
        run_local(made(objective="multi:softprob", init_model=str(first.path)))
