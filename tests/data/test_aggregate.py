"""Rows that share an id become one, by rules of a schema."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data.columns import Columns
from fedapp.data.predictions import columns_of_frame, read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import Declared, Reader, Roles, read_schema
from fedapp.errors import DataError
from fedapp.runs.local import run_local
from tests.federated import summary_of
from tests.tables import write_rows

NAMED = Roles(id_column="id")
RULES = ("count", "sum", "mean", "min", "max", "last")
# Sums of these depend on the order in which they are added.
NUMBERS = st.sampled_from([0.1, 0.2, 0.3, 1e16, -1e16, 3.0, 2**-40, None])
EVENTS = st.lists(st.tuples(st.integers(0, 3), NUMBERS, st.integers(0, 5)), min_size=1, max_size=12)


def aggregated(columns, order_by="", roles=NAMED, **rules):
    """A table of these columns by one rule a column."""
    declared = tuple(Declared(name, aggregate=rule) for name, rule in rules.items())
    return table_of_frame(pa.table(columns), roles, Reader(declared=declared, order_by=order_by))


@given(rule=st.sampled_from(RULES), events=EVENTS, seed=st.integers(0, 100))
def test_values_are_those_of_a_slow_reference_in_any_order(rule, events, seed):
    def of(rows):
        ids, numbers, times = map(list, zip(*rows, strict=True))
        columns = {"id": ids, "v": pa.array(numbers, pa.float64()), "t": times}
        table = aggregated(columns, "t" if rule == "last" else "", v=rule, t="max")
        assert table.n_read == len(rows)
        assert table.ids.tolist() == [*map(str, dict.fromkeys(ids))]  # as they come first
        return dict(zip(table.ids.tolist(), table.values[:, 0].tolist(), strict=True))

    due = {}
    for name in dict.fromkeys(str(each[0]) for each in events):
        rows = [each for each in events if str(each[0]) == name]
        values = [value for _, value, _ in rows if value is not None]
        reference = {
            "count": len(values),
            "sum": math.fsum(values) if values else math.nan,
            "mean": math.fsum(values) / len(values) if values else math.nan,
            "min": min(values, default=math.nan),
            "max": max(values, default=math.nan),
            # Of equal times the later row of the table.
            "last": max(enumerate(rows), key=lambda one: (one[1][2], one[0]))[1][1],
        }[rule]
        due[name] = float(np.float32(math.nan if reference is None else reference))
    np.testing.assert_equal(of(events), due)
    if rule != "last":  # only of equal times does the order of rows count
        turned = np.random.default_rng(seed).permutation(len(events))
        np.testing.assert_equal(of([events[row] for row in turned]), due)


def test_kinds_follow_the_rules(tmp_path):
    """Of names only the number or the last, of dates no sum."""
    (path := tmp_path / "events.csv").write_text(
        "id,kind,when,paid,note\n1,tea,2024-01-02,yes,n1\n1,milk,2024-03-01,no,n2\n"
        "2,tea,2024-02-01,yes,\n1,,2023-12-01,yes,n3\n"
    )
    (tmp_path / "schema.toml").write_text(
        'id = "id"\norder-by = "when"\n'
        '[columns.kind]\naggregate = "last"\n[columns.when]\naggregate = "min"\n'
        '[columns.paid]\naggregate = "mean"\n[columns.note]\naggregate = "count"\n'
    )
    schema = read_schema(tmp_path / "schema.toml")
    table = load_table(path, schema.roles(), schema.reader())
    assert table.columns == ("kind", "when", "paid", "note")
    assert table.categories == (("milk", "tea"), None, None, None)
    assert table.kinds == ("category", "date", "number", "number")
    days = np.array(["2023-12-01", "2024-02-01"], "M8[D]").astype(int)
    np.testing.assert_allclose(table.values, [[0, days[0], 2 / 3, 3], [1, days[1], 1, 0]])
    # A table to predict is read by the same rules, in the model's order; a served row has them.
    how = {"reader": schema.reader(), "categories": table.categories, "kinds": table.kinds}
    again = read_columns_of(str(path), table.columns, NAMED, **how)
    np.testing.assert_equal(again.values, table.values)
    with pytest.raises(DataError, match=r"^id must name the column whose rows the schema aggregat"):
        read_columns_of(str(path), table.columns, Roles(), **how)
    model = Columns.of_model(("v",), (), Reader(declared=(Declared("v", aggregate="count"),)))
    served = columns_of_frame(pa.table({"v": [5.0, 7.0]}), model, Roles())
    assert served.values[:, 0].tolist() == [5, 7]


ONE = {"id": [1, 1]}
NUMBER_OR_FLAG = r"^column 'v' must be numbers or yes or no for aggregate = "
WITH_TIME = {"v": "last", "t": "count"}


@pytest.mark.parametrize(
    ("columns", "rules", "rule"),
    [
        (
            {"v": [1, 2], "w": [1, 2]},
            {"v": "sum"},
            r"^columns 'w' must have a rule of the schema where rows share their id, as ",
        ),
        ({"v": ["a", "b"]}, {"v": "sum"}, NUMBER_OR_FLAG + '"sum", got names of categ'),
        ({"v": ["a", "b"]}, {"v": "min"}, r"aggregate = \"min\", got names"),
        ({"v": [3e38, 3e38]}, {"v": "sum"}, r"^feature columns must be finite"),
        (
            {"v": [1, 2], "t": [1, None]},
            WITH_TIME,
            r"^order-by column 't' must have a value, got 1 of 2 rows",
        ),
        (
            {"v": [1, 2], "t": ["a", "b"]},
            WITH_TIME,
            r"^order-by column 't' must be numbers or dates, got names of categories",
        ),
        ({"v": [1, 2]}, {"v": "last"}, r"^order-by column 't' must be in the table"),
    ],
)
def test_values_without_a_rule_that_fits_are_refused(columns, rules, rule):
    with pytest.raises(DataError, match=rule):
        aggregated(ONE | columns, "t" if "last" in rules.values() else "", **rules)


def test_labels_have_a_rule_of_their_own_or_none():
    columns = {"id": [1, 1, 2], "v": [1, 2, 3], "y": [0, 1, 0], "w": [1.0, 2.0, 1.0]}
    roles = Roles("y", "id", "w")
    with pytest.raises(DataError, match=r"^columns 'y', 'w' must have a rule of the schema where"):
        aggregated(columns, roles=roles, v="sum")
    table = aggregated(columns, roles=roles, v="sum", y="max", w="sum")
    assert (table.labels.tolist(), table.weights.tolist()) == ([1, 0], [3, 1])


def test_a_run_says_how_many_events_are_rows(vertical, tmp_path):
    rng = np.random.default_rng(4)
    y, events = rng.integers(0, 2, 150), np.sort(rng.integers(0, 150, 900))
    bank = {"id": np.arange(150), "v": rng.normal(size=150).round(3), "y": y}
    shop = {"id": events, "amount": (rng.normal(size=900) + y[events]).round(2)}
    files = [write_rows(tmp_path / f"{n}.csv", each) for n, each in enumerate((bank, shop))]
    (tmp_path / "shop.toml").write_text('[columns.amount]\naggregate = "sum"\n')
    given = {"data": f"bank={files[0]},shop={files[1]}", "schema": f"shop={tmp_path / 'shop.toml'}"}
    summary = summary_of(run_local(vertical(**given, label="y", id="id", align="psi")))
    n_ids = len({*events.tolist()})
    assert summary["matching"]["shop"] == {"rows": n_ids, "matched": n_ids, "read": 900}
    assert summary["matching"]["bank"] == {"rows": 150, "matched": n_ids}
    told = f"900 rows are aggregated to {n_ids}, one an id, by the schema"
    assert any(told in text for text in summary["facts"])
