"""Commands that use a run's model: ``fedapp predict``, ``fedapp export``, ``fedapp serve``."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click import get_current_context
from click.core import ParameterSource
from typer import Argument, Option

from fedapp.arguments import parse_overrides
from fedapp.commands.common import (
    AsJson,
    Id,
    Overrides,
    RunDir,
    console,
    followed,
    if_interrupted,
    node_config,
    port_option,
    print_json,
    say,
    site_option,
)
from fedapp.errors import ConfigError, FedappError, check_package, listed
from fedapp.home import Kind, begins_with, check_output, write_atomically
from fedapp.process import listening_socket, start_log
from fedapp.records.document import to_document
from fedapp.report.summary import print_warning
from fedapp.superlinks import SIMULATED

if TYPE_CHECKING:
    from fedapp.runs.predict import Predicted
    from fedapp.trees.divided import DividedModel

log = logging.getLogger("fedapp")
FILES = {"onnx": "model.onnx", "xgboost": "model.xgb.json", "sklearn": "model.joblib"}
FILES["curves"] = "curves.json"
KINDS = {  # by their first bytes; a model of scikit-learn has none of fedapp's
    "onnx": Kind("an ONNX model", (".onnx",), begins_with(b"\x12\x06fedapp", within=64)),
    "xgboost": Kind("a model", (".json",)),
    "sklearn": Kind("a model", (".joblib", ".pkl", ".pickle")),
}
NOTHING_WRITTEN = "no predictions were written; run the same command again"


def predict(
    run_dir: RunDir,
    data: Annotated[
        str,
        Option(
            help="Table with the columns of the model; of parties with different columns a table "
            "each: bank=a.csv,insurer=b.csv."
        ),
    ] = "",
    output: Annotated[str, Option(help="CSV or Parquet file to write.")] = "",
    id_column: Id = "",
    label: Annotated[
        str,
        Option(
            help="Column to score the predictions by, where the table has it; by default the run's."
        ),
    ] = "",
    config: Overrides = None,
    engine: Annotated[
        str,
        Option(
            help="For a divided model: local, simulation, or a "
            "SuperLink's name. There each site's node config names its table (predict-data): omit "
            "--data, --id and --output."
        ),
    ] = "local",
    inference: Annotated[
        str, Option(help="For a divided model: interactive, one-round, or eini (encrypted).")
    ] = "interactive",
    explain: Annotated[
        str,
        Option(
            metavar="ID,ID...",
            help="Rows to explain. For a whole boosted model, SHAP values of these or all, in a "
            "file beside --output. For a divided one each party writes what it may see to its "
            "disk; the ids pass through the coordinator.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a table with a run's model."""
    from fedapp.runs.predict import parts_of

    if not (model := run_dir / "model.json").is_file():
        rule = "of a run that has finished; failure.json says why one has not"
        raise ConfigError(f"model must be a file {rule}, got {model}")
    parts = parts_of(run_dir)
    tables = {"--data": data, "--output": output, "--id": id_column, "--label": label}
    _check_tables(engine, bool(parts), tables)
    if parts:
        fixed = {"strategy": inference}
        if engine in SIMULATED:
            fixed |= {"data": data, "id": id_column, **({"label": label} if label else {})}
        if explain:
            fixed["explain"] = explain
        overrides = parse_overrides(config or [])
        predicted = _predict_jointly(run_dir, parts, overrides, fixed, output, engine)
    else:
        predicted = _predict_alone(run_dir, tables, explain, config or [])
    if predicted:
        _show(predicted, output, as_json)
    if as_json:
        print_json("predict", **_fields(predicted, output))


def _predict_alone(
    run_dir: Path, tables: Mapping[str, str], explain: str, config: Sequence[str]
) -> Predicted:
    """Predict with a model that is whole in the run's folder."""
    from fedapp.runs.predict import (
        check_predictions,
        predicted_rows,
        write_explanation,
        write_rows,
    )
    from fedapp.runs.run import Run

    if config:
        rule = "must be omitted for a model that is whole in the run's folder"
        raise ConfigError(f"-c {rule}, got {', '.join(config)}")
    output, id_column = Path(tables["--output"]), tables["--id"]
    file = output.with_stem(f"{output.stem}-explanation")
    for path in (output, file) if explain else (output,):
        check_predictions(path, tables["--data"])
    rows = predicted_rows(run_dir, tables["--data"], id_column, tables["--label"])
    if explain:
        ids = [] if explain == "all" else listed(explain)
        n_rows = write_explanation(Run(run_dir).to_xgboost(), rows, id_column, ids, file)
        say(f"SHAP values of {n_rows:,} rows written to {file}")
    return write_rows(run_dir, rows, id_column, output)


def _check_tables(engine: str, has_parts: bool, given: Mapping[str, str]) -> None:
    if engine not in SIMULATED:
        if not has_parts:
            rule = "must be local for a model that is whole in the run's folder"
            raise ConfigError(f"engine {rule}, got {engine}")
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
    fixed: Mapping[str, Any],
    output: str,
    engine: str,
) -> Predicted | None:
    """Let the parties predict; the active one writes the predictions, maybe on another machine."""
    from fedapp.home import display_path, home
    from fedapp.runs.session import predict_jointly, settings_to_predict

    settings = settings_to_predict(run_dir, parts, overrides, fixed, output, engine)
    try:
        with followed(lambda: NOTHING_WRITTEN) as follower:
            predicted, explained = predict_jointly(settings, parts, output, engine, follower)
    except FedappError as error:
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        raise
    for of_party in list(explained.values())[:1]:
        if missing := of_party["not_among_the_rows"]:
            say(f"{len(missing):,} to be explained are not among the rows")
    where = display_path(home() / "sites") if predicted else "home/sites of its site's folder"
    if settings.explain:
        console.print(f"Each party's explanation.json is in {where}.", soft_wrap=True)
    if predicted is None:
        console.print(f"The predictions are at {parts.active}, in {where}.", soft_wrap=True)
    return predicted


def _fields(predicted: Predicted | None, output: str) -> dict[str, Any]:
    """A prediction in JSON, without ids; nothing if it is on another machine."""
    if predicted is None:
        return {"output": None}
    counts = {"rows": predicted.n_rows, "unmatched_rows": len(predicted.unmatched)}
    facts = {"tables": predicted.tables, "scores": predicted.scores, "note": predicted.note}
    return {"output": output, **counts, **facts, "warnings": predicted.warnings}


def _show(predicted: Predicted, output: str, as_json: bool) -> None:
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
        say(unmatched_note(len(unmatched), n_rows + len(unmatched)))
    if predicted.note:
        say(predicted.note)
    if scores and not as_json:
        console.print(score_table([(("federated", "predicted"), scores)]))
    if "threshold" in scores:
        threshold = threshold_text(scores["threshold"])
        say(f"at the run's threshold, {threshold}: {at_threshold(scores)}")
    for line in predicted.warnings:
        print_warning(console, line)


def export(
    run_dir: RunDir,
    to: Annotated[
        str, Option(help="onnx, xgboost, sklearn (forests), or curves (additive models).")
    ] = "onnx",
    output: Annotated[
        Path | None,
        Option(help="File to write, by default in the run's folder; with --edited a new folder."),
    ] = None,
    edited: Annotated[
        Path | None,
        Option(metavar="CURVES.json", help="Edited curves: write the run with their model."),
    ] = None,
    edited_by: Annotated[str, Option(help="Who has edited them; the model says so.")] = "",
) -> None:
    """Write a run's model for other runtimes: as ONNX, for stock XGBoost, or scikit-learn.

    An additive model may be written as curves, edited, and read again.
    """
    from fedapp.api import load

    if edited:
        from fedapp.runs.run import write_edited

        if not output:
            raise ConfigError("--output must name a new folder with --edited, got none")
        write_edited(load(run_dir), edited, edited_by, output)
        console.print(f"{output}", soft_wrap=True, highlight=False)
        return
    if to not in FILES:
        raise ConfigError(f"--to must be one of {', '.join(FILES)}, got {to!r}")
    run = load(run_dir)
    file = output or run.path / FILES[to]
    if output and to in KINDS:
        check_output(output, KINDS[to])
    if to == "onnx":
        content = run.to_onnx()
    elif to == "sklearn":
        from joblib import dump

        dump(run.to_sklearn(), buffer := BytesIO())
        content = buffer.getvalue()
    elif to == "curves":
        from fedapp.trees.curves import boosted
        from fedapp.trees.edited import Curves

        document = to_document(Curves.of(boosted(run.model), run.summary["model_id"]))
        content = written = (json.dumps(document, indent=1) + "\n").encode()
        unedited = Kind("unedited curves", (".json",), lambda path: path.read_bytes() == written)
        check_output(file, unedited)
    else:
        run.to_xgboost()
        content = (run.path / FILES[to]).read_bytes()
    write_atomically(file.resolve(), content)
    note = ": without the calibration" if run.summary.get("calibration") else ""
    console.print(f"{file}{note}", soft_wrap=True, highlight=False)


# Options that only one way of fedapp serve reads.
OF_WAY = {
    **dict.fromkeys(("host", "allow_host", "most_rows", "most_bytes"), "RUN_DIR"),
    "listen": "--site FOLDER",
    "runs": "--metrics",
}


def serve(
    run_dir: Annotated[Path | None, Argument(help="Folder of a run whose model is whole.")] = None,
    site: Annotated[
        Path | None,
        site_option("Score by divided models, at this site: its folder, or a node config in it."),
    ] = None,
    metrics: Annotated[
        bool, Option("--metrics", help="Count for Prometheus, of this $FEDAPP_HOME or --site.")
    ] = False,
    host: Annotated[str, Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        port_option(
            "Port to bind to; by default 8000, at a site standing-port of its node config, for "
            "--metrics 9464. The last two are on the loopback. With RUN_DIR, 0 for a free one.",
            least=0,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(
            help="Name that requests may ask for beside localhost and --host, as a proxy passes it "
            "on; may be repeated."
        ),
    ] = None,
    most_rows: Annotated[int, Option(help="Rows of one request.", min=1)] = 10_000,
    most_bytes: Annotated[int, Option(help="Bytes of one request.", min=1)] = 16_000_000,
    listen: Annotated[
        str,
        Option(
            metavar="HOST:PORT",
            help="Where a site listens for the others; by default on the port of "
            "standing-address in its node config, on all addresses.",
        ),
    ] = "",
    runs: Annotated[
        list[Path] | None,
        Option(help="Folder of runs to count beside $FEDAPP_HOME/runs; may be repeated."),
    ] = None,
) -> None:
    """Score rows over HTTP: POST /score and the Open Inference Protocol; or GET /metrics.

    A site of a divided model answers the other sites' questions about rows, and scores rows where
    the labels are; fedapp federation activate begins it. The metrics are what the files of a
    coordinator or a site count: names of runs and parties, counts and sizes, shown to everyone on
    this machine; no row, label, id or key.
    """
    ways = {"--metrics": metrics, "--site FOLDER": site and not metrics, "RUN_DIR": run_dir}
    chosen = [way for way, value in ways.items() if value]
    if len(chosen) != 1:
        got = " and ".join(chosen) or "none"
        raise ConfigError(f"serve must be given RUN_DIR, --site FOLDER or --metrics, got {got}")
    for name, way in OF_WAY.items():
        source = get_current_context().get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE and way not in chosen:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be omitted with {chosen[0]}: {way} reads it")
    if port == 0 and not run_dir:
        raise ConfigError(f"--port must be 1 to 65535 with {chosen[0]}, got 0")
    if metrics:
        _export_metrics(9464 if port is None else port, runs or ())
    elif site:
        _serve_site(node_config(site), listen, port or 0)
    elif run_dir:
        limits = most_rows, most_bytes
        _serve_run(run_dir, host, 8000 if port is None else port, allow_host or (), limits)


def _export_metrics(port: int, runs: Sequence[Path]) -> None:
    check_package("prometheus-client", "for fedapp serve --metrics", "metrics")
    from prometheus_client import start_http_server

    from fedapp.deploy.exporter import registry_of_folders
    from fedapp.home import home

    listening_socket("127.0.0.1", port, "--port names another").close()
    if_interrupted.set(lambda: "the exporter has stopped")
    start_http_server(port, "127.0.0.1", registry_of_folders(runs))
    start_log("metrics")
    log.info("metrics of %s at http://127.0.0.1:%d/metrics", home(), port)
    threading.Event().wait()


def _serve_site(config: Path, listen: str, port: int) -> None:
    for package in ("fastapi", "uvicorn", "httpx", "prometheus-client"):
        check_package(package, "for standing scores", "serve")
    from fedapp.serve.standing import stand

    if_interrupted.set(lambda: "the server has stopped")
    stand(config, listen, port, say)


def _serve_run(
    run_dir: Path, host: str, port: int, allowed: Sequence[str], limits: tuple[int, int]
) -> None:
    for package in ("fastapi", "uvicorn"):
        check_package(package, "to serve", "serve")
    import uvicorn

    from fedapp.serve.app import make_app
    from fedapp.serve.http import LOOPBACK
    from fedapp.serve.scorer import open_scorer

    scorer = open_scorer(run_dir)
    listening_socket(host, port, "--port names another, and 0 a free one").close()
    hosts = dict.fromkeys(name.lower() for name in (*LOOPBACK, host, *allowed))
    app = make_app(scorer, *limits, tuple(hosts))
    if host not in LOOPBACK:
        console.print(
            f"[yellow]![/] {host} can be reached from other machines, and nobody is asked who they "
            "are: put a proxy with authentication and TLS in front",
            soft_wrap=True,
        )
    if_interrupted.set(lambda: "the server has stopped")
    uvicorn.run(app, host=host, port=port, log_level="info", access_log=False, use_colors=False)
