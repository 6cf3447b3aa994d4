"""``fedapp predict``: the rows of a table, by a run's model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedapp.commands.common import Overrides, console, interruptible, new_follower, say
from fedapp.errors import ConfigError, FedappError, did_you_mean_path
from fedapp.home import RUNS, open_private
from fedapp.report.summary import print_warning
from fedapp.runs.engines import SIMULATED
from fedapp.settings import parse_overrides

if TYPE_CHECKING:
    from fedapp.runs.predict import Predicted

VERBOSE = "verbose.log"
NOTHING_WRITTEN = "no predictions were written; the same command begins anew"


def predict(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[
        str,
        typer.Option(
            help="Table with the columns of the model; of parties with different columns a table "
            "each: bank=a.csv,insurer=b.csv."
        ),
    ] = "",
    output: Annotated[str, typer.Option(help="CSV or Parquet file to write.")] = "",
    id_column: Annotated[str, typer.Option("--id", help="Column that names the rows.")] = "",
    label: Annotated[
        str,
        typer.Option(
            help="Column to score the predictions by, where the table has it; by default the run's."
        ),
    ] = "",
    config: Overrides = None,
    engine: Annotated[
        str,
        typer.Option(
            help="For a model whose parts lie at several parties: local, simulation, or a "
            "SuperLink's name; there every site has a table of its own (predict-data), so that "
            "--data, --id and --output must be omitted."
        ),
    ] = "local",
    inference: Annotated[
        str,
        typer.Option(help="For such a model: interactive, one-round, or eini (encrypted)."),
    ] = "interactive",
    explain: Annotated[
        str,
        typer.Option(
            metavar="ID,ID...",
            help="For such a model: rows that every party explains on its own disk, as far as it "
            "may see. Their ids pass the coordinator.",
        ),
    ] = "",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help=f"Write the ids of rows without a match into RUN_DIR/{VERBOSE}."
        ),
    ] = False,
) -> None:
    """Predict the rows of a table with a run's model."""
    from fedapp.runs.predict import parts_of, predict_table

    if not (model := run_dir / "model.json").is_file():
        rule = "of a run that has finished; failure.json says why one has not"
        raise ConfigError(
            f"model must be a file {rule}, got {model}{did_you_mean_path(run_dir, RUNS)}"
        )
    parts, verbose_folder = parts_of(run_dir), run_dir if verbose else None
    _check_tables(
        engine,
        bool(parts),
        {"--data": data, "--output": output, "--id": id_column, "--label": label},
    )
    if parts:
        overrides = parse_overrides(config or [])
        if engine in SIMULATED:
            overrides = {"data": data, "id": id_column, **overrides}
            overrides |= {"label": label} if label else {}
        overrides["strategy"] = inference
        if explain:
            overrides["explain"] = explain
        _predict_together(run_dir, parts, overrides, output, engine, verbose_folder)
        return
    for name, given in {"--explain": ["ids"] if explain else [], "-c": config or []}.items():
        if given:
            rule = "must be omitted for a model that is whole in the run's folder"
            raise ConfigError(f"{name} {rule}, got {', '.join(given)}")
    _show(predict_table(run_dir, data, id_column, Path(output), label), output, verbose_folder)


def _check_tables(engine: str, has_parts: bool, given: Mapping[str, str]) -> None:
    if engine not in SIMULATED:
        if not has_parts:
            raise ConfigError(
                f"engine must be local for a model that is whole in the run's folder, got {engine}"
            )
        for name, value in given.items():
            if value:
                rule = f"must be omitted with --engine {engine}"
                where = "the sites' node configs name the tables (predict-data)"
                raise ConfigError(f"{name} {rule}: {where}, got {value}")
        return
    for name in ("--data", "--output"):
        if not given[name]:
            raise ConfigError(f"{name} must name a file, got none")


def _predict_together(
    run_dir: Path,
    parts: Mapping[str, Any],
    overrides: Mapping[str, Any],
    output: str,
    engine: str,
    verbose_folder: Path | None,
) -> None:
    """Let the parties predict; the active one writes the predictions."""
    from fedapp.home import display_path, home
    from fedapp.runs.session import predict_jointly, settings_to_predict

    settings = settings_to_predict(run_dir, parts, overrides, output, engine)
    follower = new_follower()
    try:
        with interruptible(lambda: NOTHING_WRITTEN), follower.alive():
            result = predict_jointly(settings, parts, output, engine, follower)
    except FedappError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        raise
    for explained in list(result.explained.values())[:1]:
        if missing := explained["not_among_the_rows"]:
            _say_of(
                missing, f"{len(missing):,} to be explained are not among the rows", verbose_folder
            )
    where = (
        display_path(home() / "sites") if result.predicted else "home/sites of its site's folder"
    )
    if settings.explain:
        console.print(f"Each party's explanation.txt is in {where}.", soft_wrap=True)
    if result.predicted is None:
        console.print(f"The predictions are at {parts['active']}, in {where}.", soft_wrap=True)
        return
    _show(result.predicted, output, verbose_folder)


def _show(predicted: Predicted, output: str, folder: Path | None) -> None:
    """Print the tables read, the number of rows written, and their scores."""
    from fedapp.data.predictions import unmatched_note
    from fedapp.report.summary import at_threshold, score_table, score_text

    for line in predicted.warnings:
        print_warning(console, line)
    if predicted.tables:
        read = []
        for name, table in predicted.tables.items():
            size = f"({table['rows']:,} rows, {table['columns']:,} columns)"
            read.append(f"{name} read {' '.join(filter(None, (table['source'], size)))}")
        say(", ".join(read))
    n_rows, unmatched, scores = predicted.n_rows, predicted.unmatched, predicted.scores
    say(f"{n_rows} rows written to {output}")
    if unmatched:
        _say_of(unmatched, unmatched_note(len(unmatched), n_rows + len(unmatched)), folder)
    if predicted.note:
        say(predicted.note)
    if scores:
        console.print(score_table([("federated", "predicted", scores)]))
    if "threshold" in scores:
        threshold = score_text(scores["threshold"])
        say(f"at the run's threshold, {threshold}: {at_threshold(scores)}")


def _say_of(ids: Sequence[str], text: str, folder: Path | None) -> None:
    """Print a line on rows; their ids are only written to a private file in ``folder``."""
    if folder:
        with open_private(folder / VERBOSE, "a") as file:
            file.write(f"{text}: {', '.join(ids)}\n")
    say(f"{text}: {folder / VERBOSE} has their ids" if folder else f"{text} (--verbose: which)")
