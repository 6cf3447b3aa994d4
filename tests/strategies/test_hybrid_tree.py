"""HybridTree: a host's trees, continued by guests with more columns for some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedapp
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, FedappError
from fedapp.messages.hybrid_tree import PartitionRequest, SumRequest, TakeRequest
from fedapp.runs.baselines import join_tables
from fedapp.runs.compare import check_comparable
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.trees.divided import mean_of_pairs
from strategies.hybrid_tree import HybridTree
from tests.conftest import MakeSettings
from tests.contract.methods import METHODS
from tests.forests import parts_of
from tests.hybrid import Reference, assert_same, trees_of
from tests.letters import letters_sent
from tests.network import run
from tests.pooled import made_columns, write_rows
from tests.tampering import FALSE, keep_letters_back, refuses, rewrite_letters
from tests.transcript import Listener, check_declared, check_no_rows, summary_of

N_ROWS = 160
OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")
HOST, ONE, TWO = PARTIES = ("party-1", "party-2", "party-3")
OVERLAPPING = range(100), range(60, 140)  # rows of the guests; the last 20 are at neither
DISJOINT = range(80), range(80, 140)
MakeRun = Callable[..., Settings]


@pytest.fixture
def made(settings: MakeSettings, tmp_path: Path) -> MakeRun:
    """``made(one, two, **more)``: a run of a host with all rows and guests with some of them."""

    def make(
        one: Sequence[int] | range = OVERLAPPING[0],
        two: Sequence[int] | range = OVERLAPPING[1],
        objective: str = "reg:squarederror",
        n_rows: int = N_ROWS,
        **more: Any,
    ) -> Settings:
        table = made_columns(objective, n_rows)
        ids = np.array([f"r{number * 7919 % 10007}" for number in range(n_rows)])
        for name, rows, columns in (
            ("host", range(n_rows), "aby"),
            ("one", one, "cd"),
            ("two", two, "ce"),
        ):
            chosen = list(rows)
            given = {column: table[column][chosen] for column in columns}
            write_rows(tmp_path / f"{name}.csv", {"id": ids[chosen], **given})
        files = ",".join(str(tmp_path / f"{name}.csv") for name in ("host", "one", "two"))
        usual = {"data": files, "id": "id", "label": "y", "objective": objective, "parties": 3}
        usual |= {"num_boost_round": 2, "max_depth": 4, "max_bin": 16, "eta": 0.3}
        usual |= {"hybrid_tree__key_bits": 512, "hybrid_tree__insecure_small_key": True}
        return settings(strategy="hybrid-tree", **{**usual, **more})

    return make


def tables_of(settings: Settings) -> dict[str, str]:
    return dict(zip(PARTIES, settings.data.split(","), strict=True))


def reference_of(settings: Settings) -> Reference:
    tables = {
        name: load_table(Path(file), Roles("y" if name == HOST else "", "id"))
        for name, file in tables_of(settings).items()
    }
    return Reference(settings, tables)


# What it computes


@pytest.mark.by_default("overlapping-multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rows", [DISJOINT, OVERLAPPING], ids=["disjoint", "overlapping"])
def test_the_trees_are_those_of_one_place(
    made: MakeRun, objective: str, rows: tuple[range, range]
) -> None:
    settings = made(*rows, objective)
    folder = run_local(settings)
    assert assert_same(trees_of(folder), reference_of(settings).trees) > 4


@hypothesis.settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    st.tuples(*[st.sets(st.integers(0, 79), min_size=12, max_size=79).map(sorted)] * 2),
    st.sampled_from([(2, 1), (3, 2), (4, 1)]),
    st.sampled_from([4, 16]),
    st.integers(0, 10**6),
)
def test_the_trees_are_those_of_one_place_whatever_rows_guests_have(
    made: MakeRun,
    rows: tuple[list[int], list[int]],
    depths: tuple[int, int],
    max_bin: int,
    seed: int,
) -> None:
    depth, low = depths
    more = {"max_depth": depth, "hybrid_tree__guest_depth": low, "max_bin": max_bin, "seed": seed}
    settings = made(*rows, n_rows=80, valid_fraction=0.0, **more)
    assert_same(trees_of(run_local(settings)), reference_of(settings).trees)


def test_predictions_are_those_of_one_place_for_rows_of_no_one_and_both_guests(
    made: MakeRun,
) -> None:
    settings = made()
    folder = run_local(settings)
    predicted = fedapp.load(folder.path).predict(tables_of(settings), id="id")
    expected = reference_of(settings).margins[:, 0]
    assert len(np.unique(expected[140:])) > 3
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_that_no_guest_has_are_predicted_too(made: MakeRun, tmp_path: Path) -> None:
    settings = made()
    folder = run_local(settings)
    lines = (tmp_path / "host.csv").read_text().splitlines()
    (few := tmp_path / "few.csv").write_text("\n".join([lines[0], *lines[-5:]]) + "\n")
    tables = {**tables_of(settings), HOST: str(few)}
    predicted = fedapp.load(folder.path).predict(tables, id="id")
    expected = reference_of(settings).margins[-5:, 0]
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@hypothesis.given(
    arrays(np.float64, (6, 2), elements=st.floats(-9, 9)),
    st.lists(st.sets(st.integers(0, 5)), max_size=3),
)
def test_a_row_has_the_mean_of_the_pairs_that_have_it(local: Any, has: list[set[int]]) -> None:
    rows = {str(number): np.array(sorted(some), dtype=np.int64) for number, some in enumerate(has)}
    pairs = {name: (some, local[some] + int(name) + 1) for name, some in rows.items()}
    expected = local.copy()
    for row in range(6):
        steps = [number + 1 for number, some in enumerate(has) if row in some]
        expected[row] += np.mean(steps) if steps else 0
    np.testing.assert_allclose(mean_of_pairs(local, pairs), expected, atol=1e-12)


@pytest.mark.slow
def test_draws_of_rows_and_columns_are_the_same_each_time(made: MakeRun) -> None:
    more = {"subsample": 0.7, "colsample_bytree": 0.6, "colsample_bylevel": 0.8}
    first, second = (parts_of(run_local(made(**more))) for _ in range(2))
    assert first == second
    assert first != parts_of(run_local(made()))


@pytest.mark.slow
def test_gradients_in_several_messages_make_the_same_model(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_local(made())
    monkeypatch.setattr("fedapp.messages.encrypted_sums.BLOCK_BYTES", 128 * 30)
    blocks = run_local(made())
    assert summary_of(blocks)["exchanges"] > summary_of(whole)["exchanges"]
    assert parts_of(blocks) == parts_of(whole)


@pytest.mark.slow
def test_constraints_hold_in_the_layers_of_host_and_guests(made: MakeRun) -> None:
    shared = {"share_column_names": True, "monotone_constraints": "a:-1,d:-1"}
    free, bound = (trees_of(run_local(made(**more))) for more in ({}, shared))
    falls = [each for each in splits_of(bound) if (each["party"], each["column"]) == (ONE, 1)]
    assert falls
    for split in falls:
        assert extremes(split["left"])[0] >= extremes(split["right"])[1]
    assert free != bound


def splits_of(trees: Any) -> list[Any]:
    found = [tree for of_party in trees.values() for tree in of_party if "left" in tree]
    for tree in found:
        found += [tree[side] for side in ("left", "right") if "left" in tree[side]]
    return found


def extremes(tree: Any) -> tuple[float, float]:
    if "left" not in tree:
        return tree["value"], tree["value"]
    lows, highs = zip(*(extremes(tree[side]) for side in ("left", "right")), strict=True)
    return min(lows), max(highs)


# What each sees


@pytest.mark.slow
def test_a_guest_hears_from_the_host_only_and_of_its_rows_only(made: MakeRun) -> None:
    app = Listener()
    settings = made(align="psi", valid_fraction=0.0, test_fraction=0.2)
    folder = run(settings, app=app)
    kinds = METHODS["hybrid-tree"].kinds | {"query.alignment_mask"}
    check_declared(app, kinds)
    check_no_rows(app, summary_of(folder))
    letters = letters_sent(app)
    assert {frozenset((one.sender, one.receiver)) for one in letters} == {
        frozenset((HOST, ONE)),
        frozenset((HOST, TWO)),
    }
    n_rows = {ONE: 100, TWO: 80}
    matching = summary_of(folder)["matching"]
    assert {guest: matching[guest]["matched"] for guest in (ONE, TWO)} == n_rows
    for one in letters:
        if one.name == "Entries":
            assert one["nodes"].shape == (1, n_rows[one.receiver])
        if one.name == "CommonRows":
            assert len(one["subsets"]) == n_rows[one.receiver]
    got = {one.name for one in letters if one.receiver == ONE}
    expected = {"MaskedList", "CommonRows", "PublicKey", "EncryptedGradients", "Entries", "Splits"}
    assert got == expected
    keys = {one.receiver: one["most_rows"] for one in letters if one.name == "PublicKey"}
    drawn = [one for one in letters if one.name == "EncryptedGradients" and one.receiver == ONE]
    assert {len(one["ciphertexts"]) for one in drawn} == {keys[ONE]}
    assert keys[ONE] < n_rows[ONE]


# What is refused


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"hybrid_tree__guest_depth": 4}, r"guest-depth must be below max-depth \(4\), which leav"),
        ({"hybrid_tree__guest_depth": 0}, "hybrid-tree.guest-depth must be >= 1, got 0"),
        ({"hybrid_tree__insecure_small_key": False}, "hybrid-tree.key-bits must be >= 2048"),
        ({"join": "left"}, "join must be inner with hybrid-tree, whose host keeps the rows that g"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    made: MakeRun, given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        HybridTree.check_settings(made(**given))


def test_censored_times_are_refused(made: MakeRun) -> None:
    survival = made().model_copy(update={"objective": "survival:aft"})
    with pytest.raises(ConfigError, match=r"objective must be one of .* for hybrid-tree, got sur"):
        HybridTree.check_settings(survival)


@pytest.mark.parametrize(
    ("one", "match"),
    [([7], r"ids must have 2 rows in common at least, got 1"), (range(3), "training rows in comm")],
)
def test_a_guest_with_too_few_rows_stops_the_run(made: MakeRun, one: Any, match: str) -> None:
    refuses(match, made(one, range(60, 140), test_fraction=0.9 if len(one) > 1 else 0.2, seed=3))


@pytest.mark.slow
@pytest.mark.by_default("one-round-*")
@pytest.mark.parametrize(
    ("inference", "more", "rule"),
    [
        ("one-round", {}, "model must be one of rows that all parties have, got one of pairs of"),
        ("eini", {}, "model must be one of rows that all parties have, got one of pairs of"),
        ("interactive", {"explain": "r0"}, "explain must be empty with a model whose rows are mat"),
        ("interactive", {"join": "left"}, "join must be inner where rows are matched pair by pair"),
    ],
)
def test_ways_to_predict_that_need_the_rows_of_all_are_refused(
    made: MakeRun, inference: str, more: dict[str, Any], rule: str
) -> None:
    settings = made()
    folder = run_local(settings)
    with pytest.raises(FedappError, match=rule):
        fedapp.load(folder.path).predict(tables_of(settings), id="id", inference=inference, **more)


@pytest.mark.slow
def test_secureboost_does_not_continue_it(
    made: MakeRun, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = made()
    folder = run_local(trained)
    given = {"data": trained.data, "id": "id", "label": "y", "parties": 3, "max_bin": 16}
    given |= {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
    given |= {"objective": "reg:squarederror", "max_depth": 4, "strategy": "secureboost"}
    refuses(
        "init-model must be a run of secureboost", settings(**given, init_model=str(folder.path))
    )
    # Nor does the host, whatever the server says.
    model_id = summary_of(folder)["model_id"]
    monkeypatch.setattr("strategies.secureboost.init_model_id", lambda _: model_id)
    refuses("init-model must be a boosted model, got one of pairs", settings(**given))


# What is false


def one_a_row(nodes: Any) -> Any:
    """A leaf for each of the first rows, and so more than the four that two layers have."""
    return np.minimum(nodes * 0 + np.arange(nodes.shape[1], dtype=np.int32), 4)


@pytest.mark.slow
@pytest.mark.by_default("zero", "one too few")
@pytest.mark.parametrize(("change", "rule"), FALSE.values(), ids=FALSE)
def test_false_sums_stop_the_run_by_the_guests_name(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], rule: str
) -> None:
    rewrite_letters(monkeypatch, "EncryptedSums", "ciphertexts", change)
    refuses(rule, made())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("letter", "field", "change", "rule"),
    [
        ("Entries", "nodes", lambda nodes: nodes + 1000, "Entries.nodes must be of shape .*below"),
        ("Entries", "nodes", one_a_row, "Entries.nodes must be .*at most 4 different of a tree"),
        ("Entries", "nodes", lambda nodes: nodes[:, 1:].copy(), "Entries.nodes must be of shape"),
        ("Partition", "level", lambda level: level + 1, "Partition.level must be the one being"),
        ("Splits", "nodes", lambda nodes: nodes + 900, "Splits.nodes must be open"),
        ("CommonRows", "subsets", lambda rows: rows[1:].copy(), "subsets must be of the rows of a"),
        (
            "PublicKey",
            "most_rows",
            lambda n: n + 1,
            r"party-[23] .*: rows must be \d+, as aligned",
        ),
    ],
)
def test_false_letters_stop_the_run(
    made: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    letter: str,
    field: str,
    change: Callable[[Any], Any],
    rule: str,
) -> None:
    rewrite_letters(monkeypatch, letter, field, change)
    refuses(rule, made())


def test_subsets_that_hold_back_other_rows_do_not_match_the_hosts_order(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite_letters(monkeypatch, "CommonRows", "subsets", lambda rows: rows[::-1].copy())
    refuses("CommonRows.digest must be of the ids of party-[23]", made())


@pytest.mark.slow
@pytest.mark.by_default("SumRequest-1-*", "PartitionRequest-*")
@pytest.mark.parametrize(
    ("kind", "first", "rule"),
    [
        (SumRequest, 0, "PublicKey.letter must reach party-2"),
        (SumRequest, 1, "Splits.letter must reach party-2"),
        (PartitionRequest, 0, "Splits.letter must reach party-2"),
    ],
)
def test_a_server_that_keeps_letters_back_stops_the_run(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: Any, first: int, rule: str
) -> None:
    keep_letters_back(monkeypatch, kind, ONE, first=first)
    refuses(rule, made())


def test_a_server_that_keeps_a_block_back_stops_the_run(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedapp.messages.encrypted_sums.BLOCK_BYTES", 128 * 30)
    keep_letters_back(monkeypatch, TakeRequest, ONE, first=1)
    refuses("MoreGradients.start must be 15, the first of round 0 that is missing", made())


# Beside other models


def test_the_pooled_baseline_has_all_rows_of_the_host(made: MakeRun) -> None:
    settings = made(*DISJOINT)
    joined, active, columns = join_tables(settings)
    table = load_table(Path(settings.data.split(",")[0]), Roles("y", "id"))
    assert active == HOST
    assert np.array_equal(joined.values[:, columns], table.values, equal_nan=True)
    missing = np.isnan(joined.values[:, 2:]).all(axis=1)
    assert missing[140:].all()
    assert not missing[:140].all()
    assert np.isnan(joined.values[:80, 4:]).all()


def test_methods_that_have_other_rows_are_not_compared(made: MakeRun) -> None:
    runs = [made(), made().model_copy(update={"strategy": "secureboost"})]
    with pytest.raises(ConfigError, match="because secureboost has the rows that all tables have"):
        check_comparable(runs, 1)
