"""Test rows are new: of other persons than training rows, or later than they."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from clients.handshake import look as look_at_rows
from clients.vertical.opening import Opening, look
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.report.summary import resolved_facts
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.compare import draws_of_seed
from fedapp.runs.local import run_local
from fedapp.runs.tables import check_tables, party_configs, stacked_tables
from fedapp.settings import load_settings
from fedapp.site.settings import site_config
from fedapp.site.table import read_subsets

pytestmark = pytest.mark.usefixtures("own_folder")

N_ROWS = 60


def of_parties(settings, nodes):
    """What parties have in column c, by subset: simulated ones, or sites with node configs."""
    configs = [site_config(node, {}) for node in nodes] or party_configs(settings)
    found = {subset: [] for subset in SUBSETS}
    for config in configs:
        for subset, table in read_subsets(config, settings.holdout).items():
            found[subset] += table.values[:, table.columns.index("c")].tolist()
    return found


def of_baselines(settings):
    """The same of the rows on which baselines are trained and scored."""
    rows = baseline_rows(settings)[0]
    column = rows.values[:, rows.columns.index("c")]
    return {subset: column[getattr(rows.split, subset)].tolist() for subset in SUBSETS}


def in_two_subsets(rows, keys):
    """The keys that rows of two subsets have."""
    sets = [{keys[int(row)] for row in rows[subset]} for subset in SUBSETS]
    return sets[0] & sets[1] | sets[0] & sets[2] | sets[1] & sets[2]


def runs_of(given, path):
    """The settings of the runs that a command makes."""
    if path == "tune":  # its trials, and the last run
        yield load_settings({**given, "score-test": False})
    if path != "compare":
        yield load_settings(given)
        return
    first = load_settings({**given, "folds": 3, "fold": 1})
    for draw in [each for seed in (7, 8) for each in draws_of_seed(first, seed)]:
        yield first.model_copy(update=draw)


@pytest.mark.parametrize("path", ["run", "compare", "tune"])
@pytest.mark.parametrize("tables", ["shared", "own", "sites"])
@pytest.mark.parametrize("role", ["id", "group"])
def test_no_person_is_in_two_subsets(write_table, role, tables, path):
    """As a person's rows are alike, a model would know those that test it."""
    rng, n_kept = np.random.default_rng([len(role), len(tables), len(path)]), 0
    for number in range(8):
        persons = rng.integers(0, rng.integers(12, 30), N_ROWS).astype(str)
        columns = {"c": range(N_ROWS), "who": persons}
        files = {"": write_table("all", n_rows=N_ROWS, seed=number, **columns)}
        keys = persons
        if tables != "shared":
            files = {}
            for place, name in enumerate(("bank", "shop")):
                rows = range(place * 30, place * 30 + 30)
                of_party = {"c": rows, "who": persons[rows.start : rows.stop]}
                files[name] = write_table(f"{name}{number}", n_rows=30, seed=place, **of_party)
            if role == "id":  # each party numbers its persons; a group is one at all of them
                keys = np.array([f"{row // 30} {who}" for row, who in enumerate(persons)])
        data = ",".join(f"{name}={file}" if name else str(file) for name, file in files.items())
        common = {"label": "y", role: "who"}
        nodes = [{"name": name, "data": str(file), **common} for name, file in files.items()]
        given = {"data": data, "parties": len(files) if tables != "shared" else 3, **common}
        for settings in runs_of({"seed": number, "valid-fraction": 0.2, **given}, path):
            try:
                splits = [of_parties(settings, nodes if tables == "sites" else [])]
                splits += [of_baselines(settings)] if tables != "sites" else []
            except DataError:  # of few groups, none may be left to train
                continue
            for rows in splits:
                assert not in_two_subsets(rows, keys)
                n_rows = sorted(row for subset in SUBSETS for row in rows[subset])
                assert n_rows == sorted(range(N_ROWS)) or not settings.score_test
            n_kept += 1
    assert n_kept >= 8


def test_a_group_is_drawn_alike_by_parties_with_other_groups():
    names = np.array([f"person {number}" for number in range(4000)])
    everybody, some = names, names[1000:1500]
    holdout = Holdout(0.2, 0.1, seed=5)
    of_all, of_some = (holdout.split_groups(each, False) for each in (everybody, some))
    for subset, share in (("test", 0.2), ("valid", 0.08), ("train", 0.72)):
        first = set(everybody[getattr(of_all, subset)])
        assert set(some[getattr(of_some, subset)]) == first & {*some}
        assert len(first) / 4000 == pytest.approx(share, abs=0.03)
    ungrouped = Holdout(0.2, 0.1, 42).split(20)
    assert ungrouped.test.tolist() == [7, 9, 14, 15]
    other = replace(holdout, seed=6).split_groups(everybody, False)
    assert not np.array_equal(other.test, of_all.test)


@given(st.integers(2, 300), st.integers(2, 20), st.floats(0, 0.9), st.integers(0, 2**32))
@drawing(max_examples=50, deadline=None)
def test_each_row_tests_in_one_fold(n_rows, folds, valid, seed):
    folds = min(folds, n_rows)
    splits = [Holdout(0.2, valid, seed, fold, folds).split(n_rows) for fold in range(1, folds + 1)]
    assert sorted(np.concatenate([split.test for split in splits])) == list(range(n_rows))
    assert np.ptp([len(split.test) for split in splits]) <= 1
    for split in splits:
        rows = np.concatenate([split.train, split.valid, split.test])
        assert sorted(rows) == list(range(n_rows))
        assert len(split.train)
    of_fraction = Holdout(0.25, 0.0, 3).split(40)  # without folds
    assert (len(of_fraction.test), len(of_fraction.train)) == (10, 30)
    with pytest.raises(ConfigError, match=r"^folds must be at most the 3 rows of a table, got 4$"):
        Holdout(0.2, 0.0, 0, 1, 4).split(3)


# By time

DAYS = [f"2023-{month:02}-15" for month in range(1, 13)] * 5
NEWER = "2023-07-15,2023-09-01,2023-11-15"


def by_time(write_table, tables, **more):
    """Settings of two parties with rows of twelve months, and the node configs of sites."""
    given = {"label": "y", "parties": 2, "drop-columns": "", **more}
    if tables == "shared":
        path = write_table(n_rows=60, c=range(60), day=DAYS, who=[n % 20 for n in range(60)])
        return load_settings({"data": str(path), **given}), []
    files = {}
    for place, name in enumerate(("bank", "shop")):
        rows = range(place * 30, place * 30 + 30)
        of_party = {"day": DAYS[rows.start : rows.stop], "who": [n % 20 for n in rows]}
        files[name] = write_table(name, n_rows=30, c=rows, **of_party)
    data = ",".join(f"{name}={file}" for name, file in files.items())
    roles = {name: more[name] for name in ("id",) if name in more}
    nodes = [
        {"name": name, "data": str(file), "label": "y", **roles} for name, file in files.items()
    ]
    return load_settings({"data": data, **given}), nodes * (tables == "sites")


@pytest.mark.parametrize("tables", ["shared", "own", "sites"])
@pytest.mark.parametrize("valid", ["", "day:2023-05-15,2023-08-01,2023-10-15"])
def test_folds_by_time_train_on_all_rows_before(write_table, tables, valid):
    tests = list[float]()
    for fold in (1, 2, 3):
        times = {"test-from": f"day:{NEWER}", "valid-from": valid, "folds": 3, "fold": fold}
        settings, nodes = by_time(write_table, tables, **times)
        rows = of_parties(settings, nodes)
        days = {subset: [DAYS[int(row)] for row in rows[subset]] for subset in SUBSETS}
        start, end = [*NEWER.split(","), "9"][fold - 1 : fold + 1]
        assert start <= min(days["test"]) <= max(days["test"]) < end
        assert max(days["train"] + days["valid"]) < start
        if valid:
            first = valid.partition(":")[2].split(",")[fold - 1]
            assert max(days["train"]) < first <= min(days["valid"])
        before = [row for row in range(60) if DAYS[row] < start]
        assert sorted(rows["train"] + rows["valid"]) == before
        tests += rows["test"]
        if not nodes:
            assert {key: sorted(each) for key, each in of_baselines(settings).items()} == {
                key: sorted(each) for key, each in rows.items()
            }
            assert not {"day"} & {*stacked_tables(settings)[0].columns}
    assert sorted(tests) == [row for row in range(60) if DAYS[row] >= "2023-07-15"]


@pytest.mark.parametrize("tables", ["shared", "own", "sites"])
def test_rows_later_than_training_rows_are_of_new_persons_with_a_group(write_table, tables):
    times = {"test-from": "day:2023-07-01", "valid-from": "day:2023-05-01", "group": "who"}
    rows = of_parties(*by_time(write_table, tables, **times))
    who = np.arange(60) % 20
    if tables == "shared":
        assert not in_two_subsets(rows, who)
    for part in (range(30), range(30, 60)):  # parties cannot know each other's persons
        of_party = {key: [row for row in each if row in part] for key, each in rows.items()}
        assert not in_two_subsets(of_party, who) or tables == "shared"


def test_what_is_known_of_later_rows_is_noted(write_table):
    settings, _ = by_time(write_table, "shared", **{"test-from": "day:2023-07-01", "id": "who"})
    notes, rows = check_tables(settings), of_parties(settings, [])
    trained_on = {row % 20 for row in rows["train"]}
    n_known = sum(row % 20 in trained_on for row in rows["test"])
    assert n_known
    rule = f"{n_known} of 30 test rows share their id 'who' with a training row: scores are of "
    assert rule + "what was trained on; as group the column leaves these test rows out" in notes


VERTICAL = {
    "group": {"group": "who"},
    "time": {"test_from": "day:2023-07-01"},
    "folds of groups": {"group": "who", "folds": 2},
    "folds": {"folds": 3},
}


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("case", VERTICAL)
def test_vertical_parties_hold_back_the_rows_that_the_labels_party_draws(
    vertical, write_table, monkeypatch, own_tables, case
):
    how, ids = VERTICAL[case], [f"r{row}" for row in range(60)]
    columns = {"key": ids, "day": DAYS, "who": [f"p{row % 17}" for row in range(60)]}
    given = {"data": str(write_table(n_rows=60, c=range(60), **columns)), "columns": "even"}
    if own_tables:
        bank = write_table("bank", n_rows=60, **columns)
        of_shop = {"key": ids[::-1], "a": None, "c": range(60), "y": None}
        shop = write_table("shop", n_rows=60, **of_shop)
        given = {"data": f"bank={bank},shop={shop}", "align": "psi"}
    held, keep = {}, Opening._keep

    def note(party, rows, split=None):
        keep(party, rows, split)
        held[party.name] = [party.ids[party.n_rows.of(subset)].tolist() for subset in SUBSETS]

    monkeypatch.setattr(Opening, "_keep", note)
    keys = dict(zip(ids, columns["who"] if "group" in how else DAYS, strict=True))
    tested = []
    for fold in range(1, how.get("folds", 1) + 1):
        more = {"fold": fold} if "folds" in how else {}
        settings = vertical(label="y", id="key", num_boost_round=1, **how, **given, **more)
        run = run_local(settings)
        first, second = held.values()
        assert first == second  # the same rows in the same order
        tested += first[2]
        train, valid, test = ({keys[row] for row in subset} for subset in first)
        assert test
        if "group" in how:
            assert not train & test
            assert not valid & (train | test)
        elif case == "time":
            assert max(train | valid) < "2023-07-01" <= min(test)
        pooled = baseline_rows(settings)[0]
        sizes = [len(getattr(pooled.split, subset)) for subset in SUBSETS]
        assert sizes == [len(each) for each in first]
        column = {"group": "who", "test_from": "day"}.get(next(iter(how)))
        assert column not in {*pooled.columns, *run.summary["importance"].get("gain", ())}
    if "folds" in how:
        assert sorted(tested) == sorted(ids)


# What is refused

JULY, THREE = {"test_from": "day:2023-07-01"}, {"folds": 3, "fold": 1}
JUNE = JULY | {"valid_from": "day:2023-06-01"}
RANKED = {"qid": "half", "objective": "rank:ndcg"}
REFUSED = [
    ({"folds": 1}, r"^folds must be 0 \(none\) or >= 2, got 1$"),
    ({"folds": 3}, "^fold must be in .*, got 0; fedapp compare --folds runs all of them$"),
    ({"folds": 3, "fold": 4}, r"^fold must be in \[1, 3\] with folds=3, got 4"),
    ({"fold": 1}, "^fold must be 0 without folds, got 1"),
    (THREE | {"test_fraction": 0.5}, "^test-fraction must be omitted with folds, of .*, got 0.5$"),
    ({"test_from": "2023-07-01"}, "^test-from must be COLUMN:TIME, as in booked:2024"),
    ({"test_from": "day:2023-07-01,2023-08-01"}, "^test-from must have one time.* 2$"),
    (JULY | THREE, r"^test-from must have 3 times, one a fold \(booked.*, got 1$"),
    ({"valid_from": "day:2023-07-01"}, "^valid-from must come with test-from"),
    (JULY | {"valid_from": "a:1"}, "^valid-from must be of the column of test-from, got"),
    (JULY | {"test_fraction": 0.5}, "^test-fraction must be omitted with test-from, got"),
    (JUNE | {"valid_fraction": 0.5}, "^valid-fraction must be omitted with valid-from, got 0.5$"),
    (JUNE | {"test_from": "day:2023-05-01"}, r"^valid-from must be before test-from \(day:2023"),
    (THREE | {"test_from": "c:3,1,2"}, "^test-from must be times that increase, got 3,1,2$"),
    (
        {"test_from": "day:2030-01-01"},
        "^test-from must leave test rows, .*: those of day from 2030",
    ),
    (
        {"test_from": "day:2020-01-01"},
        "test-from must leave training rows, which .* day:2020-01-01",
    ),
    ({"test_from": "day:19500"}, "^test-from must be a date, as .*, as column 'day' is,"),
    ({"test_from": "c:2023-07-01"}, "^test-from must be a number, as column 'c' is, g"),
    ({"test_from": "town:1"}, "^test-from column 'town' must be numbers or dates, got "),
    ({"test_from": "dya:2023-07-01"}, "^test-from column 'dya' must be in .*day"),
    ({"group": "whom"}, r"^group column 'whom' must be in .*did you mean who\?$"),
    ({"group": "same"}, "^group must have test rows, got none: .* few groups. Another"),
    ({"group": "gaps"}, "^group column 'gaps' must have no missing values"),
    ({"group": "half"} | THREE, "^folds must be at most the 2 groups of rows that ar"),
    (
        {"group": "who"} | RANKED,
        "^group must be omitted with qid, as the rows of a query are in on",
    ),
]


@pytest.mark.parametrize(("how", "rule"), REFUSED)
def test_what_cannot_be_split_is_refused(write_table, settings, how, rule):
    columns = {"c": range(60), "day": DAYS, "town": ["Oslo", "Rome"] * 30}
    columns |= {"who": [n % 20 for n in range(60)], "same": ["x"] * 60, "half": [1, 2] * 30}
    columns |= {"gaps": ["", "z"] * 30}
    path = write_table(n_rows=60, **columns)
    with pytest.raises(FedappError, match=rule):
        check_tables(settings(strategy="pax", data=str(path), label="y", parties=2, **how))


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"folds": 3, "fold": 3}, "^test-from must have 3 times, one a fold"),
        ({"valid_from": "a:1"}, "^valid-from must be of the column of test-from, got a:1$"),
    ],
)
def test_a_site_refuses_an_opening_that_breaks_the_rules(write_table, how, rule):
    bank = write_table("bank", n_rows=60, day=DAYS)
    config = site_config({"name": "bank", "data": str(bank), "label": "y"}, {})
    opening = HelloRequest("binary:logistic", 0.2, 0.1, 7, False, test_from="day:2023-07-01")
    with pytest.raises(ConfigError, match=rule):
        look_at_rows(config, replace(opening, **how))


def test_sites_split_by_the_columns_of_their_node_configs(write_table, settings, sites):
    who = [n % 20 for n in range(60)]
    bank = write_table("bank", n_rows=60, who=who)
    shop = write_table("shop", n_rows=60, customer=who, seed=1)
    nodes = (
        {"name": "bank", "data": str(bank), "group": "who"},
        {"name": "shop", "data": str(shop), "group": "customer"},
    )
    folder = run_local(settings(strategy="pax", parties=2, seed=3), sites(*nodes))
    assert folder.summary["split"]["together"] == {"bank": "who", "shop": "customer"}
    text = resolved_facts(folder.summary)["rows together"]
    rule = "those of one who are in one subset at bank; those of one customer are in one subset at"
    assert text == f"{rule} shop"


@pytest.mark.parametrize("has_it", [True, False])
def test_a_site_without_labels_has_no_feature_of_the_group(write_table, has_it):
    ids = [f"r{row}" for row in range(40)]
    more = {"who": [n % 20 for n in range(40)], "day": DAYS[:40]} if has_it else {}
    path = write_table("shop", key=ids, y=None, **more)
    config = site_config({"name": "shop", "data": str(path), "id": "key"}, {})
    times = {"group": "who", "test_from": "day:2023-07-01"}
    request = VerticalHelloRequest(True, 1000, 7, "", False, test_fraction=0.2, **times)
    _, table, _ = look(config, request)
    assert table.columns == ("a", "b")
