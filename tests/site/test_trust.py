"""A site sends rows of its own, in whatever form, only to parties whose keys it trusts."""

import re
from dataclasses import replace

import numpy as np
import pytest

from fedapp.commands import cli
from fedapp.crypto.sealed import fingerprint_of, new_private_key, public_key
from fedapp.errors import ConfigError, ProtocolError
from fedapp.home import home
from fedapp.messages.vertical import OpenRequest, VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.trust import PINNED, check_trusted, identity, pin, site_fingerprint, trusted_keys
from strategies.vertical import Mailbox
from tests.deploy_folders import checked_site, invoke
from tests.sites import answer
from tests.tampering import refuses

MALLORY = new_private_key()  # the coordinator's own


def print_of(private):
    return fingerprint_of(public_key(private))


class Shop:
    """A passive site on a machine of its own, as the coordinator talks to it."""

    def __init__(self, table, trusted=""):
        node = {"name": "shop", "data": str(table), "id": "id", "trusted": trusted}
        node["allow"] = "secureboost"
        self.config, self.n_runs = site_config(node, {}), 0

    def ask(self, request, step):
        envelope = Envelope(f"{self.n_runs:016x}", step, method="secureboost")
        return answer(self.config, request.kind, envelope, to_content(request, "shop"))

    def open(self, active, key):
        """Greet the site, and tell it that the active party has this key."""
        self.n_runs += 1
        names = tuple(sorted((active, "shop")))
        prints = {active: print_of(key), "shop": site_fingerprint("shop")}
        plan = {
            "aggregation": "sealed",
            "parties": names,
            "fingerprints": tuple(prints[name] for name in names),
            "test_fraction": 0.2,
        }
        hello = self.ask(VerticalHelloRequest(True, 1000, 0, "", False, **plan), 1).arrays
        keys = {active: np.frombuffer(public_key(key), np.uint8), "shop": hello["box_key"]}
        of_run = {active: np.frombuffer(public_key(MALLORY), np.uint8), "shop": hello["run_key"]}
        stacked = (np.stack([each[name] for name in names]) for each in (keys, of_run))
        n_rows = np.array([40, 40])
        return self.ask(OpenRequest(names, active, *stacked, n_rows, False, 0.2, 0.0, 0), 2)


@pytest.fixture
def table(write_table):
    return write_table("shop", id=[f"patient {number}" for number in range(40)], y=None)


def test_a_coordinator_that_poses_as_the_active_party_gets_no_masked_id(table):
    """With the ids under the site's mask, and its own under the same, it could try all ids.

    What a refusal says is what lifts it.
    """
    shop, bank = Shop(table), new_private_key()
    rule = r"^bank: parcel\.key must be one shop trusts \({}\), got "
    with pytest.raises(ProtocolError, match=rule.format("none is pinned")) as caught:
        shop.open("bank", bank)
    assert "; if 'fedapp site key' prints that at bank, run at shop: fedapp " in str(caught.value)
    command = re.search(r"fedapp (site trust bank .*) --site FOLDER$", str(caught.value))
    invoke(cli, *command[1].split())
    shop.open("bank", bank)
    with pytest.raises(ProtocolError, match=rule.format(print_of(bank))):
        shop.open("bank", MALLORY)
    shop = Shop(table, f"bank:{print_of(MALLORY)}")
    with pytest.raises(ProtocolError, match=r", change trusted in the node config of shop$"):
        shop.open("bank", bank)


def swapped(keys, place):
    """The coordinator's own key in the place of a party's."""
    changed = keys.copy()
    changed[place] = np.frombuffer(public_key(MALLORY), np.uint8)
    return changed


LIES = {
    "key of the run": lambda told: replace(told, run_keys=swapped(told.run_keys, 0)),
    "active": lambda told: replace(told, active="shop"),
    "its size": lambda told: replace(told, n_rows=told.n_rows + 1),
    "sizes": lambda told: replace(told, n_rows=told.n_rows + np.array([1, 0])),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_a_coordinator_that_tells_parties_of_different_runs_is_found_out(
    vertical, joined, monkeypatch, change
):
    """The shop is told otherwise; whoever first has a letter of the other side stops."""
    honest = Mailbox.relay_each

    def relay_each(self, requests, *given, **more):
        if isinstance(opening := requests.get("shop"), OpenRequest):
            requests = {**requests, "shop": change(opening)}
        return honest(self, requests, *given, **more)

    monkeypatch.setattr(Mailbox, "relay_each", relay_each)
    sealed = "content must be sealed by .* for .* sent the two different parties, keys or"
    rule = rf"\(step 3\): parcel\.({sealed}|sender must be another party of the run)"
    if change is LIES["its size"]:
        rule = r"^shop .*: OpenRequest\.n_rows must be the number of local ids"
    refuses(rule, vertical(align="psi"), joined())


@pytest.mark.parametrize("wrong", ["bank", "clinic", "town"])
def test_every_key_is_checked_wherever_it_stands_among_the_others(wrong):
    keys = {name: public_key(new_private_key()) for name in ("bank", "clinic", "town")}
    for name, key in keys.items():
        pin(home(), name, fingerprint_of(key))
    config = site_config({"name": "shop", "data": "shop.csv", "id": "id"}, {})
    check_trusted(config, keys)
    with pytest.raises(ProtocolError, match=f"^{wrong}: parcel.key must be one shop trusts"):
        check_trusted(config, {**keys, wrong: public_key(MALLORY)})


def test_parties_of_one_home_need_no_pins_and_those_of_others_do():
    alone = SiteConfig("bank", "rows.csv")
    assert trusted_keys(alone, ["bank", "../shop"]) == {}
    assert trusted_keys(alone, ["shop"]) == {}
    key = print_of(identity("shop"))
    assert trusted_keys(alone, ["shop"]) == {"shop": key}
    assert trusted_keys(replace(alone, trusted={"a": "x"}), ["shop"]) == {"a": "x"}


def test_a_key_is_pinned_and_replaced_and_shown(table, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, second = print_of(new_private_key()), print_of(new_private_key())
    node = f'name="shop" data="{table}" id="id"'
    assert re.search(r"trusted +no other site", checked_site(node).output)
    assert "bank is trusted by its key: " in invoke(cli, "site", "trust", "bank", *first.split())
    again = invoke(cli, "site", "trust", "bank", second.replace(" ", "").upper())
    assert f"bank is trusted by its key, instead of {first}: " in again
    assert (home() / PINNED).stat().st_mode & 0o777 == 0o600
    shown = checked_site(f'{node} trusted="clinic:{first}"').output
    assert f"bank {second}, clinic {first}" in shown


def test_what_is_no_fingerprint_is_not_pinned_or_read():
    rule = "must be the name of a site and its fingerprint, 32 hex digits, got"
    for name, key in (("bank", "abcd"), ("b nk", 32 * "0")):
        with pytest.raises(ConfigError, match=f"^fedapp site trust {rule} '{name}' and '{key}'$"):
            pin(home(), name, key)
    assert not (home() / PINNED).exists()
    home().mkdir(exist_ok=True)
    for text, rule in (
        ("bank: 0000\n", "have a fingerprint for each name: "),
        ("bank = 1\n", "be the name of a site and its"),
    ):
        (home() / PINNED).write_text(text)
        with pytest.raises(ConfigError, match=rf"^trusted\.toml must {rule}"):
            trusted_keys(SiteConfig("shop", "rows.csv"), ["bank"])
