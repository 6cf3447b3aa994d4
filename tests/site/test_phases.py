"""The order in which a party's roles answer: what is not next is refused, and says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients import secureboost
from clients.secureboost.shared import ACTIVE, PASSIVE
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.settings import Settings
from fedapp.site.answer import FINISHED, Handlers, Site, Table
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from tests.network import run

ROLES: dict[str, tuple[Handlers, Table, dict[str, Any]]] = {
    "secureboost, active": (secureboost.HANDLERS, ACTIVE, {"active": "bank"}),
    "secureboost, passive": (secureboost.HANDLERS, PASSIVE, {"active": "shop"}),
}


def out_of_order() -> Iterator[tuple[str, str, type[Request]]]:
    for role, (handlers, table, _) in ROLES.items():
        for phase in (*table, FINISHED, "not aligned"):
            for request in handlers.keys() - table.get(phase, {}).keys():
                yield role, phase, request


@pytest.mark.parametrize("role", ROLES)
def test_a_message_in_a_wrong_phase_is_refused_with_the_phases_it_may_come_in(
    tmp_path: Path, role: str
) -> None:
    handlers, table, facts = ROLES[role]
    wrong = [(phase, request) for which, phase, request in out_of_order() if which == role]
    assert len(wrong) > len(table)
    for phase, request in wrong:
        store = Store(tmp_path, facts={**facts, "phase": phase})
        allowed = [name for name, messages in table.items() if request in messages]
        rule = f"bank: {request.__name__}.phase must be {' or '.join(allowed) or 'none'} at "
        with pytest.raises(ProtocolError, match=rf"^{re.escape(rule)}.*, got {phase}$"):
            handlers[request](Site(SiteConfig("bank", "rows.csv"), store), object.__new__(request))
        assert store.facts["phase"] == phase


def reached(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> set[str]:
    """The phases that any party of a run is in after any step."""
    honest, found = Store.commit, set[str]()

    def commit(self: Store, *given: Any) -> None:
        found.add(self.facts.get("phase", ""))
        honest(self, *given)

    monkeypatch.setattr(Store, "commit", commit)
    run(settings)
    return found - {""}


def test_a_run_of_secureboost_goes_through_all_phases(
    vertical: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedapp.messages.secureboost.BLOCK_BYTES", 2**15)
    begun = vertical(parties=3, num_boost_round=2, secureboost__first_trees=1)
    found = reached(monkeypatch, begun)
    goes_on = begun.model_copy(update={"init_model": begun.run_dir, "run_dir": str(tmp_path)})
    assert found | reached(monkeypatch, goes_on) == {FINISHED}.union(ACTIVE, PASSIVE)
