"""Commands that train, ``fedapp run``, ``compare`` and ``tune``; their settings, ``settings``."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from fedapp.arguments import parse_overrides
from fedapp.commands.common import (
    AnyEngine,
    AsJson,
    Engine,
    On,
    Overrides,
    RunOutput,
    console,
    followed,
    in_folder,
    print_json,
    say,
)
from fedapp.commands.json_documents import Setting
from fedapp.errors import ConfigError
from fedapp.home import display_path
from fedapp.known_names import alias, setting_hint, setting_of
from fedapp.report.progress import checkpoint_text
from fedapp.report.summary import (
    fact_grid,
    print_notes,
    print_summary,
    print_warning,
    terminal_table,
    warning_lines,
)
from fedapp.run_files import json_object
from fedapp.run_folder import RunFolder, read_run
from fedapp.sections import declared, method_sections
from fedapp.settings import Section, Settings, about_settings, defaults
from fedapp.superlinks import SIMULATED

if TYPE_CHECKING:
    from fedapp.runs.session import Training

NOTHING_SAVED = "nothing was saved yet; run the same command again"
FINISHED_CELLS = "finished cells are saved; the same command continues with the others"
TRIALS_SAVED = "finished trials are saved; the same command continues after them"
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# Settings that most runs have to do with; `fedapp settings` lists them first.
COMMON = (
    *("data", "label", "id", "parties", "drop-columns", "partition", "columns", "objective"),
    *("num-boost-round", "eta", "max-depth", "subsample", "eval-metric", "early-stopping-rounds"),
    *("test-fraction", "valid-fraction", "min-parties", "seed"),
)
KINDS = {"integer": "whole number", "number": "number", "boolean": "true or false"}


def run(
    strategy: Annotated[str, Argument(help="The method: one of those below.")],
    config: Overrides = None,
    engine: AnyEngine = "local",
    baselines: Annotated[
        bool,
        Option(
            "--baselines", help="Also train on the pooled rows, and on each party's rows alone."
        ),
    ] = False,
    output: RunOutput = None,
    as_json: AsJson = False,
) -> None:
    """Train a model and write the run's folder."""
    from fedapp.runs.session import Training

    training = Training(strategy, {}, engine, baselines)
    with followed(lambda: what_now(training)) as training.watcher:
        training.given = parse_overrides([*(config or []), *in_folder(output)])
        folder = training.carry_out()
    show_run(folder, as_json)


def show_run(folder: RunFolder | None, as_json: bool, document: str = "run", **more: Any) -> None:
    """Print the results of a run whose folder is on this machine; ``more`` are fields in JSON."""
    summary = read_run(folder.path).summary if folder else None
    if as_json:
        print_json(document, folder=folder and folder.path, summary=summary, **more)
    elif folder and summary:
        print_summary(summary, console, folder.path)


def what_now(training: Training) -> str:
    """What an interrupted command has saved, and the command that resumes it."""
    folder, engine = training.folder, training.engine
    where = display_path(folder.path) if folder else ""
    if folder and folder.has_finished:
        again = shlex.join(["fedapp", "report", where])
        return f"the run is complete and saved in {where}; its page is written by\n  {again}"
    if engine not in SIMULATED:
        return f"the run may have begun; its state is shown by\n  flwr list {engine}"
    if folder is None or not folder.has_begun:
        return NOTHING_SAVED
    words = ["fedapp", "run", training.strategy, "--engine", engine]
    words += ["--baselines"] if training.baselines else []
    words += ["-c", f"resume={where}"]
    state = folder.saved_state
    saved = f"saved up to {checkpoint_text(state)} in {where}" if state else "nothing was saved yet"
    return f"{saved}; to resume:\n  {shlex.join(words)}"


def describe(
    config: Overrides = None,
    vertical: Annotated[
        bool, Option("--vertical", help="The parties have different columns of the same rows.")
    ] = False,
    engine: AnyEngine = "local",
    output: RunOutput = None,
    as_json: AsJson = False,
) -> None:
    """Look at the parties' tables together before training: counts, quantiles, drift, leaks.

    The sites treat it as any run: it must be one that they allow, and approve.
    """
    from fedapp.runs.session import describe

    with followed(lambda: NOTHING_SAVED) as follower:
        overrides = parse_overrides([*(config or []), *in_folder(output)])
        folder = describe(overrides, vertical, engine, follower)
    if folder is None:
        return
    from fedapp.report.description import FILE, column_tables, shares_note

    document = json_object(folder.path / FILE)
    if as_json:
        print_json("describe", folder=folder.path, **document)
        return
    for _, head, rows, n_texts in column_tables(document):
        console.print(terminal_table(head, rows, n_texts))
    say(shares_note(document))
    print_notes(console, folder.summary.get("facts", []), warning_lines(folder.summary))
    say(f"report: {display_path(folder.path / 'report.html')}")


def compare(
    strategies: Annotated[list[str], Argument(help="Methods, each once.")],
    config: Overrides = None,
    seeds: Annotated[int, Option(help="Runs of each method.")] = 1,
    folds: Annotated[
        int, Option(help="Cross-validate: number of folds; each is held back in turn.")
    ] = 0,
    engine: Engine = "local",
    output: Annotated[
        Path | None,
        Option(
            help="Folder of the runs; finished ones are not run again. By default one below runs/ "
            "that follows from the table and the settings."
        ),
    ] = None,
    on: On = "",
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same rows, and set them side by side."""
    from fedapp.report.comparison import score_tables
    from fedapp.runs.compare import carry_out
    from fedapp.runs.run_groups import PAGE, Compared
    from fedapp.runs.series import other_code

    with followed(lambda: FINISHED_CELLS) as follower:
        folder, comparison = carry_out(
            strategies, parse_overrides(config or []), seeds, engine, follower, output, on, folds
        )
    if as_json:
        print_json("compare", folder=folder, summary=Compared(folder).summary)
    else:
        console.print(f"[bold]{escape(comparison.verdict)}[/]\n", highlight=False)
        console.print(fact_grid(comparison.facts))
        console.print(*score_tables(comparison.folded.records))
    console.print(f"{folder / PAGE}", soft_wrap=True)
    if warning := other_code(folder):
        print_warning(console, warning)


def tune(
    strategy: Annotated[str, Argument(help="The method: one of those below.")],
    config: Overrides = None,
    space: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=DOMAIN",
            help="Search a setting: eta=log:0.01:0.5, subsample=uniform:0.5:1, max-depth=int:3:8, "
            "pax.bins=share,equal. May be repeated; adds to the method's usual ones. Settings "
            "given by -c stay as they are.",
        ),
    ] = None,
    search: Annotated[str, Option(help="random, or optuna (TPE).")] = "random",
    runs: Annotated[int, Option(help="Number of trials.")] = 20,
    engine: Engine = "local",
    baselines: Annotated[
        bool, Option("--baselines", help="Search the baselines' settings too, with as many trials.")
    ] = False,
    output: Annotated[
        Path | None,
        Option(
            help="Folder of the search, which goes on where it is unfinished. By default one below "
            "runs/ that follows from the table, the settings and the space."
        ),
    ] = None,
    on: On = "",
    as_json: AsJson = False,
) -> None:
    """Search for the settings with the best validation score, then score its test rows once."""
    from fedapp.runs.run_groups import BEST, Tuned, ranked, read_trials, repeat_command, trial_table
    from fedapp.runs.tune import Tuning

    with followed(lambda: TRIALS_SAVED) as follower:
        overrides = parse_overrides(config or [])
        domains = _domains(space or [], strategy)
        tuning = Tuning(
            strategy, overrides, domains, search, runs, engine, follower, output, on, baselines
        )
        folder = tuning.carry_out().path
    summary = Tuned(folder).summary
    trials = read_trials(folder)
    if as_json:
        records = [asdict(trial) for trial in ranked(trials, summary["metric"])]
        print_json("tune", folder=folder, summary=summary, trials=records)
    else:
        console.print(trial_table(trials, summary["metric"]))
    say(f"test scores of the best, trial {summary['best']}: {_scores(summary['test'])}")
    if compared := summary.get("baselines"):
        say(f"pooled rows, as many trials: {_scores(compared['pooled']['test'])}")
        for party, result in compared["alone"].items():
            say(f"{party} alone, as many trials: {_scores(result['test'])}")
    say(f"its model: {display_path(folder / BEST)}; in all {summary['exchanges']:,} exchanges")
    say("to repeat it:")
    say(f"  {repeat_command(summary)}")


def _scores(scores: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)


def _domains(pairs: list[str], method: str) -> dict[str, str]:
    space: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--space must be written as key=domain, got {pair}")
        setting = setting_of(name.strip(), defaults(), method)
        if setting in space:
            raise ConfigError(f"--space must name {setting} once, got {space[setting]} and {text}")
        space[setting] = text.strip()
    return space


def settings(
    name: Annotated[
        str, Argument(metavar="[METHOD or SETTING]", help="What a method reads, or one setting.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the settings of -c, those of a method or those that several share; or one."""
    from fedapp.messages.methods import all_methods

    methods = list(all_methods())
    every = list_settings()
    one = alias(setting_of(name, every), every, "")
    if not one and name not in ("", *methods):
        hint = setting_hint(name, [*every, *methods]) or ": fedapp settings lists them"
        rule = f"must name a method ({', '.join(methods)}) or a setting"
        raise ConfigError(f"fedapp settings {rule}, got {name}{hint}")
    shown = [
        setting
        for setting in every.values()
        if (name in setting.methods or setting.name == one if name else "." not in setting.name)
    ]
    if as_json:
        print_json("settings", settings=[asdict(setting) for setting in shown], methods=methods)
    else:
        _print_settings(shown, len(methods), name * (not one))
        if not name:
            say(f"each method has more: fedapp settings METHOD, one of {', '.join(methods)}")


def _print_settings(shown: list[Setting], n_methods: int, method: str) -> None:
    """Print settings under headings: common ones, those of the method, and the rest."""
    groups = dict[str, list[Setting]]({"Common": [], f"Of {method}": []})
    general = {
        about.name: inspect.cleandoc(section.__doc__ or "").partition(".")[0].partition(";")[0]
        for section in Settings.__mro__
        if issubclass(section, Section)
        for about in declared(section).values()
    }
    for setting in shown:
        section = f"Of {method or setting.name.partition('.')[0]}"
        heading = "Common" if setting.name in COMMON else general.get(setting.name, section)
        groups.setdefault(heading, []).append(setting)
    groups["Common"].sort(key=lambda setting: COMMON.index(setting.name))
    grid = Table("setting", "default", "values", "what it does", box=None)
    grid.columns[0].no_wrap = True
    grid.columns[2].max_width = 24
    for heading, settings in groups.items():
        if settings:
            grid.add_row("", "", "", f"\n[bold]{heading}[/]")
        for setting in settings:
            is_shared = method or len(setting.methods) == n_methods
            readers = "" if is_shared else f" Read by {', '.join(setting.methods)}."
            text = f"{setting.text}{readers}"
            cells = (setting.name, in_words(setting.default), setting.values, text)
            grid.add_row(*(escape(cell.replace("`", "")) for cell in cells))
    console.print(grid)


def in_words(value: Any) -> str:
    """A default as text: digits in groups, none for an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str("none" if value == "" else value)


def list_settings() -> dict[str, Setting]:
    """Every setting by its name, section by section."""
    from strategies.run import all_strategies

    strategies = all_strategies()  # imports the methods, which declare their sections
    sections: tuple[type[Section], ...] = Settings, *method_sections().values()
    schemas = {section.table: section.model_json_schema()["properties"] for section in sections}
    listed = {}
    for name, about in about_settings().items():
        table, _, key = name.rpartition(".")
        methods = tuple(method for method, strategy in strategies.items() if strategy.takes(name))
        rule = _rule(schemas[table][key])
        listed[name] = Setting(name, defaults()[name], rule, about.text, methods)
    return listed


def _rule(schema: dict[str, Any]) -> str:
    """The rule of a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(_rule, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{choice}`" for choice in choices if choice)
    limits = [f"{sign} {_limit(schema[key])}" for key, sign in LIMITS.items() if key in schema]
    return " ".join([KINDS.get(schema["type"], "text"), ", ".join(limits)]).strip()


def _limit(number: float) -> str:
    """A limit of a setting, short: 2^63 rather than 9.22337e+18."""
    is_power = number >= 2**16 and math.log2(number).is_integer()
    return f"2^{math.log2(number):.0f}" if is_power else f"{number:g}"
