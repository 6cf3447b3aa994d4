"""Runs that a site counts, and those that wait until a person there has approved them."""

import json
import re
import signal
import stat
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands.common import console
from fedapp.commands.site import site_app
from fedapp.crypto.masking import unmasked_sum
from fedapp.crypto.noise import budget_for, composed_epsilon
from fedapp.data.partition import split_rows
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError, WaitingError
from fedapp.home import home
from fedapp.messages.handshake import HelloRequest, LabelsRequest
from fedapp.messages.methods import all_methods
from fedapp.messages.secagg import KeysRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.site import database, register
from fedapp.site.answer import answer
from fedapp.site.register import charge, runs_of
from fedapp.site.rows import hash_rows
from fedapp.site.settings import site_config
from fedapp.site.store import drop_abandoned
from fedapp.site.trust import site_fingerprint
from strategies import flower
from tests.crypto.test_masks import TERMS, Coordinator
from tests.plans import planned

METHODS = ",".join(all_methods())
NODE = {"name": "bank", "data": "rows.csv", "allow": METHODS, "runs-per-day": 100}
ASKS = {**NODE, "approve": "ask"}
PARTIES = ("bank", "insurer", "shop")


def hello(parties=("bank",), **fields):
    """An opening between parties whose keys are in this home."""
    opening = HelloRequest("binary:logistic", 0.2, 0.1, 42, False)
    return replace(opening, **(planned(parties) | fields))


def private(epsilon=1.0, delta=1e-05, **fields):
    """The opening of a private run of three parties."""
    noise = budget_for(epsilon, delta, 50, 3)
    fields = {"aggregation": "secure", "rounds": 50, "multiplier": noise.multiplier, **fields}
    return hello(PARTIES, epsilon=epsilon, delta=delta, **fields)


def rows_at(path):
    """Rows that no table at another path has."""
    values = np.random.default_rng(zlib.crc32(path.encode())).normal(size=(40, 2))
    return hash_rows(Table(("a", "b"), values.astype(np.float32)), b"key")


def admit(config, model, method, opening):
    """Admit a run on a table that need not exist."""
    register.admit(config, model, method, opening, rows_at(config.data))


def waits(config, model, opening, method="pax"):
    """A run that begins only if a person approves it."""
    with pytest.raises(WaitingError):
        admit(config, model, method, opening)


def admit_and_charge(config, model, opening):
    """A private run whose first noised sums have left."""
    admit(config, model, "pax", opening)
    charge(config, model)


def runs():
    return runs_of(home() / "sites" / "bank")


def ids():
    return [run.model for run in runs()]


def test_a_table_is_one_however_its_path_is_written(write_table, tmp_path):
    """Else a second spelling would begin with a budget and a split of its own."""
    path, link = write_table("bank"), tmp_path / "link.csv"
    link.symlink_to(path)
    spelled = path, path.parent / "." / ".." / path.parent.name / path.name, link
    tables = {site_config({**NODE, "data": str(one)}, {}).data for one in spelled}
    assert tables == {str(path.resolve())}


def model_id(number):
    return f"{number:016x}"


@pytest.fixture
def bank(sites, write_table):
    data = write_table("bank")
    return lambda **node: sites(
        {**NODE, "data": data, **{key.replace("_", "-"): v for key, v in node.items()}}
    )


def model_of(folder):
    return str(json.loads((folder.path / "summary.json").read_text())["model_id"])


def approve(*words, answer=""):
    return CliRunner().invoke(site_app, ["approve", *words], input=answer, env={"COLUMNS": "200"})


def wait_and_approve(config, model, opening):
    """A run of PAX that waits, and that a person then approves."""
    waits(config, model, opening)
    assert approve(model, "--yes").exit_code == 0


@pytest.mark.slow
def test_no_more_runs_begin_in_a_day_than_the_site_allows(settings, bank):
    contexts = bank(runs_per_day=2)
    models = [model_of(run_local(settings(parties=1), contexts)) for _ in range(2)]
    rule = r"^bank \(step 1\): runs-per-day must be <= 2 on one table in the node config of bank"
    with pytest.raises(FedappError, match=rule):
        run_local(settings(parties=1), contexts)
    assert ids() == models
    assert f"no run waits under {home()} (at a site: --site FOLDER)" in approve().output


def test_a_run_counts_once_and_for_a_day(monkeypatch):
    config, now = site_config({**NODE, "runs-per-day": 1}, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    for _ in range(3):
        admit(config, "a" * 16, "pax", hello())
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        admit(config, "b" * 16, "pax", hello())
    other = site_config({**NODE, "runs-per-day": 1, "data": "others.csv"}, {})
    admit(other, "c" * 16, "pax", hello())
    now[0] += 86_400
    admit(config, "b" * 16, "pax", hello())


def test_runs_that_were_admitted_stay_and_those_that_wait_go(monkeypatch):
    config, now = site_config(NODE, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    admit(config, "a" * 16, "pax", hello())
    waits(replace(config, asks=True), "b" * 16, hello())
    assert ids() == ["a" * 16, "b" * 16]
    now[0] += register.KEPT_SECONDS
    admit(config, "c" * 16, "pax", hello())
    assert ids() == ["a" * 16, "c" * 16]


def test_a_site_keeps_its_runs_when_it_draws_a_new_key():
    config, folder = site_config({**NODE, "runs-per-day": 1}, {}), home() / "sites" / "bank"
    admit(config, "a" * 16, "pax", hello())
    old = (folder / "identity.key").read_bytes()
    assert register.renew_identity(folder) == site_fingerprint("bank")
    assert (folder / "identity.key").read_bytes() != old
    assert (folder / "identity.key.old").read_bytes() == old
    assert stat.S_IMODE((folder / "identity.key").stat().st_mode) == 0o600
    assert ids() == ["a" * 16]
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        admit(config, "b" * 16, "pax", hello())
    (folder / "identity.key").write_bytes(old)  # which the register does not accept any more
    with pytest.raises(DataError, match="must be the register of the site"):
        admit(config, "a" * 16, "pax", hello())


@pytest.mark.slow
def test_a_run_waits_until_it_is_approved_and_is_the_same_then(settings, bank, monkeypatch):
    asked, sleep = list[str](), flower.time.sleep

    def a_while(seconds):
        if seconds:
            sleep(seconds)
            return
        [run] = runs()
        asked.append(run.model)
        if len(asked) == 3:
            assert approve(run.model, answer="y\n").exit_code == 0

    plain = run_local(settings(parties=1), bank())
    for name in ("identity.key", database.DATABASE):  # as if it had never taken part
        (home() / "sites" / "bank" / name).unlink()
    notes = []
    note = RunFolder.note
    monkeypatch.setattr(flower, "APPROVAL_POLL", 0.0)
    monkeypatch.setattr(flower.time, "sleep", a_while)
    monkeypatch.setattr(
        RunFolder, "note", lambda self, stage: (notes.append(stage.doing), note(self, stage))
    )
    folder = run_local(settings(parties=1), bank(approve="ask"))
    assert asked == [model_of(folder)] * 3
    waits = f"bank: waits for approval at bank: fedapp site approve {asked[0]}; the run asks again"
    assert sum(text.startswith(waits) for text in notes) == 3
    models = [(one.path / "model.json").read_bytes() for one in (plain, folder)]
    assert models[0] == models[1]


def test_a_run_that_nobody_approves_ends_and_says_what_to_do(settings, bank, monkeypatch):
    monkeypatch.setattr(flower, "APPROVAL_POLL", 0.0)
    rule = r"^bank \(step 1\): waits for approval at bank: fedapp site approve [0-9a-f]{16}; "
    with pytest.raises(FedappError, match=rule + "the run asks again until start-deadline"):
        run_local(settings(parties=1, start_deadline=0.1), bank(approve="ask"))


def opening_of(method, **fields):
    """An opening of a method between three parties."""
    parties = fields.pop("parties", PARTIES)
    if all_methods()[method].needs_label:
        return hello(parties, **fields)
    plan = planned(parties, aggregation="sealed", labels="paillier", **fields)
    return VerticalHelloRequest(True, 1000, 42, "", False, **plan)


MASKED = {"aggregation": "secure"}
OPENINGS = [
    *((method, {}) for method in sorted(all_methods())),
    ("pax", MASKED),
    ("pax", {**MASKED, "parties": PARTIES[:2]}),
    ("pax", {**MASKED, "threshold": 2}),
    ("pax", {**MASKED, "epsilon": 1.0, "delta": 1e-5, "multiplier": private().multiplier}),
    ("horizontal-forest", MASKED),
    ("describe-rows", MASKED),
    ("secureboost", {"join": "left"}),
    ("secureboost", {"max_leaves": 31, "goss": True, "test_from": "booked:2024-07-01"}),
]


@pytest.mark.parametrize(("method", "fields"), OPENINGS, ids=str)
def test_who_approves_reads_one_screen(method, fields, monkeypatch):
    """First facts of the run, then five to eight sentences of what leaves by its settings."""
    monkeypatch.setattr(console, "_width", 80)
    config = site_config(ASKS, {})
    with pytest.raises(WaitingError, match=r"^waits for approval at bank: fedapp site approve aa"):
        admit(config, "a" * 16, method, opening_of(method, **fields))
    refused = approve("a" * 16, answer="n\n")
    screen, asked, after = refused.output.partition("Let bank take part? [y/N]: n\n")
    facts, _, leaves = screen.partition("What leaves in this run, and who could learn what:\n")
    assert (refused.exit_code, bool(asked)) == (1, True)
    assert screen.count("\n") <= 45
    assert max(map(len, refused.output.splitlines())) <= 80
    assert facts.startswith("run ")
    assert f"aaaaaaaaaaaaaaaa of {method}, at bank on 'rows.csv'" in " ".join(facts.split())
    assert 5 <= len(re.findall("^- ", leaves, re.MULTILINE)) <= 8
    assert "fedapp site approve aaaaaaaaaaaaaaaa --all" in leaves
    assert "bank takes no part in aaaaaaaaaaaaaaaa" in after
    assert "to approve it until then: fedapp site approve aaaaaaaaaaaaaaaa\n" in after
    assert f"take {method} out of allow in site.toml, and restart the SuperNode" in after
    waits(config, "a" * 16, opening_of(method, **fields), method)


@pytest.mark.parametrize(
    ("method", "fields", "text", "is_shown"),
    [
        ("pax", {}, "Nothing hides a rare one", True),
        ("pax", MASKED, "Nothing hides a rare one", False),
        ("pax", MASKED, "Masks depend on all requests", True),
        ("pax", {}, "Masks depend on all requests", False),
        ("pax", MASKED, "and learns exactly how many rows of each class that leaf has", True),
        ("pax", MASKED, "With calibration the model has a curve", True),  # not in the opening
        ("pax", MASKED, "Where rows are ranked", False),
        ("pax", {"objective": "rank:ndcg"}, "Where rows are ranked", True),
        ("pax", {"objective": "auto"}, "With objective=rank:ndcg or rank:pairwise: Where", True),
        ("secureboost", {}, "asks for names before a run opens", True),
        ("secureboost", {}, "opens every horizontal run", False),
        ("secureboost", {}, "With join=left it learns which", False),
        ("secureboost", {"join": "left"}, "With join=left it learns which", True),
        ("federated-forest", {}, "A passive party learns codes of the labels", False),
        ("federated-forest", {}, "A seed of the server decides", True),
        ("interactive", {}, "By one_round:", False),
    ],
)
def test_the_rest_is_shown_on_demand(method, fields, text, is_shown):
    waits(site_config(ASKS, {}), "a" * 16, opening_of(method, **fields), method)
    screen, whole = (
        " ".join(approve("a" * 16, *words, answer="n\n").output.split())
        for words in ((), ("--all",))
    )
    assert (text in screen, text in whole) == (False, is_shown)


@pytest.mark.parametrize(
    ("method", "changes", "rule"),
    [
        ("bagging", {}, "strategy must be pax, as when the run first asked bank, got bagging"),
        ("pax", {"valid_fraction": 0.9}, "valid-fraction must be 0.1, as when .*, got 0.9"),
        ("pax", {"rounded": True}, "rounded must be False, as when .*, got True; begin a new run"),
        ("pax", {"aggregation": "plain"}, "aggregation must be secure, as when .*, got plain"),
        ("pax", {"rounds": 2500}, "rounds must be 50, as when .*, got 2500"),
        ("pax", {"epsilon": 0.0}, r"epsilon must be 1.0, as when .*, got 0\.0"),
        ("pax", {"parties": ("bank", "lab")}, r"parties must be \['bank', 'insurer', 'shop'\], as"),
    ],
)
def test_what_was_approved_is_what_begins(method, changes, rule):
    config = site_config(ASKS, {})
    opening = private()
    waits(config, "a" * 16, opening)
    other = replace(opening, **changes)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{rule}"):
            admit(config, "a" * 16, method, other)
        approve("a" * 16, "--yes")
    admit(config, "a" * 16, "pax", opening)


def test_a_run_of_another_table_waits_anew():
    config = site_config(ASKS, {})
    wait_and_approve(config, "a" * 16, hello())
    admit(config, "a" * 16, "pax", hello())
    waits(replace(config, data="others.csv"), "a" * 16, hello())


def test_a_run_whose_state_was_deleted_counts_and_waits_anew(write_table):
    table = {"data": str(write_table("bank")), "label": "y"}
    node = {**ASKS, **table}
    config = site_config({**node, "runs-per-day": 1}, {})
    folder, envelope = home() / "sites" / "bank", Envelope("a" * 16, 1, method="pax")

    def ask():
        answer(config, HelloRequest.kind, envelope, to_content(hello(), "bank"))

    with pytest.raises(WaitingError):
        ask()
    assert approve("a" * 16, "--yes").exit_code == 0
    for _ in range(3):
        ask()
    drop_abandoned(folder, days=-1)
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        ask()
    config = site_config({**node, "runs-per-day": 2}, {})
    with pytest.raises(WaitingError):
        ask()
    assert [bool(run.approved) for run in runs()] == [True, False]


def test_an_approval_lapses_with_its_entry(monkeypatch):
    config, now = site_config(ASKS, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    wait_and_approve(config, "a" * 16, hello())
    admit(config, "a" * 16, "pax", hello())
    now[0] += register.KEPT_SECONDS
    waits(config, "a" * 16, hello())


def test_runs_that_wait_are_listed(tmp_path):
    assert f"no run waits under {home()} (at a site: --site FOLDER)" in approve().output
    waits(site_config(ASKS, {}), "a" * 16, hello())
    assert f"{'a' * 16}  bank  pax" in approve().output
    assert approve("a" * 16, "--yes").exit_code == 0
    assert f"no run waits under {home()} (at a site: --site FOLDER)" in approve().output


def test_another_run_than_those_that_wait_cannot_be_approved():
    rule = r"^run must be one that waits under \S+ \(none; at a site: --site FOLDER\), got abc$"
    with pytest.raises(ConfigError, match=rule):
        raise approve("abc").exception


# What a person approves


def test_who_approves_sees_the_plan():
    insurer = site_fingerprint("insurer")
    config = site_config({**ASKS, "trusted": f"insurer:{insurer}", "total-epsilon": 3}, {})
    admit_and_charge(replace(config, asks=False), "a" * 16, private(2.0))
    opening = private(max_depth=4, subsample=0.5)
    waits(config, "b" * 16, opening)
    output = approve("b" * 16, answer="n\n").output
    shown = {" ".join(line.split()) for line in output.splitlines()}
    settings = "rounds 50, trees 1, max-depth 4, levels 6, subsample 0.5, goss False"
    assert settings in " ".join(output.split())
    both = composed_epsilon([budget_for(epsilon, 1e-5, 50, 3) for epsilon in (1, 2)], 1e-5)
    keys = {name: site_fingerprint(name) for name in PARTIES}
    assert shown >= {
        f"run {'b' * 16} of pax, at bank on 'rows.csv'",
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


def test_who_approves_sees_by_what_rows_are_split():
    config = site_config({**ASKS, "group": "patient"}, {})
    opening = hello(test_from="booked:2024-07-01", valid_from="booked:2024-01-01", group="who")
    waits(config, "a" * 16, opening)
    lines = approve("a" * 16, answer="n\n").output.splitlines()
    assert {" ".join(line.split()) for line in lines} >= {
        "test rows those of booked from 2024-07-01 on",
        "validation those of booked from 2024-01-01 on, before the test rows",
        "groups rows of one patient are in one subset",
    }


@pytest.mark.parametrize(
    ("field", "value"), [("group", "who"), ("test_from", "day:5"), ("valid_from", "day:3")]
)
def test_rows_that_are_held_back_by_another_column_need_approval(field, value):
    config = site_config(NODE, {})
    admit(config, "a" * 16, "pax", hello())
    rule = f"{field.replace('_', '-')} must be empty, as in the first run on the table, got {value}"
    with pytest.raises(WaitingError, match=re.escape(rule)):
        admit(config, "b" * 16, "pax", hello(**{field: value}))


def test_who_approves_sees_what_a_label_holder_could_read():
    opening = VerticalHelloRequest(True, 1000, 42, "", False, **planned(("bank",), rounds=50))
    waits(site_config({**ASKS, "allow": "secureboost"}, {}), "a" * 16, opening, "secureboost")
    output = " ".join(approve("a" * 16, answer="n\n").output.split())
    line = "label holder could read the bins of 4,096 rows a round, with crafted gradients"
    assert f"{line}; 50 rounds" in output
    line = "passive party could read 1,260 labels a round, by which of made-up columns are chosen"
    assert f"{line}; 50 rounds" in output


@pytest.mark.parametrize("is_shared", [True, False])
def test_who_approves_sees_how_many_labels_shared_figures_could_show(is_shared):
    config = site_config({**ASKS, "label": "y", "share-label-figures": is_shared}, {})
    opening = VerticalHelloRequest(True, 1000, 42, "", False, **planned(("bank",)))
    waits(config, "a" * 16, opening, "describe-columns")
    output = " ".join(approve("a" * 16, answer="n\n").output.split())
    line = "label figures labels of up to 4 rows can be read"
    assert (line in output) == is_shared
    changed = replace(config, shares_label_figures=not is_shared)
    with pytest.raises(ConfigError, match=r"share-label-figures must be (True|False), as when the"):
        admit(changed, "a" * 16, "describe-columns", opening)


def test_who_approves_sees_that_labels_are_randomised_once_for_all_runs(write_table):
    table = {"data": str(write_table("bank")), "label": "y", "allow": "secureboost"}
    opening = VerticalHelloRequest(True, 1000, 42, "", False, **planned(("bank",), rounds=50))
    config = site_config({**ASKS, **table, "label-epsilon": 2}, {})
    for number, digit in enumerate("abc", 1):
        waits(config, digit * 16, opening, "secureboost")
        output = " ".join(approve(digit * 16, "--yes").output.split())
        line = f"randomised with epsilon 2, once, for all runs on them, with this one {number}"
        assert line in output
        admit(config, digit * 16, "secureboost", opening)
    without = site_config({**ASKS, **table, "label": "", "label-epsilon": 2}, {})
    waits(without, "d" * 16, opening, "secureboost")
    assert "randomised" not in approve("d" * 16, "--yes").output.partition("aggregation")[2]


def test_texts_of_a_coordinator_do_not_reach_the_terminal_as_they_are():
    odd = "shop\x1b[2J[red]"
    opening = replace(hello(), parties=("bank", odd), fingerprints=("", odd), objective=odd)
    waits(site_config(ASKS, {}), "a" * 16, opening)
    output = approve("a" * 16, answer="n\n").output
    assert "\x1b" not in output
    assert output.count("shop\\x1b[2J[red]") == 3


def test_an_approval_is_of_the_reasons_that_were_shown():
    """Two runs that were both shown before one of them fixed which rows are held back."""
    config = site_config(ASKS, {})
    openings = {"a" * 16: hello(), "b" * 16: hello(seed=43)}
    for model, opening in openings.items():
        wait_and_approve(config, model, opening)
    admit(config, "a" * 16, "pax", openings["a" * 16])
    with pytest.raises(WaitingError, match=r"^waits for approval at bank \(seed must be 42, as in"):
        admit(config, "b" * 16, "pax", openings["b" * 16])
    output = " ".join(approve("b" * 16, "--yes").output.split())
    assert "waits because seed must be 42, as in the first run on the table, got 43" in output
    admit(config, "b" * 16, "pax", openings["b" * 16])


def test_only_an_opening_opens_a_run():
    rule = r"^bank: KeysRequest\.step must be 1, which opens a run: the site has no state of this"
    with pytest.raises(ProtocolError, match=rule):
        admit(site_config(NODE, {}), "a" * 16, "pax", KeysRequest())
    assert runs() == []


def test_an_opening_that_is_refused_fixes_and_spends_nothing(write_table):
    node = {**NODE, "data": str(write_table("bank")), "label": "y", "min-rows": 10}
    config = site_config({**node, "run-epsilon": 1}, {})

    def ask(number, opening):
        envelope = Envelope(model_id(number), 1, method="pax")
        answer(config, HelloRequest.kind, envelope, to_content(opening, "bank"))

    for number in (1, 1, 2):
        with pytest.raises(DataError, match="at least 10 validation rows, got"):
            ask(number, private())
        assert [run.admitted for run in runs()] == [0] * number
        assert f"no run waits under {home()} (at a site: --site FOLDER)" in approve().output
    for _ in range(2):
        ask(3, private(valid_fraction=0.0, test_fraction=0.3))
    assert [run.admitted for run in runs()] == [0, 0, 1]
    assert [run.begun for run in runs()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("parties", "aggregation", "rule"),
    [
        (PARTIES, "plain", "aggregation must be secure for bank, whose node config has least-"),
        (PARTIES[:2], "secure", r"parties must be >= 3 \(least-parties of bank\), got 2"),
    ],
)
def test_nobody_is_asked_about_a_run_that_the_site_refuses(write_table, parties, aggregation, rule):
    node = {**ASKS, "data": str(write_table("bank")), "label": "y", "least-parties": 3}
    config, opening = site_config(node, {}), hello(parties, aggregation=aggregation)
    envelope = Envelope(model_id(1), 1, method="pax")
    with pytest.raises(ConfigError, match=f"^{rule}"):
        answer(config, HelloRequest.kind, envelope, to_content(opening, "bank"))
    assert runs() == []


def test_an_opening_that_was_refused_meanwhile_does_not_begin():
    config, run = site_config(NODE, {}), ("a" * 16, "pax", hello())
    rule = r"^run must be admitted by bank, got an opening that it has refused$"

    def fail():
        with register.opening(config, *run):
            raise DataError("no such table")

    with register.opening(config, *run):
        with pytest.raises(DataError):
            fail()
        with pytest.raises(ConfigError, match=rule):
            register.record_opened("bank", "a" * 16)


# Which rows are held back, and between whom sums are


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_fraction": 0.25}, "test-fraction must be 0.2, as in the first run on the table, "),
        ({"valid_fraction": 0.0}, "valid-fraction must be 0.1, as in the first run on the table, "),
        ({"seed": 43}, "seed must be 42, as in the first run on the table, got 43"),
        ({"fold": 1, "folds": 5}, "fold must be 0, .*, got 1; folds must be 0, .*, got 5"),
    ],
)
def test_the_first_run_on_a_table_fixes_which_rows_are_held_back(changes, reason):
    config, other = site_config(NODE, {}), hello(**changes)
    admit(config, model_id(1), "interactive", other)  # predicts: holds nothing back
    for number in (2, 3):
        admit(config, model_id(number), "pax", hello())
    with pytest.raises(WaitingError, match=rf"^waits for approval at bank \({reason}"):
        admit(config, model_id(4), "bagging", other)
    admit(replace(config, data="others.csv"), model_id(5), "pax", other)
    admit(config, model_id(6), "interactive", other)
    assert approve(model_id(4), "--yes").exit_code == 0
    admit(config, model_id(4), "bagging", other)
    admit(config, model_id(7), "pax", other)
    admit(config, model_id(8), "pax", hello())


@pytest.mark.parametrize(
    ("aggregation", "names", "waits"),
    [
        ("secure", ("bank", "insurer"), True),
        ("secure", (*PARTIES, "lab"), True),
        ("secure", PARTIES, False),
        ("secure", ("bank", "insurer", "lab"), True),
        ("plain", ("bank", "insurer"), False),
    ],
)
def test_masked_runs_with_and_without_a_party_need_approval(aggregation, names, waits):
    config = site_config(NODE, {})
    admit(config, model_id(1), "pax", hello(("bank",), aggregation="plain"))
    admit(config, model_id(2), "pax", hello(PARTIES, aggregation="secure"))
    opening = hello(names, aggregation=aggregation)
    if waits:
        rule = f"parties must be bank, insurer, shop, as in an earlier masked run, got {names[0]}, "
        with pytest.raises(WaitingError, match=rf"^waits for approval at bank \({rule}"):
            admit(config, model_id(3), "fedavg-linear", opening)
        assert approve(model_id(3), "--yes").exit_code == 0
    admit(config, model_id(3), "fedavg-linear", opening)


@pytest.mark.slow
def test_labels_do_not_follow_from_runs_that_hold_back_one_row_each(write_table):
    """A coordinator that opens runs at an honest site which approves all, and asks for the sum of
    the labels of each."""
    n_rows = 64
    path = write_table("bank", n_rows=n_rows)
    labels = np.loadtxt(path, delimiter=",", skiprows=1)[:, 2]
    config = site_config({**NODE, "data": str(path), "label": "y"}, {})

    def label_sum(seed, test_fraction):
        opening = hello(test_fraction=test_fraction, valid_fraction=0.0, seed=seed)
        for step, request in enumerate((opening, LabelsRequest(**TERMS)), start=1):
            envelope = Envelope(model_id(seed), step, method="pax")
            try:
                reply = answer(config, request.kind, envelope, to_content(request, "bank"))
            except WaitingError:
                return None
        return float(reply.arrays["label_sums"][0])

    seeds = {}
    for seed in range(1, 2000):
        [row] = split_rows(n_rows, 1 / n_rows, 0.0, seed).test
        seeds.setdefault(int(row), seed)
    assert len(seeds) == n_rows
    whole = label_sum(0, 0.0)
    assert whole == labels.sum()
    sums = {row: label_sum(seed, 1 / n_rows) for row, seed in seeds.items()}
    read = {row for row, one in sums.items() if one is not None and whole - one == labels[row]}
    assert read == set()
    assert list(sums.values()) == [None] * n_rows


def test_a_party_does_not_follow_from_masked_runs_with_and_without_it(write_table):
    nodes = [
        {**NODE, "name": name, "data": str(write_table(name, seed=seed))}
        for seed, name in enumerate(PARTIES)
    ]
    configs = {
        str(node["name"]): site_config({**node, "label": "y", "least-parties": 2}, {})
        for node in nodes
    }

    def label_sum(model, names):
        coordinator = Coordinator({name: configs[name] for name in names}, model=model)
        masked = coordinator.masked(coordinator.opening, 3, names)
        return int(unmasked_sum(masked.values(), len(masked["bank"]))[0])

    assert label_sum(model_id(1), PARTIES) > 0
    with pytest.raises(WaitingError, match=r"^waits for approval at bank \(parties must be bank, "):
        label_sum(model_id(2), PARTIES[:2])


# What private runs come to


@pytest.mark.parametrize(
    ("node", "n_admitted"),
    [
        ({"run-epsilon": 1}, 1),
        ({"total-epsilon": 1}, 1),
        ({"run-epsilon": 1, "total-epsilon": 2}, 3),
        ({}, 6),
    ],
)
def test_private_runs_add_up(node, n_admitted):
    config = site_config({**NODE, **node}, {})
    for number in range(n_admitted):
        admit_and_charge(config, model_id(number), private())
    if not node:
        return
    limit = node.get("total-epsilon", 1)
    spent = composed_epsilon([budget_for(1, 1e-5, 50, 3)] * n_admitted, 1e-5)
    rule = (
        rf"^privacy\.epsilon must come to <= {limit} in all runs on one table \(total-epsilon in "
        rf"the node config of bank\), got [\d.]+ with this run for delta 1e-05; spent before: "
        rf"{spent:.2f} of {limit} in {n_admitted} runs?, for delta 1e-05. Ask for a smaller "
        r"epsilon, or bank for a larger total-epsilon$"
    )
    with pytest.raises(ConfigError, match=rule):
        admit(config, "a" * 16, "pax", private())
    assert len(runs()) == n_admitted
    admit(config, model_id(0), "pax", private())  # asked again, by a server that heard no answer
    admit(replace(config, data="others.csv"), "c" * 16, "pax", private())


def test_what_was_spent_stays_spent_whatever_the_person_says(monkeypatch):
    config, now = site_config({**ASKS, "run-epsilon": 1}, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    for model in ("a" * 16, "b" * 16):
        wait_and_approve(config, model, private())
    admit_and_charge(config, "a" * 16, private())
    with pytest.raises(ConfigError, match=r"^privacy\.epsilon must come to <= 1 in all runs"):
        admit(config, "b" * 16, "pax", private())
    now[0] += 400 * 86_400
    with pytest.raises(ConfigError, match=r"^privacy\.epsilon must come to <= 1 in all runs"):
        admit(config, "c" * 16, "pax", private())


def test_a_larger_delta_makes_no_run_cheaper():
    config = site_config({**NODE, "run-epsilon": 2, "total-epsilon": 2}, {})
    admit_and_charge(config, "a" * 16, private(1.0, 1e-6))
    budgets = [budget_for(1.0, 1e-6, 50, 3), budget_for(0.9, 1e-2, 50, 3)]
    assert composed_epsilon(budgets, 1e-2) < 2 < composed_epsilon(budgets, 1e-6)
    with pytest.raises(ConfigError, match=r"with this run for delta 1e-06; spent before: 1\.00 of"):
        admit(config, "b" * 16, "pax", private(0.9, 1e-2))


@pytest.mark.parametrize(
    "none", [{"multiplier": 1.0}, {"multiplier": 0.0}, {"delta": 0.0}, {"rounds": 0}]
)
def test_a_promise_that_its_noise_does_not_keep_is_no_promise(none):
    rule = r"^bank: HelloRequest\.multiplier must be of more noise to keep epsilon 1 for delta"
    with pytest.raises(ProtocolError, match=rule):
        admit(site_config(NODE, {}), "a" * 16, "pax", replace(private(), **none))
    assert runs() == []


@pytest.mark.slow
def test_site_check_shows_what_was_spent(write_table, tmp_path):
    data = str(write_table("bank"))
    said = {**NODE, "data": data, "label": "y", "run-epsilon": 1, "total-epsilon": 3}
    path = tmp_path / "site.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in said.items()))

    def facts():
        output = CliRunner().invoke(site_app, ["check", "--site", str(path)]).output
        words = (" ".join(line.split()) for line in output.splitlines())
        return {one.partition(" ")[0]: one for one in words}

    assert facts()["total-epsilon"] == "total-epsilon spent 0.00 of 3 in 0 runs"
    config = site_config(said, {})
    with register.opening(config, "a" * 16, "pax", private()):
        charge(config, "a" * 16)
    assert facts()["run-epsilon"] == "run-epsilon 1"
    assert facts()["total-epsilon"] == "total-epsilon spent 1.00 of 3 in 1 run, for delta 1e-05"
    assert facts()["runs"] == "runs today 1"


# The database


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

    def ask(number):
        try:
            admit(config, model_id(number), "pax", opening)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(16))) == 3
    assert len(runs()) == 3


def test_the_register_is_its_owners_alone_and_on_the_disk():
    admit(site_config(NODE, {}), "a" * 16, "pax", hello())
    folder = home() / "sites" / "bank"
    with database.transaction(folder) as opened:
        opened.execute("UPDATE runs SET begun = 1")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("register*")}
        assert modes == dict.fromkeys(("register.db", "register.db-wal", "register.db-shm"), 0o600)
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert opened.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_decision_that_fails_half_way_is_none():
    admit(site_config(NODE, {}), "a" * 16, "pax", hello())

    def fail():
        with database.transaction(home() / "sites" / "bank") as opened:
            opened.execute("UPDATE runs SET admitted = 0")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [bool(run.admitted) for run in runs()] == [True]


def test_a_broken_register_stops_the_site():
    folder, rule = home() / "sites" / "bank", r"^bank: register\.db must be a database that the si"
    admit(site_config(NODE, {}), model_id(1), "pax", hello())
    with database.transaction(folder) as opened:
        opened.execute("UPDATE runs SET settings = '{'")
    with pytest.raises(DataError, match=rule):
        admit(site_config(NODE, {}), model_id(2), "pax", hello())
    (folder / database.DATABASE).write_bytes(b"no database, but long enough to be one" * 100)
    with pytest.raises(DataError, match=rule):
        admit(site_config(NODE, {}), model_id(2), "pax", hello())
