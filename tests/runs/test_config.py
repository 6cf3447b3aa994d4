"""Settings: defaults, overrides, and what each refuses."""

import tomllib
from contextlib import nullcontext

import numpy as np
import pytest

from fedapp.arguments import parse_overrides
from fedapp.errors import ConfigError, DataError, listed
from fedapp.messages.methods import all_methods
from fedapp.run_folder import RunFolder
from fedapp.runs.tables import check_tables
from fedapp.settings import SIMULATED_PARTIES, about_settings, check_names, defaults, load_settings
from strategies.pax import PAX
from strategies.run import all_strategies, load_strategy


def config(**given):
    return load_settings({name.replace("_", "-"): given[name] for name in given}).as_config()


def test_defaults_and_ways_of_writing():
    settings = load_settings({})
    assert (settings.strategy, settings.eta, settings.max_bin) == ("pax", 0.1, 256)
    sums = {"bins": "auto", "fusion": "auto", "aggregation": "plain"}
    assert settings.sections["pax"] == {**sums, "additive": False, "pairs": 0}
    for overrides in ({"pax.bins": "equal"}, {"pax": {"bins": "equal"}}):
        assert PAX.section_settings(load_settings(overrides)).bins == "equal"
    assert config(align="rows")["align"] == "ordered"
    for name, text, value in (("max-bin", "64", 64), ("eta", "0.5", 0.5), ("eta", "1", 1.0)):
        found = load_settings({name: text}).as_config()[name]
        assert (type(found), found) == (type(value), value)
    assert listed(load_settings({"drop-columns": " a, b c ,,"}).drop_columns) == ("a", "b c")
    assert load_settings({"partition": "column:city"}).partition_column == "city"
    assert load_settings({"partition": "iid"}).partition_column == ""
    for name in ("label", "id", "weight", "drop-columns"):
        assert load_settings({name: 54}).as_config()[name] == "54"
    whole = {**defaults(), "preset": "xgboost"}  # as Flower hands over a run config
    assert load_settings(whole).eta == 0.3


@pytest.mark.parametrize(
    ("pair", "name", "value"),
    [
        ("eta=0.5", "eta", 0.5),
        ('label="y"', "label", "y"),
        ("resume=", "resume", ""),
        ("pax.bins=equal", "pax.bins", "equal"),
        *[("eta=" + text, "eta", text) for text in ("rows.csv", "iid", "sizes:0.9,0.1", "a=b")],
        *[("eta=" + text, "eta", text) for text in ("/data/my rows.csv", "007")],
        *[("label=" + text, "label", text) for text in ("54", "007", "1_0", "1.50", "true")],
        ("label=2020-01-01", "label", "2020-01-01"),
    ],
)
def test_overrides_are_read_as_toml_or_as_texts_and_names_stay_as_they_are(pair, name, value):
    assert parse_overrides([pair]) == {name: value}


def test_overrides_that_are_refused():
    with pytest.raises(ConfigError, match=r"^a setting must be written as key=value, got eta$"):
        parse_overrides(["eta"])
    with pytest.raises(ConfigError, match=r"^eta must be given once, got 0.1 and 0.2$"):
        parse_overrides(["eta=0.1", "eta=0.2"])


def test_every_setting_has_a_default_and_a_sentence():
    all_strategies()  # which declare their sections
    about = about_settings()
    assert set(about) == set(defaults())
    assert all(one.text.endswith(".") for one in about.values())


@pytest.mark.parametrize(
    ("data", "n_parties"), [("a.csv,b.csv", 2), ("bank=a.csv,shop=b.csv", 2), ("bank=a.csv", 1)]
)
def test_tables_name_the_number_of_parties(data, n_parties):
    assert load_settings({"data": data}).parties == n_parties
    assert load_settings({"data": "a.csv"}).parties == SIMULATED_PARTIES
    with pytest.raises(ConfigError, match=f"got {n_parties}: set parties={n_parties}$"):
        load_settings({"data": data, "parties": 5})


BINS = "pax.bins must be one of 'auto', 'share' or 'equal', got"
FEATURES = "federated-forest.max-features"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"etta": 1}, r"etta is not a setting; did you mean eta\?"),
        ({"pax.bin": 1}, r"pax.bin is not a setting; did you mean pax.bins\?"),
        ({"sections": 1}, "sections is not a setting.*"),
        ({"pax.bins": "half"}, f"{BINS} 'half'"),
        (
            {"strategy": "federated-forest", FEATURES: 2.5},
            f"{FEATURES} must be one of 'all', 'sqrt' or 'log2' or <= 1.0, got 2.5",
        ),
        ({"eta": -1.0}, "eta must be > 0.*, got -1.0"),
        ({"eta": float("nan")}, "eta must be a number or 'auto', got nan"),
        ({"max-bin": 1}, "max-bin must be >= 2, got 1"),
        ({"max-bin": 2.5}, "max-bin must be a whole number, got 2.5"),
        (
            {"max-depth": 0},
            "max-depth must be >= 1, or 0 .no limit. with max-leaves from 1 to 256, got 0.*",
        ),
        ({"num-boost-round": 0}, "num-boost-round must be >= 1 or 'auto', got 0"),
        ({"test-fraction": 1}, "test-fraction must be < 1.*, got 1"),
        ({"seed": 2**63}, "seed must be < 9223372036854775808, got 9223372036854775808"),
        ({"early-stopping-rounds": -1}, "early-stopping-rounds must be >= 0 or 'auto', got -1"),
        ({"data": ""}, "data must be a text that is not empty, got ''"),
        ({"share-column-names": "maybe"}, "share-column-names must be true or false, got 'maybe'"),
        ({"model": "xyz"}, r"model must be a text that matches \S+, got 'xyz'"),
        (
            {"objective": "quantity"},
            "objective must be one of 'binary:logistic', .*, got 'quantity'",
        ),
        ({"min-parties": 4, "parties": 3}, r"min-parties must be <= parties \(3\), got 4"),
        (
            {"early-stopping-rounds": 5, "valid-fraction": 0},
            "valid-fraction must be > 0 with early-stopping-rounds, got 0.0",
        ),
    ],
)
def test_names_and_settings_that_break_the_rule_of_a_method_or_of_several_are_refused(given, rule):
    def check_all():
        settings = load_settings(given)
        load_strategy(settings.strategy).section_settings(settings)

    with pytest.raises(ConfigError, match=f"^{rule}$"):
        check_all()
    with pytest.raises(ConfigError, match=r"^seeds is not a setting; did you mean seed\?$"):
        check_names({"eta": -1, "seeds": 1})  # before any value is looked at


@pytest.mark.parametrize(
    ("given", "eta", "rounds", "patience"),
    [
        ({"data": 'folder/"quoted" rows.csv', "drop-columns": "a, b"}, 0.1, 300, 20),
        ({"preset": "xgboost"}, 0.3, 100, 0),
        ({"preset": "xgboost", "eta": 0.1, "num-boost-round": 7}, 0.1, 7, 0),
        ({"early-stopping-rounds": 5, "num-boost-round": 50}, 0.1, 50, 5),
        ({"valid-fraction": 0.0}, 0.1, 100, 0),
        ({"pax.aggregation": "secure", "privacy.epsilon": 1.0}, 0.3, 50, 0),
        ({"pax.aggregation": "secure", "min-parties": 2}, 0.1, 100, 0),
        ({"objective": "custom"}, 0.1, 100, 0),
        ({"strategy": "secureboost", "secureboost.first-trees": 21}, 0.1, 100, 0),
        ({"strategy": "fedavg-linear"}, 0.1, 100, 0),
    ],
)
def test_a_run_that_cannot_stop_early_has_fixed_rounds(given, eta, rounds, patience, tmp_path):
    settings = load_settings(given)
    assert (settings.eta, settings.num_boost_round, settings.early_stopping_rounds) == (
        *(eta, rounds, patience),
    )
    RunFolder(tmp_path / "run").begin(settings)
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert load_settings(stored) == load_settings(settings.as_config()) == settings


def test_few_validation_rows_stop_no_run_unless_it_is_asked_for():
    assert load_settings({}).watching(99).early_stopping_rounds == 0
    assert load_settings({}).watching(100).early_stopping_rounds == 20
    assert load_settings({"early-stopping-rounds": 5}).watching(1).early_stopping_rounds == 5


# Every setting that names a column, with one that no table has, and what it needs.
TIMES, RANKS = ({"objective": name, "label": "t"} for name in ("survival:aft", "rank:ndcg"))
NAMES_A_COLUMN = {
    **dict.fromkeys(("label", "id", "weight", "drop-columns", "group", "base-margin"), ("q", {})),
    "event": ("q", TIMES),
    "qid": ("q", RANKS),
    "partition": ("column:q", {}),
    "test-from": ("q:3", {}),
    "monotone-constraints": ("q:1", {}),
    "interaction-constraints": ("[a,q]", {}),
    "feature-weights": ("q:2", {"colsample-bytree": 0.5}),
}
NAMES_NONE = {"parties", "header", "columns", "share-column-names", "min-child-weight", "max-bin"}
NAMES_NONE |= {"colsample-bytree", "colsample-bylevel", "colsample-bynode", "max-cat-to-onehot"}


def test_a_column_that_no_table_has_is_refused_by_name_before_anything_runs(tmp_path):
    common = {name: about for name, about in about_settings().items() if "." not in name}
    about = {name for name, setting in common.items() if "olumn" in setting.text}
    assert about - NAMES_NONE == NAMES_A_COLUMN.keys() - {"test-from"}
    rng, n_rows = np.random.default_rng(0), 40
    numbers = {name: rng.normal(size=n_rows).round(3) for name in "abcd"}
    table = {"i": range(n_rows), **numbers, "t": rng.integers(1, 9, n_rows), "y": [0, 1] * 20}
    rows = (",".join(map(str, row)) for row in zip(*table.values(), strict=True))
    (tmp_path / "t.csv").write_text("\n".join([",".join(table), *rows]))
    usual = {"data": str(tmp_path / "t.csv"), "label": "y", "id": "i", "parties": 2}
    for method, strategy in all_strategies().items():
        read = {*strategy.settings_read(load_settings({"strategy": method}))} & {*NAMES_A_COLUMN}
        for name in read if all_methods()[method].trains else ():
            value, needs = NAMES_A_COLUMN[name]
            if needs.get("objective", strategy.objectives[0]) not in strategy.objectives:
                continue
            named = {**usual, "strategy": method, **needs, name: value}
            with pytest.raises((ConfigError, DataError), match=rf"^{name}(?=.*\bq\b).*\ba\b"):
                check_tables(load_settings(named))


def test_a_constraint_names_a_column_of_any_party_but_of_one_only(tmp_path):
    (tmp_path / "a.csv").write_text(
        "i,a,c,y\n" + "".join(f"{n},{n},1,{n % 2}\n" for n in range(40))
    )
    (tmp_path / "b.csv").write_text("i,b,c\n" + "".join(f"{n},{-n},2\n" for n in range(40)))
    data = f"bank={tmp_path}/a.csv,shop={tmp_path}/b.csv"
    for name, is_known in (("a", True), ("b", True), ("c", False), ("i", False)):
        given = {"strategy": "secureboost", "data": data, "label": "y", "id": "i", "parties": 2}
        settings = load_settings({**given, "monotone-constraints": f"{name}:1"})
        expected = pytest.raises(ConfigError, match=rf"must name columns of .*, got {name}; ")
        with nullcontext() if is_known else expected:
            check_tables(settings)
