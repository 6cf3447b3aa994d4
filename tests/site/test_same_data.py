"""What a coordinator or a site's own hand gets by moving, growing or copying a table: nothing."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.crypto.noise import budget_for
from fedapp.errors import ConfigError, DataError, FedappError, WaitingError
from fedapp.home import home
from fedapp.messages.handshake import LabelsRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.runs.local import run_local
from fedapp.site import database, register, table
from fedapp.site.answer import answer
from fedapp.site.register import charge, count_ids, runs_of
from fedapp.site.settings import site_config
from fedapp.site.trust import identity, site_fingerprint
from tests.crypto.test_masks import TERMS
from tests.deploy_folders import checked_site
from tests.federated import summary_of
from tests.plans import planned
from tests.site.test_register import NODE, hello, model_id, private


def site(path, **node):
    """The bank, with this table."""
    more = {key.replace("_", "-"): value for key, value in node.items()}
    return site_config({**NODE, "label": "y", "data": str(path), **more}, {})


def ask(config, number, request=None, step=1):
    """What a site answers to a coordinator; by default to the opening of a run."""
    request = request or hello((config.name,))
    envelope = Envelope(model_id(number), step, method="pax")
    return answer(config, type(request).kind, envelope, to_content(request, config.name))


def begin_private(config, number, epsilon=1.0):
    """A private run whose first noised sums have left."""
    ask(config, number, private(epsilon))
    charge(config, model_id(number))


def lines_of(path):
    return path.read_text().splitlines()


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def approve(*words):
    env = {"COLUMNS": "200"}
    return " ".join(CliRunner().invoke(site_app, ["approve", *words], env=env).output.split())


# Runs on tables that differ by few rows


def test_labels_do_not_follow_from_a_table_that_grows_by_a_row(write_table, tmp_path):
    """A coordinator that asks for the sum of the labels before and after each of 20 rows."""
    whole = lines_of(write_table("bank", n_rows=60))
    opening = hello(test_fraction=0.0, valid_fraction=0.0)

    def label_sum(number):
        config = site(write(tmp_path / f"export-{number}.csv", whole[: 40 + number]))
        try:
            ask(config, number, opening)
        except WaitingError:
            return None
        return float(ask(config, number, LabelsRequest(**TERMS), 2).arrays["label_sums"][0])

    assert label_sum(0) is not None
    rule = (
        rf"^waits for approval at bank \(table must not differ from that of run {model_id(0)} by "
        r"fewer than 10 rows \(min-rows, at least 10\), got 1: what both runs disclose differs by "
        rf"these rows\): fedapp site approve {model_id(1)}"
    )
    with pytest.raises(WaitingError, match=rule):
        ask(site(write(tmp_path / "more.csv", whole[:41])), 1, opening)
    assert [label_sum(number) for number in range(2, 10)] == [None] * 8
    # Each differs by few from an earlier one, or is of more rows than single ones are hidden in.
    assert label_sum(10) is not None
    assert [label_sum(number) for number in range(11, 20)] == [None] * 9


def changed_label(path):
    lines = lines_of(path)
    fields = lines[7].split(",")
    lines[7] = ",".join([*fields[:2], str(1 - int(fields[2])), *fields[3:]])
    return write(path.with_name("july.csv"), lines)


def renamed_column(path):
    """Without the last row, and with a column of another name."""
    header, *rows = lines_of(path)
    return write(path.with_name("july.csv"), [header.replace("a,", "amount,"), *rows[:-1]])


@pytest.mark.parametrize(
    ("change", "n_differing", "min_rows"),
    [
        (lambda path: write(path, lines_of(path)[:-1]), 1, 0),
        (lambda path: write(path.with_name("july.csv"), lines_of(path)[:-9]), 9, 0),
        (lambda path: write(path.with_name("july.csv"), lines_of(path)[:-10]), None, 0),
        (lambda path: write(path.with_name("july.csv"), lines_of(path)[:-11]), 11, 12),
        (changed_label, 2, 0),
        (renamed_column, 1, 0),
        (lambda path: path, None, 0),
    ],
)
def test_a_run_on_a_table_that_differs_by_few_rows_waits(
    write_table, change, n_differing, min_rows
):
    path = write_table("june", n_rows=100, customer=[f"c{row}" for row in range(100)])
    ask(site(path, id="customer", min_rows=min_rows), 1, hello(valid_fraction=0.2))
    config, again = site(change(path), id="customer", min_rows=min_rows), hello(valid_fraction=0.2)
    if n_differing is not None:
        rule = rf"by fewer than {max(min_rows, 10)} rows \(min-rows, at least 10\), got "
        gone = "" if change is changed_label else " that are gone, as after an erasure"
        for _ in range(2):
            with pytest.raises(WaitingError, match=rf"{rule}{n_differing}{gone}: what both runs"):
                ask(config, 2, again)
        shown = approve(model_id(2), "--yes")
        assert f"waits because table must not differ from that of run {model_id(1)} by" in shown
        assert "recognised by content and id in any file; in the table of an earlier run: " in shown
    ask(config, 2, again)
    ask(config, 3, again)  # a person has approved the difference


def test_a_run_that_only_predicts_or_was_refused_is_not_compared(write_table, tmp_path):
    path = write_table("june")
    grown = write(tmp_path / "july.csv", [*lines_of(path), "0.5,0.5,1"])
    with register.opening(site(path), model_id(1), "interactive", hello()):
        pass
    with pytest.raises(DataError, match=r"at least 10 validation rows"):
        ask(site(path, min_rows=10), 2)
    ask(site(grown), 3)


# One budget for the same rows


def grown(path):
    return write(path.with_name("july.csv"), [*lines_of(path), "0.5,0.5,rome,1"])


def with_category(path):
    """A new first category: the codes of all others change."""
    return write(path.with_name("july.csv"), [*lines_of(path), "0.5,0.5,athens,1"])


def in_another_order(path):
    header, *rows = [line.split(",") for line in lines_of(path)]
    lines = [",".join(fields[::-1]) for fields in (header, *rows[::-1])]
    return write(path.with_name("july.csv"), lines)


def linked(path):
    os.link(path, link := path.with_name("july.csv"))
    return link


def copied(path):
    return Path(shutil.copy(path, path.with_name("july.csv")))


def with_two_old_rows(path):
    header, *rows = lines_of(path)
    return write(path.with_name("july.csv"), [header, *rows[:2], *["9,9,oslo,0", "8,8,bonn,1"] * 9])


COPIES = [copied, linked, grown, with_category, in_another_order, with_two_old_rows]


@pytest.fixture
def towns(write_table):
    towns = np.random.default_rng(1).choice(["bonn", "oslo", "rome"], 40)
    labels = np.random.default_rng(2).integers(0, 2, 40)
    return write_table("june", y=None, town=towns, label=labels)


@pytest.mark.by_default(
    "copied-bank",
    "linked-shop",
    "grown-bank",
    "with_category-shop",
    "in_another_order-bank",
    "with_two_old_rows-shop",
)
@pytest.mark.parametrize("name", ["bank", "shop"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_table_has_no_budget_of_its_own(towns, copy, name):
    node = {"label": "label", "run_epsilon": 1}
    begin_private(site(towns, **node), 1)
    config = site(copy(towns), name=name, **node)
    rule = (
        rf"^privacy\.epsilon must come to <= 1 in all runs on one table \(total-epsilon in the "
        rf"node config of {name}\), got 1\.\d+ with this run for delta 1e-05; spent before: 1\.00 "
    )
    parties = (name, "insurer", "lab")
    with pytest.raises(ConfigError, match=rule):
        ask(config, 2, replace(private(), **planned(parties, rounds=50)))
    checked = checked_site(node_config(config))
    assert "spent 1.00 of 1 in 1 run" in " ".join(checked.output.split())


def node_config(config):
    return (
        f'name="{config.name}" data="{config.data}" label="{config.label}" allow="pax" '
        f'run-epsilon="{config.run_epsilon:g}"'
    )


def test_new_rows_have_a_budget_of_their_own(write_table):
    begin_private(site(write_table("june", seed=1), run_epsilon=1), 1)
    config = site(write_table("june", seed=2), run_epsilon=1)
    begin_private(config, 2)
    with pytest.raises(ConfigError, match=r"spent before: 1\.00 of 1 in 1 run"):
        ask(config, 3, private())


def test_other_columns_of_the_same_file_have_no_budget_of_their_own(write_table):
    """Without ids, rows with other columns cannot be compared: then the file's name counts."""
    path = write_table("june")
    begin_private(site(path, run_epsilon=1), 1)
    with pytest.raises(ConfigError, match=r"spent before: 1\.00 of 1 in 1 run"):
        ask(site(path, run_epsilon=1, drop_columns="b"), 2, private())
    begin_private(site(copied(path), run_epsilon=1, drop_columns="b"), 3)  # not recognised


def test_parties_with_columns_of_the_same_rows_may_share_a_home(write_table):
    people = [f"c{row}" for row in range(40)]
    june = write_table("june", n_rows=40, customer=people)
    july = write_table("july", n_rows=40, customer=people, y=None, seed=3)
    limit = {"id": "customer", "runs_per_day": 1}
    configs = [site(june, **limit), site(july, name="shop", **{**limit, "label": ""})]
    for number, config in enumerate(configs):
        request = VerticalHelloRequest(True, 1000, 0, "", False, **planned([config.name]))
        with register.opening(config, model_id(number), "secureboost", request):
            pass
        with (
            pytest.raises(ConfigError, match=r"^runs-per-day must be <= 1 on one table"),
            register.opening(config, model_id(9), "secureboost", request),
        ):
            pass


# An opening is charged by what is answered


@pytest.mark.slow
def test_an_opening_that_gets_no_sum_spends_nothing(write_table):
    config = site(write_table("bank"), run_epsilon=1)
    for number in range(5):
        ask(config, number, private())
    begin_private(config, 5)
    rule = r"^privacy\.epsilon must come to <= 1 in all runs on one table \(total-epsilon in the no"
    with pytest.raises(ConfigError, match=rule):
        ask(config, 6, private())
    for number in range(5):  # opened side by side, before any of them was charged
        with pytest.raises(ConfigError, match=rule):
            charge(config, model_id(number))
    charge(config, model_id(5))  # a further sum of the same run
    assert [run.charged for run in runs_of(home() / "sites" / "bank")] == [0, 0, 0, 0, 0, 1]


@pytest.mark.slow
def test_sites_of_one_home_that_are_charged_at_once_share_a_budget(write_table):
    names = [f"site-{number}" for number in range(6)]
    path = write_table("bank")
    configs = [site(path, name=name, run_epsilon=1) for name in names]
    for number, config in enumerate(configs):
        noise = budget_for(1.0, 1e-5, 50, len(names)).multiplier
        ask(config, number, replace(private(), **planned(names), multiplier=noise))

    def is_charged(number):
        try:
            charge(configs[number], model_id(number))
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(is_charged, range(6))) == 1


def test_hashes_of_a_table_go_with_its_runs(write_table, monkeypatch):
    path, now = write_table("bank", customer=range(40)), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    with pytest.raises(WaitingError):
        ask(site(path, approve="ask", id="customer"), 1)
    now[0] += register.KEPT_SECONDS
    ask(site(write_table("lab", seed=5)), 2)
    with database.transaction(home() / "sites" / "bank") as opened:
        digests = {digest for (digest,) in opened.execute("SELECT digest FROM hashes")}
    assert digests == {run.contents for run in runs_of(home() / "sites" / "bank")}


def test_a_run_that_was_not_recorded_is_not_charged(write_table):
    config = site(write_table("bank"), run_epsilon=1)
    with pytest.raises(ConfigError, match=r"^run must be one that bank has recorded, got 0{15}1$"):
        charge(config, model_id(1))


@pytest.mark.parametrize(("delta", "fits"), [(0.9, False), (1 / 26, False), (1 / 27, True)])
def test_a_delta_that_promises_nothing_is_refused_by_the_opening(write_table, delta, fits):
    """26 of 40 rows train: a delta of 1 / 26 allows to disclose one of them."""
    config = site(write_table("bank"), run_epsilon=1)
    request = private(1.0, delta, test_fraction=0.2, valid_fraction=0.2)
    if fits:
        ask(config, 1, request)
        return
    rule = rf"^privacy\.delta must be below 1 / 26, the training rows of bank, got {delta:g}$"
    with pytest.raises(ConfigError, match=rule):
        ask(config, 1, request)
    [run] = runs_of(home() / "sites" / "bank")
    assert (run.admitted, run.begun, run.charged) == (0, 0, 0)
    begin_private(config, 2)


@pytest.mark.slow
def test_a_private_run_is_charged_by_its_first_sum(settings, three):
    given = {"pax__aggregation": "secure", "privacy__epsilon": 50.0, "early_stopping_rounds": 0}
    run_local(settings(**given), three())
    [run] = runs_of(home() / "sites" / "bank")
    assert run.charged
    run_local(settings(), three())
    assert [one.charged for one in runs_of(home() / "sites" / "bank")] == [1, 0]


# A register that is not the site's


LOST = r"^bank: register\.db must be the register of the site's identity\.key, got {}: restore it "
WAY = r"from a backup\. To give up the site's history of runs, delete register\.db and identity\.ke"


def delete(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def replace_by_new(path):
    """By a register of another site."""
    other = site_config({**NODE, "name": "lab", "label": "y", "data": "none.csv"}, {})
    register.admit(other, model_id(9), "pax", hello(("lab",)))
    shutil.copy(path.parents[1] / "lab" / "register.db", path)


def without_rows(path):
    path.unlink()
    opened = sqlite3.connect(path)
    opened.execute(database.TABLES[0])
    opened.close()


@pytest.mark.parametrize(
    ("attack", "got"),
    [
        (delete, "none"),
        (empty, "an empty file"),
        (replace_by_new, "one of another key"),
        (without_rows, "one without a key"),
    ],
)
def test_a_register_that_was_lost_is_no_new_budget(write_table, attack, got):
    config = site(write_table("bank"), run_epsilon=1)
    begin_private(config, 1)
    folder = home() / "sites" / "bank"
    key = site_fingerprint("bank")
    attack(folder / "register.db")
    for _ in range(2):
        with pytest.raises(DataError, match=LOST.format(got) + WAY):
            ask(config, 2, private())
        with pytest.raises(DataError, match=LOST.format(got) + WAY):
            charge(config, model_id(1))
    checked = checked_site(node_config(config))
    assert isinstance(checked.exception, DataError)
    for name in ("register.db", "identity.key"):
        (folder / name).unlink(missing_ok=True)
    ask(config, 3, replace(private(), **planned(("bank", "insurer", "shop"), rounds=50)))
    assert site_fingerprint("bank") != key


def test_the_key_of_the_hashes_comes_back_from_the_register(write_table):
    config = site(write_table("bank"), run_epsilon=1)
    begin_private(config, 1)
    (home() / "rows.key").unlink()
    with pytest.raises(ConfigError, match=r"^privacy\.epsilon must come to <= 1 in all runs"):
        ask(config, 2, private())
    (home() / "rows.key").write_bytes(b"another key")
    rule = r"^bank: rows\.key must be the key that register\.db has, got another: delete rows\.key$"
    with pytest.raises(DataError, match=rule):
        ask(config, 2, private())


def test_a_register_of_an_earlier_version_is_refused_also_at_another_site_of_the_home(write_table):
    bank = site(write_table("bank"), run_epsilon=1)
    begin_private(bank, 1)
    path = home() / "sites" / "bank" / "register.db"
    opened = sqlite3.connect(path, isolation_level=None)
    opened.execute("ALTER TABLE runs DROP COLUMN charged")
    opened.close()
    for config in (bank, replace(bank, name="shop")):
        with pytest.raises(DataError, match=LOST.format("one of a version before .+") + WAY):
            ask(config, 2, private())


def test_a_simulated_site_has_no_register_and_can_become_a_real_one(settings, sites, write_table):
    data = write_table("bank")
    run_local(settings(parties=1, data=f"bank={data}", label="y"))
    identity("bank")
    folder = home() / "sites" / "bank"
    assert not (folder / "register.db").exists()
    assert runs_of(folder) == []
    run_local(settings(parties=1), sites({**NODE, "data": data}))
    assert len(runs_of(folder)) == 1
    assert not (folder / "identity.new").exists()


# A table is read once


def test_a_table_is_read_once_to_open_a_run(write_table, n_read):
    ask(site(write_table("bank")), 1)
    assert len(n_read) == 1
    assert table._HELD.get() is None


def test_a_run_that_waits_does_not_have_the_table_read_each_time(write_table, n_read):
    config = site(path := write_table("bank"), approve="ask")
    for _ in range(3):
        with pytest.raises(WaitingError):
            ask(config, 1)
    assert len(n_read) == 1
    write(path, lines_of(path)[:-1])
    with pytest.raises(WaitingError):
        ask(config, 1)
    assert len(n_read) == 2
    assert "rows 39, recognised by content in any file; in the table of an earlier" in approve(
        model_id(1), "--yes"
    )
    ask(config, 1)
    assert len(n_read) == 3


def test_an_error_in_the_table_discloses_no_value(write_table):
    config = site(write_table("bank", w=[-3.25] * 40), weight="w")
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            ask(config, 1)
        assert "-3.25" not in str(caught.value)


# Ids of other parties


def test_ids_of_others_are_limited_by_the_day(write_table, monkeypatch):
    config, now = site(write_table("bank"), align_ids_per_day=100), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    for number in (1, 2):
        ask(config, number)
    for _ in range(3):  # a list that is sent again
        count_ids(config, model_id(1), "shop", 40, 40)
    count_ids(config, model_id(1), "lab", 30, 40)
    rule = (
        "^align-ids-per-day must be >= the ids that others match with one table in 24 hours, 101 "
        "with the 31 of shop, got 100 at bank$"
    )
    with pytest.raises(ConfigError, match=rule):
        count_ids(config, model_id(2), "shop", 31, 40)
    count_ids(config, model_id(2), "shop", 30, 40)
    count_ids(config, model_id(2), "bank", 1000, 40)  # its own list
    now[0] += 86_400
    count_ids(config, model_id(2), "shop", 100, 40)
    unset = replace(config, align_ids_per_day=0)
    with pytest.raises(ConfigError, match="901 with the 801 of shop, got 800 at bank"):
        count_ids(unset, model_id(1), "shop", 801, 40)


@pytest.mark.slow
def test_a_list_of_invented_ids_is_refused(vertical, sites, write_table):
    """A party that invents telephone numbers to learn which of them are customers."""
    numbers = [f"+47 {row}" for row in range(900)]
    bank = write_table("bank", n_rows=900, customer=numbers)
    shop = write_table("shop", n_rows=44, customer=numbers[:44], y=None, seed=1)
    nodes = [
        {"name": "bank", "data": bank, "id": "customer"},
        {"name": "shop", "data": shop, "id": "customer", "label": ""},
    ]
    nodes[1]["align-most-ratio"] = 100
    rule = r"align-ids-per-day must be >= .*, 900 with the 900 of bank, got 880 at shop$"
    with pytest.raises(FedappError, match=rule):
        run_local(vertical(align="psi", num_boost_round=1), sites(*nodes))
    nodes[1]["align-ids-per-day"] = 900
    run_local(vertical(align="psi", num_boost_round=1), sites(*nodes))
    with pytest.raises(FedappError, match=r"1800 with the 900 of bank, got 900 at shop$"):
        run_local(vertical(align="psi", num_boost_round=1), sites(*nodes))


@pytest.mark.slow
def test_a_prediction_is_recorded_with_the_rows_that_it_predicts(
    vertical, settings, sites, write_table
):
    people = [f"c{row}" for row in range(60)]
    new = [f"new {row}" for row in range(20)]
    nodes = [
        {"name": "bank", "data": write_table("bank", 60, customer=people), "id": "customer"},
        {
            "name": "shop",
            "data": write_table("shop", 60, 1, customer=people, y=None),
            "id": "customer",
            "label": "",
        },
    ]
    nodes = [{**node, "runs-per-day": 1} for node in nodes]
    model = summary_of(run_local(vertical(), sites(*nodes)))["model_id"]
    predicts = {"strategy": "interactive", "model": model, "parties": 2}
    rule = r"runs-per-day must be <= 1 on one table"
    with pytest.raises(FedappError, match=rule):
        run_local(settings(**predicts), sites(*nodes))
    nodes[0]["predict-data"] = write_table("bank-new", 20, 2, customer=new)
    nodes[1]["predict-data"] = write_table("shop-new", 20, 3, customer=new, y=None)
    run_local(settings(**predicts), sites(*nodes))
    assert [run.n_rows for run in runs_of(home() / "sites" / "bank")] == [60, 20]
    with pytest.raises(FedappError, match=rule):
        run_local(settings(**predicts), sites(*nodes))
