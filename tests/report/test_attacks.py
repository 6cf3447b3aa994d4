"""What attacks found, as cards of a report."""

import re
from html import unescape

import pytest

from fedapp.findings import Audit, Finding, Unmeasured
from fedapp.report.page import attack_cards

# Success, the ends of its interval, chance; what the card says of chance.
CARDS = [
    (0.619, 0.564, 0.664, 0.5, "above chance"),
    (0.049, 0.004, 0.109, 0.01, "no difference is shown"),
    (0.0, 0.0, 0.006, 0.0, "no difference is shown"),
    (1.0, 0.9, 1.0, 0.9, "no difference is shown"),
    (0.3, 0.2, 0.4, 0.5, "no difference is shown"),
]


def audit_of(*found):
    texts = {"interval": "rows", "lowered_by": "epsilon=1", "cost": "AUC 0.8 to 0.7"}
    findings = (
        Finding(f"attack <{number}>", "the server", "share of rows", *shares[:4], **texts)
        for number, shares in enumerate(found)
    )
    missing = Unmeasured("another attack", "a party", "there are no trees")
    return Audit("2026-01-02", 1.0, False, "the run", (*findings,), (missing,))


@pytest.mark.parametrize(("success", "low", "high", "chance", "verdict"), CARDS)
def test_a_card_has_seat_numbers_bar_and_verdict(success, low, high, chance, verdict):
    card, missing = re.findall(
        r"<article.*?</article>", attack_cards(audit_of((success, low, high, chance))), re.DOTALL
    )
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", card)).split())
    assert text.startswith("attack <0> by the server")
    shares = f"{success:.3f} [{low:.3f}, {high:.3f}] against {chance:.3f} by chance: {verdict}"
    assert shares in text
    assert ('class="attack above"' in card) == (verdict == "above chance")
    drawn = dict(re.findall(r'class="(reached|chance)" style="[a-z]+: ([\d.]+)%', card))
    assert drawn == {"reached": f"{100 * success:.2f}", "chance": f"{100 * chance:.2f}"}
    start, width = re.findall(r'"interval" style="left: ([\d.]+)%;\s+width: ([\d.]+)%', card)[0]
    assert (float(start), float(width)) == pytest.approx((100 * low, 100 * (high - low)), abs=0.01)
    assert "epsilon=1. Cost: AUC 0.8 to 0.7." in text
    assert "not measured: there are no trees" in missing


def test_a_run_without_an_audit_has_no_cards():
    assert attack_cards(None) == ""
