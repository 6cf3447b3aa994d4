"""Splits by categories are the same in process, in Flower's simulation and across sites."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedapp.home import home
from fedapp.records.document import load
from fedapp.runs.local import run_local
from fedapp.site.store import PART_FILE
from fedapp.trees.model import Ensemble
from simulations.deployment import settings_of, wait_for_output
from tests.deployed import SITES, model_in, same_columns, same_rows, started, use_tables, write_csv
from tests.federated import summary_of
from tests.forests import without_salt
from tests.moments import RUNS, text_columns
from tests.tables import write_rows

pytestmark = pytest.mark.slow
SMALL_KEY = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": "true"}
SHORT = {"num-boost-round": 2, "max-depth": 3, "max-bin": 8, "parties": 3}
WORDS = ["red", "green", "blue", "grey", "ochre", "teal"]


@pytest.mark.parametrize("method", ["pax", "secureboost"])
def test_flowers_simulation_gives_the_model_of_the_local_engine(
    settings, simulate, tmp_path, method
):
    data = write_rows(tmp_path / "text.csv", text_columns())
    given = {"data": str(data), "label": "y", "strategy": method, "allow-export": True}
    given |= {"parties": 3, "align": "ordered", "max-depth": 3, "max-bin": 8, **RUNS[method]}
    local, simulated = run_local(settings(**given)), simulate(settings(**given))
    assert model_in(simulated.path) == model_in(local.path)
    assert len(load(local.path / "model.json", Ensemble).sets) > 3
    assert summary_of(simulated)["engine"] == "simulation"
    assert summary_of(simulated)["metrics"] == summary_of(local)["metrics"]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with started(tmp_path_factory.mktemp("deployment")) as deployment:
        yield deployment


def with_words(nodes, prefix=""):
    """The node configs of these tables, each with a column of text that goes by its first number.

    Parameters
    ----------
    prefix : of the column's name, which ends in the site's where there is one.
    """
    found = {}
    for seed, (name, node) in enumerate(nodes.items()):
        path = Path(node["data"])
        head, *rows = (line.split(",") for line in path.read_text().splitlines())
        columns = dict(zip(head, zip(*rows, strict=True), strict=True))
        steps = np.digitize([float(row[1]) for row in rows], [-1, -0.5, 0, 0.5, 1])
        # What is high at one word and low at the next is no threshold of any order of names.
        words = np.array(WORDS)[(steps * 5 + seed) % 6]
        words[::9] = ""
        columns[prefix + name if prefix else "word"] = words
        found[name] = {**node, "data": write_csv(path.with_name(f"{path.stem}-text.csv"), columns)}
    return found


def across(deployment, method, folder, settings):
    """A run across sites."""
    given = settings_of({**settings, "run-dir": folder})
    wait_for_output(deployment.begin("run", method, "--engine", "federation", *given))
    return folder


def test_pax_across_sites_is_the_model_of_the_local_engine(deployment, tmp_path):
    use_tables(deployment, with_words(same_columns(deployment.folder)))
    local = deployment.locally(tmp_path / "local", {**SHORT, "strategy": "pax"})
    assert model_in(across(deployment, "pax", tmp_path / "across", SHORT)) == model_in(local.path)
    assert len(load(local.path / "model.json", Ensemble).sets) > 0


def part_of(place, name, model):
    """What a site keeps of a model."""
    return without_salt(json.loads((place / "sites" / name / model / PART_FILE).read_text()))


def test_secureboost_across_sites_makes_the_parts_of_the_local_engine(deployment, tmp_path):
    nodes = with_words(same_rows(deployment.folder), "word-")
    # Else it is chance, by the rows that are drawn, whether any word is chosen.
    nodes["insurer"]["drop-columns"], nodes["shop"]["drop-columns"] = "b", "c"
    use_tables(deployment, nodes)
    settings = {**SHORT, **SMALL_KEY}
    local = deployment.locally(tmp_path / "local", {**settings, "strategy": "secureboost"})
    folder = across(deployment, "secureboost", tmp_path / "across", settings)
    there, here = (json.loads(model_in(path))["model_id"] for path in (folder, local.path))
    n_sets = 0
    for name in SITES:
        found = part_of(deployment.folder / name / "home", name, there)
        assert found == part_of(home(), name, here)
        n_sets += len(found["lookup"].get("set_bits", ()))
    assert n_sets > 0
