"""What a newcomer sees first."""

import re

import pytest

from fedapp.home import app_folder
from tests.docs.first import BLOCK, PAGES, printed

INTERVAL = re.compile(r"\(95 % interval [\d.\s]+to[\d.\s]+\)")
README = app_folder() / "README.md"


@pytest.mark.skipif(not README.exists(), reason="a wheel has no README.md")
def test_the_first_result_of_the_pages_is_that_of_the_first_command():
    shown = printed()
    for page in PAGES:
        (block,) = BLOCK.findall((app_folder() / page).read_text())
        # The interval is bootstrapped from bins, of which tests have fewer.
        assert INTERVAL.sub("", block).split() == INTERVAL.sub("", shown).split()
    rows = [line.split() for line in shown.splitlines() if " test " in line]
    errors = {row[0]: float(row[2]) for row in rows}
    alone = [error for name, error in errors.items() if name.startswith("alone.")]
    assert len(alone) == 3
    assert errors["federated"] < 0.9 * min(alone)
