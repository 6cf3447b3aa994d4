"""The one harness of papers: tables as data, and results that are kept.

A study's ``main`` yields names and rows; its ``Paper`` says how they are printed.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fedapp.home import home
from fedapp.process import versions
from fedapp.run_folder import RunFolder, read_run
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.runs.series import Engine, Series, other_code
from fedapp.settings import Settings
from simulations.study import PACKAGES, Row, console, provenance, show

P = ParamSpec("P")
M = TypeVar("M", bound=Callable[[list[Row]], Iterable[Row]])  # makes lines of rows
Tables = Iterator[tuple[str, list[Row]]]


@dataclass(slots=True)
class Paper:
    """A study whose rows are printed as tables and written as JSON, with notes."""

    notes: str
    tables: dict[str, list[Callable[[list[Row], Row], None]]] = field(default_factory=dict)

    def table(self, name: str, heading: str, columns: str, n_texts: int = 1) -> Callable[[M], M]:
        """A table of the rows ``name``, if there are any; see ``show``.

        The decorated function makes its lines of the rows. The heading may name options of the
        study, as in ``{seeds} seeds``.
        """

        def decorate(lines: M) -> M:
            def print_table(rows: list[Row], options: Row) -> None:
                show(heading.format(**options), lines(rows), columns, n_texts)

            self.tables.setdefault(name, []).append(print_table)
            return lines

        return decorate

    def command(self, make: Callable[P, Tables]) -> Callable[P, None]:
        """The command of a function that yields rows; one that yields none writes nothing."""

        @wraps(make)
        def main(*values: P.args, **named: P.kwargs) -> None:
            bound = inspect.signature(make).bind(*values, **named)
            bound.apply_defaults()
            written = dict[str, Any]()
            for name, rows in make(*values, **named):
                written[name] = rows
                for print_table in self.tables.get(name, ()) if rows else ():
                    print_table(rows, bound.arguments)
            if written:
                output = bound.arguments["output"]
                self._write(written, output)

        return main

    def _write(self, tables: Row, output: Path) -> None:
        """Print the notes; write the rows with the command, ``provenance`` and versions."""
        how = {"command": " ".join(sys.argv), **provenance(), "versions": versions(PACKAGES)}
        console.print(self.notes, soft_wrap=True)
        output.mkdir(parents=True, exist_ok=True)
        RunFolder(output).write_json("tables.json", {**tables, "notes": self.notes, **how})
        console.print(f"written to {output}/tables.json", soft_wrap=True)
        if warning := other_code(output):
            console.print(warning, soft_wrap=True)


# Cells: results that are kept and read again


def series(folder: Path, what: str = "") -> Series:
    """Runs and results in a folder; printed lines about them begin with ``what``."""
    return Series(folder, partial(_say, what))


def _say(what: str, text: str) -> None:  # by name, so that a Series can be sent to another process
    console.print(f"{what}: {text}" if what else text)


def run_and_tidy(settings: Settings) -> RunFolder:
    """Train in this process; delete the sites' parts of the model."""
    folder = run_local(settings)
    forget_model(folder.summary["model_id"])
    return folder


def inferred(settings: Settings, engine: Engine, folder: Path, what: str) -> Row:
    """Costs of an inference, unless it is finished, and where its predictions are.

    Costs exclude what comes before the first message of the inference.
    """
    summary = series(folder, what).run(settings, partial(run_and_keep, engine))
    folder /= f"{settings.strategy}-{settings.seed}"
    messages = [line for line in read_run(folder).ledger if line["type"].startswith("evaluate.")]
    return {
        "folder": str(folder),
        "seconds": messages[-1]["seconds"] - messages[0]["seconds"],
        "bytes": sum(line["bytes"] for line in messages),
        "exchanges": len({line["step"] for line in messages}),
        **{name: summary.get(name, 0) for name in ("entries", "batches")},
    }


def run_and_keep(engine: Engine, settings: Settings) -> RunFolder:
    """Predict; move the predictions to the run's folder and delete the sites' files."""
    summary = (folder := engine(settings)).summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    shutil.copy(site / "predictions.parquet", folder.path)
    forget_model(summary["model_id"])
    return folder
