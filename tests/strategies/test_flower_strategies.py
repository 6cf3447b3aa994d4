"""Strategies as Flower's users know them: keyword arguments, hooks, Flower's own loop."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)

import strategies
from fedapp.errors import ConfigError
from fedapp.records.document import from_text
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.settings import defaults, load_settings
from fedapp.trees.model import Ensemble
from strategies import PAX

NO_GRID = SimpleNamespace(send_and_receive=None)  # cannot be called
QUICK = {"num_boost_round": 2, "max_depth": 2}
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}
# By class: arguments, and settings that parties read in the run config.
METHODS = {
    "PAX": (QUICK, {}),
    "Bagging": (QUICK, {}),
    "Cyclic": (QUICK, {}),
    "FedXGBllr": ({"trees": 2, "max_depth": 2, "rounds": 2, "epochs": 1}, {}),
    "FedAvgLinear": ({"rounds": 2}, {}),
    "HorizontalForest": ({"trees": 3, "max_depth": 2}, {}),
    "SecureBoost": (
        QUICK | SMALL_KEY | {"align_most_rows": 1000},  # a bound on the blocks of gradients
        {"columns": "even", "allow-export": True},
    ),
    "FederatedForest": (
        {"trees": 3, "max_depth": 2, "master_keeps_model": True},
        {"allow-export": True},
    ),
}


@contextmanager
def grid_of(n_parties=2, **run):
    """Parties in this process, with the shares of the built-in table."""
    grid = LocalGrid(simulated_contexts(load_settings({**run, "parties": n_parties})))
    try:
        yield grid
    finally:
        grid.close()


def own_start(strategy, grid):
    return strategy.start(grid, initial_arrays=ArrayRecord())


def flowers_start(strategy, grid):
    return Strategy.start(strategy, grid, ArrayRecord(), num_rounds=strategy.num_rounds)


def by_hand(strategy, grid):
    """The hooks, called directly."""
    arrays, number = ArrayRecord(), 0
    found = Result()
    while messages := list(strategy.configure_train(number + 1, arrays, ConfigRecord(), grid)):
        number += 1
        replies = grid.send_and_receive(messages)
        made, scores = strategy.aggregate_train(number, replies)
        assert made is not None
        assert scores is not None
        arrays = found.arrays = made
        found.train_metrics_clientapp[number] = scores
        if evaluated := strategy.aggregate_evaluate(number, ()):
            found.evaluate_metrics_clientapp[number] = evaluated
    return found


def text_of(result):
    return result.arrays["model"].numpy().tobytes()


def test_a_subclass_that_changes_the_method_where_nobody_calls_it_is_refused():
    def conversation(self: object, *_: object) -> None: ...

    changed = type("Changed", (strategies.PAX,), {"conversation": conversation})
    rule = "must be overridden in a subclass of strategies.pax.PAX, the method that is called"
    with pytest.raises(ConfigError, match=f"^conversation {rule}, got one in Changed$"):
        changed()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_flowers_own_loop_and_direct_calls_end_in_the_same_model(name):
    given, run = METHODS[name]
    found = {}
    for drive in (own_start, flowers_start, by_hand):
        with grid_of(**run) as grid:
            strategy = getattr(strategies, name)(**given)
            found[drive.__name__] = drive(strategy, grid)
        assert strategy.state.exchanges <= strategy.num_rounds
        last = list(found[drive.__name__].evaluate_metrics_clientapp.values())[-1]
        assert 0 < last["test_accuracy"] <= 1
    first, *others = map(text_of, found.values())
    assert others == [first, first]
    scores = found["own_start"].train_metrics_clientapp
    assert scores == {
        number: each for number, each in found["by_hand"].train_metrics_clientapp.items() if each
    }


def n_trees_of(arrays):
    text = arrays["model"].numpy().tobytes().decode() if arrays else ""
    return len(from_text(text, Ensemble).trees) if text else 0


def test_the_evaluation_function_and_every_aggregation_get_the_model_so_far():
    seen, so_far = {}, [0]

    def evaluate(number, arrays):
        seen[number] = n_trees_of(arrays)
        return MetricRecord({"trees": seen[number]})

    with grid_of() as grid:
        result = PAX(num_boost_round=3, max_depth=1).start(grid, evaluate_fn=evaluate)
    assert min(seen) == 0
    assert [*seen.values()] == [0, 1, 2, 3]  # each once
    assert {n: each["trees"] for n, each in result.evaluate_metrics_serverapp.items()} == seen
    with grid_of() as grid:
        strategy, arrays, number = PAX(num_boost_round=3, max_depth=1), ArrayRecord(), 0
        while messages := list(strategy.configure_train(number + 1, arrays, ConfigRecord(), grid)):
            number += 1
            arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
            so_far.append(n_trees_of(arrays))
    assert sorted(set(so_far)) == [0, 1, 2, 3]
    assert so_far == sorted(so_far)


@pytest.mark.parametrize(
    ("wrap", "rule"),
    [
        (
            lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 2),
            "cannot serve trees",
        ),
        (
            lambda inner: DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 2),
            "config must be empty",
        ),
    ],
    ids=["server", "client"],
)
def test_a_wrapper_that_changes_weights_is_refused(wrap, rule):
    inner = PAX(**QUICK)
    with grid_of() as grid, pytest.raises(ConfigError, match=rule):
        wrap(inner).start(grid, ArrayRecord(), num_rounds=inner.num_rounds)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_rounds": 3}, "num_rounds must be >= 26 .* got 3"),
        (
            {"initial_arrays": ArrayRecord([np.zeros(3)])},
            "arrays must be empty; init_model continues a model",
        ),
        ({"train_config": ConfigRecord({"lr": 0.1})}, "config must be empty, .* got lr"),
        ({"evaluate_config": ConfigRecord({"lr": 0.1})}, "evaluate_config must be empty, .* lr"),
    ],
)
@pytest.mark.parametrize("start", [PAX.start, Strategy.start])
def test_arguments_that_cannot_be_served_are_refused(start, given, expected):
    strategy = PAX(**QUICK)
    arguments = {"initial_arrays": ArrayRecord(), "num_rounds": strategy.num_rounds, **given}
    with grid_of() as grid, pytest.raises(ConfigError, match=expected):
        start(strategy, grid, **arguments)


@pytest.mark.by_default("*-PAX", "0.5-SecureBoost")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_too_few_rounds_are_refused_before_anything_is_sent(name, share):
    strategy = getattr(strategies, name)(**METHODS[name][0])
    n_rounds = max(1, int(share * strategy.num_rounds))  # Flower's loop does nothing without one
    for wrapper in (strategy, DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 1.0, 2)):
        with pytest.raises(ConfigError, match=rf"^num_rounds .*strategy.num_rounds.*{n_rounds};"):
            Strategy.start(wrapper, NO_GRID, ArrayRecord(), num_rounds=n_rounds)


@pytest.mark.parametrize(
    ("function", "first", "rule"),
    [(FedAvg, 0, ".*, got 1"), (Strategy.start, 2, "it is an argument of start")],
    ids=["FedAvg", "start"],
)
def test_arguments_of_flower_are_refused_with_a_reason(function, first, rule):
    for name in list(inspect.signature(function).parameters)[first:]:
        with pytest.raises(ConfigError, match=f"^{name} must be omitted: {rule}"):
            PAX(**{name: 1})


def test_hooks_out_of_order_are_refused():
    strategy = PAX(**QUICK)
    with pytest.raises(ConfigError, match=r"^aggregate_train must come after configure_train$"):
        strategy.aggregate_train(1, ())
    with grid_of() as grid:
        list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
        with pytest.raises(ConfigError, match="must be given the replies of each round"):
            strategy.configure_train(2, ArrayRecord(), ConfigRecord(), grid)
    with grid_of() as grid:
        strategy = PAX(**QUICK)
        strategy.start(grid)
        with pytest.raises(ConfigError, match="strategy must be a new one for each run"):
            strategy.start(grid)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eta": -1}, "eta must be > 0.0 or 'auto', got -1"),
        ({"max_dept": 3}, "max_dept is not a setting; did you mean max_depth"),
        ({"label": "y"}, "label must be set where the tables are read, at the parties, got 'y'"),
        ({"run_dir": "x"}, "run_dir must be omitted: fedapp's own ServerApp keeps run folders"),
        ({"strategy": "cyclic"}, "strategy must be pax for PAX, got 'cyclic'"),
        ({"epsilon": 1.0}, "^aggregation must be secure with privacy.epsilon"),
        ({"min_parties": 3, "parties": 2}, r"min_parties must be <= parties \(2\), got 3"),
    ],
)
def test_a_broken_argument_is_named_as_it_was_written(given, expected):
    with pytest.raises(ConfigError, match=expected):
        PAX(**given)


@pytest.mark.parametrize("name", METHODS)
def test_the_signature_shows_what_a_method_reads_with_the_run_configs_defaults(name):
    strategy = getattr(strategies, name)
    shown = {each.name: each.default for each in inspect.signature(strategy).parameters.values()}
    section = f"{strategy.method}."
    own = {each: value for each, value in defaults().items() if each.startswith(section)}
    for setting, value in own.items():
        assert shown[setting.removeprefix(section).replace("-", "_")] == value
    assert not {"run_dir", "label", "data", "strategy"} & set(shown)
    assert strategy(**shown).settings == strategy().settings


def test_a_run_config_is_taken_as_it_is():
    config = {**defaults(), "strategy": "fedxgbllr", "max-depth": 5, "fedxgbllr.max-depth": 3}
    with pytest.raises(ConfigError, match="max_depth must be omitted for fedxgbllr"):
        strategies.FedXGBllr(**config)
    del config["max-depth"]
    assert strategies.FedXGBllr(**config).section.max_depth == 3


@pytest.mark.parametrize("n_parties", [2, 4])
def test_all_nodes_take_part_unless_their_number_is_given(n_parties):
    with grid_of(n_parties) as grid:
        strategy = PAX(**QUICK)
        strategy.start(grid)
        assert len(strategy.parties) == strategy.settings.parties == n_parties
    for wrong in (1, 5):
        with grid_of(n_parties) as grid, pytest.raises(ConfigError, match=r"^parties must be "):
            PAX(**QUICK, parties=wrong).start(grid)
