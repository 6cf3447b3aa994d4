"""Which settings a method says that it reads."""

from __future__ import annotations

import pytest

from fedapp.config import defaults, load_settings
from fedapp.server_app import all_strategies


def read_by(strategy: str) -> set[str]:
    settings = load_settings({"strategy": strategy})
    return set(all_strategies()[strategy].settings_read(settings))


def test_every_setting_is_read_by_some_method_and_every_one_read_is_a_setting():
    assert set().union(*map(read_by, all_strategies())) == set(defaults())


@pytest.mark.parametrize("strategy", all_strategies())
def test_a_method_reads_its_own_section_and_no_other(strategy):
    sections = (strategy, *all_strategies()[strategy].sections)
    own = {name for name in defaults() if name.partition(".")[0] in sections and "." in name}
    assert {name for name in read_by(strategy) if "." in name} == own


def test_a_method_with_a_setting_of_its_own_does_not_read_the_general_one():
    assert {"eta", "max-depth"} <= read_by("pax")
    assert not {"eta", "max-depth", "num-boost-round"} & read_by("fedxgbllr")
    assert not {"eta", "max-depth", "num-boost-round", "partition"} & read_by("federated-forest")
    assert "columns" not in read_by("pax")
