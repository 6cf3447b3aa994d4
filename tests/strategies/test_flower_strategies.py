"""Strategies as Flower's users know them: keyword arguments, hooks, Flower's own loop."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)
from hypothesis import given
from hypothesis import strategies as st

import strategies
from fedapp.errors import ConfigError, StoppedError
from fedapp.records.document import from_text
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.settings import defaults, load_settings
from fedapp.trees.model import Ensemble
from strategies import PAX
from strategies.drive import Callbacks

NO_GRID = cast(Grid, SimpleNamespace(send_and_receive=None))  # cannot be called
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
@pytest.mark.by_default("PAX")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("PAX", "SecureBoost") else pytest.mark.slow)
        for name in METHODS
    ],
)
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


def test_the_model_so_far_is_returned_by_every_aggregation():
    n_trees = []
    with grid_of() as grid:
        strategy, arrays, number = PAX(num_boost_round=3, max_depth=1), ArrayRecord(), 0
        while messages := list(strategy.configure_train(number + 1, arrays, ConfigRecord(), grid)):
            number += 1
            made, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
            assert made is not None
            arrays = made
            if arrays:
                model = from_text(arrays["model"].numpy().tobytes().decode(), Ensemble)
                assert isinstance(model, Ensemble)
                n_trees.append(len(model.trees))
    assert sorted(set(n_trees)) == [1, 2, 3]
    assert n_trees == sorted(n_trees)


def test_the_evaluation_function_sees_each_model_once():
    seen = {}

    def evaluate(number, arrays):
        model = from_text(arrays["model"].numpy().tobytes().decode(), Ensemble) if arrays else None
        seen[number] = len(model.trees) if isinstance(model, Ensemble) else 0
        return MetricRecord({"trees": seen[number]})

    with grid_of() as grid:
        result = PAX(num_boost_round=3, max_depth=1).start(grid, evaluate_fn=evaluate)
    assert min(seen) == 0
    assert set(seen.values()) == {0, 1, 2, 3}
    assert {n: each["trees"] for n, each in result.evaluate_metrics_serverapp.items()} == seen


class Counting(Strategy):
    """A wrapper that changes nothing."""

    def __init__(self, strategy):
        self.strategy, self.n_messages, self.n_replies = strategy, 0, 0

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.n_messages += len(messages)
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.n_replies += len(replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, *given):
        return self.strategy.configure_evaluate(*given)

    def aggregate_evaluate(self, *given):
        return self.strategy.aggregate_evaluate(*given)

    def summary(self):
        self.strategy.summary()


@pytest.mark.slow
def test_a_wrapper_sees_every_message():
    with grid_of() as grid:
        inner = PAX(**QUICK)
        wrapper = Counting(inner)
        result = wrapper.start(grid, ArrayRecord(), num_rounds=inner.num_rounds)
    assert wrapper.n_messages == wrapper.n_replies == 2 * inner.state.exchanges
    with grid_of() as grid:
        assert text_of(PAX(**QUICK).start(grid)) == text_of(result)


@pytest.mark.parametrize("privacy", ["server", "client"])
def test_a_wrapper_that_changes_weights_is_refused(privacy):
    inner = PAX(**QUICK)
    wrapper = DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 2)
    if privacy == "client":
        wrapper = DifferentialPrivacyClientSideAdaptiveClipping(inner, 0.1, 2)
    with grid_of() as grid, pytest.raises(ConfigError, match=r"must be .*") as refused:
        wrapper.start(grid, ArrayRecord(), num_rounds=inner.num_rounds)
    assert "cannot serve trees" in str(refused.value) or "config must be empty" in str(
        refused.value
    )


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


@pytest.mark.slow
@pytest.mark.by_default("PAX", "SecureBoost")
@pytest.mark.parametrize("name", METHODS)
@given(share=st.floats(0, 1, exclude_max=True))
def test_too_few_rounds_are_refused_before_anything_is_sent(name, share):
    strategy = getattr(strategies, name)(**METHODS[name][0])
    n_rounds = max(1, int(share * strategy.num_rounds))  # Flower's loop does nothing without one
    for wrapper in (
        strategy,
        Counting(strategy),
        DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 1.0, 2),
    ):
        with pytest.raises(ConfigError, match=rf"^num_rounds .*strategy.num_rounds.*{n_rounds};"):
            Strategy.start(wrapper, NO_GRID, ArrayRecord(), num_rounds=n_rounds)


@pytest.mark.parametrize("name", inspect.signature(FedAvg).parameters)
def test_arguments_of_fedavg_are_refused_with_a_reason(name):
    with pytest.raises(ConfigError, match=f"^{name} must be omitted: .*, got 1"):
        PAX(**{name: 1})


@pytest.mark.parametrize("name", list(inspect.signature(Strategy.start).parameters)[2:])
def test_arguments_of_start_are_named_as_such(name):
    with pytest.raises(ConfigError, match=f"^{name} must be omitted: it is an argument of start"):
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


def test_callbacks_follow_a_run_and_stop_it():
    class Stopping(Callbacks):
        rounds: ClassVar[list[int]] = []

        def end_round(self, line):
            self.rounds.append(line["round"])
            return line["round"] < 2

    strategy = PAX(num_boost_round=5, max_depth=1)
    strategy.callbacks = Stopping()
    with grid_of() as grid, pytest.raises(StoppedError, match="stopped after round 2"):
        strategy.start(grid)
    assert Stopping.rounds == [1, 2]
