"""Papers' tables: small runs of all, by one table; the mathematics that single papers need."""

import json
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.errors import FedappError
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.series import Series
from fedapp.settings import load_settings
from simulations.__main__ import PAPERS
from simulations.papers import (
    fed_eini,
    federated_forest,
    glassbox,
    noniid,
    secureboost,
    unified,
    vertibench,
)
from tests.tables import write_rows

# Every paper


def small(holds, options=None, prepare=None, **names):
    """A paper's smallest run: what its tables must say, the command's options, what the module's
    names are; ``prepare`` writes what the paper reads, and returns further options."""
    prepare = prepare or (lambda folder, patch: {})
    given = {"holds": holds, "options": options or {}, "prepare": prepare}
    return SimpleNamespace(**given, names=names)


def two_tables(folder, patch):
    """UniFed's scenario of 60 rows: two tables, in different orders."""
    patch.setenv("FEDAPP_DATA", str(folder))
    values = np.random.default_rng(0).normal(size=(60, 4))
    ids, labels = np.arange(60), (values[:, 0] + values[:, 2] > 0).astype(int)
    own = {"id": ids, "y": labels, "x0": values[:, 0], "x1": values[:, 1]}
    others = {"id": ids, "x0": values[:, 2], "x1": values[:, 3]}
    write_rows(folder / "guest.csv", own)
    write_rows(folder / "host.csv", {name: column[::-1] for name, column in others.items()})
    scenario = unified.Scenario("small", unified.BINARY, 0.9, files=("guest.csv", "host.csv"))
    patch.setattr(unified, "SCENARIOS", {"small": scenario})
    return {"scenarios": ("small",)}


def an_interpret(folder, patch):
    """A logistic regression by the names of interpret, which no environment of the tests has."""
    (package := folder / "interpret").mkdir()
    (package / "__init__.py").touch()
    text = (
        "from sklearn.linear_model import LogisticRegression\n"
        "def ExplainableBoostingClassifier(**_):\n"
        "    return LogisticRegression(max_iter=5000)\n"
        "DPExplainableBoostingClassifier = ExplainableBoostingClassifier\n"
    )
    for name in ("glassbox", "privacy"):
        (package / f"{name}.py").write_text(text)
    patch.setenv("PYTHONPATH", str(folder))
    return {"interpret": sys.executable}


def glass_holds(tables):
    scores = {(row["method"], row["epsilon"]): row["score"] for row in tables["rows"]}
    assert len(scores) == 10
    assert min(scores.values()) > 0.9
    assert {row["exchanges"] is None for row in tables["rows"] if row["method"] in EBMS} == {True}


EBMS = {*glassbox.EBMS, glassbox.DP_EBM}


def eini_holds(tables):
    assert {row["model"] for row in tables["table_2"]} == {"boosted", "forest"}
    assert all(row["difference"] <= 1e-9 for row in tables["table_2"])
    exchanges = {way: [] for way in ("at once", "tree by tree", 256)}
    for row in tables["figure_10"]:
        exchanges[row["way"]].append(row["exchanges"])
        if row["key_bits"]:  # 64 bytes each, which pass the server
            assert row["bytes"] > 2 * 64 * row["rows"] * row["entries"] > 0
    at_once, slowly, _ = exchanges.values()
    assert all(more > fewer for more, fewer in zip(slowly, at_once, strict=True))
    # SecureBoost's trees are XGBoost's, so a column gains as much in both.
    assert sum(row["divided"] for row in tables["figure_9"]) == pytest.approx(1)
    for row in tables["figure_9"]:
        assert row["divided"] == pytest.approx(row["pooled"])


def forest_holds(tables):
    assert [row["data"] for row in tables["table_1"]] == ["breast-cancer", "diabetes"]
    assert [row["columns"] for row in tables["figure_3"]] == [6, 9]
    rows = tables["figures_4_to_6"]
    assert len(rows) == 4 * 3 * 2  # points, ways, engines
    exchanges = {(row["way"], row["trees"], row["depth"]): row["exchanges"] for row in rows}
    assert exchanges["one-round", 2, 2] == exchanges["one-round", 4, 2] == 2
    assert exchanges["classical", 4, 2] > exchanges["classical", 2, 2]
    assert exchanges["classical", 2, 2] > exchanges["all trees at once", 2, 2]


def heads_hold(tables):
    assert [row["clients"] for row in tables["table_2"]] == [2]
    assert [row["head"] for row in tables["table_4"]] == ["cnn", "fcnn"]
    assert all(50 < row["score"] <= 100 for row in tables["table_2"] + tables["table_4"])


def noniid_holds(tables):
    methods = {"pax", "bagging", noniid.POOLED, noniid.ALONE}
    assert {row["method"] for row in tables["rows"]} == methods


def secureboost_holds(tables):
    assert [row["ids"] for row in tables["table_1"]] == [[20, 20], [20, 30], [30, 20], [30, 30]]
    assert [row["value"] for row in tables["figure_5"]] == [2, 32, 100, 569]
    completely = [row for row in tables["tables_2_and_3"] if row["method"].startswith("Completely")]
    for row in completely:  # its first trees show the passive party nothing
        assert row["seen"][0] == pytest.approx(row["larger_class"])
        assert row["purity"][0] > row["larger_class"]
    assert completely


def tuned_holds(tables):
    methods = {row["method"]: row["auc"] for row in tables["rows"]}
    assert {"PAX, skewed", "PAX, tuned", "bagging, random"} < {*methods}
    assert min(methods["PAX, random"], methods["SecureBoost"]) > 0.9


def scenario_holds(tables):
    (row,) = tables["rows"]
    assert row["pooled"] == row["train"] > row["held_out"]
    assert row["score"] == pytest.approx(row["pooled"], abs=1e-9)
    assert (row["rows"], row["trees"], row["reported"], row["subset"]) == (60, 2, 0.9, "train")


def splits_do_not_matter(tables):
    assert len(tables["rows"]) == 8
    for row in tables["rows"]:
        assert row["method"] != "SecureBoost" or abs(row["score"] - row["pooled"]) < 1e-6


EINI = {"secureboost.key-bits": 256, "max-bin": 8, "max-depth": 2, "federated-forest.max-depth": 2}
HEAD = {"trees": 4, "max-depth": 3, "rounds": 2, "epochs": 2, "channels": 8}


def short_head(data, seed, more):
    own = {f"fedxgbllr.{name}": value for name, value in HEAD.items()}
    given = {"objective": "binary:logistic", "test-fraction": 0.25, **own, **more}
    return load_settings({"data": data, "seed": seed, **given})


SMALL = {
    "fed_eini": small(
        eini_holds,
        {"credit": ("Credit 1",), "key_bits": (256,), "rows": 40},
        CREDITS=dict.fromkeys(fed_eini.CREDITS, ("breast-cancer", "sizes:5,25")),
        TRAINING={**fed_eini.TRAINING, **EINI},
        ENGINES=dict.fromkeys(fed_eini.ENGINES, run_local),
        KEY_BITS=256,
        TREES=3,
        ROWS=(10, 30),
    ),
    "federated_forest": small(
        forest_holds,
        {"repeats": 2, "predicted_sets": ("breast-cancer",)},
        TREES=3,
        DEPTH=2,
        DATA=("breast-cancer", "diabetes"),
        DOMAIN_SEEDS=2,
        DOMAIN_DATA="breast-cancer",
        DOMAINS=(2, 3),
        ENGINES=dict.fromkeys(federated_forest.ENGINES, run_local),
        PREDICTED=("breast-cancer",),
        TIMED=dict.fromkeys(federated_forest.ENGINES, 1),
        FIGURES={
            "figure_4": ("trees", [(2, 2, 0.2), (4, 2, 0.2)]),
            "figure_5": ("depth", [(2, 2, 0.2), (2, 3, 0.2)]),
            "figure_6": ("share", [(2, 2, 0.1), (2, 2, 0.2)]),
        },
    ),
    "fedxgbllr": small(
        heads_hold,
        {"sets": ("breast-cancer",), "clients": (2,)},
        settings_of=short_head,
        POOLED={"num-boost-round": 4, "max-depth": 3},
        HEADS=("cnn", "fcnn"),
    ),
    "glassbox": small(
        glass_holds,
        {"data": ("breast-cancer",), "epsilons": (0, 50), "seeds": 1},
        an_interpret,
        DATA={"breast-cancer": {}},
        PLAIN={name: {**how, "num-boost-round": 9} for name, how in glassbox.PLAIN.items()},
        PRIVATE={**glassbox.PRIVATE, "num-boost-round": 60},
    ),
    "noniid": small(
        noniid_holds,
        {"most": 3, "data": ("breast-cancer",)},
        NATURAL={"breast-cancer": "mean radius"},
        METHODS={name: {"strategy": name, "num-boost-round": 5} for name in ("pax", "bagging")},
        ALPHAS=(0.3,),
        N_PARTIES=3,
    ),
    "secureboost": small(
        secureboost_holds,
        COMMON={**secureboost.COMMON, "max-bin": 4, "secureboost.key-bits": 256},
        CREDITS=dict.fromkeys(secureboost.CREDITS, "breast-cancer"),
        N_IDS=(20, 30),
        DEPTHS=(2,),
        N_COLUMNS=(32,),
        N_ROWS=(100, 0),
        TREES=3,
        STAGES=3,
    ),
    "tuned": small(tuned_holds, {"data": ("breast-cancer",), "rows": 300, "draws": 1, "seeds": 1}),
    "unified": small(
        scenario_holds,
        prepare=two_tables,
        TREES=2,
        KEY_BITS=256,
        COMMON={**unified.COMMON, "secureboost.insecure-small-key": True},
    ),
    "vertibench": small(
        splits_do_not_matter,
        {"data": ("breast-cancer",)},
        KEY_BITS=256,
        ROWS=120,
        TREES=2,
        COMMON={**vertibench.COMMON, "secureboost.insecure-small-key": True},
        ALPHAS=(0.1, 100.0),
        BETAS=(0.0, 1.0),
    ),
}


@pytest.mark.by_default("unified")
@pytest.mark.parametrize("name", SMALL)
def test_a_paper_fills_its_tables_and_runs_nothing_again(name, tmp_path, monkeypatch):
    run, module = SMALL[name], import_module(f"simulations.papers.{name}")
    for what, value in run.names.items():
        monkeypatch.setattr(module, what, value)
    options = {**run.options, **run.prepare(tmp_path, monkeypatch), "output": tmp_path / "out"}
    module.main(**options)
    path = tmp_path / "out" / "tables.json"
    first = json.loads(path.read_text())
    run.holds(first)
    assert first["versions"].keys() >= {"fedapp", "xgboost"}
    left = [*(tmp_path / "out").rglob("*.parquet")]
    assert [one for one in left if one.name != "predictions.parquet"] == []

    kept, rows = Series.run, Series.rows
    again = partial(pytest.fail, "a finished run is made again")
    monkeypatch.setattr(Series, "run", lambda own, how, _: kept(own, how, lambda _: again()))
    monkeypatch.setattr(Series, "rows", lambda own, what, how, _: rows(own, what, how, again))
    module.main(**options)
    tables = {name: rows for name, rows in first.items() if isinstance(rows, list)}
    again = json.loads(path.read_text())
    assert {name: again[name] for name in tables} == tables


def test_every_paper_but_one_of_real_flights_has_a_small_run():
    assert {*PAPERS} - {"pax"} == {*SMALL}


def test_a_difference_between_two_ways_is_seen_and_refused(tmp_path):
    ways = []
    for name, last in (("same", 0.2), ("again", 0.2), ("differs", 0.2 + 1e-6)):
        (folder := tmp_path / name).mkdir()
        pq.write_table(pa.table({"p": [0.1, last]}), folder / "predictions.parquet")
        point = {"data": "spambase", **dict.fromkeys(federated_forest.AXES, 1)}
        ways.append({**point, "way": name, "folder": str(folder)})
    federated_forest.check_same(ways[:2])
    with pytest.raises(ValueError, match="predictions must be alike, got others differs"):
        federated_forest.check_same(ways)


def test_a_party_with_rows_of_one_class_scores_by_chance_alone(tmp_path):
    values = np.random.default_rng(0).normal(size=60)
    labels = (values > 0).astype(int)
    columns = {"x": values, "site": np.array(["north", "south"])[labels], "y": labels}
    given = {"data": str(write_rows(tmp_path / "sites.csv", columns)), "label": "y"}
    given |= {"partition": "column:site", "parties": 2, "num-boost-round": 1}
    found = run_baselines(load_settings(given))
    assert found["pooled"]["auc"] == 1.0
    assert {scores["auc"] for scores in found["alone"].values()} == {0.5}


@pytest.mark.parametrize(
    ("paper", "options", "rule"),
    [
        (fed_eini, {"key_bits": (512, 64)}, r"eini.key-bits must be >= 256, got 64"),
        (federated_forest, {"repeats": 1}, r"^repeats must be >= 2, got 1$"),
        (glassbox, {"interpret": "nothing"}, r"^interpret must be a Python that has interpret"),
        (noniid, {"data": ("wine",)}, r"^data must be of default-credit, adult, got 'wine'$"),
        (
            unified,
            {"scenarios": ("breast_vertical",)},
            r"-guest.csv' must be in \$FEDAPP_DATA",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_first_run(
    tmp_path, monkeypatch, paper, options, rule
):
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path / "nothing"))
    with pytest.raises(FedappError, match=rule):
        paper.main(output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_z_test_is_the_papers_where_its_numbers_agree():
    for first, second, expected in (
        # Of the paper's Table 1: superconduct.
        ((15.369, 0.118), (15.411, 0.163), 0.186),
        ((0.5, 0.0), (0.5, 0.0), 1.0),
        ((0.5, 0.0), (0.6, 0.0), 0.0),
    ):
        assert federated_forest.p_value(first, second, 40) == pytest.approx(expected, abs=0.006)
