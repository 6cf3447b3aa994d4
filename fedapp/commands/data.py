"""`fedapp data`: which tables are known, where they lie, what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid

from fedapp.commands.help import Command
from fedapp.data.schema import Roles

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedapp.data.table import Table

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
    drop_columns: Annotated[
        str, typer.Option(help="Columns that are not features, separated by commas.")
    ] = "",
) -> None:
    """Describe a table: its columns and its label."""
    from fedapp.data.datasets import dataset_names, find_dataset, read_source

    dropped = tuple(name.strip() for name in drop_columns.split(",") if name.strip())
    table = read_source(source, Roles(label=label, drop=dropped))
    console = Console()
    if source in dataset_names():
        dataset = find_dataset(source)
        console.print(f"{dataset.description}\n{dataset.source}", markup=False, highlight=False)
    console.print(f"{table.n_rows:,} rows, {len(table.columns):,} feature columns")
    console.print(_columns(table))
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


def _columns(table: Table) -> Grid:
    import numpy as np

    grid = Grid("column", "missing", "distinct", "min", "mean", "max")
    for index, name in enumerate(table.columns):
        values = table.values[:, index]
        known = values[~np.isnan(values)].astype(np.float64)
        grid.add_row(escape(name), str(len(values) - len(known)), *_summary(known))
    return grid


def _summary(values: npt.NDArray[Any]) -> Iterator[str]:
    import numpy as np

    yield str(len(np.unique(values)))
    for value in (values.min(), values.mean(), values.max()) if len(values) else ():
        yield f"{value:.6g}"


def _labels(labels: npt.NDArray[Any]) -> Grid:
    """Rows of each class; of numbers with more distinct values, their range."""
    import numpy as np

    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MAX_CLASSES and labels.dtype.kind == "f":
        grid = Grid("label distinct", "min", "mean", "max")
        grid.add_row(*_summary(labels))
        return grid
    grid = Grid("label", "rows", "share")
    for at in np.argsort(-counts, kind="stable"):
        value = f"{values[at]:g}" if labels.dtype.kind == "f" else escape(values[at])
        grid.add_row(value, str(counts[at]), f"{counts[at] / len(labels):.2%}")
    return grid
