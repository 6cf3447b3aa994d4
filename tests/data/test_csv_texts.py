"""Texts in CSV files that a spreadsheet or a terminal would act on."""

import csv
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from fedapp.data.predictions import harmless, write_predictions

FORMULAS = ["=A(1)", "+1+2", "-2-3", "@SUM(A1)", "=", "+", " =1", "\u00a0=1", "\uff1d1", "-a"]
CONTROLS = {"\t=1": "?=1", "\r=1": "?=1", "\n": "?", "a\x1b[2Jb": "a?[2Jb", "\x9b2J": "?2J"}
PLAIN = ["", "-5", "+3.1", "1e-3", "-1,5", "+.5e+3", "5-3", "a=b", "c54322", "Ünal", "'=1", "7"]
WRITTEN = {text: f"'{text}" for text in FORMULAS} | CONTROLS | {text: text for text in PLAIN}
ODD = st.sampled_from("=+-@\t\r\n\x00\x1b\x7f\x9b '\",;15.e\u202e\uff1d")


@given(st.text(ODD | st.characters()))
def test_no_text_is_a_formula_or_commands_a_terminal(text):
    written = harmless(text)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", written)
    start = written.lstrip()[:1]
    if start and start in "=+-@\uff1d\uff0b\uff0d\uff20":
        float(written.replace(",", "."))
    assert harmless(written) == written


def test_a_csv_file_has_harmless_ids_and_names_and_a_parquet_file_those_of_the_table(tmp_path):
    ids = [*WRITTEN]
    scores = {"probability_\x1b": np.linspace(0, 1, len(ids), dtype=np.float32)}
    for suffix in (".csv", ".parquet"):
        write_predictions(tmp_path / f"scores{suffix}", "=id()", np.array(ids), scores)
    with (tmp_path / "scores.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["'=id()", "probability_?"]
    assert dict(zip(ids, [row[0] for row in rows], strict=True)) == WRITTEN
    exact = parquet.read_table(tmp_path / "scores.parquet").to_pydict()
    assert exact == {"=id()": ids, "probability_\x1b": scores["probability_\x1b"].tolist()}
    assert [float(row[1]) for row in rows] == pytest.approx(exact["probability_\x1b"])
