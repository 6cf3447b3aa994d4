"""A table that is read by parts is the same as one that is read whole, or refused in its words."""

import gzip
import io
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.data import large, read, scratch
from fedapp.data.describe import describe
from fedapp.data.large import LargeFrame
from fedapp.data.predictions import read_columns_of
from fedapp.data.read import file_version, load_table, read_frame
from fedapp.data.schema import NO_ROLES, PLAIN, Declared, Reader, Roles
from fedapp.data.table import Table
from fedapp.errors import DataError, FedappError
from fedapp.site.rows import hash_rows
from fedapp.site.table import fingerprint
from fedapp.trees.categories import in_secret_order, names_of
from tests.data import test_doors, test_tables

BY_ID = Reader(declared=(Declared("a", aggregate="sum"), Declared("b", aggregate="last")))
# Values whose types differ between pieces: all have one that only some have, or are text.
MIXED = (
    "1|-0|2.5|",
    "1|0x1F|2",
    "1.5|1.5|1.5|0x1F",
    "1|0|true",
    "7|7|true",
    "1|2|red",
    "|",
    "||||||1",
)
MIXED += (
    "2020-01-01|2020-01-01 10:00|2020-01-01 10:00:00.25|",
    "2020-01-01|5",
    "10:00:00||23:59:59",
)
MIXED += (
    "2020-01-01T10:00Z|2020-01-01T10:00:00.5Z|2020-01-01T10:00",
    'x|"1\n2"|"a,""b"""',
    '5"|6|7"|8',
    'a"|"b\n"|x"y"|"c"d"|""',
)
TEXTS = {
    **{f"read {case}": test_tables.READ[case] for case in test_tables.READ},
    # UTF-16 that is read as UTF-8 has two faults, of which the first one is named.
    **{f"refused {case}": of for case, of in test_tables.REFUSED.items() if case != "UTF-16"},
    **{
        f"mixed {case}": ("a,x,y\n" + "".join(f"{n / 2},{value},{n}\n" for n, value in rows), {})
        for case in MIXED
        for rows in [[*enumerate(case.split("|") * 6)]]
    },
    "aggregated": (
        "id,a,b\n" + "".join(f"{n % 4},{n},{'xyz'[n % 3]}\n" for n in range(20)),
        {"reader": BY_ID, "id_column": "id"},
    ),
    "skipped lines": ("\n# written\n\na,b\n1,2\n3,4\n", {"reader": Reader(skip_lines=3)}),
    "empty lines": ("a\n\n1\r\n\n\n2\n\n\n\n", {}),
    "old line ends": ("a,b\r1,2\r3,4\r", {}),
    "UTF-16": (
        "a,b\n1,\N{EURO SIGN}\n2,\N{EURO SIGN}\n".encode("utf-16"),
        {"reader": Reader(encoding="utf-16")},
    ),
    "names that are equal": ("a,a,b\n" + "1,2,3\n" * 5, {}),
    "columns without names": ("a,,\n" + "1,2,x\n" * 5, {"drop": ("unnamed-2", "unnamed-3")}),
    **{
        f"without rows {case}": (text, {"id_column": "i", "without": ("3", "7"), **more})
        for case, (text, more) in {
            "of a line": ("i,a\n" + "".join(f"{n},{n * n}\n" for n in range(9)), {}),
            "of several lines": (
                "a,i\r\n" + "".join(f'"\r\n{n % 2}",{n}\r\n\r\n' for n in range(9)),
                {},
            ),
            "in UTF-16": (
                ("i,a\n" + "".join(f"{n},\N{EURO SIGN}{n % 3}\n" for n in range(9))).encode(
                    "utf-16"
                ),
                {"reader": Reader(encoding="utf-16")},
            ),
            "with blanks": (
                "".join(f" {n}  {n * n}\n" for n in range(9)),
                {"reader": Reader(delimiter=" ", columns=("i", "a"), header=False)},
            ),
        }.items()
    },
}
SPARSE = {
    "": "".join(f"{n % 2} qid:{n} {1 + n % 5}:-{n} 7:{n / 2}\n" for n in range(20)),
    "queries of some": '1 qid:3 1:2\n2 1:-0.0 # "\n' * 5,
    "empty rows and lines": "1\n\n# of all\n2 4:nan\n0 2:1e-3\n",
    "no entry": "1\n2\n",
    "no line end": "1 1:5\n2 2:5",
    "nothing": "",
    "an unknown column": "1 1:5\n" * 9 + "2 9:5\n",
    "entries in no order": "1 1:5\n" * 9 + "2 2:5 1:3\n",
}
FRAMES = {
    f"{name} {type}": values for name, of in test_doors.READ.items() for type, values in of.items()
}
FRAMES |= test_doors.REFUSED


def outcome(read, *how):
    """What a call returns, or what it raises, by field."""
    try:
        result = read(*how)
    except FedappError as error:
        return [type(error), str(error), getattr(error, "outside", ""), getattr(error, "here", "")]
    if not isinstance(result, Table):
        return result
    values = {field.name: getattr(result, field.name) for field in fields(Table)}
    assert values["values"].dtype == np.float32
    if result.columns:
        values["hashes"] = hash_rows(result, b"key").contents
        values["digest"] = fingerprint({"": result}, b"key")
        values["order"] = in_secret_order(result.values, result.categories, 0, scratch.copied)[0]
        values["order"] = values["order"].tobytes()
        values["turned"] = result.in_order(result.columns[::-1]).values.tobytes()
    # Bits, as of -0 and NaN.
    values["values"] = np.ascontiguousarray(values["values"]).view(np.uint32)
    arrays = {
        name: (v.dtype, v.tolist()) for name, v in values.items() if isinstance(v, np.ndarray)
    }
    return values | arrays


@pytest.fixture
def by_parts(monkeypatch, tmp_path):
    """Calls a function twice: tables are read whole, then by parts; returns both outcomes."""
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))

    def both(read, *how, piece_bytes=16):
        whole = outcome(read, *how)
        with monkeypatch.context() as small:
            small.setattr(scratch, "LARGEST", 0)
            small.setattr(scratch, "BATCH_BYTES", 24)
            small.setattr(large, "PIECE_BYTES", piece_bytes)
            return whole, outcome(read, *how)

    yield both
    folder = tmp_path / "home" / scratch.FOLDER
    assert not folder.exists() or not list(folder.iterdir())


def how_of(case):
    content, *more = TEXTS[case]
    given = next((each for each in more if isinstance(each, dict)), {})
    roles = Roles(**{n: given[n] for n in Roles.__dataclass_fields__ if n in given})
    return content, roles, given.get("reader", PLAIN)


@pytest.mark.parametrize("case", TEXTS)
def test_a_table_by_parts_is_the_table(by_parts, tmp_path, case):
    content, roles, reader = how_of(case)
    path = tmp_path / "rows.csv"
    if isinstance(content, dict):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table(content), path, row_group_size=2)
    else:
        content = content.encode() if isinstance(content, str) else content
        if len(content) % 2:  # half of them
            path = tmp_path / "rows.csv.gz"
            content = gzip.compress(content)
        path.write_bytes(content)
    for size in (1, 40) if len(content) < 10_000 else (len(content) // 9,):
        whole, parts = by_parts(load_table, path, roles, reader, piece_bytes=size)
        assert parts == whole
    whole, parts = by_parts(describe, str(path), roles, reader, piece_bytes=size)
    assert parts == whole
    kinds = by_parts(lambda: type(read_frame(path, roles, reader)), piece_bytes=size)
    kind = kinds[1]
    is_whole = case in ("names that are equal", "columns without names")
    assert isinstance(kind, list) or is_whole == (kind is not LargeFrame)


def test_a_large_text_is_read_whole_only_if_memory_has_room(monkeypatch, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,a\n1,2\n")
    monkeypatch.setattr(scratch, "LARGEST", 7)
    monkeypatch.setattr(read, "free_memory", lambda: 24)
    assert read_frame(path, NO_ROLES).num_rows == 1
    monkeypatch.setattr(read, "free_memory", lambda: 23)
    rule = "memory must have 0.0 GiB free for data file .*, as columns that share their name are "
    with pytest.raises(DataError, match=f"^{rule}read whole, got 0.0 .*: name .* as Parquet$"):
        read_frame(path, NO_ROLES)
    monkeypatch.setattr(scratch, "LARGEST", 8)
    assert read_frame(path, NO_ROLES).num_rows == 1


@pytest.mark.parametrize("case", [case for case in TEXTS if case.startswith("without")])
def test_a_csv_file_without_some_ids_has_all_other_rows(tmp_path, case):
    content, roles, reader = how_of(case)
    path = tmp_path / "rows.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    every, others = (load_table(path, each, reader) for each in (replace(roles, without=()), roles))
    stay = np.flatnonzero(~np.isin(every.ids, roles.without))
    assert others.ids.tolist() == every.ids[stay].tolist()
    assert others.values.tolist() == every.values[stay].tolist()


@pytest.mark.parametrize("case", SPARSE)
def test_a_libsvm_file_by_parts_is_the_table(by_parts, tmp_path, case):
    path = tmp_path / "rows.svm.gz"
    path.write_bytes(gzip.compress(SPARSE[case].encode()))
    n_features = 8 if case == "an unknown column" else 0
    for qid in ("", "qid"):
        roles = Roles(label="y", qid=qid)
        whole, parts = by_parts(load_table, path, roles, Reader(n_features=n_features))
        assert parts == whole


@pytest.mark.parametrize("case", FRAMES)
def test_a_file_and_a_folder_of_any_type_are_the_table(by_parts, tmp_path, case):
    names = ["x", "x.y", "y", "z"]
    frame = pa.Table.from_arrays(
        [FRAMES[case], pa.array(range(12)), pa.array([0, 1] * 6), pa.array([*range(11), None])],
        names,
    )
    for path in (tmp_path / "t.parquet", tmp_path / "t"):
        try:
            write(path, frame)
        except (pa.ArrowException, NotImplementedError):
            pytest.skip("not in Parquet")
        for label in "yxz":
            roles = Roles(label=label, drop_unlabelled=label == "z")
            whole, parts = by_parts(load_table, path, roles)
            assert parts == whole
            if label == "y" and path.suffix:
                single = parts
        if isinstance(single, dict):
            predicted = ("x.y", "x"), NO_ROLES, "", PLAIN
            codes = [names_of(single["categories"], at) for at in (1, 0)], [*single["kinds"][1::-1]]
            whole, parts = by_parts(read_columns_of, str(path), *predicted, *map(tuple, codes))
            assert parts == whole


def write(path, frame):
    """Write a Parquet file, or a folder of three."""
    if path.suffix:
        pq.write_table(frame, path, row_group_size=5)
        return
    path.mkdir()
    (path / "_SUCCESS.parquet").write_text("")
    for number, rows in enumerate(np.array_split(np.arange(frame.num_rows), 3)):
        pq.write_table(frame.slice(rows[0], len(rows)), path / f"part-{number}.parquet")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "t", pa.table({"x": [*range(30)], "y": [0.5, 1.5] * 15}))
    return tmp_path / "t"


def replace_part(path):
    pq.write_table(pa.table({"x": [7] * 10, "y": [0.25] * 10}), path)


def test_a_folder_is_one_table_in_the_order_of_its_files_names(folder):
    (folder / "part-0.parquet").rename(folder / "z.parquet")
    values = load_table(folder, Roles(label="y")).values
    assert values.ravel().tolist() == [*range(10, 30), *range(10)]


@pytest.mark.parametrize("columns", [{"x": [1]}, {"x": [1.5], "y": [0.5]}])
def test_files_of_other_columns_or_types_are_refused(by_parts, folder, columns):
    pq.write_table(pa.table(columns), folder / "part-1.parquet")
    whole, parts = by_parts(load_table, folder)
    assert parts == whole
    rule = f"data folder '{folder}' must have files of the same columns and types, got others"
    assert whole[1:3] == [f"{rule} in 'part-1.parquet'", rule]  # names of files stay here


@pytest.mark.parametrize("name", ["a=1/part-0.parquet", "b.csv"])
def test_a_folder_that_would_be_read_in_part_is_refused(by_parts, folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    whole, parts = by_parts(load_table, folder)
    assert parts == whole
    rule = f"data folder '{folder}' must have .parquet files only, as others are not read"
    assert whole[1:3] == [f"{rule}, got '{name.partition('/')[0]}'", rule]


def test_a_damaged_file_is_refused(by_parts, folder):
    content = bytearray((folder / "part-1.parquet").read_bytes())
    content[4:40] = bytes(36)
    (folder / "part-1.parquet").write_bytes(content)
    whole, parts = by_parts(load_table, folder)
    assert parts == whole
    assert f"data file '{folder}' must be a well-formed parquet file" in whole[1]


def test_a_table_that_changes_while_it_is_read_is_refused(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(scratch, "LARGEST", 0)
    frame = read_frame(folder, NO_ROLES)
    frame.column(0)
    replace_part(folder / "part-1.parquet")
    with pytest.raises(DataError, match="must stay as it is while it is read"):
        frame.column(1)


def test_a_folders_version_is_that_of_all_its_files(folder):
    changes = [
        lambda: replace_part(folder / "part-1.parquet"),
        lambda: (folder / "part-1.parquet").rename(folder / "part-3.parquet"),
        lambda: (folder / "part-2.parquet").unlink(),
        lambda: replace_part(folder / "part-7.parquet"),
    ]
    versions = [file_version(folder)]
    for change in changes:
        change()
        versions.append(file_version(folder))
    assert len({*versions}) == 5
    (folder / "_SUCCESS").write_text("")
    assert file_version(folder) == versions[-1]
    assert (file_version(folder / "none"), file_version(folder.parent)) == ((), ())


def test_rows_without_some_ids_are_those_of_the_table(by_parts, folder):
    roles = Roles(id_column="x", label="y", without=("3", "17"))
    frame = pa.table({"x": [*range(30)], "y": [0, 1] * 15, "a": np.arange(30) / 2})
    for number in range(3):
        pq.write_table(frame.slice(10 * number, 10), folder / f"part-{number}.parquet")
    whole, parts = by_parts(load_table, folder, roles)
    assert parts == whole
    assert len(whole["values"][1]) == 28


@pytest.mark.parametrize(
    "text", ['a,b\n1,"x\ny"\n2,"\n"\n' * 5, 'a\r"\r"\r1\r2\r', "a\n1\n2", "a", ""]
)
def test_pieces_are_whole_lines_and_end_outside_quotes(text, monkeypatch):
    for size in (1, 3, 16):
        monkeypatch.setattr(large, "PIECE_BYTES", size)
        pieces = [*large.pieces_of(io.BytesIO(text.encode()), ",", 0)]
        assert b"".join(pieces) == text.encode()
        assert all(piece.endswith((b"\n", b"\r")) for piece in pieces[:-1])
        assert not any(piece.count(b'"') % 2 for piece in pieces)
    assert len(pieces) > 1 or len(text) < 20


def test_a_quote_in_lines_that_are_skipped_opens_no_field(monkeypatch):
    monkeypatch.setattr(large, "PIECE_BYTES", 4)
    lines = ['"x\n', "a\n", "1\n", "2\n", "3\n", "4\n"]
    pieces = [*large.pieces_of(io.BytesIO("".join(lines).encode()), ",", 1)]
    assert b"".join(pieces).decode() == "".join(lines)
    assert len(pieces) > 1
