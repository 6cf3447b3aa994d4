"""How many small faults the tests notice: mutants of the sources, one at a time.

::

    python -m simulations.bench.mutants --n 40                        # by the default tests
    python -m simulations.bench.mutants --n 40 -- -m "" tests         # by all of them

A mutant is a copy of the checkout with another comparison, sum, constant, truth value or negation.
It is killed if pytest fails. ``--seed`` draws the mutants, from sources in order: two suites, or
two commits that leave the sources alone, face the same ones. A mutant that behaves the same (a
bound that no value reaches) survives every suite: read the survivors.

Tests that import the mutated module run first, since they kill most mutants; the rest only if those
pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedapp.settings import app_folder

PACKAGES = ("fedapp/crypto", "fedapp/histograms", "fedapp/trees", "fedapp/wire")
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"),
}  # fmt: skip
LONGEST_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one source: ``before`` becomes ``after`` in the bytes from start to end."""

    source: str
    line: int
    before: str
    after: str
    start: int
    end: int


def mutants_of(source: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a source, from top to bottom."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in _expressions(ast.parse(text)):
        if (after := _changed(node)) is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[start:end].decode()
            yield Mutant(source, node.lineno, before, after, start, end)


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """All expressions except those in f-strings, whose positions Python 3.11 does not report."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.JoinedStr):
            if isinstance(node, ast.expr):
                yield node
            yield from _expressions(node)


def _changed(node: ast.expr) -> str | None:
    """Replacement of an expression, or None."""
    match node:
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
            other = COMPARISONS[type(operator)]
            return f"({ast.unparse(node.left)} {other} {ast.unparse(right)})"
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            _, other = OPERATORS[type(operator)]
            return f"(({ast.unparse(node.left)}) {other} ({ast.unparse(node.right)}))"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return f"({value + 1})"
        case ast.UnaryOp(op=ast.Not()):
            return f"bool({ast.unparse(node.operand)})"
    return None


def draw(n: int, seed: int, root: Path) -> list[Mutant]:
    """Draw ``n`` mutants, the same for the same sources and seed."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    mutants = [
        mutant
        for path in paths
        for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text())
    ]
    return random.Random(seed).sample(mutants, min(n, len(mutants)))


def kill(mutant: Mutant, checkout: Path, tests: Sequence[str], near_first: bool = True) -> bool:
    """Whether pytest fails on a mutant; the checkout is restored."""
    path = checkout / mutant.source
    whole = path.read_bytes()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    try:
        near = []
        if near_first:  # the test files that import the mutated module
            module = mutant.source.removesuffix(".py").replace("/", ".")
            imports = (f"from {module} import", f"import {module}\n")
            files = sorted((checkout / "tests").rglob("test_*.py"))
            near = [str(f) for f in files if any(each in f.read_text() for each in imports)]
        return (bool(near) and fails(near, checkout)) or fails(tests, checkout)
    finally:
        path.write_bytes(whole)


def fails(tests: Sequence[str], checkout: Path) -> bool:
    """Whether a test fails, or a run of them hangs."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        ended = subprocess.run(
            command, cwd=checkout, capture_output=True, timeout=LONGEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    root, n_killed = app_folder(), 0
    mutants = draw(options.n, options.seed, root)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(root, checkout, ignore=shutil.ignore_patterns(".*", "runs", "build"))
        for mutant in mutants:
            start = time.monotonic()
            killed = kill(mutant, checkout, options.tests)
            n_killed += killed
            line = {**asdict(mutant), "killed": killed, "seconds": time.monotonic() - start}
            print(json.dumps(line), flush=True)
    print(f"{n_killed} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
