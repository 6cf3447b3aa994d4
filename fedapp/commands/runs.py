"""Commands on finished runs: ``fedapp runs``, ``report``, ``audit``, ``documents``."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer import Option

from fedapp.commands.common import (
    AnyEngine,
    AsJson,
    Command,
    Group,
    RunDir,
    RunOutput,
    console,
    followed,
    node_config,
    print_json,
    say,
    site_option,
)
from fedapp.commands.run import show_run, what_now
from fedapp.errors import ConfigError
from fedapp.home import RUNS, check_output, display_path
from fedapp.report.summary import human_bytes, human_seconds, terminal_table
from fedapp.run_folder import read_run

if TYPE_CHECKING:
    from fedapp.runs.clean import Cleaning


MOST = 20
NOTHING_WRITTEN = "the audit was not written; run the same command again"


class RunsGroup(Group):
    """``fedapp runs`` lists, without a command too."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; those that begin with an option are of ``list``."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(context, args)


runs_app = typer.Typer(cls=RunsGroup, help="Runs in ./runs: list (by default), clean, retrain.")


@runs_app.command("list", cls=Command)
def list_command(
    show_all: Annotated[
        bool, Option("--all", help=f"More than the last {MOST}, and those of comparisons.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List runs, comparisons and searches in ./runs: state, test score, size."""
    from fedapp.run_folder import State
    from fedapp.runs.clean import list_runs

    listed = list_runs(RUNS, show_all, say)
    shown = listed if show_all else listed[:MOST]
    if as_json:
        print_json("runs list", runs=shown, not_shown=len(listed) - len(shown))
        return
    if not listed:
        console.print(f"no runs in {RUNS}")
        return
    head = ("run", "state", "method", "data", "test score", "size", "started", "ended")
    rows = []
    for run in shown:
        path, score = Path(run["run"]), run["test_score"]
        cells = (str(path.relative_to(RUNS)), run["state"], run["method"], Path(run["data"]).name)
        times = (
            f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}" if time else ""
            for time in (run["started"], run["ended"])
        )
        shown_score = "" if score is None else f"{run['metric']} {score:.4f}"
        rows.append((*cells, shown_score, human_bytes(run["bytes"]), *times))
    console.print(terminal_table(head, rows, len(head)))
    if len(shown) < len(listed):
        console.print(f"{len(listed) - len(shown)} more: fedapp runs --all")
    resumable = [run for run in shown if run["state"] == State.RESUMABLE]
    for run in resumable[:1]:
        say(f"to resume: fedapp run {run['method']} -c resume={run['run']}")


@runs_app.command("clean", cls=Command)
def clean_command(
    yes: Annotated[bool, Option("--yes", help="Delete without asking.")] = False,
    all_parts: Annotated[
        bool,
        Option("--all", help="Parts of models too, also those that finished runs predict with."),
    ] = False,
) -> None:
    """Delete failed and interrupted runs in ./runs, and what sites have kept for a week of others.

    Shows first what goes, and how large it is. Finished runs, runs that are going on, and the keys
    of sites always stay.
    """
    from fedapp.runs.clean import plan

    cleaning = plan(RUNS, all_parts, say)
    if cleaning.retained:
        size = human_bytes(sum(state.n_bytes for state in cleaning.retained))
        number = len(cleaning.retained)
        say(f"kept: parts of models at sites ({number}), {size}; --all deletes them too")
    if not (cleaning.runs or cleaning.states):
        say("nothing to delete")
        return
    _list(cleaning)
    if cleaning.needed:
        models = len({state.path.name for state in cleaning.needed})
        say(f"WARNING: finished runs in {RUNS} that cannot predict without these parts: {models}")
    if not yes:
        typer.confirm(f"Delete all this, {human_bytes(cleaning.n_bytes)}?", abort=True)
    say(f"deleted, {human_bytes(cleaning.carry_out(say))}")


@runs_app.command("retrain", cls=Command)
def retrain_command(
    run_dir: RunDir,
    without: Annotated[
        str, Option(help="CSV files with ids of rows that the tables still have: FILE,...")
    ] = "",
    output: RunOutput = None,
    engine: AnyEngine = "local",
    as_json: AsJson = False,
) -> None:
    """Train a finished run again, as if its tables had never had some rows."""
    from fedapp.run_folder import RunFolder
    from fedapp.runs.retrain import remains, retraining

    earlier = RunFolder(run_dir)
    training = retraining(earlier, without, engine, str(output or ""))
    with followed(lambda: what_now(training)) as training.watcher:
        folder = training.carry_out()
    lines = remains(earlier, folder, engine)
    show_run(folder, as_json, "runs retrain", remains=lines)
    for line in [] if as_json else lines:
        say(f"still has the rows: {line}")


def _list(cleaning: Cleaning) -> None:
    for run in cleaning.runs:
        size = human_bytes(run.measured.n_bytes)
        say(f"{display_path(run.path)}  {run.state}, {run.method}, {size}")
    for title, is_part in (("states of old runs", False), ("parts of models", True)):
        sizes: dict[str, list[int]] = {}
        for state in cleaning.states:
            if state.is_part == is_part:
                sizes.setdefault(state.site, []).append(state.n_bytes)
        for site, of_site in sorted(sizes.items()):
            say(f"site {site}: {title} ({len(of_site)}), {human_bytes(sum(of_site))}")


def report(
    run_dir: RunDir, output: Annotated[Path | None, Option(help="Where the page goes.")] = None
) -> None:
    """Write the HTML page of a run, also of one that was interrupted."""
    from fedapp.report import write_report

    console.print(f"{write_report(run_dir, output)}", soft_wrap=True)


def documents(
    run: RunDir,
    answers: Annotated[
        Path | None,
        Option(metavar="FILE.toml", help="Answers to blanks: purpose = '...', a line each."),
    ] = None,
    output: Annotated[
        Path | None, Option(metavar="FOLDER", help="By default RUN/documents.")
    ] = None,
) -> None:
    """Write what people sign: threat model, impact assessment, validation report, packages.

    What fedapp cannot know is marked TO FILL IN; answers fill it, in this run and the next ones.
    """
    from fedapp.home import read_toml, write_atomically
    from fedapp.report.card import CARD, Blanks, model_card
    from fedapp.report.documents import CHECKSUMS, KINDS, PACKAGES, checksums
    from fedapp.report.documents import documents as written

    folder = output or run / "documents"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output must be a folder, got the file {folder}")
    for name, kind in KINDS.items():
        if output and folder.is_dir():
            check_output(folder / name, kind)
    filled = read_toml(answers.read_bytes(), f"{answers} must be TOML") if answers else {}
    blanks = Blanks({name: str(text) for name, text in filled.items()})
    files = written(read := read_run(run), blanks)
    write_atomically(run / CARD, model_card(read, blanks.answers).encode())
    folder.mkdir(parents=True, exist_ok=True)
    if find_spec("cyclonedx_py"):
        # Validating the list takes it 20 seconds.
        program = [sys.executable, "-P", "-m", "cyclonedx_py", "environment", "--no-validate"]
        listed = subprocess.run(program, stdout=subprocess.PIPE, check=True, encoding="utf-8")
        files[PACKAGES] = listed.stdout
    else:
        say(f"{PACKAGES} is not written: pip install cyclonedx-bom, and run the same command again")
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    write_atomically(folder / CHECKSUMS, checksums(run, folder).encode())
    for name in files:
        n_open = blanks.open[name.removesuffix(".md")] if name.endswith(".md") else 0
        left = f"  {n_open} blanks to fill in" if n_open else ""
        say(f"{display_path(folder / name)}{left}")
    say(f"{display_path(folder / CHECKSUMS)}  of the run's files and these; sha256sum -c checks")


def audit(
    run_dir: RunDir,
    quick: Annotated[
        bool, Option("--quick", help="Fewer shadow models, columns and equations.")
    ] = False,
    site: Annotated[
        Path | None, site_option("Audit this site's own rows only: its folder, or a node config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack a run from every seat, and write what was found into its report and model card.

    Rows rebuilt, bins solved, labels guessed, members recognised: by those who keep to the
    protocol. A simulated run is trained again, and must give the same model. At a site of a
    deployment, --site asks how far the model shows which of its own rows trained it.
    """
    from fedapp.audit.run import Auditing, at_site
    from fedapp.records.document import to_document
    from fedapp.run_files import HEAD

    if site and quick:
        raise ConfigError("--quick must be omitted with --site, which trains no models, got both")
    if site:
        audited = at_site(run_dir, node_config(site))
    else:
        auditing = Auditing.of(run_dir, quick)
        for attack in auditing.attacks:
            say(f"{attack.name}, {attack.seat}: {human_seconds(attack.seconds)}")
        say(f"about {human_seconds(auditing.seconds)} in all")
        with followed(lambda: NOTHING_WRITTEN) as follower:
            audited = auditing.carry_out(follower)
    if as_json:
        print_json("audit", **to_document(audited))
        return
    console.print(terminal_table(HEAD, [finding.cells for finding in audited.findings], len(HEAD)))
    for line in (*audited.notes, audited.summary):
        say(line)
