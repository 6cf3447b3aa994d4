import bz2
import gzip
import hashlib
import io
import os
import urllib.request
import warnings
from email.message import Message
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest

from fedapp.data import datasets
from fedapp.data.datasets import DataFile, DataSet, dataset_names, fetch, find_dataset, read_source
from fedapp.data.schema import Reader, Roles
from fedapp.errors import ConfigError, DataError

CONTENT = b"row,size,city,y\n1,5,Rome,u\n2,6,Bern,v\n3,7,,u\n"
URL = "https://data.example/tiny.csv"

needs_files = pytest.mark.usefixtures("real_data")
LARGE = ("kddcup99", "cod-rna-test", "ijcnn1-test")  # seconds to read


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDAPP_DATA", raising=False)
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "data"


@pytest.fixture
def tiny(monkeypatch):
    def register(url=URL, stored=b"as it was stored", **rest):
        file = DataFile("tiny.csv.gz", sha256(stored), sha256(CONTENT), url)
        dataset = DataSet("binary", (3, 2), "rows", "here", (file,), "y", ("row",), **rest)
        monkeypatch.setitem(datasets.REGISTRY, "tiny", dataset)

    register()
    return register


@pytest.fixture
def downloads(monkeypatch):
    served = {}

    class Reply(io.BytesIO):
        headers = Message()

    def urlopen(url, timeout):
        if url not in served:
            raise URLError("no route")
        return Reply(served[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return served


@pytest.fixture
def run():
    with warnings.catch_warnings():
        # typer imports a name that click is about to drop.
        warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
        from typer.testing import CliRunner

        from fedapp.commands.data import data_app

    return lambda *words: CliRunner().invoke(data_app, list(words))


def put(folder, content, name="tiny.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    "name", ["breast-cancer", "digits", "diabetes", "wine", "diabetes-clinics"]
)
def test_built_in_sets_have_their_shape(name):
    table = read_source(name)
    assert table.values.shape == datasets.BUILT_IN[name].shape
    assert len(table.columns) == table.values.shape[1]
    assert table.labels.dtype == np.float64


def test_a_group_is_kept_out_of_the_features():
    table = read_source("diabetes", Roles(partition="sex"))
    assert "sex" not in table.columns
    assert table.partitions is not None
    assert len(np.unique(table.partitions)) == 2


def test_the_clinics_of_a_built_in_set_have_thirds_of_its_rows_by_body_mass():
    table = read_source("diabetes-clinics", Roles(partition="clinic"))
    diabetes = read_source("diabetes")
    np.testing.assert_array_equal(table.values, diabetes.values)
    masses = table.values[:, table.columns.index("bmi")]
    clinics = [masses[table.partitions == name] for name in ("light", "medium", "heavy")]
    assert [len(rows) for rows in clinics] == pytest.approx([442 / 3] * 3, abs=8)
    ends = [(rows.min(), rows.max()) for rows in clinics]
    assert ends[0][1] < ends[1][0] <= ends[1][1] < ends[2][0]


@pytest.mark.parametrize(("name", "pack"), [("tiny.csv", bytes), ("tiny.csv.gz", gzip.compress)])
def test_a_file_is_known_by_its_content(cache, tiny, name, pack):
    put(cache, pack(CONTENT), name)
    table = read_source("tiny")
    assert table.columns == ("size", "city")
    assert table.labels.tolist() == ["u", "v", "u"]


def test_a_file_is_known_as_it_is_stored(cache, tiny):
    stored = gzip.compress(CONTENT.replace(b"Rome", b"Oslo"))
    tiny(stored=stored)
    put(cache, stored, "tiny.csv.gz")
    assert read_source("tiny", Roles(partition="city")).partitions is not None


def test_the_shared_folder_comes_before_the_cache(cache, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path / "shared"))
    put(cache, b"damaged")
    put(tmp_path / "shared", CONTENT)
    assert read_source("tiny").n_rows == 3


def test_columns_of_a_set_are_features_groups_or_dropped(cache, tiny):
    put(cache, CONTENT)
    # Text is ranked, and missing text stays missing.
    assert np.array_equal(read_source("tiny").values[:, 1], [1, 0, np.nan], equal_nan=True)
    by_city, by_row = (read_source("tiny", Roles(partition=name)) for name in ("city", "row"))
    assert by_city.columns == ("size",)
    assert by_city.partitions.tolist() == ["Rome", "Bern", "missing"]
    assert by_row.partitions.tolist() == ["1", "2", "3"]  # a column that the set drops
    assert read_source("tiny", Roles(drop=("city",), label="y")).columns == ("size",)


def test_a_reader_names_columns_and_skips_lines(cache, tiny):
    tiny(reader=Reader(skip_lines=2, columns=("row", "size", "city", "y")))
    put(cache, CONTENT)
    assert read_source("tiny").n_rows == 2


def test_another_label_than_the_sets_own_is_refused():
    with pytest.raises(ConfigError, match=r"label must be 'target' or empty .* 'wine', got 'hue'"):
        read_source("wine", Roles(label="hue"))


def test_a_file_is_read_where_no_set_has_the_name(tmp_path):
    path = put(tmp_path, b"a,y\n1,2\n", "rows.csv")
    assert read_source(str(path), Roles(label="y")).columns == ("a",)


def test_an_unknown_source_is_refused_as_typed():
    rule = "data must be a built-in name, a registry name or an existing file, got"
    with pytest.raises(ConfigError, match=f"{rule} 'win'; close matches: wine"):
        read_source("win")
    with pytest.raises(ConfigError, match=f"{rule} '/private/no.csv'$"):
        read_source("/private/no.csv")
    with pytest.raises(ConfigError, match=r"^data must be a file, got the folder '.*/data'$"):
        read_source(str(Path(__file__).parent))
    with pytest.raises(ConfigError, match=r"data set must be a built-in name .*, got 'wino'"):
        find_dataset("wino")


def test_a_file_that_is_not_here_is_refused(cache, tiny):
    with pytest.raises(DataError, match=r"\$FEDAPP_DATA .* cache, .*`fedapp data fetch tiny`"):
        read_source("tiny")
    tiny(url="")
    with pytest.raises(DataError, match="no public copy of this exact file; put it into"):
        read_source("tiny")


def test_a_file_with_other_content_is_refused(cache, tiny):
    put(cache, b"damaged")
    with pytest.raises(DataError, match=r"tiny.csv' must have content of sha256 .*, got"):
        read_source("tiny")
    put(cache, b"damaged", "tiny.csv.gz")
    with pytest.raises(DataError, match=r"tiny.csv.gz' must unpack, got BadGzipFile"):
        read_source("tiny")


@pytest.mark.parametrize(
    ("suffix", "kept", "pack"),
    [("", "", bytes), (".gz", ".gz", gzip.compress), (".bz2", "", bz2.compress)],
)
def test_a_fetched_file_is_kept_plain_or_with_gzip(cache, tiny, downloads, suffix, kept, pack):
    tiny(url=URL + suffix)
    downloads[URL + suffix] = pack(CONTENT)
    seen = []
    path = fetch("tiny", lambda done, total: seen.append((done, total)))
    assert path == cache / f"tiny.csv{kept}"
    assert seen == [(len(pack(CONTENT)), 0)]
    assert os.listdir(cache) == [path.name]
    assert read_source("tiny").n_rows == 3


def test_a_file_that_is_here_is_not_fetched(cache, tiny, downloads):
    path = put(cache, CONTENT)
    assert fetch("tiny") == path


def test_a_failed_download_leaves_nothing(cache, tiny, downloads):
    with pytest.raises(DataError, match=r"download of 'tiny.csv.gz' must succeed, got .*no route"):
        fetch("tiny")
    downloads[URL] = b"damaged"
    with pytest.raises(DataError, match="must have content of sha256"):
        fetch("tiny")
    assert os.listdir(cache) == []


def test_what_cannot_be_fetched_is_refused(cache, tiny):
    with pytest.raises(ConfigError, match=r"must be one with files, got 'wine' \(built-in\)"):
        fetch("wine")
    tiny(url="")
    with pytest.raises(DataError, match=r"no public copy of this exact file; put it into \$FEDAPP"):
        fetch("tiny")
    tiny(url="http://data.example/tiny.csv")
    with pytest.raises(DataError, match=r"url must start with https://, got http://data.example"):
        fetch("tiny")


def test_every_published_file_is_fetched_over_https():
    files = [file for dataset in datasets.REGISTRY.values() for file in dataset.files]
    assert {file.name for file in files if not file.url} == {
        "cod-rna.libsvm.gz",
        "cod-rna-test.libsvm.gz",
        "airline-delayed-2008-01.csv.gz",
    }
    assert all(
        file.url.startswith("https://raw.githubusercontent.com/") for file in files if file.url
    )


def test_list_says_where_a_set_lies(cache, tiny, run):
    put(cache, CONTENT)
    lines = run("list").output.splitlines()
    where = {words[1]: words[-2] for words in map(str.split, lines) if len(words) > 5}
    assert where["wine"] == "built-in"
    assert where["tiny"] == "cache"
    assert where["a9a"] == "here"


def test_describe_counts_rows_columns_and_labels(tmp_path, run):
    path = put(tmp_path, b"a,[b],y\n1,2,u\n3,,u\n5,2,v\n", "rows.csv")
    result = run("describe", str(path), "--label", "y")
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()
    ]
    assert result.exit_code == 0
    assert "3 rows, 2 feature columns" in result.output
    assert ["a", "number", "0", "3", "1 .. 5", "1"] in [line[:6] for line in cells]
    assert ["[b]", "number", "1", "1", "2 .. 2", "2"] in [line[:6] for line in cells]
    assert ["u", "2", "66.67%"] in cells


def test_fetch_prints_where_the_file_is(cache, tiny, run, downloads):
    downloads[URL] = CONTENT
    assert run("fetch", "tiny").output.strip() == str(cache / "tiny.csv")


def test_an_error_passes_through_a_command(run):
    with pytest.raises(ConfigError, match="got 'wino'"):
        raise run("describe", "wino").exception


LABEL_COUNTS = {
    "default-credit": {0.0: 23364, 1.0: 6636},
    "give-me-some-credit": {0.0: 139974, 1.0: 10026},
    "a9a": {-1.0: 24720, 1.0: 7841},
    "a9a-test": {-1.0: 12435, 1.0: 3846},
    "cod-rna": {-1.0: 39690, 1.0: 19845},
    "cod-rna-test": {-1.0: 181078, 1.0: 90539},
    "ijcnn1": {-1.0: 45137, 1.0: 4853},
    "ijcnn1-test": {-1.0: 82989, 1.0: 8712},
    "higgs-11k": {0.0: 5163, 1.0: 5821},
    "ionosphere": {"b": 126, "g": 225},
    "spambase": {0.0: 2788, 1.0: 1813},
    "waveform": {0.0: 1657, 1.0: 1647, 2.0: 1696},
    "kddcup99": {"smurf.": 280790, "neptune.": 107201, "normal.": 97278},
    "airline": {0.0: 65188, 1.0: 117727},
    "adult": {"<=50K": 37155, ">50K": 11687},
    "agaricus": {0.0: 3373, 1.0: 3140},
    "agaricus-test": {0.0: 835, 1.0: 776},
}
N_DISTINCT = {"kddcup99": 23, "abalone": 28, "space-ga": 3105}


@pytest.mark.by_default("default-credit", "a9a-test", "abalone", "ionosphere", "agaricus-test")
@needs_files
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
        for name in dataset_names()
        if name in datasets.REGISTRY
    ],
)
def test_registry_sets_have_their_published_counts(name):
    table = read_source(name)
    assert table.values.shape == datasets.REGISTRY[name].shape
    assert table.labels is not None
    values, counts = np.unique(table.labels, return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    expected = LABEL_COUNTS.get(name, {})
    assert {label: found[label] for label in expected} == expected
    assert len(values) == N_DISTINCT.get(name, len(expected))


@pytest.mark.slow
@needs_files
def test_missing_values_of_registry_sets_are_found():
    credit = read_source("give-me-some-credit")
    missing = dict(zip(credit.columns, np.isnan(credit.values).sum(axis=0).tolist(), strict=True))
    assert missing["MonthlyIncome"] == 29731
    assert missing["NumberOfDependents"] == 3924
    assert np.isnan(read_source("adult").values).sum() == 2799 + 2809 + 857


@pytest.mark.slow
@needs_files
def test_airline_has_only_what_is_known_before_landing():
    table = read_source("airline", Roles(partition="UniqueCarrier"))
    assert table.columns == (
        *("DayofMonth", "DayOfWeek", "DepTime", "CRSDepTime", "CRSArrTime", "FlightNum"),
        *("CRSElapsedTime", "DepDelay", "Origin", "Dest", "Distance", "TaxiOut"),
    )
    assert table.partitions is not None
    assert len(np.unique(table.partitions)) == 20
    assert "WN" in table.partitions
