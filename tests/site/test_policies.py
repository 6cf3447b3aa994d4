"""What `fedapp site init` writes of a policy, and which runs a site then takes part in."""

from shutil import rmtree
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.errors import ConfigError
from fedapp.messages.methods import all_methods
from fedapp.site.settings import parse_node_config
from tests.deploy_folders import init_site

BOTH = {"least-parties": 3, "min-rows": 20, "share-categories": 10, "approve": "ask"}
SUMS = {"allow": "describe-rows,eini,interactive,one-round,pax", "least-bin-rows": 5, **BOTH}
PRIVATE = {"allow": "pax", "run-epsilon": 1.0, "total-epsilon": 3.0, **BOTH}
# That sites score by themselves is not in any policy: it is allowed by name.
EVERY = [name for name, method in all_methods().items() if not method.stands]
ROWS = {"allow": ",".join(EVERY)}


@pytest.fixture
def init(tmp_path, write_table):
    """``init(*options)``: the node config that the command writes, and what it prints."""

    def make(*options):
        folder, shown = init_site(tmp_path, write_table("rows"), *options)
        return parse_node_config(str(folder / "site.toml")), shown

    return make


@pytest.mark.parametrize(
    ("options", "written"),
    [
        (("--policy", "sums"), SUMS),
        (("--policy", "private"), PRIVATE),
        (("--policy", "rows"), ROWS),
        (("--policy", "sums", "--min-rows", "100"), {**SUMS, "min-rows": 100}),
        (("--policy", "sums", "--allow", "pax"), {**SUMS, "allow": "pax"}),
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
        ("sums\n", (), SUMS, True),
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
    assert parse_node_config(str(folder / "site.toml")) == node
