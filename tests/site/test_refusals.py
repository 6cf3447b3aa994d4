"""What a site refuses, each by a message that it answers with the rule."""

from dataclasses import replace

import numpy as np
import pytest

from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import Request
from fedapp.messages.handshake import LabelsRequest
from fedapp.messages.methods import all_methods
from fedapp.messages.pax import SketchRequest
from fedapp.messages.pax_secure import PrivateTreesRequest
from fedapp.messages.scoring import EvaluateRequest
from fedapp.messages.secagg import LeftRequest
from fedapp.messages.secureboost import SetupRequest
from fedapp.runs.local import run_local
from fedapp.site.database import DATABASE
from fedapp.site.settings import site_config
from fedapp.site.store import PART_FILE
from tests.crypto.test_masks import TERMS, Coordinator, counting
from tests.messages.declared import example, kinds, name_of
from tests.site.office import NODE, PARTIES, hello, model_id, private, vertical_hello
from tests.site.office import ask as ask_number
from tests.site.test_account import senders
from tests.site.test_plan import private as private_run

SKETCH = SketchRequest(n_bins=4, **TERMS)
NO_POLICY = r"none: set allow in the node config of bank, or see fedapp site init --policy\), got "
QUANTILES = hello(objective="reg:absoluteerror")
RANKS, TIMES = hello(objective="rank:ndcg"), hello(objective="survival:cox")


def ask(config, request, method="pax", number=1):
    """What a site answers to the first message of a run."""
    return ask_number(config, number, request, method=method)


def filled(kind, **fields):
    return kind(**{**example(kind), **fields})


@pytest.mark.parametrize(
    ("node", "request_", "method", "rule"),
    [
        ({"allow": " , "}, hello(), "pax", rf"strategy must be one that .* allows \({NO_POLICY}"),
        ({"allow": "pax"}, hello(), "bagging", r"strategy must be one .* \(pax\), got bagging$"),
        ({"allow": "secureboost"}, SKETCH, "secureboost", "strategy must be .*, got pax$"),
        ({}, LabelsRequest(**TERMS), "secureboost", "strategy must be horizontal to send query.la"),
        ({}, SKETCH, "bagging", "strategy must be pax to send train.pax_sketch, got bagging$"),
        ({}, filled(EvaluateRequest), "describe-rows", "strategy must be one that trains to send"),
        ({"monotone-constraints": "a:1"}, hello(), "pax", "monotone-constraints and interaction-"),
        ({"interaction-constraints": "[a,b]"}, hello(), "pax", "monotone-constraints and inter"),
        ({"least-bin-rows": 5}, hello(), "bagging", "least-bin-rows must be 0 in the node config,"),
        ({"label-epsilon": 1}, hello(), "pax", "label-epsilon must be 0 in the node config, or st"),
        ({"base-margin": "m"}, hello(), "fedavg-linear", "base-margin must be empty in the node "),
        # Objectives that do not fit the labels
        ({"event": "dead"}, hello(), "pax", r"objective must be survival:\S+ .* \(event\), got bi"),
        ({"qid": "query"}, hello(), "pax", r"objective must be rank:ndcg or .* \(qid\), got "),
        ({"weight": "w", "qid": "query"}, RANKS, "pax", "weight .*, in which all queries count al"),
        ({"weight": "w"}, TIMES, "pax", "weight must be empty .*, in which all rows count alike$"),
        ({}, RANKS, "pax", "qid must name the column of queries at bank for rank:ndcg, got none$"),
        (
            {"label-epsilon": 1},
            filled(SetupRequest, objective="reg:absoluteerror", insecure_small_key=False),
            *("secureboost", "label-epsilon must be 0 .* for reg:absoluteerror: drawn labels do"),
        ),
        ({}, QUANTILES, "bagging", "objective must be one whose leaves are sums at bank, or strat"),
        ({"weight": "w"}, QUANTILES, "pax", "weight must be empty at bank for reg:absoluteerror "),
        ({"least-bin-rows": 5}, QUANTILES, "pax", "least-bin-rows must be 0 at bank for reg:absol"),
        # What may leave only in sums, or with noise
        ({"least-parties": 3}, hello(PARTIES), "pax", "aggregation must be secure for bank, whose"),
        ({"least-parties": 3}, SKETCH, "pax", r"aggregation must be secure .* got pax without$"),
        (
            {"least-parties": 3},
            hello(PARTIES[:2], aggregation="secure"),
            *("pax", r"parties must be >= 3 \(least-parties of bank\), got 2; "),
        ),
        ({"run-epsilon": 1}, hello(), "pax", "privacy.epsilon must be > 0 and <= 1 .*; got 0$"),
        ({"run-epsilon": 1}, private(2.0), "pax", "privacy.epsilon must be > 0 and .*; got 2$"),
        ({"total-epsilon": 1}, private(2.0), "pax", "privacy.epsilon must be > 0 and .*; got 2$"),
        ({"run-epsilon": 1}, SKETCH, "pax", "privacy.epsilon must be .*; got pax without$"),
        ({"run-epsilon": 1}, counting(), "pax", "privacy.epsilon must be .*; got pax without$"),
    ],
)
def test_a_run_that_a_node_config_forbids_is_refused(node, request_, method, rule):
    """Nobody is asked about it."""
    config = site_config({**NODE, "label": "y", "approve": "ask", **node}, {})
    with pytest.raises(ConfigError, match=f"^{rule}"):
        ask(config, request_, method)
    assert not (home() / "sites" / "bank" / model_id(1)).exists()
    assert not (home() / "sites" / "bank" / DATABASE).exists()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"fold": 6, "folds": 5}, r"fold must be in \[1, 5\] with folds=5, got 6"),
        ({"valid_from": "booked:1"}, "valid-from must come with test-from, got booked:1$"),
    ],
)
@pytest.mark.parametrize("method", ["pax", "secureboost"])
def test_a_plan_that_holds_no_rows_back_by_a_rule_is_not_shown_to_a_person(method, change, rule):
    """A person reads which rows test, and approves that."""
    config = site_config({**NODE, "label": "y", "allow": method, "approve": "ask"}, {})
    request = hello() if method == "pax" else vertical_hello()
    with pytest.raises(ConfigError, match=f"^{rule}"):
        ask(config, replace(request, **change), method)
    assert not (home() / "sites" / "bank" / DATABASE).exists()


BOUNDED = [
    kind for kind in kinds() if issubclass(kind, Request) and (kind.limits or kind.for_trials)
]


@pytest.mark.parametrize("kind", BOUNDED, ids=name_of)
def test_every_limit_and_every_rule_for_trials_binds(kind):
    """A message at the limit is refused too, but later: as there is no such run."""
    method = next(name for name in all_methods() if kind.kind in senders(name))
    safe = {
        name: float(rule.below) if rule.below else False for name, rule in kind.for_trials.items()
    }
    config = site_config({**NODE, "label": "y"}, {})
    allowing = replace(config, allows_insecure=True)

    def refusal(config, **fields):
        with pytest.raises(FedappError) as refused:
            ask(config, filled(kind, **(safe | fields)), method)
        return str(refused.value)

    for name, limit in kind.limits.items():
        value, key = max(example(kind)[name], 1), limit.setting.replace("-", "_")
        text = f"{name.replace('_', '-')} must be <= {value - 1} ({limit.setting} in the node "
        assert text in refusal(replace(config, **{key: value - 1}), **{name: value})
        assert "in the node config" not in refusal(replace(config, **{key: value}))
    for name in kind.for_trials:
        value = True if safe[name] is False else safe[name] - 1
        text = f"{name.replace('_', '-')} must be "
        assert refusal(config, **{name: value}).startswith(text)
        assert "allow-insecure" not in refusal(allowing, **{name: value})


@pytest.fixture
def bank(write_table):
    """``bank(**node)``: a site with a table, that takes part in all methods."""
    data = str(write_table("bank", id=[f"c{number}" for number in range(40)]))
    table = {**NODE, "data": data, "label": "y", "id": "id"}
    return lambda **node: site_config({**table, **node}, {})


@pytest.mark.parametrize(
    ("model", "method", "plan", "rule"),
    [
        ("../../etc", "interactive", {"rounds": 0}, "must be 16 hex digits"),
        ("0" * 16, "secureboost", {}, "must name a model to predict, and none to train"),
    ],
)
def test_a_model_that_is_none_or_trains_is_refused(bank, model, method, plan, rule):
    with pytest.raises(ProtocolError, match=rf"VerticalHelloRequest\.model {rule}$"):
        ask(bank(), vertical_hello(model=model, aggregation="sealed", **plan), method)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        (None, "model must have a part at this party, got none: was it trained here"),
        ("no JSON", "model's part must be as fedapp wrote it, got a file that was changed"),
        ('{"salt": "00"}', "model's part must be as fedapp wrote it, got a file that was changed"),
    ],
)
def test_a_model_without_a_sound_part_here_predicts_nothing(bank, part, rule):
    if part:
        (folder := home() / "sites" / "bank" / ("0" * 16)).mkdir(parents=True)
        (folder / PART_FILE).write_text(part)
    with pytest.raises(DataError, match=f"^{rule}"):
        ask(bank(), vertical_hello(model="0" * 16, aggregation="sealed", rounds=0), "interactive")


TOWNS = ["Oslo"] * 39 + ["Rome"]


@pytest.mark.parametrize(
    ("columns", "node", "rule"),
    [
        ({"id": ["", *range(39)]}, {}, r"id column \[withheld\] must have no missing values, got"),
        (
            {"town": TOWNS},
            {"share-categories": False},
            r"categories of feature columns must be given by the schema where share-categories is "
            r"false in the node config, got none for \[withheld\]; the site's own log says more$",
        ),
        (
            {"y": None, "w": range(40)},
            {"label": "", "weight": "w"},
            r"weight column \[withheld\] must be in the table with the labels, got it in one ",
        ),
    ],
    ids=["no id", "names", "weights"],
)
def test_a_table_that_breaks_a_rule_is_refused_and_its_columns_are_not_named(
    write_table, columns, node, rule
):
    data = str(write_table("bank", 40, **{"id": range(40), **columns}))
    table = {"data": data, "label": "y", "id": "id", "allow-export": True}
    config = site_config({**NODE, **table, **node}, {})
    with pytest.raises(DataError, match=f"^{rule}"):
        ask(config, vertical_hello(aggregation="sealed", rounds=1), "secureboost")


def test_no_value_of_a_table_is_in_an_error_that_leaves(write_table, caplog):
    """The columns of parties with the same ones are known; the site's log has the line."""
    table = {"data": str(write_table("bank", y=["", *[1, 0] * 19, 1])), "label": "y"}
    rule = r"^label column 'y' must have no missing values, got 1 of 40 rows"
    with pytest.raises(DataError, match=rf"{rule}[^,]*; the site's own log says more$"):
        ask(site_config({**NODE, **table}, {}), hello())
    assert "first in line 2" in caplog.text


def test_no_more_ids_are_matched_in_a_day_than_the_site_allows(vertical, joined):
    rule = r"^shop \(step \d\): align-ids-per-day must be >= .*, 40 with the 40 of bank, got 39"
    with pytest.raises(FedappError, match=rule):
        run_local(vertical(align="psi"), joined(shop={"align-ids-per-day": 39}))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"names": (*PARTIES, "zoo")}, r"parcel\.key must be one a name$"),
        ({"names": ("bank", "in surer", "shop")}, r"parcel\.names must be letters, digits, "),
        ({"names": (*PARTIES, "shop")}, r"parcel\.names must be distinct and include the"),
    ],
    ids=["too few", "no name", "twice"],
)
def test_a_roster_of_another_form_is_refused(configs, change, rule):
    coordinator = Coordinator(configs)
    with pytest.raises(ProtocolError, match=f"^bank: {rule}"):
        coordinator.ask(replace(coordinator.opening, **change), 3, ["bank"])
    with pytest.raises(ProtocolError, match=r"step must come later: the site has no masks of this"):
        coordinator.ask(LeftRequest(), 3, ["bank"])  # before they sum


def test_a_run_with_noise_is_asked_for_no_exact_sums(configs):
    coordinator = private_run(configs)
    coordinator.ask(coordinator.opening, 3, ["bank"])
    rule = r"^bank: CountRequest\.class must be one for noised sums, as the run has begun$"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(counting(), 4, ["bank"])


def tree(round_id, threshold=0.0, n_leaves=1):
    """Sums of a tree of one split, after one of so many leaves."""
    return PrivateTreesRequest(
        sizes=np.array([3], np.int32),
        lefts=np.array([1, 0, 0], np.uint16),
        values=np.array([threshold, 0, 0], np.float32),
        columns=np.zeros(1, np.int32),
        defaults=np.zeros(1, np.uint8),
        sets=np.empty(0, np.uint8),
        leaf_values=np.zeros(n_leaves, np.float32),
        round_id=round_id,
        base_margin=np.zeros(1, np.float32),
    )


@pytest.mark.parametrize(
    ("simulated", "again", "rule"),
    [
        (True, [tree(1, n_leaves=2), tree(2, n_leaves=2)], "step must be one of 2 for tree"),
        (True, [tree(0, 0.5, n_leaves=2)], r"content must be what it was when tree 0 was disc"),
        (False, [tree(0, 0.5, n_leaves=2)], "round_id must be 1 by the plan that opened the r"),
        (False, [tree(2, n_leaves=2)], "round_id must be 1 by the plan that opened the run"),
    ],
)
def test_noised_sums_are_those_of_the_schedule_and_each_is_of_one_request(
    configs, simulated, again, rule
):
    """A simulated site has no plan that refuses them before."""
    sites = {name: replace(config, simulated=simulated) for name, config in configs.items()}
    coordinator = private_run(sites)
    coordinator.ask(coordinator.opening, 3, ["bank"])
    for step, request in enumerate((tree(0, n_leaves=0), *again[:-1]), start=4):
        coordinator.ask(request, step, ["bank"])
    with pytest.raises(ProtocolError, match=rf"^bank: PrivateTreesRequest\.{rule}"):
        coordinator.ask(again[-1], 4 + len(again), ["bank"])


@pytest.mark.parametrize(
    ("multiplier", "rule"), [(1.0, "be of more noise to keep epsilon 1"), (1e9, "be of less noise")]
)
def test_noise_that_breaks_its_promise_or_cannot_be_drawn_is_refused(configs, multiplier, rule):
    sites = {name: replace(config, simulated=True) for name, config in configs.items()}
    coordinator = private_run(sites)
    request = replace(coordinator.opening, multiplier=multiplier)
    with pytest.raises(ProtocolError, match=rf"^bank: PrivateOpenRequest\.multiplier must {rule}"):
        coordinator.ask(request, 3, ["bank"])
