"""Schemas: what they say of a table, and the rules by which rows that share an id become one."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data.columns import Columns
from fedapp.data.describe import describe, schema_text
from fedapp.data.predictions import columns_of_frame, read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import Declared, Reader, Roles, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.runs.local import run_local
from fedapp.site.settings import SiteConfig, site_config, table_settings
from fedapp.site.table import read_table
from tests.federated import summary_of
from tests.tables import write_rows

NAN = np.nan


def config_of(folder, schema, rows="", **settings):
    """A site with a schema for its rows.csv."""
    (folder / "rows.toml").write_text(schema)
    if rows:
        (folder / "rows.csv").write_text(rows)
    given = {"data": str(folder / "rows.csv"), "schema": str(folder / "rows.toml"), **settings}
    return SiteConfig("bank", **table_settings(given))


COLUMN = "[columns.a]\n"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("separator = ", "schema '.*rows.toml' must be TOML"),
        ("seperator = 'tab'", "/rows.toml': seperator is not a field of a schema"),
        ("separator = 'dash'", "/rows.toml': separator must be one of '', 'comma', .* got 'dash'"),
        ("header = 'no'", "/rows.toml': header must be true or false, got 'no'"),
        ("encoding = 'latin-99'", "/rows.toml': encoding must be one that Python knows"),
        ("names = ['a', 'a']", "/rows.toml': names must be distinct"),
        ("skip-lines = -1", "/rows.toml': skip-lines must be >= 0, got -1"),
        (COLUMN + "type = 'text'", r"columns.a.type must be one of .*, got 'text'"),
        (COLUMN + "type = 'ordinal'", "columns.a.order must name the values from the lowest"),
        (
            COLUMN + "type = 'number'\ncategories = ['x']",
            'columns.a.categories needs type = "category", got "number"',
        ),
        (
            COLUMN + "type = 'category'\ncategories = ['x', 'x']",
            "columns.a.categories must list every name once",
        ),
        (COLUMN + "name = 'b'\n[columns.b]", "columns must have distinct names, got 'b' twice"),
        # Rules by which rows that share an id become one
        (COLUMN + "aggregate = 'median'", r"columns\.a\.aggregate must be one of .*, got 'medi"),
        (COLUMN + "aggregate = 'last'", 'order-by must come with aggregate = "last", columns'),
        ("order-by = 't'\n" + COLUMN + "aggregate = 'sum'", "order-by must come .*, no column has"),
        (COLUMN + "type = 'drop'\naggregate = 'sum'", r"columns\.a\.aggregate must be omitted"),
    ],
)
def test_a_malformed_schema_is_refused(tmp_path, schema, message):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, schema)


def test_a_schema_that_is_not_there_and_columns_that_are_not_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"schema '.*no\.toml' must be a file that can be read"):
        read_schema(tmp_path / "no.toml")
    config = config_of(tmp_path, "[columns.amuont]\ntype = 'number'", "amount,b\n1,2\n")
    with pytest.raises(DataError, match=r"columns of the schema .* got 'amuont' .*mean amount\?"):
        read_table(config)


@pytest.mark.parametrize(
    ("type", "last", "message"),
    [
        ("number", "9", "1 of 3 values of 'b' is not a number, first 'x' in line 3"),
        ("boolean", "no", "2 of 3 values of 'b' are not booleans, first '7' in line 2"),
        ("date", "no", "3 of 3 values of 'b' are not dates, first '7' in line 2"),
    ],
)
def test_values_of_another_type_than_declared_are_refused(tmp_path, type, last, message):
    config = config_of(tmp_path, f"[columns.b]\ntype = '{type}'", f"a,b\n1,7\n2,x\n3,{last}\n")
    with pytest.raises(DataError, match=message):
        read_table(config)


def test_a_schema_says_what_columns_are(tmp_path):
    config = config_of(
        tmp_path,
        """
        decimal = ","
        [columns.amt]
        name = "amount"
        missing = [-9]
        [columns.grade]
        type = "ordinal"
        order = ["low", "high"]
        [columns.town]
        type = "category"
        categories = ["Rome", "Oslo"]
        codes = {1 = "Oslo", 2 = "Rome", 3 = "Bonn"}
        [columns.paid]
        missing = ["none"]
        [columns.free]
        type = "drop"
        """,
        "amt;grade;town;paid;day;free\n"
        "1,5;low;1;Y;2024-01-01;u\n-9;high;2;N;1970-01-02 12:00;v\n2;mid;3;;;w\n",
        **{"drop-columns": "paid"},
    )
    table = read_table(config)
    assert table.columns == ("amount", "grade", "town", "day")
    expected = [[1.5, 0, 1, 19723], [NAN, 1, 0, 1.5], [2, NAN, NAN, NAN]]
    assert np.array_equal(table.values, expected, equal_nan=True)
    assert table.categories == (None, None, ("Rome", "Oslo"), None)
    assert table.given == {"town"}
    told = [note.text(shares_names=True) for note in table.notes]
    assert any("'town' has 1 values that are none of its categories" in note for note in told)
    assert any("'grade' has 1 values that are none" in note for note in told)


def test_a_schema_that_was_written_reads_the_table_alike(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("i,c,d,b\n1,x,2024-05-01,yes\n2,y,2024-05-02,no\n3,x,,\n")
    described = describe(str(path), Roles(), Reader())
    plain, declared = load_table(path), read_table(config_of(tmp_path, schema_text(described)))
    assert np.array_equal(plain.values, declared.values, equal_nan=True)
    assert plain.categories == declared.categories
    types = [column.type for column in described.columns]
    assert types == ["number", "category", "date", "boolean"]


def test_a_node_config_names_a_schema_of_its_own(tmp_path):
    config_of(tmp_path, "names = ['a', 'y']\nlabel = 'y'\n", "1,u\n2,v\n")
    node = {"data": str(tmp_path / "rows.csv"), "schema": str(tmp_path / "rows.toml")}
    table = read_table(site_config({"name": "bank", **node}, {"schema": "not-read.toml"}))
    assert table.columns == ("a",)
    assert table.labels.tolist() == ["u", "v"]


# Rows that share an id become one

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
