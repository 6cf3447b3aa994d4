"""Papers' tables: small runs of all, by one table; the mathematics that single papers need."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.data.datasets import find_dataset, read_source
from fedapp.data.partition import partition_columns, partition_rows
from fedapp.errors import ConfigError, DataError
from fedapp.runs.baselines import baseline_rows, run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.series import Series
from fedapp.settings import load_settings
from simulations import paper as harness
from simulations.__main__ import PAPERS
from simulations.papers import (
    fed_eini,
    federated_forest,
    fedxgbllr,
    forests,
    noniid,
    secureboost,
    timberstrike,
    tuned,
    unified,
    vertibench,
)
from tests.tables import write_rows

# Every paper


def small(holds, options=None, prepare=None, file="tables.json", lacks=(), keeps=True, **names):
    """A paper's smallest run: what its tables must say, the command's options, what the module's
    names are; ``prepare`` writes what the paper reads, and returns further options, and columns
    that no row fills are those that it ``lacks``; it may ``keep`` no runs."""
    prepare = prepare or (lambda folder, patch: {})
    given = {"holds": holds, "options": options or {}, "prepare": prepare, "file": file}
    return SimpleNamespace(**given, lacks=lacks, keeps=keeps, names=names)


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


def three_clients(folder, patch):
    """A folder like that of TimberStrike's authors: three clients' rows, and accuracies."""
    rng = np.random.default_rng(5)
    for client in range(timberstrike.CLIENTS):
        place = folder / timberstrike.ROWS / f"client_{client}" / "train"
        place.mkdir(parents=True)
        values = rng.normal(size=(60, 4))
        np.save(place / "x_train.npy", values)
        np.save(place / "y_train.npy", (values[:, :1] > 0).astype(int))
    figures = folder / timberstrike.FIGURES
    figures.parent.mkdir(parents=True)
    names = [name for _, names in timberstrike.SYSTEMS.values() for name in names]
    lines = [f"3,{name},{70 + place},,,60" for place, name in enumerate(names)]
    head = "Depth,System,Accuracy,Train F1,Train AUC,Baseline Accuracy"
    figures.write_text("\n".join([head, *lines]))
    return {"code": str(folder)}


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


def every_method_has_a_score(tables):
    names = [*forests.METHODS, forests.POOLED, forests.ALONE]
    assert [row["method"] for row in tables["rows"]] == 2 * names
    assert {row["data"]: row["score"] for row in tables["rows"]} == {
        "breast-cancer": "auc",
        "diabetes": "rmse",
    }
    assert all(row["value"] > 0.9 for row in tables["rows"] if row["score"] == "auc")


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


def beside_the_authors(tables):
    bagging, pax = tables["rows"]
    assert (bagging["theirs"], bagging["their baseline"], pax["theirs"]) == (
        "70.0",
        60,
        "71.0 / 72.0",
    )
    assert min(row["bounds"] - row["bounds, a guess"] for row in (bagging, pax)) > 0


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


FEW = {"horizontal-forest.trees": 5, "horizontal-forest.max-depth": 3}
FEW |= {"num-boost-round": 3, "fedavg-linear.rounds": 2}
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
        lacks={"SimFL", *fedxgbllr.HEADS, *(f"paper, {head}" for head in fedxgbllr.HEADS)},
        settings_of=short_head,
        POOLED={"num-boost-round": 4, "max-depth": 3},
        HEADS=("cnn", "fcnn"),
    ),
    "forests": small(
        every_method_has_a_score,
        {"seeds": 1, "data": ("breast-cancer", "diabetes")},
        keeps=False,
        METHODS={name: {**how, **FEW} for name, how in forests.METHODS.items()},
        FOREST={**forests.FOREST, **FEW},
    ),
    "noniid": small(
        noniid_holds,
        {"most": 3, "data": ("breast-cancer",)},
        file="steps-small/tables.json",
        NATURAL={"breast-cancer": "mean radius"},
        METHODS={"pax": {"strategy": "pax"}, "bagging": {"strategy": "bagging"}},
        BOOSTED={size: {"preset": "xgboost", "num-boost-round": 5} for size in noniid.BOOSTED},
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
    "timberstrike": small(
        beside_the_authors,
        prepare=three_clients,
        SYSTEMS={name: timberstrike.SYSTEMS[name] for name in ("bagging", "pax")},
        DEPTHS=(3,),
        ROUNDS=10,
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


def is_shown(line, name):
    return line.get({"mb": "bytes", "peak_mb": "peak_bytes"}.get(name, name)) is not None


@pytest.mark.by_default("unified")
@pytest.mark.parametrize("name", SMALL)
def test_a_paper_fills_its_tables_and_runs_nothing_again(name, tmp_path, monkeypatch):
    run, module = SMALL[name], import_module(f"simulations.papers.{name}")
    for what, value in run.names.items():
        monkeypatch.setattr(module, what, value)
    options = {**run.options, **run.prepare(tmp_path, monkeypatch), "output": tmp_path / "out"}
    shown, show = Counter(), harness.show

    def look(title, rows, columns, n_texts=1):
        lines = list(rows)
        for column in columns.split("; "):
            field = column.rpartition("=")[2].partition(":")[0]
            shown[title] += 1
            is_filled = any(is_shown(line, field) for line in lines)
            assert is_filled or field in run.lacks, f"{title}: no {field} in {lines}"
        show(title, lines, columns, n_texts)

    monkeypatch.setattr(harness, "show", look)
    module.main(**options)
    path = tmp_path / "out" / run.file
    first = json.loads(path.read_text())
    run.holds(first)
    assert shown
    assert first["versions"].keys() >= {"fedapp", "xgboost"}
    left = [*(tmp_path / "out").rglob("*.parquet")]
    assert [one for one in left if one.name != "predictions.parquet"] == []

    if not run.keeps:
        return
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


@pytest.mark.parametrize(
    ("paper", "options", "rule"),
    [
        (fed_eini, {"engine": ("cloud",)}, "engine must be of local, simulation, got 'cloud'"),
        (fed_eini, {"key_bits": (512, 64)}, r"eini.key-bits must be >= 256, got 64"),
        (federated_forest, {"repeats": 1}, r"^repeats must be >= 2, got 1$"),
        (noniid, {"data": ("wine",)}, r"^data must be of default-credit, adult, got 'wine'$"),
        (noniid, {"steps": "tiny"}, r"^steps must be of large, small, got 'tiny'$"),
        (unified, {"scenarios": ("dvisits_vertical",)}, r"^scenarios must be of breast_vertical, "),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_first_run(tmp_path, paper, options, rule):
    with pytest.raises(ConfigError, match=rule):
        paper.main(output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_is_not_in_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path / "nothing"))
    rule = r"^'breast-hetero-guest.csv' must be in \$FEDAPP_DATA, got no such file"
    with pytest.raises(DataError, match=rule):
        unified.SCENARIOS["breast_vertical"].data()
    with pytest.raises(DataError, match="must be a checkout"):
        timberstrike.main(str(tmp_path))


# Fed-EINI and Federated Forest


def test_what_comes_before_the_inference_is_left_out(tmp_path, monkeypatch):
    kinds = ["query.vertical_hello", "query.alignment_open", "evaluate.eini_step"]
    ledger = [
        {"step": step, "type": kind, "bytes": 10**step, "seconds": step + late}
        for step, kind in enumerate(kinds)
        for late in (0.0, 0.25)
    ]
    monkeypatch.setattr(Series, "run", lambda *_: {"entries": 7})
    monkeypatch.setattr(harness, "read_run", lambda folder: SimpleNamespace(ledger=ledger))
    found = harness.inferred(load_settings({"seed": 3}), run_local, tmp_path, "what")
    assert found.pop("folder") == str(tmp_path / "pax-3")
    costs = {"seconds": 0.25, "bytes": 200, "exchanges": 1}
    assert found == {**costs, "entries": 7, "batches": 0}


def predictions(folder, **values):
    """Folders with predictions, by name."""
    for name, column in values.items():
        (folder / name).mkdir()
        pq.write_table(pa.table({"p": column}), folder / name / "predictions.parquet")
    return [str(folder / name) for name in values]


def test_a_difference_between_two_ways_is_seen_and_refused(tmp_path, monkeypatch):
    credits = dict.fromkeys(fed_eini.CREDITS, ("breast-cancer", "sizes:5,25"))
    monkeypatch.setattr(fed_eini, "CREDITS", credits)
    scores = np.random.default_rng(0).uniform(0.1, 0.9, 100)
    other = np.append(scores[:-1], scores[-1] + 1e-6)
    same, again, differs = predictions(tmp_path, same=scores, again=scores, differs=other)
    runs = [{"credit": "Credit 1", "rows": 100, "folder": folder} for folder in (same, differs)]
    found = fed_eini.table_2("boosted", *runs)
    assert [row["rows"] for row in found] == [10, 20, 40, 80, 100]
    assert [row["difference"] > 1e-9 for row in found] == [False] * 4 + [True]
    assert found[0]["auc"][0] == found[0]["auc"][1]

    point = {"data": "spambase", **dict.fromkeys(federated_forest.AXES, 1)}
    ways = [{**point, "way": folder, "folder": folder} for folder in (same, again, differs)]
    federated_forest.check_same(ways[:2])
    with pytest.raises(ValueError, match=f"predictions must be alike, got others {differs}"):
        federated_forest.check_same(ways)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # Of the paper's Table 1: year prediction, superconduct.
        ((9.537, 0.003), (9.555, 0.061), 0.058),
        ((15.369, 0.118), (15.411, 0.163), 0.186),
        ((0.0, 0.6), (1.96 / 40**0.5, 0.8), 0.05),
        ((0.5, 0.1), (0.5, 0.2), 1.0),
        ((0.5, 0.0), (0.5, 0.0), 1.0),
        ((0.5, 0.0), (0.6, 0.0), 0.0),
    ],
)
def test_the_z_test_is_the_papers_where_its_numbers_agree(first, second, expected):
    assert federated_forest.p_value(first, second, 40) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("data", ["breast-cancer", "wine", "diabetes"])
def test_what_the_forest_is_compared_with_has_the_runs_rows_and_columns(data):
    objective = federated_forest.OBJECTIVES[find_dataset(data).task]
    given = {**federated_forest.own_settings(objective, 5, 4), "data": data}
    settings = load_settings({**given, "columns": "random", "seed": 3})
    name = federated_forest.score_name(objective)
    found, expected = federated_forest.others(settings), run_baselines(settings)
    assert found["NonFF"] == expected["pooled"][name]
    assert found["RF1"] == expected["alone"]["party-1"][name]
    assert len({found["RF1"], found["RF2"], found["NonFF"]}) == 3
    assert (found["LR"] is None) == (data == "wine")


def test_rare_classes_are_not_drawn_and_domains_join_one_after_the_other(monkeypatch):
    monkeypatch.setattr(federated_forest, "KDD_ROWS", 500)
    labels = np.array(["many"] * 900 + ["some"] * 90 + ["few"] * 10)
    rows = federated_forest.drawn_rows(labels)
    assert set(labels[rows]) == {"many", "some"}
    assert 480 < len(set(rows.tolist())) == len(rows) < 500

    table = read_source("breast-cancer")
    two, of_two = federated_forest.domains_of(table, 2)
    every, of_all = federated_forest.domains_of(table, federated_forest.N_DOMAINS)
    assert (of_two, of_all) == ("sizes:3,3", "sizes:" + ",".join("3" * 10))
    assert two.columns == every.columns[:6]
    assert sorted(every.columns) == sorted(table.columns)
    place = table.columns.index(two.columns[4])
    np.testing.assert_array_equal(two.values[:, 4], table.values[:, place])


def test_timberstrikes_victim_is_client_0_and_its_attacker_client_2(tmp_path, monkeypatch):
    three_clients(tmp_path, monkeypatch)
    monkeypatch.setattr(timberstrike, "ROUNDS", 10)
    seen, knowing = [], timberstrike.knowing
    monkeypatch.setattr(
        timberstrike, "knowing", lambda *each: seen.append(knowing(*each)) or seen[-1]
    )
    clients = [timberstrike.rows_of(tmp_path / timberstrike.ROWS, client) for client in range(3)]
    timberstrike.attacked(clients, "cyclic", 3)
    for rows, client in ((seen[0].truth, 0), (seen[0].known, 2)):
        np.testing.assert_allclose(np.sort(rows[:, 0]), np.sort(clients[client]["x0"]), rtol=1e-6)


# FedXGBllr


def test_every_set_and_head_of_fedxgbllr_has_the_papers_figures_and_weights():
    assert list(fedxgbllr.PAPER) == list(fedxgbllr.PAPER_HEADS)
    for name in fedxgbllr.PAPER:
        assert find_dataset(name).task in ("binary", "regression")
        # Table 4's first column repeats Table 2's 5 clients.
        of_five = fedxgbllr.PAPER[name][fedxgbllr.HEADS_CLIENTS]
        assert fedxgbllr.PAPER_HEADS[name][0] == of_five
    for (head, n_clients), printed in fedxgbllr.PAPER_WEIGHTS.items():
        assert fedxgbllr.weights_of(head, n_clients) == printed, (head, n_clients)
    own = fedxgbllr.settings_of("breast-cancer", 42, {"strategy": "fedxgbllr"}).sections[
        "fedxgbllr"
    ]
    assert (own["max-depth"], own["eta"], own["rounds"], own["epochs"]) == (8, 0.1, 10, 100)
    assert (own["batch-size"], own["learning-rate"], own["channels"]) == (64, 0.001, 64)
    # Equation 6 gives the paper's 6 MB at 10 clients.
    assert [fedxgbllr.eq_6(n) for n in (2, 5, 10, 3)] == ["2.8", "4.0", "6.0", ""]


# SecureBoost


def test_further_columns_are_products_of_the_tables():
    found = secureboost.product_columns(np.array([[2, 3], [5, 7]], np.float32), 6)
    assert found.tolist() == [[2, 3, 4, 6, 9, 8], [5, 7, 25, 35, 49, 125]]


def test_an_alignment_finds_the_ids_that_were_made_common(tmp_path):
    (found,) = secureboost.alignment(30, 12)
    assert (found["common"], found["seconds"] > 0) == (6, True)
    # Points of 32 bytes: each list goes to the other party and back, each time past the server.
    assert found["bytes"] > 4 * 32 * (30 + 12)
    assert not list((tmp_path / "home" / "sites").glob("*/*/state"))


@pytest.mark.parametrize(("max_depth", "seen"), [(2, [3, 4, 2, 2]), (3, [3, 4, 5, 6])])
def test_the_active_partys_splits_of_the_last_level_are_not_seen(max_depth, seen):
    none = 2**31 - 1  # XGBoost's parent of a root
    tree = {"parents": [none, 0, 0, 1, 1, 2, 2], "split_indices": [0, 2, 1, 0, 0, 0, 0]}
    leaves = np.array([3, 4, 5, 6])
    assert secureboost.last_seen(leaves, tree, slice(0, 2), max_depth).tolist() == seen


def test_purity_is_the_share_of_the_larger_class_over_nodes():
    labels, nodes = np.array([0, 0, 1, 1, 1, 0]), np.array([3, 3, 3, 4, 4, 6])
    assert secureboost.purity(labels, nodes) == pytest.approx(5 / 6)


# Benchmarks by rows


def test_scenarios_go_from_chance_to_unlike_parties_and_from_two_to_a_hundred():
    skews = noniid.skews("default-credit")
    kinds = [one.partition.partition(":")[0] for one in skews]
    assert kinds == ["iid", *["dirichlet"] * 3, "sizes", "column"]
    assert [one.parties for one in noniid.counts("adult", 100)] == [2, 5, 10, 30, 100]
    assert [one.parties for one in noniid.counts("adult", 10)] == [2, 5, 10]
    every = {one.folder for one in [*skews, *noniid.counts("default-credit", 100)]}
    assert len(every) == 10  # rows by chance at five parties are of both kinds
    shares = partition_rows(noniid.halved(10), np.arange(10_230), 10, np.random.default_rng(0))
    assert [len(share) for share in shares] == [5120 >> party for party in range(10)]


def test_a_party_with_rows_of_one_class_scores_by_chance_alone(tmp_path):
    values = np.random.default_rng(0).normal(size=60)
    labels = (values > 0).astype(int)
    columns = {"x": values, "site": np.array(["north", "south"])[labels], "y": labels}
    given = {"data": str(write_rows(tmp_path / "sites.csv", columns)), "label": "y"}
    given |= {"partition": "column:site", "parties": 2, "num-boost-round": 1}
    found = run_baselines(load_settings(given))
    assert found["pooled"]["auc"] == 1.0
    assert {scores["auc"] for scores in found["alone"].values()} == {0.5}


@pytest.mark.parametrize("method", noniid.METHODS)
def test_steps_are_those_of_the_command_but_for_methods_that_have_their_own(method):
    scenario = noniid.skews("adult")[0]
    large, small = (
        noniid.settings_of(replace(scenario, steps=steps), method, 7)
        for steps in (noniid.LARGE, noniid.SMALL)
    )
    assert (large.seed, large.strategy) == (7, noniid.METHODS[method]["strategy"])
    if method == "fedavg-linear":
        assert small == large
    elif method == "fedxgbllr":
        assert large.sections[method] == load_settings({}).sections[method]
        assert small.sections[method] == large.sections[method] | {"max-depth": 4}
    else:
        assert (large.eta, large.max_depth, large.early_stopping_rounds) == (0.3, 6, 0)
        assert (small.eta, small.max_depth, small.num_boost_round) == (0.1, 4, 100)


def test_xgboost_splits_sets_of_categories(tmp_path):
    table = tuned.write_table("made", 600, tmp_path)
    rows = baseline_rows(load_settings({**table, "valid-fraction": 0.2, "strategy": "pax"}))[0]
    model = tuned.xgboost_of({"max_cat_to_onehot": 1}, rows, 3).get_booster()
    assert len(rows.categories[2]) > 128
    assert model.feature_types == [*"ccc", *["float"] * 6]
    fields = json.loads(model.save_raw("json"))["learner"]["gradient_booster"]
    assert any(tree["categories_nodes"] for tree in fields["model"]["trees"])


@pytest.mark.slow
def test_alternatives_are_compared_on_the_same_rows():
    (line,) = tuned.changed("made", 400, [42], {"the same": {"eta": 0.1}})
    assert (line["auc"], line["low"], line["high"], line["logloss"]) == (0, 0, 0, 0)
    lines = tuned.changed_when_skewed("made", 400, [42])
    assert [line["change"] for line in lines] == list(tuned.WHEN_SKEWED)
    for line in lines:
        assert line["low"] < line["auc"] < line["high"]
        assert line["after"] - line["before"] == pytest.approx(line["auc"], abs=2e-3)
        assert min(line["mb_before"], line["mb_after"]) > 0


# Benchmarks by columns


def test_unifeds_settings_and_scores_are_its_own(tmp_path, monkeypatch):
    two_tables(tmp_path, monkeypatch)
    settings = unified.settings_of(unified.SCENARIOS["small"])
    grown = settings.num_boost_round, settings.max_depth, settings.max_bin, settings.eta
    assert grown == (64, 6, 64, 0.05)
    assert (settings.parties, settings.test_fraction, settings.valid_fraction) == (2, 0.0, 0.0)
    assert settings.sections["secureboost"]["insecure-small-key"] is False
    found = unified.pooled_scores(settings)
    assert 0.5 < found["held_out"] < found["train"]


@pytest.fixture
def pairs():
    """Correlations of six columns: three pairs that say the same."""
    return np.kron(np.eye(3), np.ones((2, 2)))


def all_splits(n_columns, n_parties):
    """Every way to deal columns out in equal numbers."""
    size = n_columns // n_parties
    return {
        tuple(tuple(sorted(order[k : k + size])) for k in range(0, n_columns, size))
        for order in permutations(range(n_columns))
    }


def test_columns_by_importance_are_at_one_party_and_gather_where_alpha_is_small():
    def splits(n_columns, alpha, n_seeds):
        rngs = map(np.random.default_rng, range(n_seeds))
        return [vertibench.importance_split(n_columns, 4, alpha, rng) for rng in rngs]

    for alpha in (1e-3, 0.1, 1.0, 100.0):
        for split in splits(9, alpha, 20):
            assert sorted(column for party in split for column in party) == list(range(9))
            assert min(map(len, split)) >= 1
    largest = {
        alpha: np.mean([max(map(len, split)) for split in splits(40, alpha, 40)])
        for alpha in (0.01, 1000.0)
    }
    assert largest[0.01] > 34
    assert largest[1000.0] < 16


def test_the_search_finds_the_least_and_the_largest_icor_of_all_splits(pairs):
    together, apart = ((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 4), (3, 5))
    assert vertibench.inter_correlation(pairs, together) == pytest.approx(-1.0)
    assert vertibench.inter_correlation(pairs, apart) > -0.2
    noise = np.random.default_rng(0).normal(size=(6, 6)) * 0.05
    correlations = pairs * 0.9 + (noise + noise.T) * (1 - np.eye(6))
    every = [vertibench.inter_correlation(correlations, split) for split in all_splits(6, 3)]
    found = vertibench.icor_range(correlations, 3, np.random.default_rng(1))
    assert found == (pytest.approx(min(every)), pytest.approx(max(every)))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_split_has_the_correlation_that_beta_asks_for(beta):
    values = np.random.default_rng(2).normal(size=(50, 6)).astype(np.float32)
    values[:, 1] += 3 * values[:, 0]
    values[:, 5] -= 2 * values[:, 4]
    correlations = vertibench.rank_correlations(values)
    every = [vertibench.inter_correlation(correlations, split) for split in all_splits(6, 2)]
    split = vertibench.correlation_split(correlations, 2, beta, np.random.default_rng(3))
    assert [len(party) for party in split] == [3, 3]
    asked = min(every) + beta * (max(every) - min(every))
    nearest = min(every, key=lambda icor: abs(icor - asked))
    assert vertibench.inter_correlation(correlations, split) == pytest.approx(nearest)


def test_correlations_are_of_ranks_and_a_constant_column_has_none():
    column = np.array([1, 2, 3, 4], np.float32)
    columns = np.stack([column, np.exp(column), -column, 0 * column], axis=1)
    found = vertibench.rank_correlations(columns)
    np.testing.assert_allclose(found[0], [1, 1, -1, 0], atol=1e-12)
    assert np.isfinite(found).all()


def test_a_split_is_the_same_again_and_the_table_deals_its_columns_out_so():
    table, point = vertibench.drawn_table("wine", 100), vertibench.Point("wine", "importance", 1.0)
    split = vertibench.split_of(point, table)
    assert split == vertibench.split_of(point, table)
    order, columns = vertibench.column_order(split)
    rng = np.random.default_rng(0)
    dealt = partition_columns(columns, len(order), vertibench.N_PARTIES, rng)
    assert [tuple(order[place] for place in party) for party in dealt] == list(split)
    for method in vertibench.METHODS:
        settings = vertibench.settings_of(point, method, "wine.parquet", "sizes:9,2,1,1")
        own = settings.sections["secureboost"]
        assert (own["key-bits"], own["insecure-small-key"]) == (2048, False)
        assert (settings.parties, settings.columns) == (4, "sizes:9,2,1,1")
