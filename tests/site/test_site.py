"""What a site allows, and what its engineer sees of it before any run."""

import json
import re
from dataclasses import is_dataclass, replace
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.deploy import warm
from fedapp.errors import ConfigError, FedappError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import OnlyInTrials, Range, Request, SiteLimit, request
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.methods import _groups, all_methods, kinds_of, module_of_group
from fedapp.messages.vertical import OpenRequest, VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.runs.local import run_local
from fedapp.site.account import planned as planned_at
from fedapp.site.answer import answer
from fedapp.site.check import check_site, kind_of
from fedapp.site.mail import box_key
from fedapp.site.policy import check_message, check_policy, group_of
from fedapp.site.register import admit
from fedapp.site.settings import SiteConfig, parse_node_config, site_config
from fedapp.site.store import PART_FILE, Store
from fedapp.site.trust import pin
from strategies.vertical import VerticalStrategy
from tests.deploy_folders import checked_site
from tests.network import run
from tests.plans import planned
from tests.transcript import Listener, arrays_of


def node(allow="", **others):
    return {"name": "bank", "data": "rows.csv", "allow": allow} | {
        key.replace("_", "-"): str(value) for key, value in others.items()
    }


# Policy

NOT_ALLOWED = r"one that the site allows \(pax, secureboost\), got "


@pytest.mark.parametrize("given", [{}, {"allow": ""}, {"allow": " , "}])
@pytest.mark.parametrize("method", sorted(all_methods()))
def test_a_site_without_a_policy_allows_no_method_and_says_how_to(given, method):
    config = site_config({"name": "bank", "data": "rows.csv", **given}, {})
    way = "set allow in the node config of bank, or see fedapp site init --policy"
    rule = rf"^strategy must be one that the site allows \(none: {way}\), got {method}$"
    kind = f"train.{method.replace('-', '_')}_grow"
    with pytest.raises(ConfigError, match=rule):
        check_policy(config, kind, method)
    check_policy(replace(config, simulated=True), kind, method)


@pytest.mark.parametrize(
    ("kind", "method", "rule"),
    [
        ("query.hello", "bagging", NOT_ALLOWED),
        ("train.bagging_boost", "bagging", NOT_ALLOWED),
        ("train.bagging_boost", "pax", NOT_ALLOWED),
        ("train.fedavg_linear_average", "pax", NOT_ALLOWED),
        ("query.hello", "", NOT_ALLOWED),
        # A module that declares nothing is a method of its own.
        ("query.parameters_read", "pax", NOT_ALLOWED + "parameters$"),
        # Messages that the method never sends.
        ("query.alignment_open", "pax", "inference or vertical to send query.alignment_open, got "),
        ("query.labels", "secureboost", "horizontal to send query.labels, got "),
        ("evaluate.explain_rows", "secureboost", "inference to send evaluate.explain_rows, got "),
    ],
)
def test_a_message_of_a_method_that_is_not_allowed_is_refused(kind, method, rule):
    config = site_config(node("pax, secureboost"), {})
    with pytest.raises(ConfigError, match=f"^strategy must be {rule}"):
        check_policy(config, kind, method)


# Which methods may send the messages of each module.
HORIZONTAL = {"pax", "fedxgbllr", "bagging", "cyclic", "fedavg-linear", "describe-rows"}
HORIZONTAL |= {"horizontal-forest"}
VERTICAL = {"secureboost", "federated-forest", "describe-columns"}
INFERENCE = {"interactive", "one-round", "eini", "standing"}
SENDERS = {
    "greet": HORIZONTAL | VERTICAL | INFERENCE,
    "hello": HORIZONTAL,
    "labels": HORIZONTAL,
    "scoring": HORIZONTAL - {"describe-rows"},
    "secure": HORIZONTAL,
    "private": HORIZONTAL - {"describe-rows"},
    "vertical": VERTICAL | INFERENCE,
    "alignment": VERTICAL | INFERENCE,
    "explain": INFERENCE,
    **{name.replace("-", "_"): {name} for name in sorted(HORIZONTAL | VERTICAL | INFERENCE)},
}


def all_requests():
    """Kinds of all requests, by the module that has them."""
    return {name: found for name in SENDERS if (found := {kind.kind for kind in handlers_of(name)})}


def handlers_of(module):
    file = module_of_group(module).__name__.rpartition(".")[2]
    handlers = import_module(f"clients.{file}").HANDLERS
    return [kind for kind in handlers if group_of(kind.kind) == module]


def test_the_policy_matrix_has_every_message_and_every_method():
    assert set(all_methods()) == HORIZONTAL | VERTICAL | INFERENCE
    assert set(_groups()) == set(SENDERS)
    declared = {kind for name in SENDERS for kind in kinds_of(module_of_group(name))}
    assert declared == set().union(*all_requests().values())


@pytest.mark.parametrize("method", [*sorted(HORIZONTAL | VERTICAL | INFERENCE), "", "hello", "no"])
@pytest.mark.parametrize("module", SENDERS)
def test_a_message_is_taken_of_those_methods_alone_that_send_it(module, method):
    for allow in ("", ",".join(SENDERS), "pax", "secureboost,eini", method or "pax"):
        config = site_config(node(allow), {})
        for kind in all_requests()[module]:
            if method in SENDERS[module] and method in allow.replace("_", "-").split(","):
                check_policy(config, kind, method)
            else:
                with pytest.raises(ConfigError, match=r"^strategy must be .* got"):
                    check_policy(config, kind, method)


@request("train.trial_begin")
class TrialRequest(Request):
    """Of a method that no other module knows."""

    no_cover: Annotated[bool, OnlyInTrials()]
    fewest_ways: Annotated[float, Range(0, 1e9), OnlyInTrials(below=12.5)]
    n_bins: Annotated[int, Range(0, 10**6), SiteLimit("most-bins")]


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (TrialRequest(True, 12.5, 0), "no-cover must be false, .* got true"),
        (TrialRequest(False, 12.4, 0), r"fewest-ways must be >= 12\.5, .* got 12\.4"),
    ],
)
def test_a_value_for_trials_is_refused_whatever_its_field_is_called(request_, rule):
    site = SiteConfig("bank", "rows.csv")
    with pytest.raises(ConfigError, match=f"^{rule}"):
        check_message(site, request_, "bank")
    check_message(replace(site, allows_insecure=True), request_, "bank")
    check_message(replace(site, simulated=True), request_, "bank")
    check_message(site, TrialRequest(False, 12.5, 0), "bank")


def test_a_value_beyond_a_limit_of_the_site_is_refused():
    asked = TrialRequest(False, 12.5, 1025)
    rule = r"^n-bins must be <= 1024 \(most-bins in the node config of bank\), got 1025$"
    with pytest.raises(ConfigError, match=rule):
        check_message(site_config(node(), {}), asked, "bank")
    check_message(site_config(node(), {}), replace(asked, n_bins=1024), "bank")
    check_message(site_config(node(most_bins=2000), {}), asked, "bank")
    check_message(SiteConfig("bank", "rows.csv", simulated=True), asked, "bank")


def test_every_message_that_asks_for_bins_declares_the_limit_of_the_site():
    limited = {"n_bins": "most-bins", "max_bin": "most-bins", "score_bins": "score-bins"}
    found = {
        (kind, name): kind.limits[name].setting if name in kind.limits else ""
        for module in SENDERS
        for kind in handlers_of(module)
        for name in kind.forms
        if "bin" in name
    }
    assert len(found) >= 10
    assert found == {(kind, name): limited[name] for kind, name in found}


def test_every_message_with_a_key_or_a_guard_declares_what_is_for_trials():
    declared = {
        (method, name)
        for method in all_methods()
        for kind in vars(module_of_group(method.replace("-", "_"))).values()
        if isinstance(kind, type) and issubclass(kind, Request) and is_dataclass(kind)
        if "describe" not in method or method.replace("-", "_") in kind.kind
        for name in kind.for_trials
    }
    assert declared == {
        *((name, "insecure_small_key") for name in ("describe-columns", "secureboost")),
        ("federated-forest", "insecure_small_key"),
        *(("eini", name) for name in ("insecure_small_key", "unguarded", "least_possibilities")),
    }


@pytest.mark.parametrize("strategy", ["bagging", "secureboost"])
def test_a_run_of_a_method_that_a_site_does_not_allow_ends_with_its_words(
    settings, sites, write_table, strategy
):
    contexts = sites(
        {"name": "bank", "data": write_table("bank"), "allow": "pax"},
        {"name": "shop", "data": write_table("shop", seed=1), "allow": "pax,bagging,secureboost"},
    )
    match = rf"^bank \(step 0\): strategy must be one that the site allows \(pax\), got {strategy}$"
    with pytest.raises(FedappError, match=match):
        run_local(settings(strategy=strategy, parties=2), contexts)


@pytest.mark.slow
def test_a_run_of_an_allowed_method_is_the_same_as_without_a_policy(settings, sites, write_table):
    bank, shop = write_table("bank", 300), write_table("shop", 300, seed=1)
    models = []
    for policy in ({"allow": ",".join(all_methods())}, {"allow": "pax", "min-rows": "20"}):
        contexts = sites(
            {"name": "bank", "data": bank, **policy}, {"name": "shop", "data": shop, **policy}
        )
        folder = run_local(settings(parties=2), contexts)
        models.append((folder.path / "model.json").read_bytes())
    assert models[0] == models[1]


def test_a_run_that_would_train_on_too_few_rows_is_refused(settings, sites, write_table):
    contexts = sites({"name": "bank", "data": write_table("bank"), "min-rows": "30"})
    with pytest.raises(
        FedappError, match=r"bank.*table must have at least 30 training rows, got 29"
    ):
        run_local(settings(parties=1), contexts)


@pytest.mark.parametrize(
    ("part", "fraction", "n_rows"),
    [("validation", "valid_fraction", 1), ("test", "test_fraction", 2)],
)
def test_a_part_of_few_rows_is_refused_before_training(
    settings, sites, write_table, part, fraction, n_rows
):
    """Of one row that validates its class and loss could be read each round."""
    contexts = sites({"name": "bank", "data": write_table("bank", 400), "min-rows": "30"})
    rule = rf"bank \(step 1\): table must have at least 30 {part} rows, got {n_rows} "
    way = rf"\(min-rows of bank\); {fraction.replace('_', '-')}=0 holds none back$"
    fractions = {"valid_fraction": 0.0, "test_fraction": 0.0, fraction: n_rows / 400}
    with pytest.raises(FedappError, match=rule + way):
        run_local(settings(parties=1, **fractions), contexts)
    folder = run_local(settings(parties=1, valid_fraction=0.0, test_fraction=0.0), contexts)
    assert (folder.path / "model.json").exists()


@pytest.mark.by_default("20-10")
@pytest.mark.parametrize(("min_rows", "fewest"), [("20", 10), ("5", 5), ("0", 1)])
def test_scores_do_not_tell_of_single_rows_where_min_rows_is_set(
    settings, sites, write_table, min_rows, fewest
):
    """With a leaf a value and a bin a leaf, a crafted model would give values with their labels."""
    node_ = {"name": "bank", "data": write_table("bank", 300), "min-rows": min_rows}
    app = Listener()
    run(settings(parties=1, num_boost_round=8, max_depth=4, max_bin=256), sites(node_), app)
    found = [
        array.sum(axis=0)
        for _, _, reply in app.heard
        for name, array in arrays_of(reply).items()
        if name.endswith("_scores") and array.size
    ]
    assert len(found) > 10
    smallest = min(cells[cells > 0].min() for cells in found if cells.any())
    assert smallest >= fewest
    assert (smallest == 1) == (min_rows == "0")


def test_vertical_parties_with_few_common_rows_to_validate_are_refused(vertical, joined):
    contexts = joined(200, bank={"min-rows": "12"})
    rule = r"ids must have 12 validation rows in common at least \(min-rows of bank\), got 1; "
    with pytest.raises(FedappError, match=rf"^bank \(step 4\): {rule}valid-fraction=0"):
        run_local(vertical(align="psi", valid_fraction=0.005), contexts)


@pytest.mark.slow
def test_a_run_that_trains_cannot_begin_as_one_that_predicts(vertical, joined, monkeypatch):
    """The fewest rows hold for training alone: an old model's name does not lift them."""
    contexts = joined()
    old = json.loads((run_local(vertical(), contexts).path / "summary.json").read_text())
    for context in contexts:
        context.node_config["min-rows"] = "39"
    greeting = VerticalStrategy.greeting
    monkeypatch.setattr(
        VerticalStrategy, "greeting", lambda self: replace(greeting(self), model=old["model_id"])
    )
    rule = r"VerticalHelloRequest\.model must name a model to predict, and none to train$"
    with pytest.raises(FedappError, match=rf"^(bank|shop) \(step 1\): {rule}"):
        run_local(vertical(), contexts)


@pytest.mark.slow
def test_a_finished_run_does_not_begin_again_under_its_id(vertical, joined):
    """A server that says it was started again gets no letter twice and changes no part."""
    contexts = joined()
    folder = run_local(vertical(), contexts)
    model_id = json.loads((folder.path / "summary.json").read_text())["model_id"]
    config, names = site_config(contexts[0].node_config, {}), ("bank", "shop")
    part = home() / "sites" / "bank" / model_id / PART_FILE
    before = part.read_bytes()
    keys = np.stack([box_key(name) for name in names])
    plan = planned_at(Store.open(part.parent))
    plan = {name: tuple(one) if isinstance(one, list) else one for name, one in plan.items()}
    asked = [
        VerticalHelloRequest(**plan),
        OpenRequest(names, "bank", keys, keys, np.array([9, 9]), False, 0.2, 0.1, 42),
    ]
    for step, one in enumerate(asked, start=1):
        envelope = Envelope(model_id, step, 0, attempt=1, method="secureboost")
        given = config, one.kind, envelope, to_content(one, "bank")
        if step == 1:
            answer(*given)
        else:
            with pytest.raises(ProtocolError, match=r"OpenRequest\.message must come at most once"):
                answer(*given)
    assert part.read_bytes() == before


def test_vertical_parties_with_too_few_rows_in_common_are_refused(vertical, sites, write_table):
    ids = [f"c{number}" for number in range(40)]
    bank = write_table("bank", id=ids)
    shop = write_table("shop", y=None, id=[f"c{number}" for number in range(25, 65)])
    contexts = sites(
        {"name": "bank", "data": bank, "id": "id"},
        {"name": "shop", "data": shop, "id": "id", "label": "", "min-rows": "12"},
    )
    match = r"shop.*ids must have 12 training rows in common at least \(min-rows of shop\), got 11"
    with pytest.raises(FedappError, match=match):
        run_local(vertical(align="psi"), contexts)


def test_a_run_config_has_no_say_in_a_policy():
    run = {"data": "iris", "partition": "iid", "columns": "even", "allow": "pax", "min-rows": 9}
    run |= {"draws-secret": SECRET}
    config = site_config({"partition-id": 0, "num-partitions": 2}, run)
    assert (config.allowed, config.min_rows, config.draws_secret) == (frozenset(), 0, "")


# What a site draws

SECRET = "a text that nobody guesses"
SHORT = {
    "pax": {"subsample": 0.5},
    "bagging": {"subsample": 0.5},
    "cyclic": {"subsample": 0.5},
    "fedavg-linear": {"fedavg_linear__rounds": 2, "fedavg_linear__batch_size": 8},
    "secureboost": {
        "secureboost__goss": True,
        "secureboost__key_bits": 512,
        "secureboost__insecure_small_key": True,
        "allow_export": True,
    },
    "fedxgbllr": {"subsample": 0.5, "fedxgbllr__trees": 2, "fedxgbllr__rounds": 1},
}


@pytest.fixture
def trained(settings, sites, write_table):
    """``trained(strategy, overrides, **node)``: the model of two sites with such node configs."""

    def train(strategy, overrides, **more):
        own = {key.replace("_", "-"): value for key, value in more.items()}
        ids, is_one = range(80), strategy == "secureboost"
        tables = {
            "bank": write_table("bank", 80, id=ids),
            "shop": write_table("shop", 80, seed=1, id=ids, **({"y": None} if is_one else {})),
        }
        nodes = [{"name": name, "data": data, "id": "id", **own} for name, data in tables.items()]
        nodes[1] |= {"label": ""} if is_one else {}
        for node_ in nodes:
            node_["allow-export"] = "true"
        folder = run_local(settings(strategy=strategy, parties=2, **overrides), sites(*nodes))
        return (folder.path / "model.json").read_bytes()

    return train


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", SHORT)
def test_rows_are_drawn_by_a_secret_that_a_site_keeps_or_is_given(
    trained, monkeypatch, tmp_path, strategy
):
    if strategy == "fedxgbllr":
        pytest.importorskip("torch")
    drawn = trained(strategy, SHORT[strategy])
    assert trained(strategy, SHORT[strategy]) == drawn
    given = trained(strategy, SHORT[strategy], draws_secret=SECRET)
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "another"))
    assert trained(strategy, SHORT[strategy], draws_secret=SECRET) == given
    assert len({drawn, given, trained(strategy, SHORT[strategy])}) == 3


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic", "secureboost", "fedxgbllr"])
def test_a_round_that_draws_too_few_rows_is_refused(trained, strategy):
    """What a coordinator asks for could else be sums of the few rows of a small draw."""
    goss = {"secureboost__top_rate": 0.1, "secureboost__other_rate": 0.1}
    given = {**SHORT[strategy], "valid_fraction": 0.0, "test_fraction": 0.0}
    few = given | (goss if strategy == "secureboost" else {"subsample": 0.1})
    rule = r"subsample \(or secureboost\.goss\) must draw at least 20 training rows a round"
    with pytest.raises(FedappError, match=rf"^(bank|shop).*: {rule} \(min-rows of .*\), got \d+; "):
        trained(strategy, few, min_rows="20")
    trained(strategy, given, min_rows="20")


def test_a_secret_is_not_shown():
    assert SECRET not in repr(site_config(node(draws_secret=SECRET), {}))


# Node configs


def test_a_node_config_is_read_as_flower_reads_it(tmp_path):
    text = 'name="bank" data="my rows.csv" min-rows=50 allow-export=true'
    expected = {"name": "bank", "data": "my rows.csv", "min-rows": 50, "allow-export": True}
    assert parse_node_config(text) == expected
    path = tmp_path / "site.toml"
    path.write_text(text.replace('" ', '"\n').replace("50 ", "50\n"))
    assert parse_node_config(str(path)) == expected


SWITCHES = {
    "header": "reader.header",
    "share-column-names": "shares_names",
    "allow-export": "allows_export",
    "encrypted-labels": "encrypts_labels",
    "share-label-figures": "shares_label_figures",
    "allow-insecure": "allows_insecure",
    "full-masks": "full_masks",
    "share-categories": "shares_categories",
}
OR_ROWS = ", or a whole number >= 2"


PINS = "must be the name of a site and its fingerprint, 32 hex digits, got 'a' and 'b'"
REFUSED = [
    ("name", "../bank", "in the node config must be .*, got '../bank'"),
    ("alow", "pax", r"in the node config is not a setting; did you mean allow\?"),
    *(
        (key, value, rule)
        for key in (
            *("most-bins", "score-bins", "align-most-rows", "min-rows", "min-bin-rows"),
            "predict-min-rows",
        )
        for value, rule in (
            ("-1", "must be >= 0, got '-1'"),
            ("many", "must be a whole number, got 'many'"),
            ("1e3", "must be a whole number, got '1e3'"),
        )
    ),
    *(
        (
            key,
            value,
            f"must be true or false{OR_ROWS if key == 'share-categories' else ''}, got {value!r}",
        )
        for key in SWITCHES
        for value in ("yes", "1", 1, 0, 1.0, "on", "True", "True ", "FALSE", "", "no")
    ),
    ("align-most-ratio", 0, "must be >= 1, got 0"),
    *(
        ("share-categories", value, f"must be true or false{OR_ROWS}, got {value!r}")
        for value in (2.0, -2, "2.0", "02", "1e2", "٢", 10**10)
    ),
    ("approve", "no", "must be ask or all, got 'no'"),
    ("missing-label", "keep", "must be refuse or drop, got 'keep'"),
    ("decimal", ";", "must be one of '.' or ',', got ';'"),
    ("least-parties", 1, "must be >= 2, got 1"),
    ("least-parties", 0, "must be >= 2 or absent, got 0"),
    ("draws-secret", "", "must be a secret or absent, got ''"),
    ("run-epsilon", "x", "must be a number, got 'x'"),
    ("total-epsilon", -1, "must be >= 0.0, got -1"),
    ("run-epsilon", "inf", "must be a number, got 'inf'"),
    ("draws-secret", "abc", "must have 16 characters or more, or be none or absent, got 3"),
    ("trusted", "a:b", PINS),
    ("monotone-constraints", "age", "must be .*, got age in the node config"),
    ("interaction-constraints", "age", "must be .*, got age in the node config"),
    *(
        ("app", text, rf"must be hashes of 64 hex digits \(fedapp site hash\), got '{text}'")
        for text in ("latest", "a" * 63, f"{'a' * 64},{'G' * 64}")
    ),
    (
        "release-keys",
        "abc",
        r"must be public keys of 64 hex digits \(python -m fedapp.site.bundle sign\), got 'abc'",
    ),
]


@pytest.mark.parametrize(("key", "value", "rule"), REFUSED)
def test_a_node_config_that_breaks_a_rule_is_refused(key, value, rule):
    with pytest.raises(ConfigError, match=f"^{key} {rule}$"):
        site_config({**node(), key: value}, {})


@pytest.mark.parametrize(
    ("text", "rule"),
    [("name=bank", "node config must be like name="), ('name="bank"', "data in the node config")],
)
def test_a_node_config_without_a_table_is_refused(text, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        site_config(parse_node_config(text), {})


@pytest.mark.parametrize(("value", "is_on"), [(True, 1), (False, 0), ("true", 1), ("false", 0)])
@pytest.mark.parametrize("key", SWITCHES)
def test_a_switch_may_be_a_text(key, value, is_on):
    assert attrgetter(SWITCHES[key])(site_config({**node(), key: value}, {})) is bool(is_on)


# fedapp site check


WIDE = {"COLUMNS": "200"}


def check(site):
    given = ["check", "--site", str(site)]
    is_file = isinstance(site, Path)
    result = CliRunner().invoke(site_app, given, env=WIDE) if is_file else checked_site(site)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_check_shows_what_is_odd_about_the_table(write_table):
    shown = check(f'name="bank" data="{write_table(b=[7] * 40)}" label="y"')
    assert shown.splitlines()[-1] == "! feature column 'b' has the same value in every row"


def test_a_check_says_where_flower_is_none_of_the_known_versions(write_table, monkeypatch):
    monkeypatch.setattr(warm, "DIGESTS", "[site] gone: gone=111111")
    shown = check(f'name="bank" data="{write_table("rows")}" label="y"')
    rule = r"! flwr must be 1\.41\.0 or 1\.42\.0, got [\d.]+: it differs; slow mode, each exchange"
    assert re.search(rule, shown)


def test_a_check_shows_the_table_from_the_outside_and_no_value_or_path(write_table):
    ids = [f"customer-{number}" for number in range(200)]
    path = write_table("secret", 200, id=ids, b=[""] * 3 + [7654321] * 197)
    shown = check(
        f'name="bank" data="{path}" label="y" id="id" allow="pax,secureboost" min-rows=9 '
        f'trusted="shop:{32 * "0"}"',
    )
    lines = [line.replace("│", " ").split() for line in shown.splitlines()]
    for words in (
        ["a", "numbers", "0"],
        ["b", "one", "value", "3"],
        ["rows,", "columns", "200,", "2"],
        ["label", "numbers,", "2", "distinct"],
        ["ids", "unique", "in", "every", "row"],
        ["min-rows", "9"],
        ["rows", "are", "drawn", "by", "a", "key", "of", "the", "site"],
        ["min-bin-rows", "9"],
        ["most-bins", "1024"],
        ["allow", "pax,", "secureboost"],
    ):
        assert words in lines
    for words in (
        ["pax", "yes", "each", "party's", "sums:", "most", "rows", "of", "a", "small", "table"],
        ["secureboost", "yes,", "active", "sizes,", "scores,"],
        ["bagging", "no:", "not", "in", "allow", "each", "party's", "trees;"],
    ):
        assert any(line[: len(words)] == words for line in lines)
    for secret in ("7654321", "customer-", str(path), path.stem):
        assert secret not in shown


def test_a_check_says_what_a_site_lacks(write_table, tmp_path):
    path = write_table("rows", y=None, id=["same"] * 40)
    config = tmp_path / "site.toml"
    allow = ",".join(all_methods())
    config.write_text(f'name = "shop"\ndata = "{path}"\nid = "id"\nallow = "{allow}"\n')
    shown = check(config)
    assert "none: a passive party" in shown
    assert "40 rows of 40 that share one" in shown
    assert "no: needs a label" in shown
    assert "passive, but only with align=ordered (needs ids else)" in shown
    # 53 + 6 + 1 bits a field of 40 rows, two fields, the 32 nodes of level 5
    line = "secureboost could show the label holder  the bins of 3,840 rows a round"
    assert line in shown


@pytest.mark.parametrize(("is_shared", "shows"), [("true", True), ("false", False)])
def test_a_check_says_how_many_labels_shared_figures_could_show(write_table, is_shared, shows):
    node = f'name="bank" data="{write_table()}" label="y" allow="describe-columns,secureboost"'
    shown = check(f"{node} share-label-figures={is_shared}")
    line = "describe-columns could show a passive party  labels of up to 2 rows can be read"
    assert (line in shown) == shows == ("describe-columns could show" in shown)


def test_no_label_holder_reads_bins_where_the_site_has_the_labels_or_refuses_the_method(
    write_table,
):
    path = write_table("rows", y=None)
    refusing = check(f'name="shop" data="{path}" allow="secureboost" least-bin-rows=5')
    active = check(f'name="bank" data="{write_table()}" label="y"')
    for shown in (refusing, active):
        assert "could show the label holder" not in shown
    assert "could show a passive party" not in refusing + active  # which allows no method


def test_a_check_says_how_many_labels_a_choice_of_splits_could_tell(write_table):
    config = f'name="bank" data="{write_table()}" label="y" allow="secureboost" most-columns=64'
    shown = check(config)
    # 16 x 64 bins, the 63 nodes of depth 6
    line = "secureboost could show a passive party  630 labels a round, by which of made-up columns"
    assert line in shown


def test_a_check_counts_runs_once_under_the_home_of_the_site(write_table, tmp_path, monkeypatch):
    data = write_table("rows")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "site.toml").write_text(
        f'name = "shop"\ndata = "{data}"\nlabel = "y"\nallow = "pax"\nleast-parties = 3\n'
    )
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "shop" / "home"))
    monkeypatch.chdir(tmp_path)
    config = site_config({"name": "shop", "data": str(data), "allow": "pax"}, {})
    opening = HelloRequest("binary:logistic", 0.2, 0.1, 42, False)
    admit(config, "a" * 16, "pax", replace(opening, **planned(["shop"])))
    lines = [line.split() for line in check(Path("shop/site.toml")).splitlines()]
    assert ["runs", "today", "1"] in lines
    assert ["least-parties", "3"] in lines


@pytest.mark.parametrize("name", ["supernode.key", "home/sites/shop/identity.key"])
def test_a_check_says_which_keys_others_may_read(write_table, tmp_path, name):
    config, key = tmp_path / "site.toml", tmp_path / name
    key.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f'name = "shop"\ndata = "{write_table("rows")}"\nlabel = "y"\n')
    assert "none here yet" in check(config)
    key.with_name("identity.new").touch()
    key.touch(mode=0o600)
    assert "readable by the owner only" in check(config)
    key.chmod(0o640)
    assert f"chmod 600: others may read {key} (mode 0640)" in check(config)


def test_a_check_says_what_a_run_must_ask_for(write_table):
    path = write_table("rows", id=[f"r{number}" for number in range(40)])
    allow = "secureboost,federated-forest"
    node = f'name="bank" data="{path}" label="y" id="id" encrypted-labels=true allow="{allow}"'

    def answers():
        lines = [line.replace("│", " ") for line in check(node).splitlines()]
        return {line.split()[0]: line for line in lines if line.strip()}

    assert "active, but only with others' keys (fedapp site trust)" in answers()["secureboost"]
    pin(home(), "shop", 32 * "0")
    assert "active, but only with labels=paillier (enc" in answers()["federated-forest"]
    assert "yes, active" in answers()["secureboost"]


def test_a_check_says_when_a_table_is_smaller_than_its_own_policy(write_table):
    path = write_table("rows")
    node = f'name="bank" data="{path}" label="y" min-rows=30 allow="pax"'
    shown = check(node)
    assert "no: 29 training rows, fewer than 30 (min-rows)" in shown


SUMS = {"least_parties": 3}
FLOORS = {"least_bin_rows": 5}


@pytest.mark.parametrize(
    ("method", "policy", "answer", "gets"),
    [
        ("pax", {}, "yes", "each party's sums: most rows of a small table"),
        ("pax", FLOORS, "yes", "each party's sums over bins of several rows"),
        (
            "pax",
            SUMS,
            "yes, but only with aggregation=secure (least-parties) and others' keys "
            "(fedapp site trust)",
            "sums over all parties: rows of a small table, not whose",
        ),
        (
            "pax",
            {**SUMS, **FLOORS, "trusted": f"shop:{32 * '0'}"},
            "yes, but only with aggregation=secure (least-parties)",
            "sums over all parties over bins of several rows",
        ),
        (
            "pax",
            {**SUMS, **FLOORS, "run_epsilon": 1, "trusted": f"shop:{32 * '0'}"},
            "yes, but only with aggregation=secure (least-parties) and "
            "privacy.epsilon up to 1 (run-epsilon)",
            "noised sums over all parties",
        ),
        (
            "fedavg-linear",
            {},
            "yes",
            "each party's columns' means and spreads; its model each round",
        ),
        (
            "fedavg-linear",
            {"run_epsilon": 1},
            "no: the coordinator gets more than run-epsilon allows",
            "each party's columns' means and spreads; its model each round",
        ),
        (
            "bagging",
            SUMS,
            "no: the coordinator gets more than least-parties allows",
            "each party's trees; a leaf may be a single row",
        ),
        (
            "bagging",
            FLOORS,
            "no: would ignore least-bin-rows",
            "each party's trees; a leaf may be a single row",
        ),
        (
            "secureboost",
            FLOORS,
            "no: would ignore least-bin-rows",
            "sizes, scores, which party has labels",
        ),
        (
            "federated-forest",
            {"encrypted_labels": "true"},
            "active, but only with align=ordered (needs ids else) and labels=paillier "
            "(encrypted-labels) and others' keys (fedapp site trust)",
            "sizes, scores, structure of trees",
        ),
        (
            "secureboost",
            {"allow": "pax"},
            "no: not in allow",
            "sizes, scores, which party has labels",
        ),
        (
            "eini",
            {**SUMS, **FLOORS},
            "active, but only with align=ordered (needs ids else) and others' keys "
            "(fedapp site trust)",
            "sizes",
        ),
    ],
)
def test_a_check_says_what_the_coordinator_gets_from_each_method(
    write_table, method, policy, answer, gets
):
    given = {"allow": ",".join(all_methods()), "label": "y", "data": write_table("rows"), **policy}
    config = site_config({**node(), **node(**given)}, {})
    assert check_site(config, all_methods(), (0.2, 0.2), 6).methods[method] == (answer, gets)


def test_every_method_declares_what_the_coordinator_gets():
    settings = {"least-bin-rows", "least-parties", "run-epsilon", "encrypted-labels"}
    for method in all_methods().values():
        assert next(iter(method.gets)) == ""
        assert settings.issuperset(" ".join(method.gets).split())


@pytest.mark.parametrize(
    ("site", "rule"),
    [
        (Path("nowhere"), "^--site must be the folder of fedapp site init, or a .*, got nowhere"),
        ('name="bank"', "data in the node config must name a table"),
        ('name="bank" data="gone.csv"', "data must be a built-in name"),
        (
            'name="bank" data="breast-cancer" allow="pax,scureboost"',
            r"allow must name methods \(.*secureboost, standing\), got scureboost",
        ),
    ],
)
def test_a_check_that_cannot_be_made_says_why(site, rule):
    with pytest.raises(FedappError, match=rule):
        check(site)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, np.nan], "0/1"),
        ([3, 3], "one value"),
        ([1, 2], "whole numbers"),
        ([0.5, 2], "numbers"),
        ([np.nan], "empty"),
    ],
)
def test_a_column_has_a_kind(values, kind):
    assert kind_of(np.array(values, dtype=np.float32)) == kind
