"""Every method trains on every table of a few rows, or says why it does not."""

import math

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import FedappError
from fedapp.runs.local import run_local
from tests.contract.test_contract import trains
from tests.tables import write_rows

CELLS = {
    "numbers": (-1.0, 0.0, 0.5, 2.0, math.nan),
    "constant": (3.0,),
    "categories": ("Bern", "Oslo", "Rome", math.nan),
}
LABELS = {
    "binary:logistic": (0, 1),
    "multi:softprob": (0, 1, 2),
    "reg:squarederror": (0.0, 1.0, 2.0),
}
# Before its trees are of the depth that it may have, a forest has no node that can be split.
STOPS_GROWING = (
    {
        "a": [0.637, 0.017, 0.607, 0.935, 0.857, 0.176, 0.3, 0.124, 0.615, 0.981],
        "b": [0.27, 0.813, 0.729, 0.816, 0.034, 0.863, 0.423, 0.671, 0.384, 0.686],
        "c": [0.041, 0.913, 0.544, 0.003, 0.73, 0.541, 0.028, 0.647, 0.997, 0.65],
        "y": [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0],
    },
    {
        "objective": "reg:squarederror",
        "parties": 2,
        "depth": 0,
        "seed": 1,
        "test_fraction": 0.0,
        "valid_fraction": 0.0,
    },
)


@st.composite
def tiny_runs(draw):
    """A table of 2 to 12 rows, which may have weights, and settings of a run on it."""
    n_rows, objective = draw(st.integers(2, 12)), draw(st.sampled_from(sorted(LABELS)))

    def column(cells):
        return draw(st.lists(st.sampled_from(cells), min_size=n_rows, max_size=n_rows))

    kinds = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=4))
    table = {f"c{index}": column(CELLS[kind]) for index, kind in enumerate(kinds)}
    given = {
        "objective": objective,
        "parties": draw(st.integers(1, 3)),
        "depth": draw(st.sampled_from((0, 2))),
        "seed": draw(st.integers(0, 99)),
        "test_fraction": draw(st.sampled_from((0.0, 0.3))),
        "valid_fraction": draw(st.sampled_from((0.0, 0.3))),
    }
    if draw(st.booleans()):
        table["w"] = column((0.0, 0.5, 1.0, 3.0))
        given["weight"] = "w"
    return {**table, "y": column(LABELS[objective])}, given


@pytest.mark.by_default("horizontal-forest", "cyclic", "federated-forest, encoded")
@trains
@example(STOPS_GROWING)
@examples(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tiny=tiny_runs())
def test_a_tiny_table_trains_or_is_refused(made, tmp_path, name, tiny):
    table, given = tiny
    data = write_rows(tmp_path / "tiny.csv", table)
    refusal = ""
    try:
        run_local(made(name, data=str(data), **given))
    except FedappError as error:
        refusal = str(error)
    # What a party did not foresee is in its own log, and its error says so.
    assert "the site's own log" not in refusal
