"""The ``fedapp`` command."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedapp.config import Settings, load_settings, parse_overrides
from fedapp.errors import ConfigError, FedappError, RunFailedError
from fedapp.run_folder import RunFolder, new_run_dir, resumed_settings

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tree models trained across organisations that may not pool their rows.",
)
SIMULATED = {"local", "simulation"}
# Tables are cut to the width of a terminal; a file or a pipe has none.
console = Console() if sys.stdout.isatty() else Console(width=120)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="KEY=VALUE", help="Override a setting; may be repeated."
    ),
]


@cli.command()
def run(
    strategy: Annotated[
        str,
        typer.Argument(
            help="pax, fedxgbllr, bagging, cyclic, fedavg-linear, secureboost or federated-forest."
        ),
    ],
    config: Overrides = None,
    engine: Annotated[
        str,
        typer.Option(help="local (this process), simulation (Flower's), or a SuperLink's name."),
    ] = "simulation",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also train on pooled rows, and each party alone.")
    ] = False,
) -> None:
    """Train a model and write the run's folder."""
    from fedapp.server_app import load_strategy, write_report
    from strategies.inference import InferenceStrategy

    settings = load_settings({**parse_overrides(config or []), "strategy": strategy})
    settings = resumed_settings(settings)
    strategy_class = load_strategy(settings.strategy)
    if issubclass(strategy_class, InferenceStrategy):
        rule = f"must be one that trains (fedapp predict --inference {settings.strategy} predicts)"
        raise ConfigError(f"strategy {rule}, got {settings.strategy!r}")
    strategy_class.own_settings(settings)
    if baselines and engine not in SIMULATED:
        raise ConfigError(f"--baselines must have all rows in one place, got --engine {engine}")
    settings = settings.model_copy(update={"run_dir": _run_dir(settings, engine)})
    with followed(settings):
        folder = _engine(engine)(settings)
    if not (folder.path / "summary.json").exists():
        console.print("The run has finished; its folder lies where the ServerApp runs.")
        return
    if baselines:
        _add_baselines(folder, settings)
    write_report(folder)
    _show(folder)


def _run_dir(settings: Settings, engine: str) -> str:
    """Where the run is written; a SuperLink elsewhere chooses a place of its own."""
    if not settings.run_dir and engine not in SIMULATED:
        return ""
    run_dir = Path(settings.run_dir or new_run_dir(settings.strategy, Path("runs"))).resolve()
    if not settings.resume:
        RunFolder(run_dir).check_new()
    run_dir.mkdir(parents=True, exist_ok=True)
    return str(run_dir)


def _engine(name: str) -> Callable[[Settings], RunFolder]:
    """What carries the messages."""
    from simulations import engines

    if name == "local":
        return engines.run_local
    if name == "simulation":
        return engines.run_simulation
    return lambda settings: engines.run_superlink(settings, name)


@contextmanager
def followed(settings: Settings) -> Iterator[None]:
    """Show progress while the block runs."""
    from fedapp.metrics import default_metric
    from fedapp.report.progress import follow
    from fedapp.server_app import load_strategy

    ended = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=(
            RunFolder(Path(settings.run_dir)).rounds,
            load_strategy(settings.strategy).most_rounds(settings),
            default_metric(settings.objective),
            console,
            lambda: not ended.is_set(),
        ),
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _add_baselines(folder: RunFolder, settings: Settings) -> None:
    """Write the baselines into the summary."""
    from simulations.baselines import run_baselines

    summary = json.loads((folder.path / "summary.json").read_text())
    folder.write_json("summary.json", {**summary, "baselines": run_baselines(settings)})


def _show(folder: RunFolder) -> None:
    """Print a run's summary and where it lies."""
    from fedapp.report.summary import print_summary, read_run

    print_summary(read_run(folder.path).summary, console, folder.path)


@cli.command()
def compare(
    strategies: Annotated[list[str], typer.Argument(help="Two methods or more.")],
    config: Overrides = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or simulation.")] = "local",
    output: Annotated[
        Path, typer.Option(help="Folder of the runs; finished ones are not run again.")
    ] = Path("runs/compare"),
) -> None:
    """Run several methods on the same rows, and set them side by side."""
    from fedapp.report.tradeoff import score_table, tradeoff_page
    from fedapp.server_app import load_strategy
    from simulations.compare import compare as compare_all

    overrides = parse_overrides(config or [])
    for strategy in strategies:
        settings = load_settings({**overrides, "strategy": strategy})
        load_strategy(strategy).own_settings(settings)
    output.mkdir(parents=True, exist_ok=True)
    found = compare_all(strategies, overrides, seeds, output, _engine(engine), console.print)
    console.print(score_table(found.lines, found.metric))
    page = tradeoff_page(found.lines, found.metric, settings.data, len(found.seeds))
    RunFolder(output).write("comparison.html", page)
    console.print(f"{output / 'comparison.html'}", soft_wrap=True)


@cli.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
) -> None:
    """Write an HTML page about one run, or one that compares several."""
    from fedapp.report.page import write_report

    console.print(f"{write_report(run_dirs, output)}", soft_wrap=True)


@cli.command()
def predict(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    data: Annotated[str, typer.Option(help="Table with the columns of the model.")] = "",
    output: Annotated[str, typer.Option(help="CSV or Parquet file to write.")] = "",
    id_column: Annotated[str, typer.Option("--id", help="Column that names the rows.")] = "",
    config: Overrides = None,
    engine: Annotated[
        str,
        typer.Option(
            help="For a model whose parts lie at several parties: local, simulation, or a "
            "SuperLink's name; there every site has a table of its own (predict-data), so that "
            "--data, --id and --output are left out."
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
) -> None:
    """Predict the rows of a table with a run's model."""
    from fedapp.predict import parts_of, predict_table

    if not (model := run_dir / "model.json").is_file():
        rule = "of a run that has finished; failure.json says why one has not"
        raise ConfigError(f"model must be a file {rule}, got {model}")
    parts = parts_of(run_dir)
    _check_tables(engine, bool(parts), {"--data": data, "--output": output, "--id": id_column})
    if parts:
        overrides = parse_overrides(config or [])
        if engine in SIMULATED:
            overrides = {"data": data, "id": id_column, **overrides}
        overrides["strategy"] = inference
        if explain:
            overrides["explain"] = explain
        _predict_together(run_dir, parts, overrides, output, engine)
        return
    if explain:
        rule = "must be left out for a model that lies whole in the run's folder"
        raise ConfigError(f"--explain {rule}, got {explain}")
    n_rows = predict_table(run_dir, data, id_column, Path(output))
    console.print(f"{n_rows} rows written to {output}", soft_wrap=True)


def _check_tables(engine: str, has_parts: bool, given: Mapping[str, str]) -> None:
    """Hold that a table is named where this command reads one, and nowhere else.

    Raises
    ------
    ConfigError : names the option.
    """
    if engine not in SIMULATED:
        if not has_parts:
            raise ConfigError(
                f"engine must be local for a model that lies whole in the run's folder, "
                f"got {engine}"
            )
        for name, value in given.items():
            if value:
                rule = f"must be left out with --engine {engine}"
                where = "the sites' node configs name the tables (predict-data)"
                raise ConfigError(f"{name} {rule}: {where}, got {value}")
        return
    for name in ("--data", "--output"):
        if not given[name]:
            raise ConfigError(f"{name} must name a file, got none")


def _predict_together(
    run_dir: Path, parts: Mapping[str, Any], overrides: Mapping[str, Any], output: str, engine: str
) -> None:
    """Have the parties predict; the predictions are written at the active one."""
    from fedapp.data.predictions import check_suffix
    from fedapp.home import home
    from fedapp.server_app import all_strategies
    from strategies.inference import InferenceStrategy

    known = {
        name: strategy
        for name, strategy in all_strategies().items()
        if issubclass(strategy, InferenceStrategy)
    }
    if overrides["strategy"] not in known:
        got = overrides["strategy"]
        raise ConfigError(f"inference must be one of {', '.join(known)}, got {got!r}")
    if output:
        check_suffix(Path(output))
    trained = tomllib.loads((run_dir / "config.toml").read_text())
    names = ("parties", "partition", "columns", "align", "align-most-rows", "seed")
    given = {name: trained[name] for name in names}
    given |= {"model": parts["model_id"], **overrides}
    if output:
        given["output"] = Path(output).suffix
    settings = load_settings(given)
    known[settings.strategy].own_settings(settings)
    settings = settings.model_copy(update={"run_dir": _run_dir(settings, engine)})
    folder = _engine(engine)(settings)
    if settings.explain:
        console.print("Each party's explanation.txt lies in its folder under $FEDAPP_HOME/sites.")
    if engine not in SIMULATED:
        console.print(f"The predictions lie at {parts['active']}, under its $FEDAPP_HOME/sites.")
        return
    summary = json.loads((folder.path / "summary.json").read_text())
    site = home() / "sites" / parts["active"] / summary["model_id"]
    shutil.copyfile(site / f"predictions{settings.output}", output)
    n_rows = summary["matched_rows"]["predicted"]
    console.print(f"{n_rows} rows written to {output}", soft_wrap=True)


@cli.command()
def key(name: Annotated[str, typer.Argument(help="The site's name in its node config.")]) -> None:
    """Print the fingerprint of this site's key, for the others' node configs to trust."""
    from fedapp.crypto.sealed import fingerprint_of
    from fedapp.site.config import NAME
    from fedapp.site.mail import box_key

    if not NAME.fullmatch(name):
        raise ConfigError(f"name must be letters, digits, '.', '_' or '-', got {name!r}")
    console.print(fingerprint_of(box_key(name).tobytes()), highlight=False)


def main() -> None:
    """Run the command; an error of fedapp is one line and status 1."""
    from fedapp.data.commands import data_app
    from fedapp.deploy.commands import federation_app
    from fedapp.site.commands import site_app

    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.ERROR)
    logging.getLogger("fedapp.site").setLevel(logging.CRITICAL)
    cli.add_typer(data_app, name="data")
    cli.add_typer(site_app, name="site")
    cli.add_typer(federation_app, name="federation")
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cli()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except FedappError as error:
        for line in error.log_lines if isinstance(error, RunFailedError) else ():
            print(line, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
