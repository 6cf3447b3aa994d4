"""Small faults planted in sources: each is another program, drawn the same again, and killed."""

from __future__ import annotations

import ast
from pathlib import Path

from simulations.bench.mutants import draw, kill, mutants_of

SOURCE = """def clipped(value, low):
    found = not value < low
    return f"{value + 1}" if found else low + 2
"""
CHANGES = [("not value < low", "bool(value < low)"), ("value < low", "(value <= low)")]
CHANGES += [("low + 2", "((low) - (2))"), ("2", "(3)")]


def test_every_mutant_is_another_program_and_none_is_in_an_f_string() -> None:
    found = list(mutants_of("clipped.py", SOURCE))
    assert sorted((one.before, one.after) for one in found) == sorted(CHANGES)
    for one in found:
        text = SOURCE[: one.start] + one.after + SOURCE[one.end :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))


def test_the_same_seed_draws_the_same_mutants(tmp_path: Path) -> None:
    package = tmp_path / "fedapp" / "wire"
    package.mkdir(parents=True)
    (package / "clipped.py").write_text(SOURCE)
    first = draw(3, 1, tmp_path)
    assert draw(3, 1, tmp_path) == first
    assert len({(one.start, one.end) for one in first}) == 3
    assert len(draw(99, 1, tmp_path)) == len(CHANGES)


def test_a_mutant_is_killed_where_a_test_fails_and_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "clipped.py").write_text(SOURCE)
    (tests := tmp_path / "tests").mkdir()
    (tests / "test_clipped.py").write_text(
        "from clipped import clipped\n\n\ndef test_low():\n    assert clipped(1, 3) == 5\n"
    )
    by_change = {one.before: one for one in mutants_of("clipped.py", SOURCE)}
    assert kill(by_change["low + 2"], tmp_path, ["tests"])
    assert not kill(by_change["value < low"], tmp_path, ["tests"])  # 1 < 3 and 1 <= 3
    assert (tmp_path / "clipped.py").read_text() == SOURCE
