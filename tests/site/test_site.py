"""What a site allows, and what its engineer sees of it before any run."""

import re
from dataclasses import is_dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.deploy import warm
from fedapp.errors import ConfigError, FedappError
from fedapp.messages.fields import Request
from fedapp.messages.methods import _groups, all_methods, kinds_of, module_of_group
from fedapp.runs.local import run_local
from fedapp.site.check import check_site
from fedapp.site.policy import check_policy, group_of
from fedapp.site.settings import read_node_config, site_config
from tests.deploy_folders import checked_site, init_site
from tests.federated import model_bytes
from tests.network import run
from tests.site.office import admit, hello
from tests.transcript import Listener, arrays_of


def node(allow="", **others):
    return {"name": "bank", "data": "rows.csv", "allow": allow} | {
        key.replace("_", "-"): str(value) for key, value in others.items()
    }


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
    methods = ("describe-columns", "secureboost", "federated-forest", "eini")
    small = {(name, "insecure_small_key") for name in methods}
    assert declared == small | {("eini", "unguarded"), ("eini", "least_possibilities")}


def test_scores_do_not_tell_of_single_rows_where_min_rows_is_set(settings, sites, write_table):
    """With a leaf a value and a bin a leaf, a crafted model would give values with their labels."""
    node_ = {"name": "bank", "data": write_table("bank", 300), "min-rows": "20"}
    app = Listener()
    run(settings(parties=1, num_boost_round=8, max_depth=4, max_bin=256), sites(node_), app)
    replies = [arrays_of(reply) for _, _, reply in app.heard]
    named = [one for reply in replies for one in reply.items() if one[0].endswith("_scores")]
    scores = [array.sum(axis=0) for _, array in named if array.size]
    assert len(scores) > 10
    assert min(cells[cells > 0].min() for cells in scores if cells.any()) >= 10


NONE_BACK = r"\(min-rows of bank\); {}-fraction=0 holds none back$"
FEW_ROWS = [
    (0.2, 0.1, "training rows, got 29 "),
    # Of one row that validates its class and loss could be read each round.
    (0.0, 1 / 40, f"validation rows, got 1 {NONE_BACK.format('valid')}"),
    (2 / 40, 0.0, f"test rows, got 2 {NONE_BACK.format('test')}"),
]


@pytest.mark.parametrize(("test", "valid", "rule"), FEW_ROWS)
def test_a_run_of_too_few_rows_is_refused_before_it_begins(
    settings, sites, write_table, test, valid, rule
):
    contexts = sites({"name": "bank", "data": write_table("bank"), "min-rows": 30})
    with pytest.raises(FedappError, match=rf"^bank \(step 1\): table must have at least 30 {rule}"):
        run_local(settings(parties=1, test_fraction=test, valid_fraction=valid), contexts)
    run_local(settings(parties=1, valid_fraction=0.0, test_fraction=0.0), contexts)


@pytest.mark.parametrize(
    ("n_common", "fraction", "rule"),
    [
        (200, 0.005, "12 validation rows in common at least (min-rows of bank), got 1; valid-frac"),
        (14, 0.0, "12 training rows in common at least (min-rows of bank), got "),
    ],
)
def test_parties_with_too_few_rows_in_common_are_refused(
    vertical, joined, n_common, fraction, rule
):
    contexts = joined(n_common, bank={"min-rows": "12"})
    with pytest.raises(FedappError, match=rf"^bank \(step 4\): ids must have {re.escape(rule)}"):
        run_local(vertical(align="psi", valid_fraction=fraction), contexts)


def test_a_run_config_has_no_say_in_a_policy():
    run = {"data": "iris", "partition": "iid", "columns": "even", "allow": "pax", "min-rows": 9}
    run |= {"draws-secret": SECRET}
    config = site_config({"partition-id": 0, "num-partitions": 2}, run)
    assert (config.allowed, config.min_rows, config.draws_secret) == (frozenset(), 0, "")


SECRET = "a text that nobody guesses"
SHORT = {
    "pax": {"subsample": 0.5},
    "bagging": {"subsample": 0.5},
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
        more = {key.replace("_", "-"): value for key, value in more.items()}
        ids, without = range(80), {"y": None} if strategy == "secureboost" else {}
        bank, shop = write_table("bank", 80, id=ids), write_table("shop", 80, 1, id=ids, **without)
        common = {"id": "id", "allow-export": "true", **more}
        nodes = [{"name": "bank", "data": bank, **common}, {"name": "shop", "data": shop, **common}]
        nodes[1] |= {"label": ""} if without else {}
        return model_bytes(
            run_local(settings(strategy=strategy, parties=2, **overrides), sites(*nodes))
        )

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
    assert SECRET not in repr(site_config(node(draws_secret=SECRET), {}))


@pytest.mark.by_default("pax", "bagging", "secureboost")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "secureboost", "fedxgbllr"])
def test_a_round_that_draws_too_few_rows_is_refused(trained, strategy):
    """Sums of the few rows of a small draw would else leave."""
    goss = {"secureboost__top_rate": 0.1, "secureboost__other_rate": 0.1}
    given = {**SHORT[strategy], "valid_fraction": 0.0, "test_fraction": 0.0}
    few = given | (goss if strategy == "secureboost" else {"subsample": 0.1})
    rule = r"subsample \(or secureboost\.goss\) must draw at least 20 training rows a round"
    with pytest.raises(FedappError, match=rf"^(bank|shop).*: {rule} \(min-rows of .*\), got \d+; "):
        trained(strategy, few, min_rows="20")
    trained(strategy, given, min_rows="20")


def test_a_node_config_is_read_as_toml(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('name="bank"\ndata="my rows.csv"\nmin-rows=50\nallow-export=true')
    expected = {"name": "bank", "data": "my rows.csv", "min-rows": 50, "allow-export": True}
    assert read_node_config(path) == expected
    assert site_config(node(), {}).runs_per_day == 5


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
PINS = "must be the name of a site and its fingerprint, 32 hex digits, got 'a' and 'b'"
WHOLE = ("most-bins", "score-bins", "align-most-rows", "min-rows", "min-bin-rows")
HASHES, SIGN = (r"\(fedapp site hash\)", r"\(python -m fedapp.site.bundle sign\)")
NO_SWITCH = ("yes", "1", 1, 0, 1.0, "on", "True", "True ", "FALSE", "", "no")
NO_ROWS = (*NO_SWITCH, 2.0, -2, "2.0", "02", "1e2", "٢", 10**10)
TRUE_OR_FALSE, WHOLE_NUMBER = "must be true or false", "must be a whole number"
REFUSED = [
    ("name", "../bank", "in the node config must be .*, got '../bank'"),
    ("alow", "pax", r"in the node config is not a setting; did you mean allow\?"),
    *((key, "-1", "must be >= 0, got '-1'") for key in (*WHOLE, "predict-min-rows")),
    *(
        (key, value, f"{WHOLE_NUMBER}, got '{value}'")
        for key in (*WHOLE, "predict-min-rows")
        for value in ("many", "1e3")
    ),
    *(
        (key, value, f"{TRUE_OR_FALSE}, got {value!r}")
        for key in SWITCHES
        if key != "share-categories"
        for value in NO_SWITCH
    ),
    *(
        ("share-categories", value, f"{TRUE_OR_FALSE}, or a whole number >= 2, got {value!r}")
        for value in NO_ROWS
    ),
    ("align-most-ratio", 0, "must be >= 1, got 0"),
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
        ("app", text, f"must be hashes of 64 hex digits {HASHES}, got '{text}'")
        for text in ("latest", "a" * 63, f"{'a' * 64},{'G' * 64}")
    ),
    *(
        ("workers", text, f"must be auto, HOST:PORT or ray://HOST:PORT, got '{text}'")
        for text in ("4", "ray://", "local", "http://head:6379", "head")
    ),
    ("release-keys", "abc", f"must be public keys of 64 hex digits {SIGN}, got 'abc'"),
]


@pytest.mark.parametrize(("key", "value", "rule"), REFUSED)
def test_a_node_config_that_breaks_a_rule_is_refused(key, value, rule):
    with pytest.raises(ConfigError, match=f"^{key} {rule}$"):
        site_config({**node(), key: value}, {})


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("name=bank", "node config .* must be TOML, like name = "),
        ('name="bank"', "data in the node config"),
    ],
)
def test_a_node_config_without_a_table_is_refused(text, rule, tmp_path):
    (path := tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{rule}"):
        site_config(read_node_config(path), {})


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


ALL = ",".join(all_methods())
IDS = [f"r{number}" for number in range(40)]
HOLDER, PASSIVE = "could show the label holder  ", "could show a passive party  "
# Columns of the table, the node config, what is shown, and what is not.
CHECKS = {
    "what a site lacks": (
        {"y": None, "id": ["same"] * 40},
        f'name="shop" id="id" allow="{ALL}"',
        [
            "none: a passive party",
            "40 rows of 40 that share one",
            "no: needs a label",
            "passive, but only with align=ordered (needs ids else)",
            # 53 + 6 + 1 bits a field of 40 rows, two fields, the 32 nodes of level 5
            f"secureboost {HOLDER}the bins of 3,840 rows a round",
        ],
        [],
    ),
    "floors of bins": (
        {"y": None},
        'name="shop" allow="secureboost" least-bin-rows=5',
        ["no: would ignore least-bin-rows"],
        [HOLDER, PASSIVE],
    ),
    "few rows": (
        {},
        'name="bank" label="y" min-rows=30 allow="pax"',
        ["no: 29 training rows, fewer than 30 (min-rows)"],
        [],
    ),
    "keys": (
        {"id": IDS},
        'name="bank" label="y" id="id" encrypted-labels=true '
        f'allow="secureboost,federated-forest" trusted="shop:{32 * "0"}"',
        ["active, but only with labels=paillier (enc", "yes, active"],
        ["others' keys"],
    ),
}


@pytest.mark.parametrize("case", CHECKS)
def test_a_check_shows(write_table, case):
    columns, config, shown, hidden = CHECKS[case]
    output = check(f'{config} data="{write_table(**columns)}"')
    assert [text for text in shown if text not in output] == []
    assert [text for text in hidden if text in output] == []


def test_a_check_names_the_patches_that_do_not_fit_flower(write_table, monkeypatch):
    monkeypatch.setenv(warm.OFF, "polling")
    warm.causes.cache_clear()
    shown = check(f'name="bank" data="{write_table("rows")}" label="y"')
    warm.causes.cache_clear()
    rule = r"! flwr [\d.]+: FEDAPP_WARM_OFF turns polling off; without long polling, exchanges take"
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
        ["rows,", "columns", "200,", "2"],
        ["ids", "unique", "in", "every", "row"],
        ["min-bin-rows", "9"],
        ["allow", "pax,", "secureboost"],
    ):
        assert words in lines
    for words in (
        ["secureboost", "yes,", "active", "sizes,", "scores,"],
        ["bagging", "no:", "not", "in", "allow", "each", "party's", "trees;"],
    ):
        assert any(line[: len(words)] == words for line in lines)
    for secret in ("7654321", "customer-", str(path), path.stem):
        assert secret not in shown


@pytest.fixture
def shop(write_table, tmp_path):
    """The node config of a site with a table, as a file."""
    path = tmp_path / "site.toml"
    path.write_text(
        f'name = "shop"\ndata = "{write_table("rows")}"\nlabel = "y"\nallow = "pax"\n'
        "least-parties = 3\ntotal-epsilon = 3\n"
    )
    return path


def test_a_check_counts_runs_under_the_home_of_the_site(shop, tmp_path):
    config = site_config(read_node_config(shop), {})
    admit(config, 1, hello(["shop"]))
    lines = [" ".join(line.split()) for line in check(shop).splitlines()]
    spent = "total-epsilon spent 0.00 of 3 in 0 runs"
    assert {"runs today 1", "least-parties 3", spent} <= set(lines)


@pytest.mark.parametrize("name", ["supernode.key", "home/sites/shop/identity.key"])
def test_a_check_says_which_keys_others_may_read(shop, tmp_path, name):
    key = tmp_path / name
    key.parent.mkdir(parents=True, exist_ok=True)
    assert "none here yet" in check(shop)
    key.with_name("identity.new").touch()
    for mode, shown in (
        (0o600, "readable by the owner only"),
        (0o640, f"chmod 600: others may read {key} (mode 0640)"),
    ):
        key.touch()
        key.chmod(mode)
        assert shown in check(shop)


SUMS = {"least_parties": 3}
FLOORS = {"least_bin_rows": 5}
TRUSTED = {**SUMS, **FLOORS, "trusted": f"shop:{32 * '0'}"}
KEYS = "others' keys (fedapp site trust)"
MASKED = "yes, but only with aggregation=secure (least-parties)"
ORDERED = "active, but only with align=ordered (needs ids else)"
MORE = "no: the coordinator gets more than"
MEANS = "each party's columns' means and spreads; its model each round"
LEAVES = "each party's trees; a leaf may be a single row"
SCORES = "sizes, scores, which party has labels"


@pytest.mark.parametrize(
    ("method", "policy", "answer", "gets"),
    [
        ("pax", FLOORS, "yes", "each party's sums over bins of several rows"),
        ("pax", TRUSTED, MASKED, "sums over all parties over bins of several rows"),
        (
            "pax",
            {**TRUSTED, "run_epsilon": 1},
            f"{MASKED} and privacy.epsilon up to 1 (run-epsilon)",
            "noised sums over all parties",
        ),
        ("fedavg-linear", {"run_epsilon": 1}, f"{MORE} run-epsilon allows", MEANS),
        ("bagging", SUMS, f"{MORE} least-parties allows", LEAVES),
        ("secureboost", FLOORS, "no: would ignore least-bin-rows", SCORES),
        (
            "federated-forest",
            {"encrypted_labels": "true"},
            f"{ORDERED} and labels=paillier (encrypted-labels) and {KEYS}",
            "sizes, scores, structure of trees",
        ),
        ("eini", {**SUMS, **FLOORS}, f"{ORDERED} and {KEYS}", "sizes"),
    ],
)
def test_a_check_says_what_the_coordinator_gets_from_each_method(
    write_table, method, policy, answer, gets
):
    given = {"allow": ",".join(all_methods()), "label": "y", "data": write_table("rows"), **policy}
    config = site_config({**node(), **node(**given)}, {})
    assert check_site(config, all_methods(), (0.2, 0.2), 6).methods[method] == (answer, gets)


@pytest.mark.parametrize(
    ("site", "rule"),
    [
        (Path("nowhere"), "--site must be the folder of fedapp site init, or a .*, got nowhere"),
        ('name="bank" data="gone.csv"', "data must be a built-in name"),
        (
            'name="bank" data="breast-cancer" allow="pax,scureboost"',
            r"allow must name methods \(.*secureboost, standing\), got scureboost",
        ),
    ],
)
def test_a_check_that_cannot_be_made_says_why(site, rule):
    with pytest.raises(FedappError, match=f"^{rule}"):
        check(site)


# fedapp site init


BOTH = {"least-parties": 3, "min-rows": 20, "share-categories": 10, "approve": "ask"}
OF_SUMS = {"allow": "describe-rows,eini,interactive,one-round,pax", "least-bin-rows": 5, **BOTH}
OF_PRIVATE = {"allow": "pax", "run-epsilon": 1.0, "total-epsilon": 3.0, **BOTH}
# That sites score by themselves is not in any policy: it is allowed by name.
EVERY = [name for name, method in all_methods().items() if not method.stands]
OF_ROWS = {"allow": ",".join(EVERY)}


@pytest.fixture
def init(tmp_path, write_table):
    """``init(*options)``: the node config that the command writes, and what it prints."""

    def make(*options):
        folder, shown = init_site(tmp_path, write_table("rows"), *options)
        return read_node_config(folder / "site.toml"), shown

    return make


@pytest.mark.parametrize(
    ("options", "written"),
    [
        (("--policy", "sums"), OF_SUMS),
        (("--policy", "private"), OF_PRIVATE),
        (("--policy", "rows"), OF_ROWS),
        (("--policy", "sums", "--allow", "pax"), {**OF_SUMS, "allow": "pax"}),
        (("--allow", "pax,bagging"), {"allow": "bagging,pax"}),
        ((), {}),
    ],
)
def test_a_policy_is_written_as_plain_settings(init, tmp_path, options, written):
    table = {"name": "bank", "data": str(tmp_path / "rows.csv")}
    assert init(*options)[0] == {**table, **written}


def test_a_site_is_told_what_it_allows_and_how_to_choose(init, tmp_path):
    def shown_of(*options):
        rmtree(tmp_path / "bank", ignore_errors=True)
        return init(*options)[1]

    shown = shown_of()
    assert f"bank allows no method yet: set allow in {tmp_path}/bank/site.toml, or choose " in shown
    for policy in ("sums", "private", "rows"):
        assert f"--policy {policy}: " in shown
    assert "Policy sums: but only pax\n" in shown_of("--policy", "sums", "--allow", "pax")
    rule = "the coordinator can rebuild most rows of a small table with their labels (373 of 409 "
    assert rule in shown_of("--policy", "rows")
    shown_of("--policy", "sums")
    lines = (tmp_path / "bank" / "site.toml").read_text().splitlines()
    keys = [line.removeprefix("# ").split(" = ")[0] for line in lines]
    assert len(set(keys)) == len(keys)  # each setting is offered or set
    assert {"# run-epsilon = 1", "min-rows = 20"} <= {line.split("  ")[0] for line in lines}


def test_a_policy_that_is_none_is_refused_and_nothing_is_written(init, tmp_path):
    rule = r"^policy must be one of sums, private, rows, got 'open'$"
    with pytest.raises(ConfigError, match=rule):
        init("--policy", "open")
    assert not (tmp_path / "bank").exists()


@pytest.mark.parametrize(
    ("typed", "options", "written", "is_terminal"),
    [
        ("sums\n", (), OF_SUMS, True),
        ("\n", (), {}, True),
        ("", ("--allow", "pax"), {"allow": "pax"}, True),
        ("sums\n", (), {}, False),
    ],
)
def test_only_a_terminal_is_asked_for_a_policy_that_is_not_given(
    write_table, tmp_path, monkeypatch, typed, options, written, is_terminal
):
    stream = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr("fedapp.commands.site.sys", SimpleNamespace(stdin=stream))
    table, folder = str(write_table("rows")), tmp_path / "bank"
    given = ["--name", "bank", "--superlink", "fed.example.org:9092", "--data", table, *options]
    shown = CliRunner().invoke(site_app, ["init", str(folder), *given], input=typed).output
    asked = is_terminal and bool(typed)
    assert ("Policy (Enter: no method is allowed)" in shown) == asked
    node = {"name": "bank", "data": table, **written}
    assert read_node_config(folder / "site.toml") == node
