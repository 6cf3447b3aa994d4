"""PAX that promises an epsilon, with splits chosen by noised sums."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clients.pax_secure import gradient_bounds, splits
from fedapp.crypto.noise import Budget, budget_for
from fedapp.errors import ConfigError, PartyError
from fedapp.histograms.build import make_sums_consistent, sums_by_column
from fedapp.messages.pax_secure import (
    PrivateSplitsRequest,
)
from fedapp.messages.secagg import MaskedReply
from fedapp.report.card import model_card
from fedapp.report.summary import read_run
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site import answer
from fedapp.site.store import Store
from fedapp.site.sums import add_noise, bounds_of
from fedapp.trees.model import LEAF, load_model
from fedapp.trees.objective import hide_class_shares
from strategies import pax
from strategies.horizontal import mean_label
from strategies.pax_dp import SPLIT_BINS
from tests.network import die, resumed, run
from tests.test_private import KINDS, MakeRun, made, model_of, silent, told
from tests.transcript import check_declared, listen, summary_of

__all__ = ["made", "silent", "told"]  # fixtures

GREEDY = {"privacy__trees": "greedy", "privacy__epsilon": 1000.0}


# A run


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_without_noise_splits_are_those_of_all_rows(
    silent: None, made: MakeRun, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    given: dict[str, Any] = {**GREEDY, "num_boost_round": 2, "max_depth": 2}
    if objective == "reg:squarederror":
        given["privacy__clip"] = 2.0**12  # more than any gradient
    runs = [run_local(made(objective, parties=n, **given)) for n in (2, 4)]
    assert model_of(runs[0]) == model_of(runs[1])
    assert summary_of(runs[0])["exchanges"] == 2 + 1 + 4 + 2 * (2 + 1) + 1
    without = {"privacy__epsilon": 0.0, "privacy__clip": 0.0}
    # With noise, classes start alike.
    monkeypatch.setattr(pax, "mean_label", lambda *given: hide_class_shares(mean_label(*given)))
    exact = run_local(made(objective, num_boost_round=2, max_depth=2, **without))
    assert first_splits(runs[0]) == first_splits(exact)


def first_splits(folder: RunFolder) -> list[list[tuple[int, float]]]:
    """Column and threshold of each split of the first round."""
    model = load_model(folder.path / "model.json")
    inner = [tree[tree["left"] != LEAF] for tree in model.trees[: model.n_outputs]]
    return [list(own[["column", "threshold"]].tolist()) for own in inner]


def test_bins_are_few_whatever_a_run_asks_for(made: MakeRun) -> None:
    folder = run_local(made(max_bin=256, **GREEDY))
    assert summary_of(folder)["privacy"]["split_bins"] == SPLIT_BINS


def test_messages_hold_what_their_module_lists_and_nothing_else(made: MakeRun) -> None:
    _, app = listen(made(**GREEDY))
    check_declared(app, {**KINDS, "train.private_splits": (PrivateSplitsRequest, MaskedReply)})


def test_much_budget_learns(made: MakeRun) -> None:
    """At this epsilon, three runs scored 0.834 to 0.874."""
    folder = run_local(made(num_boost_round=5, eta=0.5, **{**GREEDY, "privacy__epsilon": 1e5}))
    assert summary_of(folder)["metrics"]["test"]["auc"] > 0.65
    told_of = summary_of(folder)["privacy"]
    assert (told_of["trees"], told_of["split_bins"]) == ("greedy", 16)
    card = model_card(read_run(folder.path))
    assert "- trees: split by sums with noise over at most 16 bins a column; leaves have" in card


# Noise


def test_sums_by_bin_have_noise_of_the_told_variance(
    made: MakeRun, told: dict[Any, list[Any]]
) -> None:
    run_local(made(**GREEDY))
    scaled, numbers = [], set()
    for (_, kind, number, _), answers in told.items():
        for _, added, each in answers if kind == "splits" else ():
            scaled.append(np.ravel(added / np.sqrt(np.array(each.variances, dtype=float))))
            numbers.add(number)
    flat = np.concatenate(scaled)
    assert {0, 1, 2, 3} <= numbers <= set(range(2 * 3))
    # Within 7 standard deviations of a mean of squares.
    assert abs((flat**2).mean() - 1) < 7 * math.sqrt(2 / len(flat))


def test_no_row_moves_the_sums_by_bin_by_more_than_its_bound(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[float] = []

    def listening(name: str, store: Store, request: Any, *rest: Any) -> Any:
        if isinstance(request, PrivateSplitsRequest) and request.level == 1:
            moved.extend(moves(store, request, name))
        return add_noise(name, store, request, *rest)

    monkeypatch.setattr(answer, "add_noise", listening)
    run_local(made("multi:softprob", num_boost_round=1, **GREEDY))
    assert 0.3 < max(moved) <= 1


def moves(store: Store, request: PrivateSplitsRequest, name: str) -> list[float]:
    """How far single rows move all sums, in units of what the noise is for."""
    site: Any = SimpleNamespace(store=store, name=name)
    weights, before = store["train.weights"], splits(site, request)
    units = np.array(gradient_bounds(store).sensitivities(bounds_of(store)))
    units *= math.sqrt(len(request.drawn))
    found = []
    for row in range(15):
        store["train.weights"] = np.where(np.arange(len(weights)) == row, np.float32(0), weights)
        pairs = zip(splits(site, request).arrays, before.arrays, strict=True)
        found.append(math.sqrt(sum((((now - was) / units) ** 2).sum() for now, was in pairs)))
    store["train.weights"] = weights
    return found


@pytest.mark.parametrize("step", [7, 8])
def test_a_server_that_dies_in_a_tree_gets_the_same_noise_again(
    made: MakeRun, told: dict[Any, list[Any]], step: int
) -> None:
    settings = made(**GREEDY)
    contexts = simulated_contexts(settings)
    die(settings, contexts, dies_before_reading=step)
    folder = run(resumed(settings), contexts)
    assert summary_of(folder)["trees"] == 2
    again = [answers for answers in told.values() if len(answers) > 1]
    assert again
    for answers in again:
        for total, _, _ in answers:
            np.testing.assert_array_equal(total, answers[0][0])


# The budget


@pytest.mark.parametrize("levels", [0, 1, 6])
def test_the_shares_of_a_run_are_one_budget(levels: int) -> None:
    schedule = Budget(1.0, 1e-5, 4.0, 20, 3, levels).schedule
    assert sum(each.times * each.share for each in schedule) == pytest.approx(1)
    assert {each.kind: each.times for each in schedule}.get("splits", 0) == 20 * levels


def test_a_site_refuses_sums_by_bin_that_the_epsilon_is_not_spent_on(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shallower(*given: Any) -> Budget:
        return replace(budget_for(*given), levels=1)

    monkeypatch.setattr("strategies.pax_dp.budget_for", shallower)
    with pytest.raises(PartyError, match=r"level must be < 1, the levels of a tree that the run's"):
        run_local(made(**GREEDY))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"drawn": np.array([1, 1], np.int32)}, r"drawn must ascend, and be < \d"),
        ({"drawn": np.array([99], np.int32)}, r"drawn must ascend, and be < \d"),
        ({"drawn": np.array([], np.int32)}, r"drawn must ascend, and be < \d"),
        ({"level": 2}, r"level must be that of a leaf, got 2"),
    ],
)
def test_a_site_refuses_sums_that_are_not_of_its_table(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], rule: str
) -> None:
    def changed(**fields: Any) -> PrivateSplitsRequest:
        return PrivateSplitsRequest(**(fields | change))

    monkeypatch.setattr("strategies.pax_dp.PrivateSplitsRequest", changed)
    with pytest.raises(PartyError, match=rule):
        run_local(made(**GREEDY))


def test_too_few_rows_to_split_by_sums_are_refused(made: MakeRun) -> None:
    given = {**GREEDY, "privacy__epsilon": 0.45}
    with pytest.raises(ConfigError, match=r"^privacy\.trees must be cyclic or random for so few"):
        run_local(made(**given))


def test_trees_that_no_sum_splits_are_warned_of(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(changed: Any, **fields: Any) -> Any:
        heavy = {"min_child_weight": 1e9} if "min_child_weight" in fields else {}
        return replace(changed, **{**fields, **heavy})

    monkeypatch.setattr("strategies.pax_dp.replace", strict)
    folder = run_local(made(**GREEDY))
    assert any("a tree was not split" in text for text in summary_of(folder)["warnings"])
    assert [len(tree) for tree in load_model(folder.path / "model.json").trees] == [1, 1]


# Sums that agree


def test_sums_without_noise_stay_as_they_are() -> None:
    rng, widths = np.random.default_rng(0), np.array([2, 3])
    cells = rng.integers(1, 9, (4, 2, 2)).astype(float)
    other = np.stack((cells[:, 0], cells[:, 1] / 2, cells[:, 1] / 4), axis=1)
    missing = np.stack((np.zeros((4, 2)), cells[:, 1] / 4), axis=1)
    whole = np.concatenate((cells, other), axis=1)
    found = make_sums_consistent(whole, missing, widths, deviation=0.0)
    np.testing.assert_allclose(found.histograms, whole)
    np.testing.assert_allclose(found.totals, cells.sum(axis=1))
    assert found.has_missing.tolist() == [[False, True]] * 4


def test_sums_with_noise_agree_and_are_nearer_to_the_truth() -> None:
    rng, widths = np.random.default_rng(1), np.array([8, 8, 4])
    truth = np.repeat(rng.uniform(50, 90, (300, 4, 2)), 2, axis=1)
    whole = np.concatenate([truth, truth[:, ::-1], truth[:, ::2] + truth[:, 1::2]], axis=1)
    noisy = whole + rng.normal(0, 5, whole.shape)
    found = make_sums_consistent(noisy, np.zeros((300, 3, 2)), widths, deviation=5.0)
    totals = np.repeat(found.totals[:, None], 3, axis=1)
    np.testing.assert_allclose(sums_by_column(found.histograms, widths), totals)
    for n_cells in (4, 7, 8):
        before, after = (
            np.square((each - whole)[:, :n_cells].sum(axis=1)).mean()
            for each in (noisy, found.histograms)
        )
        assert after < 0.8 * before


def test_sums_by_column_may_be_of_no_bins() -> None:
    whole = np.arange(12).reshape(2, 3, 2)
    found = sums_by_column(whole, np.array([0, 2, 0, 1, 0]))
    assert found[0].tolist() == [[0, 0], [2, 4], [0, 0], [4, 5], [0, 0]]
