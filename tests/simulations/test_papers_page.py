"""The page that sets the papers' figures beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulations import paper as every
from simulations import study
from simulations.paper import Compared
from simulations.papers import fed_eini, fedxgbllr, pax
from simulations.study import Row


def test_shares_and_percents_differ_by_points_and_errors_by_a_ratio() -> None:
    assert Compared("AUC", 0.80, 0.82, 0.8).differs
    assert not Compared("AUC", 0.80, 0.805, 0.8).differs
    assert Compared("accuracy", 85.0, 83.0, None, study.PERCENT).differs
    assert Compared("MSE", 4.0, 3.5, None, study.TIMES, True).differs
    assert not Compared("MSE", 4.0, 4.2, None, study.TIMES, True).differs
    assert not Compared("AUC", None, 0.5, 0.9).differs


def test_a_figure_shows_what_is_known_of_it() -> None:
    assert Compared("a", 0.8, 0.75, 0.9).cells == ["a", "0.8", "0.75", "0.9", "-0.0500"]
    assert Compared("b", 4.0, 2.0, None, 1.1, True).cells[-2:] == ["", "x 0.50"]
    assert Compared("c", None, 0.5, None).cells == ["c", "", "0.5", "", ""]


def pax_rows(seed: int, auc: float) -> list[Row]:
    scores = dict.fromkeys(pax.METRICS, auc)
    parties = ["pooled", 1, 2]
    return [{"draw": "random", "partition": one, "seed": seed, **scores} for one in parties]


@pytest.fixture
def tables() -> dict[str, dict[str, Any]]:
    """What the commands write, a little of each."""
    of_credit = {"credit": "Credit 1", "method": "SecureBoost"}
    scores = {"accuracy": 0.8, "auc": 0.7, "f1": 0.4}
    by_method = {"draw": "random", "seed": 42, **dict.fromkeys(pax.METRICS, 0.95)}
    methods = [{**by_method, "method": method} for method in pax.METHODS]
    mse = {"data": "abalone", "clients": 2, "score": 5.0, "head": "cnn"}
    sent = {**mse, "clients": 10, "head_bytes": 4e6, "trees_bytes": 3e6, "other_bytes": 0}
    eini = {"credit": "Credit 2", "model": "boosted", "share": 10, "auc": [0.85, 0.85]}
    return {
        "pax": {
            "partitions": [*pax_rows(42, 0.9), *pax_rows(43, 0.8), *methods],
            "notes": "Label.",
        },
        "fedxgbllr": {
            "table_2": [mse, sent],
            "pooled": [{"data": "abalone", "test": 5.4}],
            "table_4": [mse],
            "notes": "Rows: other ones.",
        },
        "secureboost": {
            "tables_2_and_3": [{**of_credit, "first_tree": scores, "all_trees": scores}],
            "notes": "None at hand.",
        },
        "federated_forest": {
            "table_1": [{"data": "spambase", "NonFF": [0.948, 0.006], "FF": [0.947, 0.007]}],
            "notes": "Depth.",
        },
        "fed_eini": {"table_2": [eini, {**eini, "model": "forest"}], "notes": "Sets."},
    }


def write(folder: Path, tables: dict[str, dict[str, Any]]) -> None:
    for name, content in tables.items():
        (folder / name).mkdir(parents=True)
        command = {"command": f"python -m simulations papers {name}"}
        (folder / name / "tables.json").write_text(json.dumps({**content, **command}))


def test_every_paper_is_set_beside_what_it_prints(
    tmp_path: Path, tables: dict[str, dict[str, Any]]
) -> None:
    write(tmp_path, tables)
    found = {paper.title.partition(",")[0]: paper for paper in every.read_papers(tmp_path)}
    assert list(found) == ["PAX", "FedXGBllr", "SecureBoost", "Federated Forest", "Fed-EINI"]
    first = next(row for row in found["PAX"].rows if "partition 2, auc" in row.what)
    assert (first.paper, first.ours, first.pooled) == (0.79, pytest.approx(0.85), first.ours)
    second = found["FedXGBllr"].rows[0]
    assert (second.paper, second.pooled) == (fedxgbllr.PAPER["abalone"][2], 5.4)
    assert second.differs
    homogeneous = next(row for row in found["PAX"].rows if "Homo SecureBoost, auc" in row.what)
    assert (homogeneous.paper, homogeneous.ours) == (0.81, 0.95)
    megabytes = next(row for row in found["FedXGBllr"].rows if row.what.endswith("MB"))
    assert (megabytes.paper, megabytes.ours) == (6.0, 7.0)
    assert [row.ours for row in found["SecureBoost"].rows] == [0.8, 0.7, 0.4] * 2
    assert found["Federated Forest"].rows[1].pooled == 0.948
    boosted, forest = found["Fed-EINI"].rows
    assert (boosted.paper, forest.paper) == (fed_eini.PRINTED["Credit 2", 10][0], None)


def test_the_page_holds_every_figure_and_says_why(
    tmp_path: Path, tables: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, tables)
    every.page(tmp_path)
    written = (tmp_path / "papers.html").read_text()
    for text in (
        "abalone, 2 clients, MSE",
        "Rows: other ones.",
        "simulations papers pax",
        "Label.",
    ):
        assert text in written
    assert "printed figures differ" in capsys.readouterr().out


def test_papers_that_were_not_run_are_missing_and_none_at_all_is_an_error(
    tmp_path: Path, tables: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(SystemExit, match=r"^no tables\.json below"):
        every.page(tmp_path)
    write(tmp_path, {"pax": tables["pax"]})
    assert len(every.read_papers(tmp_path)) == 1
