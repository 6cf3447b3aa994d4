"""Strategies as Flower's users know them: keyword arguments, hooks, Flower's own loop."""

import inspect
import re
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)

import strategies
from fedapp.arguments import python_name
from fedapp.client_app import SiteApp
from fedapp.errors import ConfigError
from fedapp.records.document import from_text
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.settings import defaults, load_settings
from fedapp.site.store import LiveStores
from fedapp.trees.model import Ensemble
from strategies import PAX
from strategies.arguments import OF_TABLES
from strategies.flower import HOOKS
from strategies.method import OF_APP

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
def grid_of(n_parties=2, app=None, **run):
    """Parties in this process, with the shares of the built-in table."""
    grid = LocalGrid(simulated_contexts(load_settings({**run, "parties": n_parties})), app)
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
    class Mixin:
        def conversation(self): ...

    rule = "must be overridden in a subclass of strategies.pax.PAX, the method that is called"
    for bases in ((Mixin, PAX), (type("Changed", (PAX,), dict(vars(Mixin))),)):
        with pytest.raises(ConfigError, match=f"^conversation {rule}, got .*Mixin.conversation$"):
            type("Changed", bases, {})()


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


def seen(value):
    """What a hook was given or has returned: messages by their nodes and kinds, arrays by bytes."""
    if isinstance(value, ArrayRecord):
        return [(name, array.data) for name, array in value.items()]
    if isinstance(value, list | tuple):
        return [seen(each) for each in value]
    if isinstance(value, Message):
        return value.metadata.src_node_id, value.metadata.dst_node_id, value.metadata.message_type
    return value if isinstance(value, int | MetricRecord | ConfigRecord | None) else type(value)


def overridden(name, hook, calls, at):
    """A strategy with a hook that notes what it is given, and calls the method's."""
    plain = getattr(strategies, name)

    def noting(self, *arguments, **keywords):
        given = [*arguments, *keywords.values()]
        given = [list(each) if isinstance(each, map) else each for each in given]
        returned = getattr(plain, hook)(self, *given)
        calls.append((hook, seen(given), seen(returned)))
        return returned

    if at == "class":
        return type("Noting", (plain,), {hook: noting})(**METHODS[name][0])
    strategy = plain(**METHODS[name][0])
    setattr(strategy, hook, partial(noting, strategy))
    return strategy


@pytest.mark.by_default("*-PAX-class", "aggregate_train-PAX-instance")
@pytest.mark.parametrize("at", ["class", "instance"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hook", [*HOOKS, "summary"])
def test_a_hook_that_is_overridden_is_called_as_by_flowers_loop(hook, name, at):
    models, calls = [], {}
    for start in (own_start, flowers_start):
        with grid_of(**METHODS[name][1]) as grid:
            noted = calls[start] = []
            strategy = overridden(name, hook, noted, at)
            models.append(text_of(start(strategy, grid)))
    own, flowers = calls.values()
    assert len(own) == (1 if hook == "summary" else strategy.state.exchanges)
    assert own == flowers[: len(own)]
    with grid_of(**METHODS[name][1]) as grid:
        plain = text_of(own_start(getattr(strategies, name)(**METHODS[name][0]), grid))
    assert models == [plain, plain]


def test_a_hook_may_send_messages_of_its_own_and_reads_the_replies():
    app = SiteApp(stores=LiveStores())

    @app.evaluate()
    def rows(message, context):
        node = context.node_id
        return Message(RecordDict({"rows": MetricRecord({"node": node})}), reply_to=message)

    class Asking(PAX):
        def configure_evaluate(self, server_round, arrays, config, grid):
            nodes = grid.get_node_ids() if server_round == 2 else ()
            return (Message(RecordDict(), node, "evaluate") for node in nodes)

        def aggregate_evaluate(self, server_round, replies):
            nodes = [reply.content["rows"]["node"] for reply in replies]
            return MetricRecord({"nodes": nodes}) if nodes else None

    with grid_of(app=app) as grid:
        result = Asking(**QUICK).start(grid)
        nodes = list(grid.get_node_ids())
    assert {n: dict(each) for n, each in result.evaluate_metrics_clientapp.items()} == {
        2: {"nodes": nodes}
    }


@pytest.mark.parametrize(
    ("hook", "function", "expected"),
    [
        (
            "configure_train",
            lambda self, *given: list(PAX.configure_train(self, *given))[1:],
            r"^messages of configure_train must return .*, one for each party, got 1 for \[\d+\]$",
        ),
        ("configure_train", lambda *_: (), "^messages of configure_train must .*got 0 for "),
        ("aggregate_train", lambda *_: (None, None), "aggregate_train must be given the replies"),
        (
            "aggregate_train",
            lambda self, number, replies: PAX.aggregate_train(self, number, list(replies)[1:]),
            r"^aggregate_train must be given the replies of all parties, .*, got none of .*\d;",
        ),
        (
            "aggregate_train",
            lambda self, *given: (ArrayRecord([np.zeros(3)]), PAX.aggregate_train(self, *given)[1]),
            "^arrays must be the last model",
        ),
    ],
    ids=["left-out", "no-messages", "not-passed", "one-not-passed", "another-model"],
)
def test_a_hook_that_breaks_the_conversation_is_refused(hook, function, expected):
    for start in (own_start, flowers_start) if hook == "aggregate_train" else (own_start,):
        strategy = type("Broken", (PAX,), {hook: function})(**QUICK)
        with grid_of() as grid, pytest.raises(ConfigError, match=expected):
            start(strategy, grid)


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


@pytest.mark.parametrize("name", METHODS)
def test_an_argument_is_taken_if_the_method_reads_it_and_else_refused_with_the_way_out(name):
    strategy = getattr(strategies, name)
    plain = strategy().settings
    read = strategy.protocol_class.settings_read(plain)
    mine = {python_name(each.rpartition(".")[2]): each for each in sorted(read) if taken(each)}
    assert mine.keys() == set(inspect.signature(strategy).parameters)
    if "eta" in mine:
        mine.setdefault("learning_rate", mine["eta"])  # a synonym
    for setting, value in defaults().items():
        section, _, own = setting.replace("-", "_").rpartition(".")
        keyword, is_read = python_name(setting.rpartition(".")[2]), setting in mine.values()
        ways = [({keyword: defaults()[mine.get(keyword, setting)]}, keyword in mine)]
        if section:
            nested, joined = {section: {own: value}}, {f"{section}_{own}": value}
            ways += [({setting: value}, is_read), (nested, is_read), (joined, False)]
        for given, is_taken in ways if setting != "strategy" else ():
            if is_taken:
                assert strategy(**given).settings == plain
                continue
            with pytest.raises(ConfigError) as caught:  # before the rule that parties break
                strategy(parties=-1, **given)
            check_way_out(str(caught.value), setting, strategy.method, mine)


def taken(setting):
    return setting not in OF_APP | OF_TABLES


def check_way_out(text, setting, method, mine):
    """It names a setting that the constructor takes, methods that read it, or where it belongs."""
    assert re.match(r"[\w']+(={'\w+': ...})? (must be omitted|is not a setting|must be set)", text)
    if near := re.search(r"(?:did you mean|nearest is) (\w+)\??$", text):
        assert near[1] in mine
    elif readers := re.search("; read by (.*)$", text):
        assert method not in readers[1].split(", ")
    elif setting in OF_TABLES:
        assert re.search("where the tables are read, at the parties, got", text)
    else:
        assert setting in OF_APP
        assert re.search("; fedapp run .* has it$", text)


def test_a_run_config_is_taken_as_it_is():
    config = {**defaults(), "strategy": "fedxgbllr", "max-depth": 5, "fedxgbllr.max-depth": 3}
    with pytest.raises(ConfigError, match="max_depth must be omitted for fedxgbllr"):
        strategies.FedXGBllr(**config)
    del config["max-depth"]
    assert strategies.FedXGBllr(**config).protocol.section.max_depth == 3


@pytest.mark.parametrize("n_parties", [2, 4])
def test_all_nodes_take_part_unless_their_number_is_given(n_parties):
    with grid_of(n_parties) as grid:
        strategy = PAX(**QUICK)
        strategy.start(grid)
        assert len(strategy.parties) == strategy.settings.parties == n_parties
    for wrong in (1, 5):
        with grid_of(n_parties) as grid, pytest.raises(ConfigError, match=r"^parties must be "):
            PAX(**QUICK, parties=wrong).start(grid)
