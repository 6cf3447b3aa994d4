"""`fedapp data`: list, fetch and describe tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid

from fedapp.commands.help import Command

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedapp.data.describe import Described

MAX_CLASSES = 30

data_app = typer.Typer(help="Data sets: list, fetch, describe.", no_args_is_help=True)


@data_app.command("list", cls=Command)
def list_command() -> None:
    """List the data sets that are known by name."""
    from fedapp.data.datasets import dataset_names, find_dataset

    grid = Grid("name", "task", "rows x columns", "where")
    for name in dataset_names():
        dataset = find_dataset(name)
        rows, columns = dataset.shape
        grid.add_row(name, dataset.task, f"{rows} x {columns}", _where(name))
    Console().print(grid)


@data_app.command("fetch", cls=Command)
def fetch_command(name: Annotated[str, typer.Argument(help="Name of a data set.")]) -> None:
    """Download a data set into the cache."""
    from fedapp.data.datasets import fetch

    with Progress(transient=True) as bar:
        task = bar.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        path = fetch(name, show)
    Console().print(str(path), soft_wrap=True, highlight=False)


@data_app.command("describe", cls=Command)
def describe_command(
    source: Annotated[str, typer.Argument(help="Name of a data set, or a file.")],
    label: Annotated[str, typer.Option(help="Label column of a file.")] = "",
    id_column: Annotated[str, typer.Option("--id", help="Column that names the rows.")] = "",
    weight: Annotated[str, typer.Option(help="Column of weights.")] = "",
    base_margin: Annotated[
        str, typer.Option(help="Column of the margin that each row starts from.")
    ] = "",
    missing_label: Annotated[
        str, typer.Option(help="What becomes of rows without a label: refuse or drop.")
    ] = "",
    drop_columns: Annotated[
        str, typer.Option(help="Columns that are not features, separated by commas.")
    ] = "",
    header: Annotated[
        bool, typer.Option(help="Whether the first line of the file names the columns.")
    ] = True,
    decimal: Annotated[str, typer.Option(help="Decimal point or comma of a file.")] = ".",
    encoding: Annotated[str, typer.Option(help="Encoding of a file, as latin-1.")] = "",
    schema: Annotated[
        Path | None,
        typer.Option(
            help="A schema: applied if the file is there, else written there, to be changed."
        ),
    ] = None,
) -> None:
    """Describe a table: what each column holds, what a run would do with it, and its label."""
    from fedapp.commands.common import console
    from fedapp.data.datasets import check_source, dataset_names, find_dataset, read_source
    from fedapp.data.describe import describe, schema_text
    from fedapp.site.settings import SiteConfig, table_settings

    is_read = schema is not None and schema.exists()
    config = SiteConfig(
        "describe",
        **table_settings(
            {
                "data": source,
                "label": label,
                "id": id_column,
                "weight": weight,
                "base-margin": base_margin,
                "missing-label": missing_label,
                "drop-columns": drop_columns,
                "header": header,
                "decimal": decimal,
                "encoding": encoding,
                "schema": str(schema) if is_read else "",
            }
        ),
    )
    roles = config.roles
    check_source(source)
    if source in dataset_names():
        dataset = find_dataset(source)
        console.print(f"{dataset.description}\n{dataset.source}", markup=False, highlight=False)
    description = describe(source, roles, config.reader)
    n_features = sum(one.use.startswith("feature") for one in description.columns)
    console.print(f"{description.n_rows:,} rows, {n_features:,} feature columns")
    console.print(_columns(description.columns))
    for note in description.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if schema is not None and not is_read:
        schema.write_text(schema_text(description), encoding="utf-8")
        console.print(f"schema written to {schema}", markup=False, highlight=False, soft_wrap=True)
    if any(one.refused for one in description.columns):
        console.print("a run refuses this table: see the columns, and --schema", highlight=False)
        return
    if description.refused:
        console.print(f"a run refuses this table: {description.refused}", highlight=False)
        roles = replace(roles, drop_unlabelled=True)
    table = read_source(source, roles, config.reader)
    if table.labels is not None:
        console.print(_labels(table.labels))


def _where(name: str) -> str:
    from fedapp.data.datasets import cache_folder, find_dataset, locate
    from fedapp.data.registry import BUILT_IN

    if name in BUILT_IN:
        return "built-in"
    path = locate(find_dataset(name).files[0])
    if path is None:
        return "not here"
    return "cache" if path.parent == cache_folder() else "folder"


def _columns(columns: Iterable[Described]) -> Grid:
    grid = Grid()
    grid.add_column("column", overflow="fold")  # never cut: it can be copied to drop-columns
    for name in ("type", "missing", "distinct", "range", "example"):
        grid.add_column(name)
    grid.add_column("in a run", overflow="fold")
    for one in columns:
        counts = f"{one.n_missing:,}", f"{one.n_distinct:,}"
        texts = (one.span, one.example, one.use)
        grid.add_row(escape(one.name), one.type, *counts, *map(escape, texts))
    return grid


def _labels(labels: npt.NDArray[Any]) -> Grid:
    """Rows of each class; the range of numbers with more than ``MAX_CLASSES`` values."""
    import numpy as np

    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MAX_CLASSES and labels.dtype.kind == "f":
        grid = Grid("label distinct", "min", "mean", "max")
        ends = (labels.min(), labels.mean(), labels.max())
        grid.add_row(str(len(values)), *(f"{value:.6g}" for value in ends))
        return grid
    grid = Grid("label", "rows", "share")
    for at in np.argsort(-counts, kind="stable"):
        value = f"{values[at]:g}" if labels.dtype.kind == "f" else escape(values[at])
        grid.add_row(value, str(counts[at]), f"{counts[at] / len(labels):.2%}")
    return grid
