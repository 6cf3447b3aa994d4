"""The one harness of papers: tables as data, and results that are kept.

A study's ``main`` yields names and rows; its ``Paper`` says where cells are kept, and how rows are
printed.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from fedapp.home import home
from fedapp.process import versions
from fedapp.run_folder import RunFolder, read_run
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.runs.series import Engine, Series, other_code
from fedapp.settings import Settings
from simulations.study import PACKAGES, Row, console, provenance, show

M = TypeVar("M", bound=Callable[[list[Row]], Iterable[Row]])  # makes lines of rows
Tables = Iterator[tuple[str, list[Row]]]
KEPT = "Prints tables, and writes rows as JSON. What is finished in --output is not made again."


def series(folder: Path, what: str = "") -> Series:
    """Runs and results in a folder; printed lines about them begin with ``what``."""

    def say(text: str) -> None:
        console.print(f"{what}: {text}" if what else text)

    return Series(folder, say)


def run_and_tidy(settings: Settings) -> RunFolder:
    """Train in this process; delete the sites' parts of the model."""
    folder = run_local(settings)
    forget_model(folder.summary["model_id"])
    return folder


def run_and_keep(engine: Engine, settings: Settings) -> RunFolder:
    """Predict; move the predictions to the run's folder and delete the sites' files."""
    summary = (folder := engine(settings)).summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    shutil.copy(site / "predictions.parquet", folder.path)
    forget_model(summary["model_id"])
    return folder


@dataclass(slots=True)
class Paper:
    """A study whose rows are printed as tables and written as JSON, with notes.

    Cells, the results that are kept and read again, are in ``folder``.
    """

    folder: Path  # by default; that of ``--output`` once the command runs
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

    def command(self, make: Callable[..., Tables]) -> Callable[..., None]:
        """The command of a function that yields rows, with an option ``--output`` more.

        One that yields none writes nothing.
        """
        signature = inspect.signature(make)

        @wraps(make)
        def main(output: Path = self.folder, **options: Any) -> None:
            self.folder = output
            bound = signature.bind(**options)
            bound.apply_defaults()
            written = dict[str, Any]()
            for name, rows in make(**options):
                written[name] = rows
                for print_table in self.tables.get(name, ()) if rows else ():
                    print_table(rows, bound.arguments)
            if written:
                self._write(written)

        main.__doc__ = f"{inspect.getdoc(make)}\n\n{KEPT}"
        option = inspect.signature(main, follow_wrapped=False).parameters["output"]
        parameters = [*signature.parameters.values(), option]
        main.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return main

    def _write(self, tables: Row) -> None:
        """Print the notes; write the rows with the command, ``provenance`` and versions."""
        how = {"command": " ".join(sys.argv), **provenance(), "versions": versions(PACKAGES)}
        console.print(self.notes, soft_wrap=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        RunFolder(self.folder).write_json("tables.json", {**tables, "notes": self.notes, **how})
        console.print(f"written to {self.folder}/tables.json", soft_wrap=True)
        if warning := other_code(self.folder):
            console.print(warning, soft_wrap=True)

    def run(
        self, settings: Settings, folder: str, what: str = "", engine: Engine = run_and_tidy
    ) -> Row:
        """The summary of a run in a subfolder, unless it is finished; ``what`` is in its lines."""
        return series(self.folder / folder, what or folder).run(settings, engine)

    def rows(
        self, name: str, settings: Settings, make: Callable[[], list[Row]], what: str = ""
    ) -> list[Row]:
        """Rows of the file ``name.json``, unless they are made; ``what`` is in its lines."""
        path = self.folder / name
        return series(path.parent, what).rows(path.name, settings, make)

    def inferred(self, settings: Settings, engine: Engine, folder: str, what: str) -> Row:
        """Costs of an inference, unless it is finished, and where its predictions are.

        Costs exclude what comes before the first message of the inference.
        """
        summary = self.run(settings, folder, what, partial(run_and_keep, engine))
        path = self.folder / folder / f"{settings.strategy}-{settings.seed}"
        messages = [line for line in read_run(path).ledger if line["type"].startswith("evaluate.")]
        return {
            "folder": str(path),
            **span_of(messages),
            "exchanges": len({line["step"] for line in messages}),
            **{name: summary.get(name, 0) for name in ("entries", "batches")},
        }


def span_of(messages: Sequence[Mapping[str, Any]]) -> Row:
    """Seconds from the first to the last of some messages of a ledger, and their bytes."""
    seconds = messages[-1]["seconds"] - messages[0]["seconds"]
    return {"seconds": seconds, "bytes": sum(line["bytes"] for line in messages)}
