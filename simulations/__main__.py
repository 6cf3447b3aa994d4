"""The command of all studies: benches, attacks and the papers' tables.

::

    python -m simulations bench NAME ...     one bench, with its options; --help lists them
    python -m simulations bench --quick      every bench, into one folder; --full as the README
    python -m simulations attacks NAME ...   one attack; without a name those of ``attacks --only``
    python -m simulations papers NAME ...    a paper's tables, or ``page``: all beside the papers'
    python -m simulations reference ...      digests of what every method computes

Each describes itself and its options with ``--help``.
"""

# Modules of studies are imported when they are needed: benches measure their own memory.

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedapp.errors import FedappError
from simulations.batch import BENCHES
from simulations.options import command

# Studies by module; each is a function, or of attacks an ``Attack`` in capitals.
ATTACK_MODULES = {
    "vertical": "shared_nodes label_privacy label_groups forest_nodes",
    "vertical_bins": "reverse_sums solved_bins",
    "eini_paths": "eini_paths",
    "timberstrike": "timberstrike",
    "pax_rows": "pax_rows",
    "membership": "membership",
    "crafted": "crafted_gradients",
    "canaries": "canaries",
    "redraws": "label_redraws",
    "crafted_sums": "crafted_sums",
    "false_sums": "described_labels forest_sums held_out_sides",
}
TABLED = (  # in the order of their table
    *("shared_nodes", "reverse_sums", "solved_bins", "eini_paths", "label_groups"),
    *("forest_nodes", "timberstrike"),
)
PAPERS = (
    *("pax", "fedxgbllr", "secureboost", "federated_forest", "fed_eini"),
    *("noniid", "unified", "vertibench", "tuned", "forests", "timberstrike"),
)
# Module and function of each study; attacks have commands of their own.
PLACES = {
    **{("bench", name): (f"bench.{bench.file}", name) for name, bench in BENCHES.items()},
    **{("papers", name): (f"papers.{name}", "main") for name in PAPERS},
    ("papers", "defaults"): ("papers.noniid", "defaults"),
    ("papers", "alternatives"): ("papers.tuned", "alternatives"),
    ("papers", "page"): ("paper", "page"),
    ("bench", ""): ("batch", "bench"),
    ("reference", ""): ("reference", "reference"),
}
HELP = ("-h", "--help")


def main(words: Sequence[str] | None = None) -> None:
    """Find the study and call it with the other words."""
    words = list(sys.argv[1:] if words is None else words)
    room, name = words[0] if words else "", words[1] if len(words) > 1 else ""
    if name.startswith("-"):
        name = ""
    entry, attacks = PLACES.get((room, name)), by_name(ATTACK_MODULES)
    if entry is None and (room != "attacks" or name not in ("", *attacks)):
        papers = [paper for paper_room, paper in PLACES if paper_room == "papers"]
        names = {"bench": [*BENCHES], "attacks": [*attacks], "papers": papers}
        texts = [f"  {title} {' '.join(listed)}" for title, listed in names.items()]
        lines = [textwrap.fill(text, 96, subsequent_indent="    ") for text in texts]
        if words and words[-1] in HELP:
            print("\n".join([str(__doc__), *lines, "  reference"]))
            return
        rule = "python -m simulations must be called with one of"
        raise SystemExit("\n".join([rule, *lines, "  reference"]))
    n_names = 2 if name else 1
    sys.argv = [" ".join(["python -m simulations", *words[:n_names]]), *words[n_names:]]
    if entry is None:
        carry_out(lambda: attack(name))
        return
    module_name, function = entry
    module = importlib.import_module(f"simulations.{module_name}")
    carry_out(lambda: run(name, getattr(module, function)))


def carry_out(study: Callable[[], None]) -> None:
    """Call a study; print when and where it ran, and what it took."""
    from simulations.study import made, provenance

    start, before = time.monotonic(), provenance()
    try:
        study()
    except FedappError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(made(before, time.monotonic() - start), file=sys.stderr)


def run(name: str, function: Any) -> None:
    """Call a study; print the lines that it returns."""
    from simulations.study import print_line

    lines = command(function)
    for line in lines if isinstance(lines, Iterator) else [lines] if lines else []:
        print_line(name, **line)


def by_name(modules: Mapping[str, str]) -> dict[str, str]:
    """The module of each study."""
    return {name: module for module, names in modules.items() for name in names.split()}


def attack_of(name: str) -> Any:
    """An ``Attack``, or the function of one that has a command of its own."""
    module = importlib.import_module(f"simulations.attacks.{by_name(ATTACK_MODULES)[name]}")
    return getattr(module, name.upper(), None) or getattr(module, name)


def attack(name: str) -> None:
    """Call one attack, or those of one table."""
    from simulations.attack import Attack, attack_main

    if not name:
        attack_main(*(attack_of(attack) for attack in TABLED))
    elif isinstance(function := attack_of(name), Attack):
        attack_main(function)
    else:
        run(name, function)


def warn_once() -> None:
    """Print each warning once, however many runs of a study have it."""
    shown = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_first = message not in shown
        shown.add(message)
        return is_first

    handler = logging.StreamHandler()
    handler.addFilter(is_new)
    logging.getLogger("fedapp").addHandler(handler)


if __name__ == "__main__":
    warn_once()
    main()
