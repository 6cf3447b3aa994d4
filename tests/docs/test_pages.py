"""Files and lines that pages show: each loads, and does what its page says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedapp.errors import ConfigError
from fedapp.messages.handshake import HelloRequest
from fedapp.settings import app_folder
from fedapp.site.settings import (
    SiteConfig,
    check_leaving,
    check_policy,
    parse_node_config,
    site_config,
)

HOSPITAL = Path(__file__).parent / "hospital.toml"
THREATS = app_folder() / "docs" / "explanation" / "threat-model.md"
PARTIES = ("clinic", "hospital", "lab")


@pytest.fixture
def hospital() -> SiteConfig:
    return site_config(parse_node_config(str(HOSPITAL)), {})


def opening(**plan: Any) -> HelloRequest:
    return HelloRequest("binary:logistic", 0.2, 0.1, 42, False, **plan)


def test_the_hospital_takes_part_in_a_masked_run_within_its_epsilon(hospital: SiteConfig) -> None:
    check_policy(hospital, "query.hello", "pax")
    private = opening(aggregation="secure", epsilon=1.0, delta=1e-5, parties=PARTIES)
    check_leaving(hospital, "pax", private)


@pytest.mark.parametrize(
    ("plan", "refused"),
    [
        ({"parties": PARTIES}, "aggregation must be secure for hospital"),
        ({"aggregation": "secure", "parties": PARTIES}, "privacy.epsilon must be > 0 and <= 1"),
        ({"aggregation": "secure", "epsilon": 2.0, "parties": PARTIES}, "<= 1 for hospital"),
        ({"aggregation": "secure", "epsilon": 1.0, "parties": PARTIES[:2]}, "must be >= 3"),
    ],
)
def test_the_hospital_refuses_plain_sums_and_larger_promises(
    hospital: SiteConfig, plan: dict[str, Any], refused: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(refused)):
        check_leaving(hospital, "pax", opening(**plan))


def test_the_hospital_takes_part_in_no_other_method(hospital: SiteConfig) -> None:
    with pytest.raises(ConfigError, match="strategy must be one that the site allows"):
        check_policy(hospital, "query.hello", "fedxgbllr")


@pytest.mark.skipif(not THREATS.is_file(), reason="a wheel has no documentation")
def test_epsilon_under_colluders_is_what_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = THREATS.read_text()
    pytest.importorskip("dp_accounting")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert code
    assert len(shown) == 3
    exec(code[1], {})
    computed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert computed == [list(row) for row in shown]
