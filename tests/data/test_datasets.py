import bz2
import gzip
import hashlib
import io
import os
import re
import urllib.request
from email.message import Message
from functools import reduce
from operator import getitem
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands.data import data_app
from fedapp.data import datasets
from fedapp.data.datasets import (
    DataFile,
    DataSet,
    check_source,
    fetch,
    find_dataset,
    read_source,
)
from fedapp.data.schema import DATA_SETS, Reader, Roles
from fedapp.errors import ConfigError, DataError

CONTENT = b"row,size,city,y\n1,5,Rome,u\n2,6,Bern,v\n3,7,,u\n"
URL = "https://data.example/tiny.csv"

needs_files = pytest.mark.usefixtures("real_data")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDAPP_DATA", raising=False)
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "data"


@pytest.fixture
def tiny(monkeypatch):
    def register(url=URL, **rest):
        file = DataFile("tiny.csv.gz", sha256(CONTENT), url)
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


def run(*words):
    return CliRunner().invoke(data_app, list(words))


def put(folder, content, name="tiny.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("name", [name for name, of in datasets.REGISTRY.items() if not of.files])
def test_built_in_sets_have_their_shape(name):
    table = read_source(name)
    assert table.values.shape == datasets.REGISTRY[name].shape
    assert len(table.columns) == table.values.shape[1]
    assert table.labels.dtype == np.float64


def test_the_clinics_of_a_built_in_set_have_thirds_of_its_rows_by_body_mass():
    table = read_source("diabetes-clinics", Roles(partition="clinic"))
    diabetes = read_source("diabetes")
    np.testing.assert_array_equal(table.values, diabetes.values)
    masses = table.values[:, table.columns.index("bmi")]
    clinics = [masses[table.partitions == name] for name in ("light", "medium", "heavy")]
    assert [len(rows) for rows in clinics] == pytest.approx([442 / 3] * 3, abs=8)
    ends = [(rows.min(), rows.max()) for rows in clinics]
    assert ends[0][1] < ends[1][0] <= ends[1][1] < ends[2][0]


REFUSES = "'.* must (have content of sha256|unpack, got BadGzipFile)"


@pytest.mark.parametrize(
    ("name", "content", "is_known"),
    [
        ("tiny.csv", CONTENT, True),
        ("tiny.csv.gz", gzip.compress(CONTENT, mtime=0), True),
        ("tiny.csv", b"damaged", False),
        ("tiny.csv.gz", b"damaged", False),
    ],
)
def test_a_file_is_known_by_its_content(cache, tiny, name, content, is_known):
    put(cache, content, name)
    if not is_known:
        with pytest.raises(DataError, match=REFUSES):
            read_source("tiny")
        return
    table = read_source("tiny")
    assert table.columns == ("size", "city")
    assert table.labels.tolist() == ["u", "v", "u"]


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


UNKNOWN = "data must be a built-in name, a registry name or an existing file, got"
NOT_PUBLIC = r"no public copy of this exact file; put it into \$FEDAPP"
HERE, NO_HTTPS = str(Path(__file__).parent), "http://data.example/tiny.csv"


@pytest.mark.parametrize(
    ("do", "name", "url", "message"),
    [
        (read_source, "win", URL, f"{UNKNOWN} 'win'; did you mean wine"),
        (read_source, HERE, URL, r"^data must be a file, or a .* got the folder '.*/data'$"),
        (read_source, "tiny", URL, r"\$FEDAPP_DATA .* cache, .*`fedapp data fetch tiny`"),
        (read_source, "tiny", "", NOT_PUBLIC),
        (find_dataset, "wino", URL, r"data set must be a built-in name .*, got 'wino'"),
        (fetch, "wine", URL, r"must be one with files, got 'wine' \(built-in\)"),
        (fetch, "tiny", NO_HTTPS, f"url must start with https://, got {NO_HTTPS}"),
        (fetch, "tiny", URL, r"download of 'tiny.csv.gz' must succeed, got .*no route"),
    ],
)
def test_what_cannot_be_read_or_fetched_is_refused(cache, tiny, downloads, do, name, url, message):
    tiny(url=url)
    with pytest.raises((ConfigError, DataError), match=message):
        do(name)


@pytest.mark.parametrize(
    ("data", "way"),
    [
        ("~/*.csv", "{0}/a.csv,{0}/b.csv"),
        ("$HOME/a.csv", "{0}/a.csv"),
        ("~/[x].csv", ""),
    ],
)
def test_what_a_shell_has_left_is_written_out(tmp_path, monkeypatch, data, way):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).touch()
    rule = f"{UNKNOWN} '{data}'; ~, $, * and ? must be written out, the tables of several parties"
    for check, ending in ((check_source, way and ": " + way.format(tmp_path)), (read_source, "")):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{rule} as a.csv,b.csv{ending}')}$"):
            check(data)


def test_another_label_than_the_sets_own_is_refused():
    with pytest.raises(ConfigError, match=r"label must be 'target' or empty .* 'wine', got 'hue'"):
        read_source("wine", Roles(label="hue"))


@pytest.mark.parametrize(
    ("suffix", "kept", "pack"), [(".gz", ".gz", gzip.compress), (".bz2", "", bz2.compress)]
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


def test_a_failed_download_leaves_nothing_and_a_file_that_is_here_is_not_fetched(
    cache, tiny, downloads
):
    downloads[URL] = b"damaged"
    with pytest.raises(DataError, match="must have content of sha256"):
        fetch("tiny")
    assert os.listdir(cache) == []
    path = put(cache, CONTENT)
    assert fetch("tiny") == path
    assert run("fetch", "tiny").output.strip() == str(path)


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


def test_list_says_where_a_set_lies(cache, tiny):
    put(cache, CONTENT)
    lines = run("list").output.splitlines()
    where = {words[1]: words[-2] for words in map(str.split, lines) if len(words) > 5}
    assert where["wine"] == "built-in"
    assert where["tiny"] == "cache"
    assert where["a9a"] == "here"


@pytest.mark.parametrize("path", [("labels",), ("reader", "skip"), ("files", 0, "size")])
def test_the_registry_has_no_name_that_is_none_of_a_set(path):
    section = {"task": "binary", "shape": [1, 1], "description": "rows", "source": "here"}
    section |= {"reader": {}, "files": [{"name": "a.csv", "sha256": "", "url": URL}]}
    assert DATA_SETS.validate_python({"tiny": section})["tiny"].files[0].url == URL
    *parents, name = path
    reduce(getitem, parents, section)[name] = "1"
    with pytest.raises(ValueError, match=rf"{name}\n +Unexpected keyword argument"):
        DATA_SETS.validate_python({"tiny": section})


ROWS_OF_A_LABEL = """
default-credit=6636 give-me-some-credit=10026 a9a=7841 a9a-test=3846 cod-rna=19845
cod-rna-test=90539 ijcnn1=4853 ijcnn1-test=8712 higgs-11k=5163 ionosphere=126 spambase=1813
waveform=1647 adult=11687 kddcup99=97278 airline=65188 agaricus=3140 agaricus-test=776
"""
N_DISTINCT = {"kddcup99": 23, "abalone": 28, "space-ga": 3105, "waveform": 3}


@pytest.mark.by_default("default-credit", "a9a-test", "abalone", "ionosphere", "agaricus-test")
@needs_files
@pytest.mark.parametrize("name", [name for name, of in datasets.REGISTRY.items() if of.files])
def test_registry_sets_have_their_published_counts(name):
    table = read_source(name)
    assert table.values.shape == datasets.REGISTRY[name].shape
    counts = np.unique(table.labels, return_counts=True)[1].tolist()
    assert len(counts) == N_DISTINCT.get(name, 2)
    published = dict(pair.split("=") for pair in ROWS_OF_A_LABEL.split())
    assert int(published.get(name, counts[0])) in counts
