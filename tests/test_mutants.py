"""The listed faults still fit the code, and one that does not is noticed."""

from dataclasses import replace

import pytest

from tests.mutants import Mutant, load_mutants

FITS = Mutant("a sum is a difference", "code.py", "a + b", "a - b", ("test_code.py::test_sum",))


def test_no_listed_mutant_is_stale():
    listed = load_mutants()
    assert len({one.name for one in listed}) == len(listed)
    reasons = {one.name: one.staleness() for one in listed}
    assert {name: reason for name, reason in reasons.items() if reason} == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"file": "gone.py"}, "gone.py is not a file"),
        ({"old": "a * b"}, "old occurs 0 times in code.py"),
        ({"old": "a"}, "old occurs 2 times in code.py"),
        ({"new": "a + b"}, "new is old"),
        ({"tests": ()}, "no test is named"),
        ({"tests": ("test_gone.py",)}, "test_gone.py is not a file"),
        ({"tests": ("test_code.py::test_su",)}, "test_code.py has no test_su"),
    ],
)
def test_a_mutant_that_does_not_fit_the_code_is_stale(change, reason, tmp_path):
    (tmp_path / "code.py").write_text("a = a + b\n")
    (tmp_path / "test_code.py").write_text("def test_sum():\n    assert a == 3\n")
    assert replace(FITS, **change).staleness(tmp_path) == reason
