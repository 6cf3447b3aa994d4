"""The command of all studies: benches, attacks and the papers' tables.

::

    python -m simulations bench NAME ...     one bench, with its options; --help lists them
    python -m simulations attacks NAME ...   one attack
    python -m simulations papers NAME ...    a paper's tables
    python -m simulations reference ...      digests of what every method computes

Each describes itself and its options with ``--help``.
"""

# Modules of studies are imported when they are needed: benches measure their own memory.

from __future__ import annotations

import importlib
import logging
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fedapp.errors import FedappError

BENCH_MODULES = {
    "pax": "pax_speed pax_secure pax_floor privacy",
    "trees": "parties rows federated_forest secureboost",
    "exchange": "exchange",
    "score": "score",
    "faults": "faults",
    "exactness": "exactness",
    "cluster": "site_cluster site_rows",
}
# Attacks by module; names in capitals are those of an ``Attack``, the others of functions.
ATTACK_MODULES = {
    "vertical": "SHARED_NODES LABEL_PRIVACY SOLVED_BINS",
    "eini_paths": "EINI_PATHS",
    "horizontal": "TIMBERSTRIKE pax_rows membership",
    "crafted": "REVERSE_SUMS crafted_sums",
    "canaries": "canaries",
}
PAPERS = (
    *("pax", "fedxgbllr", "secureboost", "federated_forest", "fed_eini"),
    *("noniid", "unified", "vertibench", "tuned", "glassbox"),
)
# Module and object of each study, by room and name.
PLACES = {
    room: {
        name.lower(): (f"{room}.{file}", name)
        for file, names in modules.items()
        for name in names.split()
    }
    for room, modules in (("bench", BENCH_MODULES), ("attacks", ATTACK_MODULES))
}
PLACES["papers"] = {name: (f"papers.{name}", "main") for name in PAPERS}
PLACES["reference"] = {"": ("reference", "reference")}
HELP = ("-h", "--help")


def main(words: Sequence[str] | None = None) -> None:
    """Find the study and call it with the other words."""
    words = list(sys.argv[1:] if words is None else words)
    room, name = (*words, "", "")[:2]
    name = "" if name.startswith("-") else name
    if name not in PLACES.get(room, ()):
        texts = ["  " + " ".join([of, *filter(None, names)]) for of, names in PLACES.items()]
        lines = [textwrap.fill(text, 96, subsequent_indent="    ") for text in texts]
        if words and words[-1] in HELP:
            print("\n".join([str(__doc__), *lines]))
            return
        raise SystemExit("\n".join(["python -m simulations must be called with one of", *lines]))
    n_names = 2 if name else 1
    sys.argv = [" ".join(["python -m simulations", *words[:n_names]]), *words[n_names:]]
    module, attribute = PLACES[room][name]
    study = getattr(importlib.import_module(f"simulations.{module}"), attribute)
    carry_out(partial(run, name, study))


def carry_out(study: Callable[[], None]) -> None:
    """Call a study; print when and where it ran, and what it took."""
    from simulations.study import made, provenance

    # What ends the command ends what it has started.
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, before = time.monotonic(), provenance()
    try:
        study()
    except FedappError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, usual)
    print(made(before, time.monotonic() - start), file=sys.stderr)


def run(name: str, study: Any) -> None:
    """Call the function of a study, or carry out an ``Attack``; print the lines that it returns."""
    from simulations.attack import Attack, attack_results
    from simulations.study import Bench, command, print_line

    if isinstance(study, Attack):
        text, study = study.run.__doc__, partial(attack_results, name, study)
        study.__doc__ = text
    lines = command(study)
    lines = lines.lines() if isinstance(lines, Bench) else lines
    for line in lines if isinstance(lines, Iterator) else [lines] if lines else []:
        print_line(name, **line)


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
