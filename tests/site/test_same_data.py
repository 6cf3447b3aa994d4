"""What a coordinator or a site's own hand gets by moving, growing or copying a table: nothing."""

import shutil
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv, parquet

from fedapp.crypto.noise import budget_for
from fedapp.data import scratch
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, WaitingError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.site import database, register
from fedapp.site.register import charge, count_ids, runs_of
from fedapp.site.rows import compare, hash_rows
from fedapp.site.settings import site_config
from fedapp.site.trust import identity, site_fingerprint
from tests.deploy_folders import checked_site
from tests.plans import planned
from tests.site.office import (
    DAY,
    NODE,
    approve,
    ask,
    hello,
    model_id,
    private,
    read,
    runs,
    set_clock,
)


def site(path, **node):
    """The bank, with this table."""
    config = {**NODE, "label": "y", "data": path, **node}
    return site_config({key.replace("_", "-"): str(value) for key, value in config.items()}, {})


def begin_private(config, number, epsilon=1.0):
    """A private run whose first noised sums have left."""
    ask(config, number, private(epsilon))
    charge(config, model_id(number))


def checked(config):
    """``fedapp site check``."""
    return checked_site(
        f'name="{config.name}" data="{config.data}" label="{config.label}" allow="pax" '
        f'run-epsilon="{config.run_epsilon:g}"'
    )


def lines_of(path):
    return path.read_text().splitlines()


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def july(path, change):
    """Another file, with the lines changed."""
    return write(path.with_name("july.csv"), change(lines_of(path)))


def changed_label(lines):
    fields = lines[7].split(",")
    lines[7] = ",".join([*fields[:2], str(1 - int(fields[2])), *fields[3:]])
    return lines


def renamed_column(lines):
    """Without the last row, and with a column of another name."""
    return [lines[0].replace("a,", "amount,"), *lines[1:-1]]


@pytest.mark.parametrize(
    ("change", "n_differing", "min_rows"),
    [
        (lambda lines: lines[:-1], 1, 0),
        (lambda lines: lines[:-9], 9, 0),
        (lambda lines: lines[:-10], None, 0),
        (lambda lines: lines[:-11], 11, 12),
        (changed_label, 2, 0),
        (renamed_column, 1, 0),
        (None, None, 0),
    ],
)
def test_a_run_on_a_table_that_differs_by_few_rows_waits(
    write_table, change, n_differing, min_rows
):
    path = write_table("june", n_rows=100, customer=[f"c{row}" for row in range(100)])
    node, opening = {"id": "customer", "min_rows": min_rows}, hello(valid_fraction=0.2)
    ask(site(path, **node), 1, opening)
    config = site(july(path, change) if change else path, **node)
    if n_differing is not None:
        gone = "" if change is changed_label else " that are gone, as after an erasure"
        rule = (
            rf"^waits for approval at bank \(table must not differ from that of run {model_id(1)} "
            rf"by fewer than {max(min_rows, 10)} rows \(min-rows, at least 10\), got {n_differing}"
            rf"{gone}: what both runs disclose differs by these rows\): fedapp site approve "
        )
        for _ in range(2):
            with pytest.raises(WaitingError, match=rule + model_id(2)):
                ask(config, 2, opening)
        shown = read(approve(model_id(2), "--yes"))
        assert f"waits because table must not differ from that of run {model_id(1)} by" in shown
        assert "recognised by content and id in any file; in the table of an earlier run: " in shown
    ask(config, 2, opening)
    ask(config, 3, opening)  # a person has approved the difference


def test_a_run_that_only_predicts_or_was_refused_is_not_compared(write_table):
    path = write_table("june")
    with register.opening(site(path), model_id(1), "interactive", hello()):
        pass
    with pytest.raises(DataError, match=r"at least 10 validation rows"):
        ask(site(path, min_rows=10), 2)
    ask(site(july(path, lambda lines: [*lines, "0.5,0.5,1"])), 3)


def in_folder(path):
    """The same rows as Parquet files."""
    frame, folder = csv.read_csv(path), path.with_name("july")
    folder.mkdir()
    for number in range(2):
        parquet.write_table(frame.slice(20 * number, 20), folder / f"{number}.parquet")
    return folder


NEW_ROWS = ["9,9,oslo,0", "8,8,bonn,1"] * 9
COPIES = {
    "copied": partial(july, change=list),
    # A new first category: the codes of all others change.
    "with a category": partial(july, change=lambda lines: [*lines, "0.5,0.5,athens,1"]),
    "with two old rows": partial(july, change=lambda lines: [*lines[:3], *NEW_ROWS]),
    "in a folder": in_folder,
}


@pytest.fixture
def towns(write_table):
    towns = np.random.default_rng(1).choice(["bonn", "oslo", "rome"], 40)
    labels = np.random.default_rng(2).integers(0, 2, 40)
    return write_table("june", y=None, town=towns, label=labels)


@pytest.mark.parametrize(
    ("copy", "name"), [*zip(COPIES, ["bank", "shop", "bank", "bank"], strict=True)]
)
def test_a_copy_of_the_table_has_no_budget_of_its_own(towns, copy, name):
    node = {"label": "label", "run_epsilon": 1}
    begin_private(site(towns, **node), 1)
    config = site(COPIES[copy](towns), name=name, **node)
    rule = (
        rf"^privacy\.epsilon must come to <= 1 in all runs on one table \(total-epsilon in the "
        rf"node config of {name}\), got 1\.\d+ with this run for delta 1e-05; spent before: 1\.00 "
    )
    with pytest.raises(ConfigError, match=rule):
        ask(config, 2, replace(private(), **planned((name, "insurer", "lab"), rounds=50)))
    assert "spent 1.00 of 1 in 1 run" in read(checked(config))


def test_only_new_rows_have_a_budget_of_their_own(write_table):
    """Without ids, rows with other columns cannot be compared: then the file's name counts."""
    spent = r"spent before: 1\.00 of 1 in 1 run"
    old, new = (write_table(name, seed=seed) for seed, name in enumerate(("may", "june")))
    for number, path in enumerate((old, new)):
        begin_private(site(path, run_epsilon=1), number)
        for more in ({}, {"drop_columns": "b"}):
            with pytest.raises(ConfigError, match=spent):
                ask(site(path, run_epsilon=1, **more), 9, private())
    begin_private(site(july(new, list), run_epsilon=1, drop_columns="b"), 3)  # not recognised


def test_sites_of_one_home_that_are_charged_at_once_share_a_budget(write_table):
    names, path = [f"site-{number}" for number in range(6)], write_table("bank")
    noise = budget_for(1.0, 1e-5, 50, len(names)).multiplier

    configs = [site(path, name=name, run_epsilon=1) for name in names]
    for number, config in enumerate(configs):
        ask(config, number, replace(private(), **planned(names), multiplier=noise))

    def is_charged(number):
        with suppress(ConfigError):
            charge(configs[number], model_id(number))
            return True

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(is_charged, range(6))].count(True) == 1


def test_a_table_with_more_rows_than_the_register_can_compare_is_refused(write_table, monkeypatch):
    monkeypatch.setattr(register, "MOST_ROWS", 39)
    with pytest.raises(DataError, match=r"at most 39 rows, whose hashes .*, got 40$"):
        ask(site(write_table("bank")), 1)
    assert runs() == []
    ask(site(write_table("lab", n_rows=39)), 2)


def test_hashes_of_a_table_go_with_its_runs(write_table, monkeypatch):
    path, now = write_table("bank", customer=range(40)), 1e9
    set_clock(monkeypatch, now)
    with pytest.raises(WaitingError):
        ask(site(path, approve="ask", id="customer"), 1)
    set_clock(monkeypatch, now + register.KEPT_SECONDS)
    ask(site(write_table("lab", seed=5)), 2)
    with database.transaction(home() / "sites" / "bank") as opened:
        digests = {digest for (digest,) in opened.execute("SELECT digest FROM hashes")}
    assert digests == {run.contents for run in runs()}


def test_a_delta_that_promises_nothing_is_refused_by_the_opening(write_table):
    """26 of 40 rows train: a delta of 1 / 26 allows to disclose one of them."""
    config = site(write_table("bank"), run_epsilon=1)
    for number, delta in enumerate((0.9, 1 / 26)):
        rule = rf"^privacy\.delta must be below 1 / 26, the training rows of bank, got {delta:g}$"
        with pytest.raises(ConfigError, match=rule):
            ask(config, number, private(1.0, delta, valid_fraction=0.2))
        assert {(run.admitted, run.begun, run.charged) for run in runs()} == {(0, 0, 0)}
    ask(config, 2, private(1.0, 1 / 27, valid_fraction=0.2))


LOST = r"^bank: register\.db must be the register of the site's identity\.key, got {}: restore it "
WAY = r"from a backup\. To give up the site's history of runs, delete register\.db and identity\.ke"


def of_another_site(path):
    register.admit(site("none.csv", name="lab"), model_id(9), "pax", hello(("lab",)))
    shutil.copy(path.parents[1] / "lab" / "register.db", path)


def without_rows(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(database.TABLES[0])


def without_charges(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as opened:
        opened.execute("ALTER TABLE runs DROP COLUMN charged")


@pytest.mark.parametrize(
    ("attack", "got"),
    [
        (Path.unlink, "none"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (of_another_site, "one of another key"),
        (without_rows, "one without a key"),
        (without_charges, "one of a version before .+"),
    ],
)
def test_a_register_that_was_lost_is_no_new_budget(write_table, attack, got):
    config = site(write_table("bank"), run_epsilon=1)
    begin_private(config, 1)
    folder, key = home() / "sites" / "bank", site_fingerprint("bank")
    attack(folder / "register.db")
    for _ in range(2):
        with pytest.raises(DataError, match=LOST.format(got) + WAY):
            ask(config, 2, private())
        with pytest.raises(DataError, match=LOST.format(got) + WAY):
            charge(config, model_id(1))
    assert isinstance(checked(config).exception, DataError)
    if attack is without_charges:  # another site of the home reads it too
        with pytest.raises(DataError, match=LOST.format(got) + WAY):
            ask(replace(config, name="shop"), 2, private())
    for name in ("register.db", "identity.key"):
        (folder / name).unlink(missing_ok=True)
    ask(config, 3, private())
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


def test_ids_of_others_are_limited_by_the_day(write_table, monkeypatch):
    config, now = site(write_table("bank"), align_ids_per_day=100), 1e9
    set_clock(monkeypatch, now)

    def count(number, owner, n_ids, config=config):
        count_ids(config, model_id(number), owner, n_ids, 40)

    for number in (1, 2):
        ask(config, number)
    for _ in range(3):  # a list that is sent again
        count(1, "shop", 40)
    count(1, "lab", 30)
    rule = (
        "^align-ids-per-day must be >= the ids that others match with one table in 24 hours, 101 "
        "with the 31 of shop, got 100 at bank$"
    )
    with pytest.raises(ConfigError, match=rule):
        count(2, "shop", 31)
    count(2, "shop", 30)
    count(2, "bank", 1000)  # its own list
    set_clock(monkeypatch, now + DAY)
    count(2, "shop", 100)
    with pytest.raises(ConfigError, match="901 with the 801 of shop, got 800 at bank"):
        count(1, "shop", 801, replace(config, align_ids_per_day=0))


N_ROWS = 30


def people(n_rows=N_ROWS):
    """Rows with a number, a category, missing values, label, weight, margin and id."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(n_rows, 2)).astype(np.float32)
    values[:, 1] = rng.integers(0, 3, n_rows)
    values[::7] = np.nan
    return Table(
        ("age", "town"),
        values,
        labels=rng.integers(0, 2, n_rows).astype(np.float64),
        weights=rng.random(n_rows).astype(np.float32),
        ids=np.array([f"customer {row}" for row in range(n_rows)]),
        categories=(None, ("bonn", "oslo", "rome")),
        base_margins=rng.normal(size=n_rows).astype(np.float32),
    )


def hashed(rows):
    return hash_rows(rows, b"key")


def by_content(first, second):
    """Rows that two tables share, and rows that only one has, by what is in them."""
    return compare(hashed(first), hashed(second), with_ids=False)


def recoded(rows):
    """The same rows after a town has come first in the alphabet: all codes are others."""
    values = rows.values + np.array([0, 1], np.float32)
    return replace(rows, values=values, categories=(None, ("athens", "bonn", "oslo", "rome")))


@pytest.mark.parametrize(
    "same",
    [
        lambda rows: rows.take(np.random.default_rng(0).permutation(N_ROWS)),
        lambda rows: rows.in_order(("town", "age")),
        recoded,
        lambda rows: replace(rows, labels=rows.labels.astype(np.int64).astype(str)),
        lambda rows: replace(rows, ids=None),
        lambda rows: replace(rows, values=np.where(rows.values == 0, -0.0, rows.values)),
    ],
)
def test_rows_stay_the_same_however_they_are_written(same):
    assert by_content(people(), same(people())) == (N_ROWS, 0)


@pytest.mark.parametrize("field", ["values", "labels", "weights", "base_margins"])
def test_rows_are_others_if_anything_in_them_is(field):
    changed = getattr(people(), field).copy()
    changed[3] += 1
    assert by_content(people(), replace(people(), **{field: changed})) == (N_ROWS - 1, 2)


def test_rows_of_another_category_are_others():
    rows = replace(people(), categories=(None, ("bonn", "oslo", "paris")))
    n_changed = int((rows.values[:, 1] == 2).sum())
    assert by_content(people(), rows) == (N_ROWS - n_changed, 2 * n_changed)


def test_a_text_longer_than_all_changes_no_hash_of_another():
    both = people(N_ROWS + 1)
    both = replace(both, ids=np.append(people().ids, "a customer with a much longer name"))
    assert compare(hashed(people()), hashed(both), with_ids=True)[0] == N_ROWS


@pytest.mark.parametrize("seed", range(20))
def test_shared_rows_are_counted_as_by_hand(seed, monkeypatch):
    """Of tables with few distinct rows, so that most are there several times."""
    monkeypatch.setattr(scratch, "BATCH_BYTES", 8 * seed)
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, 3, size=(rng.integers(1, 60), 2)) for _ in range(2)]
    tables = [Table(("a", "b"), rows.astype(np.float32)) for rows in drawn]
    first, second = (Counter(map(tuple, rows.tolist())) for rows in drawn)
    n_shared = (first & second).total()
    n_differing = ((first - second) + (second - first)).total()
    assert by_content(*tables) == (n_shared, n_differing if n_shared else 0)


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda rows: rows, 0),
        (lambda rows: replace(rows.take(np.arange(1, N_ROWS)), columns=("years", "town")), 1),
        (lambda rows: replace(rows, labels=1 - rows.labels), 0),
        (lambda rows: replace(rows, labels=rows.labels + (np.arange(N_ROWS) == 3)), 2),
    ],
)
def test_rows_of_equal_ids_are_the_same_whatever_their_columns(change, differing):
    counts = compare(hashed(people()), hashed(change(people())), with_ids=True)
    assert counts == (change(people()).n_rows, differing)
