"""Rows that share an id become one, by rules of a schema."""

import math

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data.columns import Columns
from fedapp.data.predictions import columns_of_frame, read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import Declared, Reader, Roles, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.records.document import load
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble
from tests.federated import summary_of
from tests.tables import write_rows

NAMED = Roles(id_column="id")
RULES = ("count", "sum", "mean", "min", "max", "last")
# Sums of these depend on the order in which they are added.
NUMBERS = st.sampled_from([0.1, 0.2, 0.3, 1e16, -1e16, 3.0, 2**-40, None])
EVENTS = st.lists(st.tuples(st.integers(0, 3), NUMBERS, st.integers(0, 5)), min_size=1, max_size=12)


def aggregated(columns, order_by="", **rules):
    """A table of these columns by one rule a column."""
    declared = tuple(Declared(name, aggregate=rule) for name, rule in rules.items())
    return table_of_frame(pa.table(columns), NAMED, Reader(declared=declared, order_by=order_by))


@pytest.mark.slow
@pytest.mark.by_default("count", "last")
@pytest.mark.parametrize("rule", RULES)
@given(events=EVENTS, seed=st.integers(0, 100))
def test_values_are_those_of_a_slow_reference_in_any_order(rule, events, seed):
    def of(rows):
        ids, numbers, times = map(list, zip(*rows, strict=True))
        columns = {"id": ids, "v": pa.array(numbers, pa.float64()), "t": times}
        table = aggregated(columns, "t" if rule == "last" else "", v=rule, t="max")
        assert table.ids is not None
        assert table.n_read == len(rows)
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


def test_rows_keep_the_order_of_their_first_events():
    table = aggregated({"id": ["c", "a", "c", "b"], "v": [1, 2, 3, 4]}, v="sum")
    assert table.ids is not None
    assert table.ids.tolist() == ["c", "a", "b"]
    assert table.values[:, 0].tolist() == [4, 2, 4]
    text = "4 rows are aggregated to 3, one an id, by the schema"
    assert [note.text(False) for note in table.notes] == [text]


def test_large_tables_are_pandas(tmp_path):
    rng = np.random.default_rng(1)
    frame = pandas.DataFrame({"id": rng.integers(0, 900, 5000), "v": rng.normal(size=5000)})
    frame["w"] = rng.integers(0, 9, 5000).astype(float)
    frame.loc[rng.random(5000) < 0.2, "w"] = np.nan
    columns = {"id": frame["id"], "v": frame["v"], "w": pa.array(frame["w"], from_pandas=True)}
    table = aggregated(columns, v="mean", w="max")
    due = frame.groupby("id", sort=False).agg({"v": "mean", "w": "max"})
    assert table.ids is not None
    assert table.ids.tolist() == due.index.astype(str).tolist()
    np.testing.assert_allclose(table.values, due.to_numpy(np.float32), rtol=1e-6)


def test_kinds_follow_the_rules(tmp_path):
    """Of names only the number or the last, of dates no sum."""
    (tmp_path / "events.csv").write_text(
        "id,kind,when,paid,note\n1,tea,2024-01-02,yes,n1\n1,milk,2024-03-01,no,n2\n"
        "2,tea,2024-02-01,yes,\n1,,2023-12-01,yes,n3\n"
    )
    (tmp_path / "schema.toml").write_text(
        'id = "id"\norder-by = "when"\n'
        '[columns.kind]\naggregate = "last"\n[columns.when]\naggregate = "min"\n'
        '[columns.paid]\naggregate = "mean"\n[columns.note]\naggregate = "count"\n'
    )
    schema = read_schema(tmp_path / "schema.toml")
    table = load_table(tmp_path / "events.csv", schema.roles(), schema.reader())
    assert table.columns == ("kind", "when", "paid", "note")
    assert table.categories == (("milk", "tea"), None, None, None)
    assert table.kinds == ("category", "date", "number", "number")
    days = [
        (np.datetime64(day) - np.datetime64("1970-01-01")).astype(int)
        for day in ("2023-12-01", "2024-02-01")
    ]
    np.testing.assert_allclose(table.values, [[0, days[0], 2 / 3, 3], [1, days[1], 1, 0]])
    # A table to predict is read by the same rules, in the model's order.
    how = {"reader": schema.reader(), "categories": table.categories, "kinds": table.kinds}
    again = read_columns_of(str(tmp_path / "events.csv"), table.columns, NAMED, **how)
    np.testing.assert_equal(again.values, table.values)
    with pytest.raises(DataError, match=r"^id must name the column whose rows the schema aggregat"):
        read_columns_of(str(tmp_path / "events.csv"), table.columns, Roles(), **how)


def test_rows_of_a_request_are_as_they_come():
    """A served row has the features of an id already."""
    reader = Reader(declared=(Declared("v", aggregate="count"),))
    model = Columns.of_model(("v",), (), reader)
    table = columns_of_frame(pa.table({"v": [5.0, 7.0]}), model, Roles())
    assert table.values[:, 0].tolist() == [5, 7]


@pytest.mark.parametrize(
    ("columns", "rules", "rule"),
    [
        (
            {"id": [1, 1], "v": [1, 2], "w": [1, 2]},
            {"v": "sum"},
            r"^columns 'w' must have a rule of the schema where rows share their id, as ",
        ),
        (
            {"id": [1, 1], "v": ["a", "b"]},
            {"v": "sum"},
            r"^column 'v' must be numbers or yes or no for aggregate = \"sum\", got names of categ",
        ),
        (
            {"id": [1, 1], "v": ["2024-01-01", "2024-01-02"]},
            {"v": "mean"},
            r"^column 'v' must be numbers or yes or no for aggregate = \"mean\", got dates",
        ),
        ({"id": [1, 1], "v": ["a", "b"]}, {"v": "min"}, r"aggregate = \"min\", got names"),
        ({"id": [1, None], "v": [1, 2]}, {"v": "sum"}, r"^id column 'id' must have no missing"),
        ({"id": [1, 1], "v": [3e38, 3e38]}, {"v": "sum"}, r"^feature columns must be finite"),
        ({"id": [1, 1], "v": [1e39, -1e39]}, {"v": "sum"}, r"^feature columns must be finite"),
    ],
)
def test_values_without_a_rule_that_fits_are_refused(columns, rules, rule):
    with pytest.raises(DataError, match=rule):
        aggregated(columns, **rules)


@pytest.mark.parametrize(
    ("times", "rule"),
    [
        ([1, None], r"^order-by column 't' must have a value, got 1 of 2 rows"),
        (["a", "b"], r"^order-by column 't' must be numbers or dates, got names of categories"),
    ],
)
def test_an_order_needs_numbers_or_dates(times, rule):
    with pytest.raises(DataError, match=rule):
        aggregated({"id": [1, 1], "v": [1, 2], "t": times}, "t", v="last", t="count")
    with pytest.raises(DataError, match=r"^order-by column 't' must be in the table"):
        aggregated({"id": [1, 1], "v": [1, 2]}, "t", v="last")


def test_labels_have_a_rule_of_their_own_or_none():
    columns = {"id": [1, 1, 2], "v": [1, 2, 3], "y": [0, 1, 0], "w": [1.0, 2.0, 1.0]}
    roles = Roles("y", "id", "w")

    def read(**rules):
        declared = tuple(Declared(name, aggregate=each) for name, each in rules.items())
        return table_of_frame(pa.table(columns), roles, Reader(declared=declared))

    with pytest.raises(DataError, match=r"^columns 'y', 'w' must have a rule of the schema where"):
        read(v="sum")
    table = read(v="sum", y="max", w="sum")
    assert table.labels is not None
    assert table.weights is not None
    assert (table.labels.tolist(), table.weights.tolist()) == ([1, 0], [3, 1])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            '[columns.v]\naggregate = "median"',
            r"columns\.v\.aggregate must be one of .*, got 'medi",
        ),
        (
            '[columns.v]\naggregate = "last"',
            r"order-by must come with aggregate = \"last\", columns",
        ),
        ('order-by = "t"\n[columns.v]\naggregate = "sum"', r"order-by must come .*, no column has"),
        ('[columns.v]\ntype = "drop"\naggregate = "sum"', r"columns\.v\.aggregate must be omitted"),
    ],
)
def test_rules_that_cannot_be_are_refused_with_the_schema(tmp_path, text, rule):
    (tmp_path / "schema.toml").write_text(text + "\n")
    with pytest.raises(ConfigError, match=rf"^schema '.*schema.toml': {rule}"):
        read_schema(tmp_path / "schema.toml")


@pytest.mark.slow
def test_a_model_of_events_is_that_of_the_aggregated_table(settings, tmp_path):
    rng = np.random.default_rng(4)
    people = np.arange(150)
    v, y = rng.normal(size=150).round(3), rng.integers(0, 2, 150)
    events = np.sort(rng.integers(0, 150, 900))
    amounts = (rng.normal(size=900) + y[events]).round(2)
    bank = write_rows(tmp_path / "bank.csv", {"id": people, "v": v, "y": y})
    shop = write_rows(tmp_path / "shop.csv", {"id": events, "amount": amounts})
    frame = pandas.DataFrame({"id": events, "amount": amounts}).groupby("id")["amount"]
    sums = {name: math.fsum(values) for name, values in frame}
    one = {"id": list(sums), "amount": list(sums.values())}
    (tmp_path / "shop.toml").write_text('[columns.amount]\naggregate = "sum"\n')
    given = {"strategy": "secureboost", "label": "y", "id": "id", "parties": 2, "max_depth": 3}
    given |= {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
    given |= {"allow_export": True}
    schema = {"schema": f"shop={tmp_path / 'shop.toml'}"}
    by_rule = run_local(settings(**given, data=f"bank={bank},shop={shop}", **schema))
    done = write_rows(tmp_path / "done.csv", one)
    by_hand = run_local(settings(**given, data=f"bank={bank},shop={done}"))
    models = [load(each.path / "model.json", Ensemble) for each in (by_rule, by_hand)]
    for tree, other in zip(*(model.trees for model in models), strict=True):
        assert tree.tobytes() == other.tobytes()
    matching = summary_of(by_rule)["matching"]
    n_ids = len(sums)
    assert matching["shop"] == {"rows": n_ids, "matched": n_ids, "read": 900}
    assert matching["bank"] == {"rows": 150, "matched": n_ids}
    told = f"900 rows are aggregated to {n_ids}, one an id, by the schema"
    assert any(told in text for text in summary_of(by_rule)["facts"])
