"""`fedapp data` lists, fetches and describes tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click import get_current_context
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table as Grid
from typer import Argument, Option

from fedapp.commands.common import AsJson, Command, Group, Id, console, print_json
from fedapp.report.summary import print_notes
from fedapp.terminal import Terminal

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedapp.data.describe import TableColumn
    from fedapp.data.schema import DataSet


MAX_CLASSES = 30

data_app = typer.Typer(cls=Group, help="Data sets: list, fetch, describe.", no_args_is_help=True)


@data_app.command("list", cls=Command)
def list_command(as_json: AsJson = False) -> None:
    """List the data sets that are known by name."""
    from fedapp.data.schema import REGISTRY

    listed: list[dict[str, Any]] = []
    for name, dataset in REGISTRY.items():
        rows, columns = dataset.shape
        facts = {"task": dataset.task, "rows": rows, "columns": columns, "where": _where(dataset)}
        listed.append({"name": name, **facts})
    if as_json:
        print_json("data list", data_sets=listed)
        return
    grid = Grid("name", "task", "rows x columns", "where")
    for entry in listed:
        shape = f"{entry['rows']} x {entry['columns']}"
        grid.add_row(entry["name"], entry["task"], shape, entry["where"])
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
    weight: Annotated[str, Option(help="Column of weights.")] = "",
    base_margin: Annotated[
        str, Option(help="Column of the margin that each row starts from.")
    ] = "",
    missing_label: Annotated[
        str, Option(help="What becomes of rows without a label: refuse or drop.")
    ] = "",
    drop_columns: Annotated[
        str, Option(help="Columns that are not features, separated by commas.")
    ] = "",
    header: Annotated[
        bool, Option(help="Whether the first line of the file names the columns.")
    ] = True,
    decimal: Annotated[str, Option(help="Decimal point or comma of a file.")] = ".",
    encoding: Annotated[str, Option(help="Encoding of a file, as latin-1.")] = "",
    schema: Annotated[
        Path | None,
        Option(help="A schema: applied if the file is there, else written there, to be changed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a table: what each column holds, what a run would do with it, and its label."""
    from fedapp.data.datasets import check_source, read_source
    from fedapp.data.describe import describe, schema_text
    from fedapp.data.schema import REGISTRY
    from fedapp.home import Kind, check_output, write_atomically
    from fedapp.site.settings import SiteConfig, table_settings

    is_read = schema is not None and schema.exists()
    if schema is not None and not is_read:
        check_output(schema, Kind("a schema", (".toml",)), name="--schema")
    options = {
        name.replace("_", "-"): value for name, value in get_current_context().params.items()
    }
    settings = {
        **options,
        "data": source,
        "id": id_column,
        "missing-label": missing_label or "refuse",
        "schema": str(schema) if is_read else "",
    }
    config = SiteConfig("describe", **table_settings(settings))
    roles = config.roles
    check_source(source)
    if source in REGISTRY:
        dataset = REGISTRY[source]
        console.print(f"{dataset.description}\n{dataset.source}", markup=False, highlight=False)
    description = describe(source, roles, config.reader)
    n_features = sum(column.in_a_run.startswith("feature") for column in description.columns)
    console.print(f"{description.n_rows:,} rows, {n_features:,} feature columns")
    if not as_json:
        console.print(_columns(description.columns))
    print_notes(console, description.facts, description.warnings)
    if schema is not None and not is_read:
        write_atomically(schema.resolve(), schema_text(description).encode())
        console.print(f"schema written to {schema}", markup=False, highlight=False, soft_wrap=True)
    has_refused = any(column.refused for column in description.columns)
    refused = "see the columns, and --schema" if has_refused else description.refused
    if refused:
        console.print(f"a run refuses this table: {refused}", highlight=False)
    labels = None
    if not has_refused:
        roles = replace(roles, drop_unlabelled=roles.drop_unlabelled or bool(refused))
        labels = read_source(source, roles, config.reader).labels
    counts = None if labels is None else _label_counts(labels)
    if as_json:
        print_json(
            "data describe",
            rows=description.n_rows,
            features=n_features,
            columns=[asdict(column) for column in description.columns],
            label=counts,
            facts=description.facts,
            warnings=description.warnings,
            refused=refused,
        )
    elif counts is not None:
        console.print(_labels(counts))


def _where(dataset: DataSet) -> str:
    from fedapp.data.datasets import cache_folder, locate

    if not dataset.files:
        return "built-in"
    path = locate(dataset.files[0])
    if path is None:
        return "not here"
    return "cache" if path.parent == cache_folder() else "folder"


def _columns(columns: Iterable[TableColumn]) -> Grid:
    grid = Grid()
    grid.add_column("column", overflow="fold")  # never cut: it can be copied to drop-columns
    for name in ("type", "missing", "distinct", "range", "example"):
        grid.add_column(name)
    grid.add_column("in a run", overflow="fold")
    for column in columns:
        counts = f"{column.missing:,}", f"{column.distinct:,}"
        texts = (column.span, column.example, column.in_a_run)
        grid.add_row(escape(column.name), column.type, *counts, *map(escape, texts))
    return grid


def _label_counts(labels: npt.NDArray[Any]) -> dict[str, Any]:
    """Rows of each class; the range of numbers with more than ``MAX_CLASSES`` values."""
    import numpy as np

    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MAX_CLASSES and labels.dtype.kind == "f":
        ends = {"min": labels.min(), "mean": labels.mean(), "max": labels.max()}
        return {"distinct": len(values), **{name: float(end) for name, end in ends.items()}}
    return {
        "classes": [
            {
                "label": values[at].item(),
                "rows": int(counts[at]),
                "share": float(counts[at] / len(labels)),
            }
            for at in np.argsort(-counts, kind="stable")
        ]
    }


def _labels(counted: Mapping[str, Any]) -> Grid:
    if "classes" not in counted:
        grid = Grid("label distinct", "min", "mean", "max")
        ends = (f"{counted[name]:.6g}" for name in ("min", "mean", "max"))
        grid.add_row(str(counted["distinct"]), *ends)
        return grid
    grid = Grid("label", "rows", "share")
    for counts in counted["classes"]:
        value = counts["label"]
        text = f"{value:g}" if isinstance(value, float) else escape(value)
        grid.add_row(text, str(counts["rows"]), f"{counts['share']:.2%}")
    return grid
