"""Plant one fault at a time in a copy of the code, and see whether the default tests find it.

``python -m tests.mutants [WORDS ...]`` tries all mutants of ``mutants.toml``, or those whose names
contain one of these, and prints a line of each: the test that found it, or what is wrong. The exit
status is 1 if one of them was not found.

The checkout is only read: tracked files are copied, with changes that are not committed, and a
fault is planted in the copy. Its bytecode goes with it, as Python compares only whole seconds and
sizes of sources. Kernels need no care: the folder of compiled ones is named by a digest of all
sources that may be part of one (``fedapp.kernels``), so a fault in any of them compiles them again.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from fedapp.kernels import cache_folder, n_cores

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
FOUND = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
PYTEST = (sys.executable, "-m", "pytest", "-n0", "-x", "--tb=short", "-p", "no:cacheprovider")
TESTS_FAILED = 1  # exit status of pytest
MOST_SECONDS = 900  # of the tests of one mutant


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: `new` in place of `old`, which occurs once in the file; `tests` are to find it."""

    name: str  # a sentence that describes the fault
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # files, or tests as ``file::function``

    def staleness(self):
        """Why the mutant does not fit the code any more; empty if it does."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} is not a file"
        if (count := path.read_text(encoding="utf-8").count(self.old)) != 1:
            return f"old occurs {count} times in {self.file}"
        if self.old == self.new:
            return "new is old"
        if not self.tests:
            return "no test is named"
        for test in self.tests:
            file, _, function = test.partition("::")
            if not (ROOT / file).is_file():
                return f"{file} is not a file"
            if f"def {function}(" not in (ROOT / file).read_text(encoding="utf-8") and function:
                return f"{file} has no {function}"
        return ""


def load_mutants():
    """The mutants of the list, in its order."""
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**one, "tests": tuple(one["tests"])}) for one in listed]


def copy_tracked(target):
    """Copy all tracked files, as they are in the checkout; returns the folder of the copy."""
    listed = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # it may be deleted, and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(copy, tests):
    """Run tests in a copy, whose modules come before those of an editable installation."""
    return subprocess.run(
        (*PYTEST, *tests),
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(copy.parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )


def attempt(copies, mutant):
    """Plant a mutant in one of the copies and run its tests; returns what came of it."""
    if staleness := mutant.staleness():
        return f"STALE: {staleness}"
    copy = copies.get()
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    try:
        _write(path, source.replace(mutant.old, mutant.new))
        ended = run_tests(copy, mutant.tests)
    except subprocess.TimeoutExpired:
        return f"NOT FOUND: its tests did not end within {MOST_SECONDS} s"
    finally:
        _write(path, source)
        copies.put(copy)
    if ended.returncode == TESTS_FAILED and (by := FOUND.search(ended.stdout)):
        return f"found by {by[1]}"
    if ended.returncode == 0:
        return "NOT FOUND"
    return f"NOT FOUND: pytest ended with {ended.returncode}\n{ended.stdout}"


def _write(path, source):
    path.write_text(source, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def main(words):
    """Try the mutants whose names contain one of `words`; returns the exit status."""
    listed = load_mutants()
    mutants = [one for one in listed if any(word in one.name for word in words)] or listed
    with TemporaryDirectory() as folder, ThreadPoolExecutor(n_cores()) as pool:
        base, copies = Path(folder), SimpleQueue[Path]()
        for number in range(n_cores()):
            copies.put(copy_tracked(base / f"copy-{number}"))
        if kernels := cache_folder():
            shutil.copytree(kernels, base / "fedapp" / "kernels" / kernels.name)
        # A test that fails anyway would find every fault.
        tests = sorted({test for one in mutants for test in one.tests})
        if (ended := run_tests(base / "copy-0", tests)).returncode:
            print(ended.stdout, "The tests must pass where no fault is planted", sep="\n")
            return 1
        outcomes = pool.map(partial(attempt, copies), mutants)
        n_missed = 0
        for mutant, outcome in zip(mutants, outcomes, strict=True):
            print(f"{mutant.name}: {outcome}", flush=True)
            n_missed += not outcome.startswith("found")
    return int(n_missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
