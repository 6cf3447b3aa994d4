"""How many small faults the tests notice: mutants of the sources, one at a time.

::

    python -m simulations.bench.mutants --n 40                        # by the default tests
    python -m simulations.bench.mutants --n 40 -- -m "" tests         # by all of them

A mutant is a copy of the checkout in which one comparison, sum, constant, truth value or negation
is another. It is killed where pytest fails. Mutants are drawn by ``--seed``, sources in order:
two suites, or two commits that leave the sources alone, face the same ones. A fault that changes
nothing (a bound that no value reaches) survives every suite: read the survivors.

The tests that import the mutated module run first, for most mutants die there; the rest only if
those pass.
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

from fedapp.config import app_folder

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
    """One change of one source.

    Parameters
    ----------
    source : path in the checkout.
    line : counted from 1.
    before, after : the expression as it is, and as it becomes.
    start, end : bytes of the expression in the source.
    """

    source: str
    line: int
    before: str
    after: str
    start: int
    end: int


def mutants_of(source: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a source, from its top to its end."""
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
    """All expressions but those in f-strings, whose places Python 3.11 does not tell."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.JoinedStr):
            if isinstance(node, ast.expr):
                yield node
            yield from _expressions(node)


def _changed(node: ast.expr) -> str | None:
    """Another expression in place of one; None where there is none."""
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
    """So many mutants, the same for the same sources and seed."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    found = [
        mutant
        for path in paths
        for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text())
    ]
    return random.Random(seed).sample(found, min(n, len(found)))


def kill(mutant: Mutant, checkout: Path, tests: Sequence[str], near_first: bool = True) -> bool:
    """Whether pytest fails on a mutant; the checkout is left as it was."""
    path = checkout / mutant.source
    whole = path.read_bytes()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    try:
        near = _near(mutant, checkout) if near_first else []
        return (bool(near) and fails(near, checkout)) or fails(tests, checkout)
    finally:
        path.write_bytes(whole)


def _near(mutant: Mutant, checkout: Path) -> list[str]:
    """The test files that import the mutated module."""
    module = mutant.source.removesuffix(".py").replace("/", ".")
    names = (f"from {module} import", f"import {module}\n")
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [str(file) for file in files if any(name in file.read_text() for name in names)]


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
    """Draw mutants, run the tests on each, print a line of JSON each and the count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    root, n_killed = app_folder(), 0
    mutants = draw(given.n, given.seed, root)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(root, checkout, ignore=shutil.ignore_patterns(".*", "runs", "build"))
        for mutant in mutants:
            began = time.monotonic()
            killed = kill(mutant, checkout, given.tests)
            n_killed += killed
            line = {**asdict(mutant), "killed": killed, "seconds": time.monotonic() - began}
            print(json.dumps(line), flush=True)
    print(f"{n_killed} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
