"""The listed faults still fit the code."""

from tests.mutants import load_mutants


def test_no_listed_mutant_is_stale():
    listed = load_mutants()
    assert len({one.name for one in listed}) == len(listed)
    reasons = {one.name: one.staleness() for one in listed}
    assert {name: reason for name, reason in reasons.items() if reason} == {}
