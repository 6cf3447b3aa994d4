"""`fedapp data` lists, fetches and describes tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid
from typer import Argument, Option

from fedapp.commands.common import Command, Group, Id, Overrides, console
from fedapp.report.summary import print_notes
from fedapp.terminal import Terminal

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedapp.data.describe import Described


MAX_CLASSES = 30

data_app = typer.Typer(cls=Group, help="Data sets: list, fetch, describe.", no_args_is_help=True)


@data_app.command("list", cls=Command)
def list_command() -> None:
    """List the data sets that are known by name."""
    from fedapp.data.datasets import dataset_names, find_dataset

    grid = Grid("name", "task", "rows x columns", "where")
    for name in dataset_names():
        dataset = find_dataset(name)
        rows, columns = dataset.shape
        grid.add_row(name, dataset.task, f"{rows} x {columns}", _where(name))
    Terminal().print(grid)


@data_app.command("fetch", cls=Command)
def fetch_command(name: Annotated[str, Argument(help="Name of a data set.")]) -> None:
    """Download a data set into the cache."""
    from fedapp.data.datasets import fetch

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        path = fetch(name, show)
    Terminal().print(str(path), soft_wrap=True, highlight=False)


@data_app.command("describe", cls=Command)
def describe_command(
    source: Annotated[str, Argument(help="Name of a data set, or a file.")],
    label: Annotated[str, Option(help="Label column of a file.")] = "",
    id_column: Id = "",
    config: Overrides = None,
    schema: Annotated[
        Path | None,
        Option(help="A schema: applied if the file is there, else written there, to be changed."),
    ] = None,
) -> None:
    """Describe a table: what each column holds, what a run would do with it, and its label.

    Settings of tables change how it is read, as -c weight=COLUMN or -c decimal=,.
    """
    from fedapp.arguments import parse_overrides
    from fedapp.data.datasets import check_source, dataset_names, find_dataset, read_source
    from fedapp.data.describe import describe, schema_text
    from fedapp.home import Kind, check_output, write_atomically
    from fedapp.settings import flatten, load_settings
    from fedapp.site.settings import SiteConfig, table_settings

    is_read = schema is not None and schema.exists()
    if schema is not None and not is_read:
        check_output(schema, Kind("a schema", (".toml",)), name="--schema")
    options = {"label": label, "id": id_column, "schema": str(schema) if is_read else ""}
    named = {name: value for name, value in options.items() if value}
    settings = load_settings({**parse_overrides(config or []), **named, "data": source})
    site = SiteConfig("describe", **table_settings(flatten(settings.as_config())))
    roles = site.roles
    check_source(source)
    if source in dataset_names():
        dataset = find_dataset(source)
        console.print(f"{dataset.description}\n{dataset.source}", markup=False, highlight=False)
    description = describe(source, roles, site.reader)
    n_features = sum(column.use.startswith("feature") for column in description.columns)
    console.print(f"{description.n_rows:,} rows, {n_features:,} feature columns")
    console.print(_columns(description.columns))
    print_notes(console, description.facts, description.warnings)
    if schema is not None and not is_read:
        write_atomically(schema.resolve(), schema_text(description).encode())
        console.print(f"schema written to {schema}", markup=False, highlight=False, soft_wrap=True)
    has_refused = any(column.refused for column in description.columns)
    refused = "see the columns, and --schema" if has_refused else description.refused
    if refused:
        console.print(f"a run refuses this table: {refused}", highlight=False)
    if not has_refused:
        roles = replace(roles, drop_unlabelled=roles.drop_unlabelled or bool(refused))
        if (labels := read_source(source, roles, site.reader).labels) is not None:
            console.print(_labels(labels))


def _where(name: str) -> str:
    from fedapp.data.datasets import cache_folder, find_dataset, locate
    from fedapp.data.schema import BUILT_IN

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
    for column in columns:
        n_missing, n_distinct = f"{column.n_missing:,}", f"{column.n_distinct:,}"
        texts = (column.span, column.example, column.use)
        grid.add_row(escape(column.name), column.type, n_missing, n_distinct, *map(escape, texts))
    return grid


def _labels(labels: npt.NDArray[Any]) -> Grid:
    """Rows of each class; the range of numbers with more than ``MAX_CLASSES`` values."""
    import numpy as np

    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MAX_CLASSES and labels.dtype.kind == "f":
        grid = Grid("label distinct", "min", "mean", "max")
        ends = (f"{end:.6g}" for end in (labels.min(), labels.mean(), labels.max()))
        grid.add_row(str(len(values)), *ends)
        return grid
    grid = Grid("label", "rows", "share")
    for at in np.argsort(-counts, kind="stable"):
        value = values[at].item()
        text = f"{value:g}" if isinstance(value, float) else escape(value)
        grid.add_row(text, str(counts[at]), f"{counts[at] / len(labels):.2%}")
    return grid
