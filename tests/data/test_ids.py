"""Ids of several columns: one text a row, other parts another text."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedapp.data.read import load_table, read_ids, table_of_frame
from fedapp.data.schema import PLAIN, Roles, joined_id, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.runs.local import run_local
from fedapp.site.rows_to_predict import Query
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.table import row_ids
from tests.federated import summary_of
from tests.tables import write_rows

BOTH = Roles(id_column="branch,customer")
# Of the letters that separate and mark, so that most pairs could be confused.
PART = st.text(st.sampled_from("a,\\b"), min_size=1, max_size=4)
PARTS = st.lists(PART, min_size=2, max_size=3)


def ids_of(branches, customers, path=None):
    """Ids of a frame, or of a CSV file at a path."""
    columns = {"branch": branches, "customer": customers, "x": range(len(branches))}
    if path is None:
        table = table_of_frame(pa.table(columns), BOTH)
    else:
        quoted = {name: [f'"{value}"' for value in values] for name, values in columns.items()}
        table = load_table(write_rows(path, quoted), BOTH)
    assert table.columns == ("x",)
    return table.ids.tolist()


@example(["a,b", "c"], ["a", "b,c"])
@example(["a,b", "c"], ["a\\", "b", "c"])
@given(PARTS, PARTS)
def test_other_parts_are_another_id(first, second):
    assert (joined_id(first) == joined_id(second)) == (first == second)


@given(st.lists(st.tuples(PART, PART), min_size=1, max_size=6))
def test_a_table_joins_parts_like_single_rows(pairs):
    branches, customers = map(list, zip(*pairs, strict=True))
    assert ids_of(branches, customers) == [joined_id(pair) for pair in pairs]


def test_parts_are_spelled_as_single_ids_are_and_may_be_in_one_column(tmp_path):
    due = ["7,é", "8,b c", "9,007"]
    assert ids_of([7.0, 8.0, 9.0], ["é", " b c ", "007"]) == due
    assert ids_of([7, 8, 9], ["e\u0301", "b c", "007"]) == due
    assert ids_of([" 7", "8.0", "9"], ["é", "b c", "007"], tmp_path / "a.csv") == due
    assert ids_of(["a,b", "a"], ["c", "b,c"], tmp_path / "b.csv") == ["a\\,b,c", "a,b\\,c"]
    joined = pa.table({"key": ["north,7", "south,7"], "x": [1, 2]})
    one = table_of_frame(joined, Roles(id_column="key"))
    assert one.ids.tolist() == ids_of(["north", "south"], [7, 7])


@pytest.mark.parametrize(
    ("branches", "customers", "rule"),
    [
        (["a", None], ["1", "2"], r"^id column 'branch,customer' must have no missing values, got"),
        (["a", "a"], [0.5, 2.0**54], r"^id column 'customer' must be .* beyond 2\^53"),
    ],
)
def test_rows_without_a_part_are_refused(branches, customers, rule):
    with pytest.raises(DataError, match=rule):
        ids_of(branches, customers)
    with pytest.raises(DataError, match=r"^id column 'customer' must be in the table"):
        table_of_frame(pa.table({"branch": branches, "x": [1, 2]}), BOTH)


def test_repeated_ids_are_those_of_all_parts(tmp_path):
    path = write_rows(tmp_path / "a.csv", {"branch": "aab", "customer": "121", "x": [1, 2, 3]})
    config = site_config({"name": "a", "data": str(path), "id": "branch,customer"}, {})
    table = load_table(path, config.roles)
    assert row_ids(table, config, True).tolist() == ["a,1", "a,2", "b,1"]
    write_rows(path, {"branch": "aaa", "customer": "122", "x": [1, 2, 3]})
    way = r"got 2 rows of 3 that share one: rules of a schema aggregate them, as aggregate = "
    with pytest.raises(DataError, match=rf"^id column 'branch,customer' must be unique .*{way}"):
        row_ids(load_table(path, config.roles), config, True)


def test_rows_are_left_out_by_all_parts_of_their_id(tmp_path):
    (path := tmp_path / "rows.csv").write_text('branch,customer,v\na,"b,c",1\n"a,b",c,2\na,x,3\n')
    (gone := tmp_path / "gone.csv").write_text('customer,branch\n"b,c",a\nx,\n')
    without = read_ids(str(gone), "branch,customer")
    assert without == ("a,b\\,c",)
    table = load_table(path, Roles(id_column="branch,customer", without=without))
    assert table.values[:, 0].tolist() == [2.0, 3.0]


def test_a_schema_lists_the_columns_and_a_database_needs_one(tmp_path):
    for number, text in enumerate(('id = ["branch", "customer"]', 'id = "branch, customer"')):
        (path := tmp_path / f"{number}.toml").write_text(text + "\n")
        assert {name for _, name in read_schema(path).roles().columns()} == {"branch", "customer"}
    rows = {"predict_data": f"sqlite:///{tmp_path / 'rows.db'}", "predict_ids": "SELECT id FROM t"}
    query = "SELECT * FROM t WHERE id IN :ids"
    query = Query(SiteConfig("shop", "rows.csv", **rows, predict_query=query))
    rule = r"^id must be one column where rows come from a database"
    with pytest.raises(ConfigError, match=rule):
        query.bound_ids("branch,customer", PLAIN)


def test_parties_match_rows_by_several_columns(vertical, tmp_path):
    """The same customer numbers in two branches are others."""
    rng = np.random.default_rng(3)
    v, w = rng.normal(size=(2, 120)).round(3)
    ids = {"branch": np.repeat(["a", "b"], 60), "customer": np.tile(np.arange(60), 2)}
    rows = rng.permutation(120)[:100]
    bank = write_rows(tmp_path / "bank.csv", {**ids, "v": v, "y": (v + w > 0).astype(int)})
    shop = {name: values[rows] for name, values in {**ids, "w": w}.items()}
    given = {"data": f"bank={bank},shop={write_rows(tmp_path / 'shop.csv', shop)}", "label": "y"}
    given |= {"id": "branch,customer", "align": "psi"}
    assert sum(summary_of(run_local(vertical(**given)))["matched_rows"].values()) == 100
