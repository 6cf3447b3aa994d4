"""What a person sees while a command works: phases, rounds, and how long a phase has taken."""

import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from rich.text import Text

import fedapp
import fedapp.messages
from fedapp.errors import ConfigError
from fedapp.messages.fields import Request
from fedapp.messages.methods import all_methods
from fedapp.messages.pax import GrowRequest, SketchRequest
from fedapp.messages.vertical import MaskRequest, MatchRequest
from fedapp.report.progress import HEARTBEAT_SECONDS, Follower, following
from fedapp.run_folder import Checkpoints, RunFolder, RunState, Silent, Stage, Stages
from fedapp.runs.local import run_local, simulated_contexts
from strategies.delivery import RULE
from strategies.handshake import find_nodes, site_names
from tests.network import die, resumed, run
from tests.report.test_report import round_line

START = 1_000_000.0


class Watched:
    """A follower of a run's folder, with a clock that is moved by hand."""

    def __init__(self, folder, **console):
        self.now, self.out = START, io.StringIO()
        self.folder = RunFolder(folder)
        self.console = Console(file=self.out, **{"width": 100, **console})
        self.follower = Follower(self.console, clock=lambda: self.now)

    @property
    def lines(self):
        return self.out.getvalue().splitlines()

    def stage(self, doing, **more):
        self.folder.note(Stage(doing, self.now, **more))

    def training(self, number, **more):
        self.stage("growing trees", round=number, rounds=50, **more)

    def write(self, *rounds, tail=""):
        lines = [json.dumps(round_line(number, ["auc", "logloss"], 50)) for number in rounds]
        # As a run that goes on writes it: another file under the same name.
        self.folder.write("rounds.jsonl", "".join(f"{line}\n" for line in lines) + tail)

    def tick(self, seconds=0.0):
        """Lines that come up when so much time has passed."""
        before = len(self.lines)
        self.now += seconds
        self.follower.tick()
        return self.lines[before:]


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_what_a_command_did_before_a_run_is_not_shown_again_after_it(watched):
    watched.follower.begin("reading and checking the tables")
    with watched.follower.run(watched.folder, "auc"):
        watched.now += 1
        watched.stage("scoring")
        assert watched.tick(1) == ["0:02  scoring, 1 s"]
    assert watched.tick(1) == []
    watched.follower.begin("writing the report")
    assert watched.lines[-1] == "0:03  writing the report"


# Rounds


def test_a_round_is_a_line_once_its_own_is_finished(watched):
    with watched.follower.run(watched.folder, "auc"):
        watched.training(3)
        first = "0:00  round  3/50  valid auc 0.5370  logloss 0.5370  exchanges 14  1.2 MB  0.31 s"
        watched.write(3)
        assert watched.tick() == [first]
        line = json.dumps(round_line(4, ["accuracy", "auc", "logloss"], 50))
        watched.write(3, tail=line[:40])
        assert watched.tick() == []
        watched.write(3, 4)
        assert watched.tick(1) == [
            "0:01  round  4/50  valid auc 0.5494  logloss 0.5494  exchanges 18  1.2 MB  0.31 s"
        ]


def test_rounds_survive_that_the_file_is_written_anew(watched):
    """What ``resume`` does under a follower: the last lines go, other ones come in their place."""
    with watched.follower.run(watched.folder, "auc"):
        watched.training(3)
        watched.write(1, 2, 3)
        assert len(watched.tick()) == 3
        watched.write(1)
        assert watched.tick() == ["0:00  resuming after round 1"]
        watched.write(1, 2)
        assert [line.split()[1:3] for line in watched.tick()] == [["round", "2/50"]]
        # Longer than what was read, in a file that was begun anew.
        watched.write(1, 2, 3, 4)
        assert [line.split()[2] for line in watched.tick()] == ["3/50", "4/50"]


def test_a_resumed_run_shows_where_it_goes_on_and_no_round_of_before(watched):
    state = RunState("f00d", step=9, rounds=2)
    Checkpoints(watched.folder.path).save(state, state)
    watched.write(1, 2, 3)
    watched.stage("growing trees", round=4, rounds=50)  # of the attempt that was interrupted
    with watched.follower.run(watched.folder, "auc"):
        assert watched.lines == ["0:00  resumed after round 2"]
        assert watched.tick() == []
        watched.write(1, 2)
        watched.training(3)
        assert watched.tick() == ["0:00  round 3/50: growing trees"]
        watched.write(1, 2, 3)
        assert [line.split()[2] for line in watched.tick()] == ["3/50"]


def test_the_rounds_of_a_run_that_has_ended_are_shown(watched):
    with watched.follower.run(watched.folder, "auc"):
        watched.write(*range(1, 51))
        watched.folder.write_json("summary.json", {})
    assert len(watched.lines) == 50


def test_a_round_without_validation_shows_its_train_score(watched):
    with watched.follower.run(watched.folder, "rmse"):
        watched.training(1)
        lines = [round_line(1, ["rmse", "mae"], valid={}), round_line(2, [])]
        watched.folder.write("rounds.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert watched.lines == [
        "0:00  round 1/5  train rmse 0.5123  mae 0.5123  exchanges 6  1.2 MB  0.31 s",
        "0:00  round 2/5  exchanges 10  1.2 MB  0.31 s",
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{nonsense", r"a line of rounds.jsonl must be JSON, got: "),
        ('{"round": 1}', r"a line of rounds.jsonl must have train, got no such field"),
        ("3", r"a line of rounds.jsonl must be an object, got int"),
    ],
)
def test_rubbish_is_told_once_and_the_rest_is_shown(watched, line, text):
    with watched.follower.run(watched.folder, "auc"):
        watched.training(1)
        watched.write(1, tail=f"{line}\n")
        told, shown = watched.tick()
        assert re.search(text, told)
        assert "round  1/50" in shown
        watched.write(1, tail=f"{line}\n{json.dumps(round_line(2, ['auc'], 50))}\n")
        assert ["round  2/50" in line for line in watched.tick()] == [True]


def test_an_error_in_showing_is_told_once_and_ends_nothing(watched):
    with watched.follower.run(watched.folder, "auc"):
        (watched.folder.path / "progress.json").write_text("{nonsense")
        assert len(told := watched.tick()) == 1
        assert told[0].startswith("0:00  progress cannot be shown: ")
        assert watched.tick(1) == []
        watched.stage("scoring")
        assert watched.tick() == ["0:01  scoring"]


def test_a_thread_shows_what_comes_while_a_command_works(tmp_path):
    shown = threading.Event()

    class Told(io.StringIO):
        def write(self, text):
            if "scoring" in text:
                shown.set()
            return super().write(text)

    folder, follower = RunFolder(tmp_path), Follower(Console(file=Told()))
    with follower.alive(), follower.run(folder, "auc"):
        Stages(folder.note).wait("scoring")
        assert shown.wait(30)
    assert threading.active_count() == 1 or not [
        thread for thread in threading.enumerate() if thread.name.endswith("(watch)")
    ]


# Phases


def test_every_phase_is_a_line_and_lasting_ones_are_repeated_within_five_seconds(watched):
    assert HEARTBEAT_SECONDS < 5
    watched.follower.begin("starting Flower")
    assert watched.lines == ["0:00  starting Flower"]
    assert watched.tick(HEARTBEAT_SECONDS - 0.1) == []
    assert watched.tick(0.2) == ["0:04  starting Flower, 4 s"]
    with watched.follower.run(watched.folder, "auc"):
        watched.stage("aligning the rows")
        assert watched.tick() == ["0:04  aligning the rows"]
        watched.now += 1
        watched.stage("aligning the rows")  # the next exchange of the same phase
        assert watched.tick(0.5) == []
        watched.now += 60
        watched.training(1)
        assert watched.tick(5) == ["1:10  round 1/50: growing trees, 5 s"]
        watched.training(2)
        assert watched.tick(101) == ["2:51  round 2/50: growing trees, 1 min 41 s"]
        watched.follower.begin("writing the report")
        assert watched.lines[-1] == "2:51  writing the report"


def test_what_ends_a_run_is_not_replaced_by_what_its_processes_still_say(watched):
    with watched.follower.run(watched.folder, "auc"):
        watched.training(2)
        watched.follower.begin("ending Flower", ends=True)
        watched.now += 1
        watched.training(2)
        assert watched.tick(4) == ["0:05  ending Flower, 5 s"]
        watched.follower.begin("explaining the model on test rows")
    assert watched.lines[-1].endswith("  explaining the model on test rows")


def test_a_round_that_is_told_needs_no_line_of_its_phase(watched):
    with watched.follower.run(watched.folder, "auc"):
        watched.stage("reading the tables")
        watched.follower.tick()
        watched.write(1)
        watched.training(2)
        assert [line.split()[1:3] for line in watched.tick()] == [["round", "1/50"]]


def test_a_terminal_has_one_live_line(tmp_path):
    watched = Watched(tmp_path, force_terminal=True, width=80, color_system=None)
    with watched.follower.alive(), watched.follower.run(watched.folder, "auc"):
        watched.write(1, 2, 3)
        watched.training(4)
        watched.now += 6
        watched.follower.tick()
    text = watched.out.getvalue()
    assert text.endswith("\r\x1b[1A\x1b[2K")  # drawn over itself, and gone in the end
    drawn = text.replace("\r", "\n").replace("\x1b", "\n").splitlines()
    line = next(line for line in drawn if "round 4/50" in line)
    assert re.search(r"round 4/50: growing trees .* valid auc 0.5370 +6 s 0:00:", line)
    assert len(line.removeprefix("[2K")) <= 80


# Stages


def requests():
    for module in pkgutil.iter_modules(fedapp.messages.__path__):
        importlib.import_module(f"fedapp.messages.{module.name}")

    def below(kind):
        return [kind, *(each for one in kind.__subclasses__() for each in below(one))]

    ours = [kind for kind in below(Request)[1:] if kind.__module__.startswith("fedapp.messages.")]
    return [kind for kind in ours if hasattr(kind, "kind")]  # a part of several requests has none


@pytest.mark.parametrize("request_class", requests(), ids=lambda kind: kind.kind)
def test_every_request_says_in_words_what_is_done(request_class):
    assert re.fullmatch(r"[a-z][a-zA-Z, ]{5,40}", request_class.doing)


def test_every_training_method_has_requests_of_its_rounds():
    marked = {kind.kind.partition(".")[2] for kind in requests() if kind.each_round}
    for name in (name for name, method in all_methods().items() if method.trains):
        assert any(kind.startswith(name.replace("-", "_")) for kind in marked), name


class Timed:
    """Stages with a clock that is moved by hand."""

    def __init__(self):
        self.now, self.noted = START, list[Stage]()
        self.stages = Stages(self.noted.append, lambda: self.now)

    def exchange(self, kind, takes, **more):
        request = kind.__new__(kind)
        given = {"round_id": 1, "n_rounds": 4, **more}
        end = self.stages.begin(request, **given)
        self.now += takes
        end()
        return self.noted[-1]


def test_an_exchange_is_a_stage_and_has_a_round_if_it_is_part_of_one():
    timed = Timed()
    assert timed.exchange(SketchRequest, 5) == Stage("summarising the columns", START)
    first = Stage("growing trees", START + 5, round=1, rounds=4)
    assert timed.exchange(GrowRequest, 8) == first
    assert timed.exchange(GrowRequest, 2) == replace(first, since=START + 13)
    assert timed.exchange(GrowRequest, 6, round_id=2) == replace(first, since=START + 15, round=2)
    # The scores of the last round come with an exchange that would begin another.
    assert timed.exchange(GrowRequest, 1, round_id=5).round == 4


def test_of_the_brief_exchanges_of_a_round_the_first_stands_for_all(monkeypatch):
    monkeypatch.setattr("fedapp.run_folder.NOTED", 0.0)
    timed = Timed()
    for round_id in (1, 2):
        for takes in (0.01, 0.01, 0.2):
            timed.exchange(GrowRequest, takes, round_id=round_id)
    # Nothing is known of the first round's; of the second's the first and the long one are told.
    assert [stage.round for stage in timed.noted] == [1, 1, 1, 2, 2]
    assert timed.noted[-1].since == pytest.approx(START + 0.24)


def test_a_stage_names_the_parties_that_are_waited_for():
    timed = Timed()
    timed.exchange(GrowRequest, 1)
    timed.stages.name_waiting(["bank", "shop"])
    named = {"doing": "growing trees; waiting for bank, shop", "waiting": ["bank", "shop"]}
    assert timed.noted[-1] == replace(timed.noted[-2], **named)
    timed.stages.name_waiting(["bank", "shop"], ["shop"])
    assert timed.noted[-1].doing == "growing trees; waiting for bank, shop (shop not connected)"
    timed.exchange(GrowRequest, 1)  # brief, and noted nevertheless
    assert timed.noted[-1].doing == "growing trees"


@pytest.mark.parametrize(
    ("parties", "n_lost", "text"),
    [
        (3, 0, "waiting for 3 parties"),
        (3, 2, "waiting for 1 party"),
        (0, 0, "waiting for the parties"),  # any number of them
    ],
)
def test_the_parties_that_are_waited_for_are_counted(monkeypatch, tmp_path, parties, n_lost, text):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setattr("strategies.handshake.QUIET_SECONDS", -1.0)
    waits = []
    nodes = list(range(parties - n_lost or 3))
    assert find_nodes(LocalGrid(nodes), parties, n_lost, 9.0, waits.append) == nodes
    assert waits == [text]


class LocalGrid(SimpleNamespace):
    """A grid of the local engine, by its name."""

    def __init__(self, nodes):
        super().__init__(get_node_ids=lambda: nodes)


def test_sites_that_are_not_connected_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    (tmp_path / "sites").mkdir()
    for name, node in {"bank": 17, "shop": 4}.items():
        (tmp_path / "sites" / f"{name}.node").write_text(f"{node}\n")
    assert site_names() == {"node 17": "bank", "node 4": "shop"}
    waits = []
    with pytest.raises(ConfigError, match=r"^parties must be 2, got 1 within 0 s"):
        find_nodes(SimpleNamespace(get_node_ids=lambda: [17]), 2, 0, 0.0, waits.append)
    assert waits == ["waiting for 2 parties", "waiting for shop"]
    monkeypatch.setattr("strategies.handshake.EXPLAINED_AFTER", -1.0)
    with pytest.raises(ConfigError, match=r"^parties must be 2"):
        find_nodes(SimpleNamespace(get_node_ids=lambda: [17]), 2, 0, 0.0, waits.append)
    assert waits[-1] == f"waiting for shop, not connected: the site's own log says why; {RULE}"


def test_the_time_of_a_phase_goes_on_through_its_exchanges():
    timed = Timed()
    assert timed.exchange(MaskRequest, 5) == Stage("aligning the rows", START)
    assert timed.exchange(MatchRequest, 5) == Stage("aligning the rows", START)
    assert timed.exchange(SketchRequest, 5).since == START + 10
    timed.stages.wait("aligning the rows")
    assert timed.exchange(MaskRequest, 5).since == START + 15


def test_of_brief_rounds_one_now_and_then_stands_for_all():
    timed = Timed()
    for round_id in (1, 2, 3, 4):
        timed.exchange(GrowRequest, 0.09, round_id=round_id)
    # The first, of which nothing is known, and the one that begins 0.25 s later.
    assert [stage.round for stage in timed.noted] == [1, 4]


def test_a_run_says_where_it_is_at_every_exchange(settings, monkeypatch):
    monkeypatch.setattr("fedapp.run_folder.NOTED", 0.0)
    noted = []
    write = RunFolder.note
    monkeypatch.setattr(
        RunFolder, "note", lambda folder, stage: (noted.append(stage), write(folder, stage))[0]
    )
    folder = run_local(settings(parties=2))
    # On a loaded machine a party may be waited for.
    told = [(stage.doing.partition("; waiting for")[0], stage.round) for stage in noted]
    assert list(dict.fromkeys(told)) == [
        ("waiting for 2 parties", 0),
        ("meeting the parties", 0),
        ("reading the tables", 0),
        ("summarising the columns", 0),
        ("growing trees", 1),
        ("growing trees", 2),
        ("scoring", 0),
    ]
    assert not (folder.path / "progress.json").exists()


def test_a_run_that_was_interrupted_says_where_and_how_far_it_was_saved(settings, monkeypatch):
    monkeypatch.setattr("fedapp.run_folder.BRIEF", 0.0)  # else a quick round is not noted
    interrupted = settings(parties=2, num_boost_round=5)
    die(interrupted, dies_before_sending=8)
    folder = RunFolder(Path(interrupted.run_dir))
    stage, kept = folder.stage, folder.saved_state
    assert (stage.doing, stage.round) == ("growing trees", 3)
    assert kept is not None
    # Of the second round all is saved but its scores, which come with the third.
    assert kept.rounds == 1
    run(resumed(interrupted), simulated_contexts(interrupted))
    assert folder.stage is None
    assert folder.saved_state is None


@pytest.mark.slow
def test_a_command_says_something_before_what_trains_is_loaded():
    """Numba and Flower take seconds to import, and a command begins with a line of what it does."""
    heavy = {"numba", "flwr", "xgboost", "sklearn"}
    code = f"import sys, fedapp.commands; print(*{heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


# Calls in Python


class Terminal(io.StringIO):
    """A stream at which a person looks."""

    def isatty(self):
        return True


SEEN = ("", "sys.stderr", "sys.stdout")


@pytest.mark.parametrize("seen", SEEN)
def test_a_call_shows_progress_where_a_person_looks(seen, monkeypatch):
    terminal = Terminal()
    if seen:
        monkeypatch.setattr(seen, terminal)
    with following(None) as watcher:
        watcher.begin("reading the settings")
        watcher.tell("! a column is empty")
    assert isinstance(watcher, Follower if seen else Silent)
    assert ("reading the settings" in terminal.getvalue()) == bool(seen)
    assert ("! a column is empty" in terminal.getvalue()) == bool(seen)
    with following(False) as watcher:
        assert isinstance(watcher, Silent)


def test_a_call_writes_lines_into_a_pipe_only_if_asked(capsys):
    with following(True) as watcher:
        watcher.begin("reading the settings")
    assert capsys.readouterr() == ("", "0:00  reading the settings\n")
    with following(watcher) as same:
        assert same is watcher


def test_threads_and_other_processes_show_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    watchers = []

    def call():
        with following(None) as watcher:
            watchers.append(watcher)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    monkeypatch.setattr("fedapp.report.progress.parent_process", object)
    call()
    assert [type(watcher) for watcher in watchers] == [Silent, Silent]


def test_what_a_callback_prints_into_a_pipe_stays_out_of_the_terminal(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with following(None):
        print("round 1")
    assert capsys.readouterr().out == "round 1\n"
    assert "round 1" not in terminal.getvalue()


def test_a_notebook_has_one_output_that_changes(monkeypatch):
    """As IPython has it: a display with an id is updated in place."""
    shown = []

    class Output:
        def update(self, content, raw=False):
            text = content if raw else content._repr_mimebundle_((), ())
            shown.append(text["text/plain"])

    def display(content, display_id=False):
        output = Output()
        output.update(content)
        return output if display_id else None

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with following(None) as watcher:
        watcher.begin("reading the settings")
        watcher.tell("! a column is empty")
        watcher.begin("scoring")
    lines = [Text.from_ansi(text).plain.split("━")[0].strip() for text in shown]
    assert [line for line, _ in groupby(lines)] == [
        "",
        "reading the settings",
        "! a column is empty",
        "scoring",
        "",
    ]


@pytest.mark.slow
def test_a_run_in_python_shows_its_rounds(monkeypatch, own_folder):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    short = {"num_boost_round": 2, "max_depth": 2, "parties": 2}
    fedapp.run("pax", **short, progress=False)
    assert terminal.getvalue() == ""
    fedapp.run("pax", **short)
    assert "writing the report" in terminal.getvalue()
    X, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    terminal.truncate(0)
    fedapp.PAXClassifier(n_estimators=2, max_depth=2, parties=2, progress=False).fit(X, y)
    assert terminal.getvalue() == ""
    fedapp.PAXClassifier(n_estimators=2, max_depth=2, parties=2).fit(X, y)
    assert "writing the report" in terminal.getvalue()


@pytest.mark.slow
def test_parties_that_predict_together_show_it(monkeypatch, own_folder):
    ids = [f"p{row}" for row in range(40)]
    a, b = np.arange(80.0).reshape(2, 40)
    bank = pa.table({"id": ids, "a": a, "y": np.arange(40) % 2})
    tables = {"bank": bank, "shop": pa.table({"id": ids, "b": b})}
    forest = {"trees": 2, "max_depth": 2}
    run = fedapp.run("federated-forest", data=tables, label="y", id="id", federated_forest=forest)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    scores = run.predict_proba(tables, progress=False)
    assert terminal.getvalue() == ""
    assert np.array_equal(run.predict_proba(tables), scores)
    assert "━" in terminal.getvalue()  # the line's bar


def test_of_many_parties_that_are_waited_for_a_few_are_named():
    timed = Timed()
    timed.exchange(GrowRequest, 1)
    timed.stages.name_waiting([f"party-{n}" for n in range(300)])
    assert timed.noted[-1].doing.endswith(
        "for party-0, party-1, party-2, party-3, party-4, party-5 and 294 more"
    )
    assert len(timed.noted[-1].waiting) == 300
