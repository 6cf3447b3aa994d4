"""Progress of a command or a call: one live line where a person looks, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedapp.errors import DataError
from fedapp.process import interruptible
from fedapp.report.summary import human_bytes, human_seconds, score_text
from fedapp.run_files import RoundInfo, Scores, checked
from fedapp.run_folder import RunFolder, RunState, Stage
from fedapp.terminal import Tell, Terminal, one_line

_TICK_SECONDS = 0.2
HEARTBEAT_SECONDS = 4.0  # so that a log has a line every 5 s even on a busy machine
_SECOND_SCORES = ("logloss", "accuracy", "mae", "auc", "rmse")


class Watcher(Protocol):
    """Shows the progress of a command or a call and of its run."""

    @property
    def seconds(self) -> float:
        """Seconds since the command or the call began."""

    def begin(self, doing: str, ends: bool = False) -> None:
        """Show what is done from now on; with ``ends``, in place of the run's own stages."""

    def tell(self, text: str) -> None:
        """Print a line that stays."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """A context during which the folder's run is shown; ``metric`` is the score shown first."""


class Silent:
    """A watcher that shows nothing."""

    def __init__(self) -> None:
        self._began = time.time()

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.time() - self._began

    def begin(self, doing: str, ends: bool = False) -> None:
        """Nothing."""

    def tell(self, text: str) -> None:
        """Nothing."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


QUIET = Silent()


class Follower:
    """Shows a command's progress, and that of the run it waits for; times are Unix seconds."""

    def __init__(
        self, console: Console, began: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._began = clock, clock() if began is None else began
        view = _Notebook if console.is_jupyter else _Live if console.is_terminal else _Plain
        self._view = view(console, self._began)
        self._command: Stage | None = None
        self._run: Stage | None = None
        self._folder: RunFolder | None = None
        self._rounds: Rounds | None = None
        self._metric = ""
        self._ends = False
        self._shown: set[str] = set()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return self._clock() - self._began

    def begin(self, doing: str, ends: bool = False) -> None:
        """Show the command's stage until the run it follows reports a newer one."""
        with self._lock:
            # A run may still report stages after the command has ended it; these are ignored.
            self._command = Stage(doing, self._clock())
            self._ends = ends
        self.tick()

    def tell(self, text: str) -> None:
        """Show a permanent line."""
        with self._lock:
            self._view.say(text, self._clock())

    @contextmanager
    def run(self, folder: RunFolder, metric: str) -> Iterator[None]:
        """Show a run's stages and rounds during the block; `metric` is shown first."""
        folder.forget_stage()
        checkpoint = folder.saved_state
        if checkpoint:
            self.tell(f"resumed after {checkpoint_text(checkpoint)}")
        with self._lock:
            self._rounds = Rounds(folder.rounds_file, checkpoint.rounds if checkpoint else 0)
            self._folder = folder
            self._metric = metric
            self._run = None
        try:
            yield
        finally:
            self.tick()
            with self._lock:
                # The run's last stage stays until the command does something else.
                self._folder = self._rounds = None

    def tick(self) -> None:
        """Show what is new; an error here is shown once and does not stop the command."""
        with self._lock:
            try:
                self._show(self._clock())
            except Exception as error:
                self._tell_once(f"progress cannot be shown: {error}")

    def _show(self, now: float) -> None:
        if self._folder and self._rounds:
            self._run = self._folder.stage or self._run
            # Until a resumed run has started, the file still has its previous lines.
            for text in self._run.warnings if self._run else ():
                self._tell_once(f"! {text}")
            if self._run or self._folder.has_ended():
                for entry in self._rounds.new(self._tell_once):
                    self._view.add(entry, self._metric, now)
        followed = None if self._ends else self._run
        stages = [stage for stage in (self._command, followed) if stage]
        if stages:
            self._view.show(max(stages, key=lambda stage: stage.since), now)

    def _tell_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self._view.say(text, self._clock())

    @contextmanager
    def alive(self) -> Iterator[Follower]:
        """Call `tick` in a thread during the block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_TICK_SECONDS):
                self.tick()

        thread = threading.Thread(target=watch, daemon=True)
        with self._view.shown():
            thread.start()
            try:
                yield self
            finally:
                ended.set()
                thread.join()


@contextmanager
def following(progress: bool | Watcher | None) -> Iterator[Watcher]:
    """The watcher of a call in Python, which Ctrl-C ends; see `fedapp.run` for ``progress``."""
    terminals = [stream for stream in (sys.stderr, sys.stdout) if stream and stream.isatty()]
    console = Terminal(file=terminals[0] if terminals else sys.stderr)
    # Threads and the workers of scikit-learn's searches would write over each other's lines.
    is_alone = threading.current_thread() is threading.main_thread() and parent_process() is None
    is_shown = progress is None and is_alone and (terminals or console.is_jupyter)
    with interruptible(), ExitStack() as stack:
        if progress is True or is_shown:
            yield stack.enter_context(Follower(console).alive())
        else:
            yield Silent() if progress is None or isinstance(progress, bool) else progress


def checkpoint_text(state: RunState) -> str:
    """Progress of a checkpoint: ``round 3``, or ``exchange 12`` before the first round."""
    return f"round {state.rounds}" if state.rounds else f"exchange {state.step}"


class Rounds:
    """Reader of a growing rounds.jsonl, after round `last`; a resumed run rewrites the file."""

    def __init__(self, path: Path, last: int) -> None:
        self._path, self._last = path, last
        self._seen: tuple[int, ...] = ()

    def new(self, tell: Tell) -> list[RoundInfo]:
        """New rounds on complete lines; `tell` receives invalid lines and going back on resume."""
        if not self._path.exists():
            return []
        status = self._path.stat()
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return []
        self._seen = seen
        rounds: dict[int, RoundInfo] = {}
        for line in self._path.read_bytes().rpartition(b"\n")[0].splitlines():
            try:
                entry = checked(line, "a line of rounds.jsonl", RoundInfo)
            except DataError as error:
                tell(str(error))
                continue
            rounds[entry["round"]] = entry
        newest = max(rounds, default=0)
        if newest < self._last:
            tell(f"resuming after round {newest}")
        last, self._last = self._last, newest
        return [entry for number, entry in sorted(rounds.items()) if number > last]


class _Plain:
    """Prints a line for each phase and round, and at least one per `HEARTBEAT_SECONDS`."""

    def __init__(self, console: Console, began: float) -> None:
        self._console, self._began = console, began
        self._phase, self._last = "", began
        self._added = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield

    def say(self, text: str, now: float) -> None:
        self._last = now
        minutes, seconds = divmod(int(max(0.0, now - self._began)), 60)
        self._console.print(
            one_line(f"{minutes}:{seconds:02d}  {text}"),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def show(self, stage: Stage, now: float) -> None:
        phase = "rounds" if stage.round else stage.doing  # all rounds are one phase
        begins = phase != self._phase and not (stage.round and self._added)
        self._phase, self._added = phase, False
        if begins or now - self._last >= HEARTBEAT_SECONDS:
            self.say(", ".join(filter(None, (_where(stage), _waited(stage, now)))), now)

    def add(self, entry: RoundInfo, metric: str, now: float) -> None:
        scores, n_rounds = _score(entry, [metric, *_SECOND_SCORES]), entry.get("rounds", 0)
        parts = (
            f"round {entry['round']:>{len(str(n_rounds))}}/{n_rounds}",
            *([scores] if scores else []),
            f"exchanges {entry['exchanges']}",
            human_bytes(sum(entry["bytes"].values())),
            human_seconds(entry["seconds"]),
        )
        self.say("  ".join(parts), now)
        self._added = True


class _Live:
    """One line of at most 80 columns that is redrawn."""

    def __init__(self, console: Console, began: float) -> None:
        description = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=description),
            BarColumn(bar_width=8),
            TextColumn("[bold]{task.fields[score]}", table_column=Column(no_wrap=True)),
            TextColumn("[dim]{task.fields[waited]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
            expand=True,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what a file or a pipe gets stays there
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=None, score="", waited="")

    def shown(self) -> AbstractContextManager[object]:
        return self._progress

    def say(self, text: str, now: float) -> None:
        self._progress.console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)

    def show(self, stage: Stage, now: float) -> None:
        self._progress.update(
            self._task,
            description=_where(stage),
            completed=max(stage.round - 1, 0),
            total=stage.rounds or None,
            waited=_waited(stage, now),
        )

    def add(self, entry: RoundInfo, metric: str, now: float) -> None:
        self._progress.update(self._task, score=_score(entry, [metric]))


class _Notebook(_Live):
    """The line as an output of the notebook's cell; rich's own needs the package ipywidgets."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        from IPython.display import display

        self._output = display(self._progress, display_id=True)
        try:
            yield
        finally:
            self._output.update({"text/html": "", "text/plain": ""}, raw=True)

    def show(self, stage: Stage, now: float) -> None:
        super().show(stage, now)
        self._output.update(self._progress)


def _where(stage: Stage) -> str:
    """``aligning the rows``, or ``round 3/50: growing trees``."""
    return f"round {stage.round}/{stage.rounds}: {stage.doing}" if stage.round else stage.doing


def _waited(stage: Stage, now: float) -> str:
    """Whole seconds of the stage, ``42 s`` or ``3 min 20 s``; empty in its first second."""
    seconds = now - stage.since
    if seconds < 1:
        return ""
    return f"{seconds:.0f} s" if seconds < 99.5 else human_seconds(seconds)


def _score(entry: Mapping[str, Any], names: list[str]) -> str:
    """``valid auc 0.7781  logloss 0.4420``: the first two of `names` that the round has."""
    split = "valid" if entry["valid"] else "train"
    scores: Scores = entry[split]
    # Without a metric, start with the round's first, which is the objective's default.
    candidates = [name for name in names if name] if names[0] else [*list(scores)[:1], *names[1:]]
    shown = [name for name in dict.fromkeys(candidates) if name in scores][:2]
    texts = [f"{name} {score_text(scores[name])}" for name in shown]
    return f"{split} {'  '.join(texts)}" if texts else ""
