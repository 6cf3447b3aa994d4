"""Runs that a site counts, and those that wait until a person there has approved them."""

import re
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from fedapp.commands.common import console
from fedapp.crypto.noise import budget_for, composed_epsilon
from fedapp.errors import ConfigError, DataError, FedappError, WaitingError
from fedapp.home import home
from fedapp.messages.methods import all_methods
from fedapp.messages.secagg import KeysRequest
from fedapp.runs.local import run_local
from fedapp.site import database, register
from fedapp.site.register import charge
from fedapp.site.settings import site_config
from fedapp.site.store import drop_abandoned
from fedapp.site.trust import site_fingerprint
from strategies import flower
from tests.site.office import (
    ASKS,
    DAY,
    NODE,
    PARTIES,
    admit,
    approve,
    approved,
    ask,
    asks,
    charged,
    clock_is_off,
    hello,
    later,
    model_id,
    private,
    read,
    recorded,
    runs,
    scene_of,
    vertical_hello,
    waits,
)


def test_a_table_is_one_however_its_path_is_written(write_table, tmp_path):
    """Else a second spelling would begin with a budget and a split of its own."""
    path, link = write_table("bank"), tmp_path / "link.csv"
    link.symlink_to(path)
    spelled = path, path.parent / "." / ".." / path.parent.name / path.name, link
    tables = {site_config({**NODE, "data": str(one)}, {}).data for one in spelled}
    assert tables == {str(path.resolve())}


def test_a_site_keeps_its_runs_when_it_draws_a_new_key():
    config, folder = site_config({**NODE, "runs-per-day": 1}, {}), home() / "sites" / "bank"
    admit(config, 1)
    old = (folder / "identity.key").read_bytes()
    assert register.renew_identity(folder) == site_fingerprint("bank")
    assert (folder / "identity.key").read_bytes() != old
    assert (folder / "identity.key.old").read_bytes() == old
    assert stat.S_IMODE((folder / "identity.key").stat().st_mode) == 0o600
    assert [run.model for run in runs()] == [model_id(1)]
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        admit(config, 2)
    (folder / "identity.key").write_bytes(old)  # which the register does not accept any more
    with pytest.raises(DataError, match="must be the register of the site"):
        admit(config, 1)


def test_a_run_that_nobody_approves_ends_and_says_what_to_do(
    settings, sites, write_table, monkeypatch
):
    monkeypatch.setattr(flower, "APPROVAL_POLL", 0.0)
    rule = r"^bank \(step 1\): waits for approval at bank: fedapp site approve [0-9a-f]{16}; "
    contexts = sites({**ASKS, "data": write_table("bank")})
    with pytest.raises(FedappError, match=rule + "the run asks again until start-deadline"):
        run_local(settings(parties=1, start_deadline=0.1), contexts)


def test_only_runs_that_wait_are_listed_and_approved():
    none = f"no run waits under {home()} (at a site: --site FOLDER)"
    assert none in approve().output
    rule = r"^run must be one that waits under \S+ \(none; at a site: --site FOLDER\), got abc$"
    with pytest.raises(ConfigError, match=rule):
        raise approve("abc").exception
    waits(site_config(ASKS, {}), 1, hello())
    assert f"{model_id(1)}  bank  pax" in approve().output
    assert approve(model_id(1), "--yes").exit_code == 0
    assert none in approve().output


def opening_of(method, **fields):
    """An opening of a method between three parties."""
    fields = {"parties": PARTIES, **fields}
    if all_methods()[method].needs_label:
        return hello(**fields)
    return vertical_hello(**{"aggregation": "sealed", "labels": "paillier", **fields})


NOISE = budget_for(1.0, 1e-05, 50, 3).multiplier
MASKED = {"aggregation": "secure"}
OPENINGS = [
    *((method, {}) for method in sorted(all_methods())),
    ("pax", MASKED),
    ("pax", {**MASKED, "parties": PARTIES[:2]}),
    ("pax", {**MASKED, "threshold": 2}),
    ("pax", {"additive": True}),
    ("pax", {**MASKED, "additive": True, "pairs": 2}),
    ("pax", {**MASKED, "additive": True, "epsilon": 1.0, "delta": 1e-5, "multiplier": NOISE}),
    ("pax", {**MASKED, "epsilon": 1.0, "delta": 1e-5, "multiplier": NOISE}),
    ("secureboost", {"join": "left"}),
    ("secureboost", {"max_leaves": 31, "goss": True, "test_from": "booked:2024-07-01"}),
]


@pytest.mark.parametrize(("method", "fields"), OPENINGS, ids=str)
def test_who_approves_reads_one_screen(method, fields, monkeypatch):
    """First facts of the run, then five to eight sentences of what leaves by its settings."""
    monkeypatch.setattr(console, "_width", 80)
    config = site_config(ASKS, {})
    waits(config, 1, opening_of(method, **fields), method)
    refused = approve(model_id(1), answer="n\n")
    screen, asked, after = refused.output.partition("Let bank take part? [y/N]: n\n")
    facts, _, leaves = screen.partition("What leaves in this run, and who could learn what:\n")
    assert (refused.exit_code, bool(asked)) == (1, True)
    assert screen.count("\n") <= 45
    assert max(map(len, refused.output.splitlines())) <= 80
    assert facts.startswith("run ")
    assert f"0000000000000001 of {method}, at bank on 'rows.csv'" in " ".join(facts.split())
    assert 5 <= len(re.findall("^- ", leaves, re.MULTILINE)) <= 8
    assert "fedapp site approve 0000000000000001 --all" in leaves
    assert "bank takes no part in 0000000000000001" in after
    assert "to approve it until then: fedapp site approve 0000000000000001\n" in after
    assert f"take {method} out of allow in site.toml, and restart the SuperNode" in after
    waits(config, 1, opening_of(method, **fields), method)


@pytest.mark.parametrize(
    ("method", "fields", "text", "is_shown"),
    [
        ("pax", {}, "Nothing hides a rare one", True),
        ("pax", MASKED, "Masks depend on all requests", True),
        ("pax", MASKED, "With calibration the model has a curve", True),  # not in the opening
        ("pax", MASKED, "Where rows are ranked", False),
        ("pax", {"additive": True}, "refuses requests for tree nodes below the roots", True),
        ("pax", MASKED, "refuses requests for tree nodes below the roots", False),
        ("pax", {"objective": "auto"}, "With objective=rank:ndcg or rank:pairwise: Where", True),
        ("interactive", {}, "By one_round:", False),
    ],
)
def test_the_rest_is_shown_on_demand(method, fields, text, is_shown):
    waits(site_config(ASKS, {}), 1, opening_of(method, **fields), method)
    screen, whole = (read(approve(model_id(1), *words, answer="n\n")) for words in ((), ("--all",)))
    assert (text in screen, text in whole) == (False, is_shown)


ASKING, OTHERS = {"asks": True}, {"data": "others.csv"}
SPENT = r"privacy\.epsilon must come to <= 1 in all runs"


def scene(*events, **node):
    """What happens at a site of this node config."""
    return node, events


def is_fixed(reason, **changes):
    """The first run on a table fixes which rows are held back; predictions hold none back."""
    other = partial(asks, **changes)
    waits = other(4, "bagging", waits=rf"^waits for approval at bank \({reason}")
    begins = other(1, "interactive"), asks(2), asks(3), waits, other(5, node=OTHERS)
    approves = approved(4), other(4, "bagging"), other(7), asks(8)
    return scene(*begins, other(6, "interactive"), *approves)


def is_approved(rule, method="pax", **changes):
    """What was approved is what begins."""
    other = asks(1, method, refused=rule, opening=private, **changes)
    first = asks(1, waits=".", opening=private), other, approved(1), other
    return scene(*first, asks(1, opening=private), approve="ask")


def may_differ(names, waits=True, **plan):
    """Sums of masked runs with and without a party differ by that party's."""
    reason = f"parties must be bank, insurer, shop, as in an earlier masked run, got {names[0]}, "
    other = partial(asks, 3, "fedavg-linear", parties=names, **plan)
    begins = [other(waits=reason), approved(3)] if waits else []
    return scene(asks(1), asks(2, parties=PARTIES, **MASKED), *begins, other())


def is_spent(n_runs, limit, **node):
    """Private runs add up; one that asks again is no other."""
    spent = composed_epsilon([budget_for(1, 1e-5, 50, 3)] * n_runs, 1e-5)
    rule = (
        rf"privacy\.epsilon must come to <= {limit} in all runs on one table \(total-epsilon in "
        rf"the node config of bank\), got [\d.]+ with this run for delta 1e-05; spent before: "
        rf"{spent:.2f} of {limit} in {n_runs} runs?, for delta 1e-05. Ask for a smaller "
        r"epsilon, or bank for a larger total-epsilon$"
    )
    every = range(n_runs)
    begun = [each for number in every for each in (asks(number, opening=private), charged(number))]
    refused = [asks(99, opening=private, refused=rule), recorded(*every)] if limit else []
    more = [asks(0, opening=private), asks(98, opening=private, node=OTHERS)]
    return scene(*begun, *refused, *more, **node)


def is_no_promise(**fields):
    """Its noise does not keep it."""
    rule = r"bank: HelloRequest\.multiplier must be of more noise to keep epsilon 1 for delta"
    return scene(asks(1, opening=private, refused=rule, **fields), recorded())


ONE = asks(1, waits="."), approved(1), asks(1)
YEAR, WRONG = 365 * DAY, "runs-per-day must be <= 1 .*; clock must be at .*, got .*: set it"
IS_FULL, WEEKS = "runs-per-day must be <= 1", register.KEPT_SECONDS
asks_private = partial(asks, opening=private)
CHEAP = r".* with this run for delta 1e-06; spent before: 1\.00 of"
NO_STATE = r"bank: KeysRequest\.step must be 1, .*no state"
SCENES = {
    "a run counts once, and for a day": scene(
        *(asks(1), asks(1), asks(2, refused=IS_FULL), asks(3, node=OTHERS), later(DAY), asks(2)),
        runs_per_day=1,
    ),
    "a day's runs do not come back by a clock that is wrong": scene(
        *(asks(1), clock_is_off(YEAR), asks(2, refused=WRONG), later(60), asks(2, refused=WRONG)),
        *(clock_is_off(-YEAR), asks(2, refused=WRONG), clock_is_off(0), later(DAY), asks(2)),
        runs_per_day=1,
    ),
    "a clock that was wrong at first locks nobody out": scene(
        *(clock_is_off(YEAR), asks(1), clock_is_off(0), asks(2, refused=WRONG)),
        *(later(DAY), asks(2), asks(3, refused=IS_FULL)),
        runs_per_day=1,
    ),
    "runs that were admitted stay, those that wait go": scene(
        *(asks(1), asks(2, waits=".", node=ASKING), recorded(1, 2)),
        *(later(WEEKS), asks(3), recorded(1, 3)),
    ),
    "a run of another table waits": scene(*ONE, asks(1, waits=".", node=OTHERS), approve="ask"),
    "an approval lapses with its entry": scene(
        *ONE, later(WEEKS), asks(1, waits="."), approve="ask"
    ),
    # Both were shown before one of them fixed which rows are held back.
    "an approval is of the reasons that were shown": scene(
        *(asks(1, waits="."), approved(1), asks(2, waits=".", seed=43), approved(2), asks(1)),
        asks(2, waits=r"^waits for approval at bank \(seed must be 42, as in", seed=43),
        approved(2, "seed must be 42, as in the first run on the table, got 43"),
        asks(2, seed=43),
        approve="ask",
    ),
    "only an opening opens a run": scene(
        asks(1, refused=NO_STATE, opening=KeysRequest), recorded()
    ),
    **{
        f"held back: {name}": is_fixed(
            f"{name.replace('_', '-')} must be {fixed}, as in the first run on .*, got {value}",
            **{name: value},
        )
        for name, fixed, value in (
            *(("test_fraction", 0.2, 0.25), ("valid_fraction", 0.1, 0.0), ("seed", 42, 43)),
            *(("group", "empty", "who"), ("test_from", "empty", "day:5")),
            ("valid_from", "empty", "day:3"),
        )
    },
    "held back: fold": is_fixed(
        "fold must be 0, .*, got 1; folds must be 0, .*, got 5", fold=1, folds=5
    ),
    "approved: method": is_approved("strategy must be pax, as when the .* bank, got", "bagging"),
    **{
        f"approved: {name}": is_approved(
            rf"{name.replace('_', '-')} must be {was}, as when .*, got {value}", **{name: value}
        )
        for name, was, value in (("rounds", 50, 2500), ("aggregation", "secure", "plain"))
    },
    "approved: parties": is_approved(
        r"parties must be \['bank', 'insurer', 'shop'\], as", parties=("bank", "lab")
    ),
    "masked, without one": may_differ(("bank", "insurer"), **MASKED),
    "masked, the same": may_differ(PARTIES, waits=False, **MASKED),
    "masked, with another": may_differ(("bank", "insurer", "lab"), **MASKED),
    "plain, without one": may_differ(("bank", "insurer"), waits=False, aggregation="plain"),
    "spent: run-epsilon": is_spent(1, 1, run_epsilon=1),
    "spent: three runs": is_spent(3, 2, run_epsilon=1, total_epsilon=2),
    "spent: no limit": is_spent(6, 0),
    "what was spent stays spent, whatever the person says": scene(
        *(asks_private(1, waits="."), approved(1), asks_private(2, waits="."), approved(2)),
        *(asks_private(1), charged(1), asks_private(2, refused=SPENT)),
        *(later(400 * DAY), asks_private(3, refused=SPENT)),
        approve="ask",
        run_epsilon=1,
    ),
    # Charged once more by a further sum of the same run.
    "an opening that gets no sum spends nothing": scene(
        *(asks_private(0), asks_private(1), asks_private(2), charged(2)),
        asks_private(3, refused=SPENT),
        *(charged(0, refused=SPENT), charged(1, refused=SPENT), charged(2)),
        run_epsilon=1,
    ),
    # 0.9 for 1e-2 and 1 for 1e-6 come to less than 2 for 1e-2.
    "a larger delta makes no run cheaper": scene(
        *(asks_private(1, delta=1e-6), charged(1)),
        asks_private(2, refused=CHEAP, epsilon=0.9, delta=1e-2),
        run_epsilon=2,
        total_epsilon=2,
    ),
    "no promise: little noise": is_no_promise(multiplier=1.0),
    "no promise: no noise": is_no_promise(multiplier=0.0),
    "no promise: delta": is_no_promise(multiplier=NOISE, delta=0.0),
    "no promise: rounds": is_no_promise(multiplier=NOISE, rounds=0),
    "a run that was not recorded is not charged": scene(
        charged(1, refused=r"run must be one that bank has recorded, got 0{15}1$"), run_epsilon=1
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_run_is_admitted_waits_or_is_refused(name):
    node, events = SCENES[name]
    scene_of(**node).play(events)


def test_a_run_whose_state_was_deleted_counts_and_waits_anew(write_table):
    node = {**ASKS, "data": str(write_table("bank")), "label": "y"}
    config = site_config({**node, "runs-per-day": 1}, {})
    with pytest.raises(WaitingError):
        ask(config, 1)
    assert approve(model_id(1), "--yes").exit_code == 0
    for _ in range(3):
        ask(config, 1)
    drop_abandoned(home() / "sites" / "bank", days=-9)
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        ask(config, 1)
    with pytest.raises(WaitingError):
        ask(site_config({**node, "runs-per-day": 2}, {}), 1)
    assert [bool(run.approved) for run in runs()] == [True, False]


def test_who_approves_sees_the_plan():
    insurer = site_fingerprint("insurer")
    config = site_config({**ASKS, "trusted": f"insurer:{insurer}", "total-epsilon": 3}, {})
    admit(replace(config, asks=False), 1, private(2.0))
    charge(config, model_id(1))
    opening = private(max_depth=4, subsample=0.5)
    waits(config, 2, opening)
    result = approve(model_id(2), answer="n\n")
    shown = {" ".join(line.split()) for line in result.output.splitlines()}
    settings = "rounds 50, trees 1, max-depth 4, levels 6, subsample 0.5, goss False"
    assert settings in read(result)
    both = composed_epsilon([budget_for(epsilon, 1e-5, 50, 3) for epsilon in (1, 2)], 1e-5)
    keys = {name: site_fingerprint(name) for name in PARTIES}
    assert shown >= {
        f"run {model_id(2)} of pax, at bank on 'rows.csv'",
        "waits because approve is ask in the node config",
        "aggregation secure: only sums over all parties leave",
        f"epsilon 1 for delta 1e-05, noise {opening.multiplier:.4g}",
        "spent epsilon 2.00 of 3 in 1 run, for delta 1e-05",
        f"with this run epsilon {both:.2f} of 3 in 2 runs, for delta 1e-05",
        "test rows 0.2, drawn with seed 42",
        "validation 0.1 of the others",
        f"party bank {keys['bank']} this site",
        f"party insurer {keys['insurer']} pinned here",
        f"party shop {keys['shop']} NOT PINNED HERE",
    }


FIGURES = "label figures labels of up to 4 rows can be read"
BOOKED = partial(hello, test_from="booked:2024-07", valid_from="booked:2024-01", group="who")
# The node config, the method, the opening, and what is shown.
SHOWN = {
    "split rows": (
        {"group": "patient"},
        *("pax", BOOKED),
        "test rows those of booked from 2024-07 on validation those of booked from 2024-01 on, "
        "before the test rows groups rows of one patient are in one subset ",
    ),
    "label holder": (
        {},
        *("secureboost", partial(vertical_hello, rounds=50)),
        "label holder could read the bins of 4,096 rows a round, with crafted gradients; 50 rounds",
    ),
    "passive party": (
        {},
        *("secureboost", partial(vertical_hello, rounds=50)),
        "passive party could read 1,260 labels a round, by which of made-up columns are chosen; 50",
    ),
    "figures": ({"share-label-figures": True}, "describe-columns", vertical_hello, FIGURES),
    "no figures": ({"share-label-figures": False}, "describe-columns", vertical_hello, ""),
}


@pytest.mark.parametrize("case", SHOWN)
def test_who_approves_sees_what_settings_come_to(case):
    node, method, opening, text = SHOWN[case]
    config = site_config({**ASKS, "label": "y", **node}, {})
    waits(config, 1, opening(), method)
    screen = read(approve(model_id(1), answer="n\n"))
    assert text in screen
    assert (FIGURES in screen) == (text == FIGURES)
    if method == "describe-columns":
        changed = replace(config, shares_label_figures=not config.shares_label_figures)
        rule = r"share-label-figures must be (True|False), as when the"
        with pytest.raises(ConfigError, match=rule):
            admit(changed, 1, opening(), method)


def test_who_approves_sees_that_labels_are_randomised_once_for_all_runs(write_table):
    table = {"data": str(write_table("bank")), "label": "y", "label-epsilon": 2}
    opening, config = vertical_hello(rounds=50), site_config({**ASKS, **table}, {})
    for number in (1, 2, 3):
        waits(config, number, opening, "secureboost")
        line = f"randomised with epsilon 2, once, for all runs on them, with this one {number}"
        assert line in read(approve(model_id(number), "--yes"))
        admit(config, number, opening, "secureboost")
    waits(site_config({**ASKS, **table, "label": ""}, {}), 4, opening, "secureboost")
    assert "randomised" not in approve(model_id(4), "--yes").output.partition("aggregation")[2]


def test_texts_of_a_coordinator_do_not_reach_the_terminal_as_they_are():
    odd = "shop\x1b[2J[red]"
    opening = replace(hello(), parties=("bank", odd), fingerprints=("", odd), objective=odd)
    waits(site_config(ASKS, {}), 1, opening)
    output = approve(model_id(1), answer="n\n").output
    assert "\x1b" not in output
    assert output.count("shop\\x1b[2J[red]") == 3


def test_an_opening_that_was_refused_meanwhile_does_not_begin():
    opening = register.opening, site_config(NODE, {}), model_id(1), "pax", hello()
    begin = partial(*opening)
    with begin():
        with pytest.raises(DataError), begin():
            raise DataError("no such table")
        with pytest.raises(ConfigError, match=r"^run must be admitted by bank, got an opening th"):
            register.record_opened("bank", model_id(1))


ADMITTING = """
import sys
from fedapp.messages.handshake import HelloRequest
from fedapp.site.settings import site_config
from fedapp.site.register import admit, record_opened

node = {"name": "bank", "data": "rows.csv", "allow": "pax", "runs-per-day": 10**9}
config, number = site_config(node, {}), int(sys.argv[1])
while True:
    admit(config, f"{number:016x}", "pax", HelloRequest("binary:logistic", 0.2, 0.1, 42, False))
    print(number, flush=True)
    record_opened("bank", f"{number:016x}")
    print(-number, flush=True)
    number += 1
"""


@pytest.mark.slow
def test_a_site_that_is_killed_forgets_nothing_that_it_answered():
    admitted, begun = set[int](), set[int]()
    for start in range(1_000, 5_000, 1_000):
        command = [sys.executable, "-c", ADMITTING, str(start)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
        heard = [process.stdout.readline() for _ in range(5 + start // 500)]
        process.send_signal(signal.SIGKILL)
        heard += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        numbers = {int(line) for line in heard if line.endswith("\n")}
        admitted |= {number for number in numbers if number > 0}
        begun |= {-number for number in numbers if number < 0}
        there = {int(run.model, 16): run for run in runs()}
        assert admitted <= there.keys()
        assert begun <= {number for number, run in there.items() if run.begun}
        assert all(run.admitted for run in there.values())
        # At most the one that was under way, to which nobody heard an answer.
        assert len(there.keys() - admitted) <= (start // 1_000)
    assert len(admitted) >= 20


def test_runs_that_ask_at_once_are_counted_one_after_the_other():
    config, opening = site_config({**NODE, "runs-per-day": 3}, {}), hello()

    def begins(number):
        try:
            admit(config, number, opening)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begins, range(16))) == 3
    assert len(runs()) == 3


def test_the_register_is_its_owners_alone_and_on_the_disk():
    admit(site_config(NODE, {}), 1)
    folder = home() / "sites" / "bank"
    with database.transaction(folder) as opened:
        opened.execute("UPDATE runs SET begun = 1")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("register*")}
        assert modes == dict.fromkeys(("register.db", "register.db-wal", "register.db-shm"), 0o600)
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert opened.execute("PRAGMA synchronous").fetchone() == (2,)
    with suppress(KeyError), database.transaction(folder) as opened:
        opened.execute("UPDATE runs SET admitted = 0")
        raise KeyError  # a decision that fails half way is none
    assert [bool(run.admitted) for run in runs()] == [True]


def test_a_broken_register_stops_the_site():
    folder, rule = home() / "sites" / "bank", r"^bank: register\.db must be a database that the si"
    admit(site_config(NODE, {}), 1)
    with database.transaction(folder) as opened:
        opened.execute("UPDATE runs SET settings = '{'")
    for _ in range(2):
        with pytest.raises(DataError, match=rule):
            admit(site_config(NODE, {}), 2)
        (folder / database.DATABASE).write_bytes(b"no database, but long enough to be one" * 100)
