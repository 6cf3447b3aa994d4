"""Shared by the commands: the console, common options, JSON, progress, and what ``--help`` adds."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import click
import typer
from rich.panel import Panel
from rich.table import Table as Grid
from typer import Argument, Option
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedapp.errors import ConfigError, nearest
from fedapp.home import home
from fedapp.known_names import alias, command_hint, setting_of
from fedapp.process import INTERRUPTED
from fedapp.report.progress import Follower
from fedapp.run_files import adapter, without_nan
from fedapp.run_folder import existing_folder
from fedapp.settings import about_settings, defaults
from fedapp.terminal import Terminal, one_line

ENGINES = (
    "local (the parties are simulated in this process), simulation (in Flower's own runtime), or "
    "the name of a SuperLink in Flower's configuration."
)
# Tables are cut to the width of a terminal; a file or a pipe has none.
console = Terminal() if sys.stdout.isatty() else Terminal(width=120)

# Commands and options of earlier versions, and what took their place.
RENAMED = {
    "fedapp standing": "fedapp serve --site FOLDER",
    "fedapp metrics": "fedapp serve --metrics",
    "fedapp activate": "fedapp federation activate",
    "fedapp federation user": "fedapp federation add FOLDER --user NAME",
    "fedapp clean": "fedapp runs clean",
    "fedapp retrain": "fedapp runs retrain",
    "fedapp key": "fedapp site key",
    "fedapp trust": "fedapp site trust",
    "fedapp site rekey": "fedapp site key --new supernode",
    "fedapp app": "fedapp site hash",
    "fedapp app copy": "python -m fedapp.site.bundle copy",
    "fedapp app sign": "python -m fedapp.site.bundle sign",
    "fedapp sbom": "fedapp documents",
    "fedapp run --folds": "fedapp compare --folds",
    "fedapp compare --baselines": "fedapp compare, which always has baselines",
    "fedapp tune --exchanges": "fedapp tune --runs",
    "fedapp tune --bytes": "fedapp tune --runs",
    "fedapp site check --config": "fedapp site check --site",
    "fedapp site check --node-config": "fedapp site check --site",
}

# Options that other tools have, and their names here.
SYNONYMS = {"-o": "--output", "--table": "--data", "--input": "--data"}


def _is_table(word: str) -> bool:
    from fedapp.messages.methods import all_methods

    is_file = Path(word).suffix in (".csv", ".parquet") or Path(word).is_file()
    return is_file and word not in all_methods()


def _words_in(value: object) -> list[str]:
    """What a parser has read of an argument or an option, which may be nothing."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, list | tuple) else []


# Which option a word without one is of: the first that the command has and the word fits.
OPTION_OF: Mapping[str, Callable[[str], bool]] = {
    "--port": str.isdecimal,
    "--data": _is_table,
    "--without": _is_table,
    "--site": lambda word: Path(word).suffix == ".toml" or (Path(word) / "site.toml").is_file(),
    "--to": str.isidentifier,
    "--output": lambda word: bool(Path(word).suffix) or "/" in word,
}

# Short options of settings.
SHORT = ("data", "label", "id", "parties")

Overrides = Annotated[
    list[str] | None,
    Option("--config", "-c", metavar="KEY=VALUE", help="One of fedapp settings; may be repeated."),
]
RunOutput = Annotated[Path | None, Option("--output", help="New folder; by default one in runs/.")]

Target = Annotated[str, Option(help="What starts the processes: scripts, compose or systemd.")]
NewFolder = Annotated[Path, Argument(help="New folder, for its owner alone.")]
RunDir = Annotated[Path, Argument(callback=existing_folder, help="Folder of a run.")]
Engine = Annotated[str, Option(help="local, or simulation.")]
AnyEngine = Annotated[str, Option(help=ENGINES)]
On = Annotated[
    str,
    Option(
        help="ray: every run is a task of the Ray cluster that RAY_ADDRESS names, without one of "
        "Ray on this machine."
    ),
]


def port_option(text: str, least: int = 1) -> Any:
    """The option of a port, whose help is ``text``; 0, where it is allowed, is a free one."""
    return Option(min=least, max=65535, help=text)


Id = Annotated[str, Option("--id", help="Column that names the rows.")]


def enter_site(context: typer.Context, site: Path | None) -> Path | None:
    """Set ``$FEDAPP_HOME`` as the site's processes have it, until the command ends."""
    folder = site and (site.parent if site.is_file() else site)
    if folder and (folder / "home").is_dir():
        before = os.environ.get("FEDAPP_HOME")
        os.environ["FEDAPP_HOME"] = str((folder / "home").absolute())

        def restore() -> None:
            os.environ.pop("FEDAPP_HOME")
            os.environ.update({"FEDAPP_HOME": before} if before else {})

        context.call_on_close(restore)
    return site


def site_option(text: str) -> Any:
    """The option ``--site`` of a command, whose help is ``text``."""
    return Option("--site", metavar="FOLDER", callback=enter_site, help=text)


SiteFolder = Annotated[
    Path | None,
    site_option(
        "The site: a folder of fedapp site init, or a node config, a TOML file. By default the "
        "site of $FEDAPP_HOME, which the folder's env.sh sets."
    ),
]


def node_config(site: Path | None) -> Path:
    """The node config of ``--site``; ConfigError if there is none."""
    folder = site or home().parent
    path = folder if folder.is_file() else folder / "site.toml"
    if not path.is_file() or path.suffix != ".toml":
        rule = "must be the folder of fedapp site init, or a node config that is a TOML file"
        raise ConfigError(f"--site {rule}, got {site or 'none'}")
    return path


def _leave_stdout(context: typer.Context, as_json: bool) -> bool:
    """Print to standard error until the command ends; ``print_json`` does not."""
    if as_json:
        console.stderr = True
        context.call_on_close(lambda: setattr(console, "stderr", False))
    return as_json


AsJson = Annotated[
    bool,
    Option(
        "--json",
        callback=_leave_stdout,
        help="Print one JSON document instead of tables; the rest goes to standard error.",
    ),
]

command_began: ContextVar[float | None] = ContextVar("command_began", default=None)
# What is saved and how to resume, from the command that runs; None once it is printed.
if_interrupted: ContextVar[Callable[[], str] | None] = ContextVar(
    "if_interrupted", default=lambda: RUN_AGAIN
)
RUN_AGAIN = "run the same command again"


def say(text: str) -> None:
    """Print a line without markup or wrapping."""
    console.print(one_line(text), soft_wrap=True, highlight=False, markup=False)


def print_json(command: str, **fields: Any) -> None:
    """Print the JSON document of a command, as it is declared; NaN becomes null, a path a text."""
    from fedapp.commands.json_documents import DOCUMENTS

    text = json.dumps(without_nan(fields), indent=2, allow_nan=False, default=str)
    print(text)  # first: a field of another form than declared must cost nobody the results
    adapter(DOCUMENTS[command]).validate_json(text, strict=True)


def in_folder(output: Path | None) -> tuple[str, ...]:
    """The setting of ``--output`` of a run."""
    return (f"run-dir={output}",) if output else ()


@contextmanager
def followed(what_now: Callable[[], str]) -> Iterator[Follower]:
    """Show progress, timed from the start of this command; ``what_now`` is for its interrupt."""
    if_interrupted.set(what_now)
    with Follower(console, command_began.get()).alive() as follower:
        yield follower


def print_interrupted(text: str = "") -> None:
    """Print once that the command is interrupted, what is saved, and how to resume it."""
    if what_now := if_interrupted.get():
        if_interrupted.set(None)
        console.show_cursor()  # a progress line that was interrupted in its end has hidden it
        print(f"\ninterrupted: {text or what_now()}", file=sys.stderr)


class Command(TyperCommand):
    """A command whose help describes its arguments, and lists the methods of its families."""

    families: ClassVar[Mapping[str, str]] = {}  # each with its title

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.no_args_is_help = any(parameter.required for parameter in self.params)
        # click 8.5 also has a help for arguments, and so drops the one that typer set.
        hints = get_type_hints(inspect.unwrap(named["callback"]), include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                (info,) = hints[str(parameter.name)].__metadata__
                parameter.help = info.help

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; ConfigError names the option of a word that lacks it."""
        command = f"fedapp {context.command_path.partition(' ')[2]}"
        options = {name for option in self.params for name in option.opts}
        try:
            values, extra, _ = self.make_parser(context).parse_args(list(args))
        except click.NoSuchOption as error:
            letter = f"-{error.option_name.lstrip('-')}"
            long = [name for name in options if len(letter) == 2 and name.startswith(f"-{letter}")]
            meant = SYNONYMS.get(error.option_name, long[0] if len(long) == 1 else "")
            if meant not in options:
                raise
            rule = f"an option of {command} must be one of its --help"
            raise ConfigError(f"{rule}, got {error.option_name}: write {meant}") from error
        arguments = [one for one in self.params if isinstance(one, TyperArgument)]
        of_arguments = (_words_in(values.get(str(one.name))) for one in arguments)
        words = [*chain.from_iterable(of_arguments), *extra]
        # Where tables have an option, they are no arguments.
        tables = [word for word in words if "--data" in options and _is_table(word)]
        words = [word for word in words if word not in tables]
        n_taken = len(words) if any(one.nargs < 0 for one in arguments) else len(arguments)
        strays = [*tables, *words[n_taken:]]
        for option, fits in OPTION_OF.items():
            if option in options and (some := [word for word in strays if fits(word)]):
                before = _words_in(values.get("data")) if option == "--data" else []
                names = ("METHOD" if "strateg" in str(one.name) else "RUN" for one in arguments)
                value = ",".join([*before, *some])
                way = shlex.join([*command.split(), *(words[:n_taken] or names), option, value])
                raise ConfigError(f"{some[0]} must follow {option}, got no option: write {way}")
        return super().parse_args(context, args)

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Format the help, and append the methods."""
        super().format_help(context, formatter)
        for family, title in self.families.items():
            _print_methods(title, family)


class Group(TyperGroup):
    """Commands; those of earlier versions, and their options, name the new ones."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; exit with status 2 and the new name for one of an earlier version."""
        command, *more = args
        group = f"fedapp {context.info_name}" if context.parent else "fedapp"
        path, is_known = f"{group} {command}", command in self.commands
        written = [f"{path} {word.partition('=')[0]}" for word in more]
        for old in written if is_known else [*written, path]:
            if old in RENAMED:
                print(f"error: {old} is now {RENAMED[old]}", file=sys.stderr)
                raise typer.Exit(2)
        if not is_known and not command.startswith("-"):
            from fedapp.messages.methods import all_methods

            hint = command_hint(command, group, self.commands, all_methods())
            print(f"error: {path} is not a command{hint}", file=sys.stderr)
            raise typer.Exit(2)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Run a command; an interrupt is exit status 130, after what is saved and how to resume."""
        if context.parent:
            return super().invoke(context)
        if_interrupted.set(lambda: RUN_AGAIN)
        try:
            return super().invoke(context)
        except KeyboardInterrupt as stopped:
            # The engine has a text if the run continues without this command.
            print_interrupted(str(stopped))
            raise typer.Exit(INTERRUPTED) from None


class SettingsCommand(Command):
    """A command with short options for settings."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        for name in SHORT:
            text = f"{about_settings()[name].text} Short for -c {name}=."
            self.params.append(TyperOption(param_decls=[f"--{name}"], multiple=True, help=text))

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; ConfigError for a setting without its option."""
        parser = self.make_parser(context)
        parser.ignore_unknown_options = True
        options, rest, _ = parser.parse_args(list(args))
        methods = options.get("strategies", options.get("strategy"))
        methods = methods if isinstance(methods, tuple) else (methods,)
        words = [word for word in (*methods, *rest) if isinstance(word, str)]
        strays = dict[str, str]()  # what is written, and the setting as it should be
        for word, following in pairwise([*words, ""]):
            written, equals, value = word.removeprefix("--").partition("=")
            setting = setting_of(written, defaults(), words[0])
            if word.startswith("--") and setting not in defaults():
                setting = self._meant(written, words[0])
            if setting in defaults() and (equals or word.startswith("--")):
                if not equals:
                    value = "VALUE" if following[:2] in ("", "--") else following
                is_short = word.startswith("--") and setting in SHORT
                way = (f"--{setting}", value) if is_short else ("-c", f"{setting}={value}")
                strays[word] = shlex.join(way)
        if strays:
            text = f"got {', '.join(strays)}: write {' '.join(strays.values())}"
            raise ConfigError(f"settings must follow -c, {text}")
        self._check_methods(f"fedapp {context.info_name}", words)
        return super().parse_args(context, args)

    def _check_methods(self, command: str, words: Sequence[str]) -> None:
        """Raise ConfigError for a second method."""
        from fedapp.messages.methods import all_methods

        methods = [word for word in words if word in all_methods()]
        if len(methods) > 1 and "strategy" in {parameter.name for parameter in self.params}:
            rule = f"{command} must name one method, got {', '.join(methods)}"
            raise ConfigError(f"{rule}: fedapp compare {' '.join(methods)} compares them")

    def _meant(self, written: str, method: str) -> str:
        """The setting that an unknown option means; empty if it is an option, misspelled."""
        kebab = written.replace("_", "-")
        options = [name.lstrip("-") for option in self.params for name in option.opts]
        if meant := alias(kebab, defaults(), method):
            return meant
        return "" if nearest(kebab, options) else nearest(kebab, defaults())

    def invoke(self, context: click.Context) -> Any:
        """Add the short options to the settings."""
        options = {name: context.params.pop(name) or () for name in SHORT}
        pairs = [f"{name}={value}" for name, values in options.items() for value in values]
        context.params["config"] = [*(context.params["config"] or ()), *pairs]
        return super().invoke(context)


class TrainingCommand(SettingsCommand):
    """A command for methods that train, which its help lists."""

    families: ClassVar = {
        "horizontal": "Methods for the same columns, different rows",
        "vertical": "Methods for the same rows, different columns",
    }


class PredictingCommand(Command):
    """A command whose help lists the ways to predict with a divided model."""

    families: ClassVar = {"inference": "Ways to predict with a model that is divided among parties"}


def _print_methods(title: str, family: str) -> None:
    """Print a family's methods and the first lines of their modules, framed like the options."""
    from fedapp.messages.methods import all_methods
    from strategies.run import load_strategy

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan")
    for name, method in all_methods().items():
        if method.family != family or method.stands or method.describes:
            continue
        title_line = (sys.modules[load_strategy(name).__module__].__doc__ or "").partition("\n")[0]
        text = (title_line.partition(": ")[2] or title_line).rstrip(".")
        text = method.title or text
        grid.add_row(name, text[:1].upper() + text[1:])
    Terminal().print(Panel(grid, title=title, title_align="left", border_style="dim"))
