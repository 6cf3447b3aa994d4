"""Commands that use a run's model: ``fedapp predict``, ``fedapp export``, ``fedapp serve``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedapp.arguments import parse_overrides
from fedapp.commands.common import (
    AsJson,
    Id,
    Overrides,
    RunDir,
    console,
    interruptible,
    new_follower,
    print_json,
    say,
)
from fedapp.errors import ConfigError, FedappError, check_package, did_you_mean_path
from fedapp.home import RUNS, open_private, write_atomically
from fedapp.report.summary import print_warning
from fedapp.superlinks import SIMULATED

if TYPE_CHECKING:
    from fedapp.runs.predict import Predicted
    from fedapp.trees.divided import DividedModel

VERBOSE = "verbose.log"
SUFFIXES = {"onnx": "model.onnx", "xgboost": "model.xgb.json", "sklearn": "model.joblib"}
NOTHING_WRITTEN = "no predictions were written; run the same command again"


def predict(
    run_dir: RunDir,
    data: Annotated[
        str,
        typer.Option(
            help="Table with the columns of the model; of parties with different columns a table "
            "each: bank=a.csv,insurer=b.csv."
        ),
    ] = "",
    output: Annotated[str, typer.Option(help="CSV or Parquet file to write.")] = "",
    id_column: Id = "",
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
            help="For a divided model: local, simulation, or a "
            "SuperLink's name. There each site's node config names its table (predict-data): omit "
            "--data, --id and --output."
        ),
    ] = "local",
    inference: Annotated[
        str, typer.Option(help="For a divided model: interactive, one-round, or eini (encrypted).")
    ] = "interactive",
    explain: Annotated[
        str,
        typer.Option(
            metavar="ID,ID...",
            help="For a divided model: rows to explain. Each party writes what it may see to its "
            "disk; the ids pass through the coordinator.",
        ),
    ] = "",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help=f"Write the ids of rows without a match into RUN_DIR/{VERBOSE}."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a table with a run's model."""
    from fedapp.runs.predict import parts_of

    if not (model := run_dir / "model.json").is_file():
        rule = "of a run that has finished; failure.json says why one has not"
        raise ConfigError(
            f"model must be a file {rule}, got {model}{did_you_mean_path(run_dir, RUNS)}"
        )
    parts = parts_of(run_dir)
    verbose_folder = run_dir if verbose else None
    tables = {"--data": data, "--output": output, "--id": id_column, "--label": label}
    _check_tables(engine, bool(parts), tables)
    if parts:
        overrides = parse_overrides(config or [])
        if engine in SIMULATED:
            overrides = {"data": data, "id": id_column, **overrides}
            overrides |= {"label": label} if label else {}
        overrides["strategy"] = inference
        if explain:
            overrides["explain"] = explain
        predicted = _predict_jointly(run_dir, parts, overrides, output, engine, verbose_folder)
    else:
        predicted = _predict_alone(run_dir, tables, explain, config or [])
    if predicted:
        _show(predicted, output, verbose_folder, as_json)
    if as_json:
        print_json(**_fields(predicted, output))


def _predict_alone(
    run_dir: Path, tables: Mapping[str, str], explain: str, config: Sequence[str]
) -> Predicted:
    """Predict with a model that is whole in the run's folder."""
    from fedapp.runs.predict import predict_table

    for name, values in {"--explain": ["ids"] if explain else [], "-c": config}.items():
        if values:
            rule = "must be omitted for a model that is whole in the run's folder"
            raise ConfigError(f"{name} {rule}, got {', '.join(values)}")
    output = Path(tables["--output"])
    return predict_table(run_dir, tables["--data"], tables["--id"], output, tables["--label"])


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


def _predict_jointly(
    run_dir: Path,
    parts: DividedModel,
    overrides: Mapping[str, Any],
    output: str,
    engine: str,
    verbose_folder: Path | None,
) -> Predicted | None:
    """Let the parties predict; the active one writes the predictions, maybe on another machine."""
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
            text = f"{len(missing):,} to be explained are not among the rows"
            _say_rows(missing, text, verbose_folder)
    is_here = result.predicted is not None
    where = display_path(home() / "sites") if is_here else "home/sites of its site's folder"
    if settings.explain:
        console.print(f"Each party's explanation.txt is in {where}.", soft_wrap=True)
    if result.predicted is None:
        console.print(f"The predictions are at {parts.active}, in {where}.", soft_wrap=True)
    return result.predicted


def _fields(predicted: Predicted | None, output: str) -> dict[str, Any]:
    """A prediction in JSON, without ids; nothing if it is on another machine."""
    if predicted is None:
        return {"output": None}
    counts = {"rows": predicted.n_rows, "unmatched_rows": len(predicted.unmatched)}
    facts = {"tables": predicted.tables, "scores": predicted.scores, "note": predicted.note}
    return {"output": output, **counts, **facts, "warnings": predicted.warnings}


def _show(predicted: Predicted, output: str, folder: Path | None, as_json: bool) -> None:
    """Print the tables read, the number of rows written, and their scores."""
    from fedapp.data.predictions import unmatched_note
    from fedapp.report.summary import at_threshold, score_table, threshold_text

    if predicted.tables:
        read = []
        for name, table in predicted.tables.items():
            size = f"({table['rows']:,} rows, {table['columns']:,} columns)"
            read.append(f"{name} read {' '.join(filter(None, (table['source'], size)))}")
        say(", ".join(read))
    n_rows, unmatched, scores = predicted.n_rows, predicted.unmatched, predicted.scores
    say(f"{n_rows} rows written to {output}")
    if unmatched:
        _say_rows(unmatched, unmatched_note(len(unmatched), n_rows + len(unmatched)), folder)
    if predicted.note:
        say(predicted.note)
    if scores and not as_json:
        console.print(score_table([("federated", "predicted", scores)]))
    if "threshold" in scores:
        threshold = threshold_text(scores["threshold"])
        say(f"at the run's threshold, {threshold}: {at_threshold(scores)}")
    for line in predicted.warnings:
        print_warning(console, line)


def _say_rows(ids: Sequence[str], text: str, folder: Path | None) -> None:
    """Print a line on rows; their ids are only written to a private file in ``folder``."""
    if folder:
        with open_private(folder / VERBOSE, "a") as file:
            file.write(f"{text}: {', '.join(ids)}\n")
    say(f"{text}: {folder / VERBOSE} has their ids" if folder else f"{text} (--verbose: which)")


def export(
    run_dir: RunDir,
    to: Annotated[str, typer.Option(help="onnx, xgboost, or sklearn (forests).")] = "onnx",
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default in the run's folder.")
    ] = None,
) -> None:
    """Write a run's model for other runtimes: as ONNX, for stock XGBoost, or scikit-learn."""
    from fedapp.api import load

    if to not in SUFFIXES:
        raise ConfigError(f"--to must be one of {', '.join(SUFFIXES)}, got {to!r}")
    run = load(run_dir)
    file = output or run.path / SUFFIXES[to]
    if to == "onnx":
        write_atomically(file, run.to_onnx())
    elif to == "sklearn":
        from joblib import dump

        with open_private(file, "wb") as opened:
            dump(run.to_sklearn(), opened)
    else:
        run.to_xgboost()
        if file.resolve() != run.path / SUFFIXES[to]:
            write_atomically(file, (run.path / SUFFIXES[to]).read_bytes())
    note = ": without the calibration" if run.summary.get("calibration") else ""
    console.print(f"{file}{note}", soft_wrap=True, highlight=False)


def activate(
    run_dir: RunDir,
    engine: Annotated[str, typer.Option(help="A SuperLink's name.")],
    service: Annotated[
        str,
        typer.Option(help="Name by which callers know it; by default that of the run's folder."),
    ] = "",
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Match new ids only; other rows stay as they are.")
    ] = False,
    none: Annotated[
        bool, typer.Option("--none", help="End: the standing processes answer by no version.")
    ] = False,
    config: Overrides = None,
) -> None:
    """Let the sites of a divided model score by it, each by its fedapp standing.

    They match ids once, agree on pseudonyms and addresses, and switch together. An older run's
    model is active again once it is activated again.
    """
    from fedapp.runs.predict import parts_of
    from fedapp.runs.session import activate

    if (parts := parts_of(run_dir)) is None:
        rule = "must be a run whose model is divided among the sites (fedapp serve has whole ones)"
        raise ConfigError(f"run {rule}, got {run_dir}{did_you_mean_path(run_dir, RUNS)}")
    about = {"service": service or run_dir.resolve().name, "refresh": refresh, "none": none}
    overrides = {f"standing.{name}": value for name, value in about.items()}
    follower = new_follower()
    with interruptible(lambda: "the sites answer by the version that they had"), follower.alive():
        n_rows = activate(
            run_dir, parts, parse_overrides(config or []) | overrides, engine, follower
        )
    if none:
        say("The sites answer by no version any more.")
    else:
        rows = "Rows" if n_rows is None else f"{n_rows:,} rows"
        say(f"{rows} can be scored at {parts.active}, by its fedapp standing.")


def standing(
    config: Annotated[Path, typer.Option(help="The site's node config, a TOML file.")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where it listens for the other sites; by default on the port of "
            "standing-address in the node config, on all addresses.",
        ),
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            help="Port for callers, on the loopback; by default standing-port of the node config, "
            "8090.",
            show_default=False,
        ),
    ] = 0,
) -> None:
    """Answer the other sites' questions about rows, and score rows where the labels are.

    POST /score and the Open Inference Protocol, GET /health, /metrics; fedapp activate begins it.
    """
    for package in ("fastapi", "uvicorn", "httpx", "prometheus-client"):
        check_package(package, "for standing scores", "serve")
    from fedapp.serve.standing import stand

    if not config.is_file():
        raise ConfigError(f"config must be the site's node config, got {config}, which is none")
    stand(config, listen, port, say)


def serve(
    run_dir: RunDir,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind to; 0: a free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests may ask for beside localhost and --host, as a proxy passes it "
            "on; may be repeated."
        ),
    ] = None,
    most_rows: Annotated[int, typer.Option(help="Rows of one request.", min=1)] = 10_000,
    most_bytes: Annotated[int, typer.Option(help="Bytes of one request.", min=1)] = 16_000_000,
) -> None:
    """Score rows over HTTP: POST /score, the Open Inference Protocol at /v2.

    The sites of a divided model score it by fedapp activate and fedapp standing.
    """
    for package in ("fastapi", "uvicorn"):
        check_package(package, "to serve", "serve")
    import uvicorn

    from fedapp.serve.app import make_app
    from fedapp.serve.http import LOOPBACK
    from fedapp.serve.scorer import open_scorer

    scorer = open_scorer(run_dir)
    hosts = dict.fromkeys(name.lower() for name in (*LOOPBACK, host, *(allow_host or ())))
    app = make_app(scorer, most_rows, most_bytes, tuple(hosts))
    if host not in LOOPBACK:
        console.print(
            f"[yellow]![/] {host} can be reached from other machines, and nobody is asked who they "
            "are: put a proxy with authentication and TLS in front",
            soft_wrap=True,
        )
    with interruptible(lambda: "the server has stopped"):
        uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)
