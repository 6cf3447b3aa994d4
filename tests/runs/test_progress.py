"""What a person sees while a command works: phases, rounds, and how long a phase has taken."""

import io
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import fedapp
import fedapp.messages
from fedapp.conversation import Exchange
from fedapp.errors import ConfigError, PartyError
from fedapp.messages.handshake import GreetReply
from fedapp.messages.pax import GrowRequest, SketchRequest
from fedapp.messages.vertical import MaskRequest, MatchRequest
from fedapp.report.progress import HEARTBEAT_SECONDS, Follower, Silent, following
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs.local import run_local
from strategies import PAX
from strategies.flower import Stages
from strategies.handshake import find_nodes, removed_nodes, shown_names, site_names
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


def test_a_round_is_a_line_once_its_own_is_finished(watched):
    """Also where the file is written anew, as ``resume`` does: the last lines go, other ones come
    in their place; and where lines are rubbish, which is told once."""
    with watched.follower.run(watched.folder, "auc"):
        watched.stage("reading the tables")
        watched.tick()
        watched.training(3)
        first = "0:00  round  3/50  valid auc 0.5370  logloss 0.5370  exchanges 14  1.2 MB  0.31 s"
        watched.write(3)
        assert watched.tick() == [first]  # which needs no line of its phase
        line = json.dumps(round_line(4, ["accuracy", "auc", "logloss"], 50))
        watched.write(3, tail=line[:40])
        assert watched.tick() == []
        watched.write(3, 4)
        assert [text.split()[2] for text in watched.tick(1)] == ["4/50"]
        watched.write(1)
        assert watched.tick() == ["0:01  resuming after round 1"]
        watched.write(1, 2)
        assert [text.split()[2] for text in watched.tick()] == ["2/50"]
        watched.write(1, 2, 3, 4)  # longer than what was read, in a file that was begun anew
        assert [text.split()[2] for text in watched.tick()] == ["3/50", "4/50"]
        watched.write(1, 2, 3, 4, tail="{nonsense\n")
        assert ["rounds.jsonl must be JSON, got: " in text for text in watched.tick()] == [True]
        watched.write(*range(1, 6))
        assert [text.split()[2] for text in watched.tick()] == ["5/50"]
        watched.write(*range(1, 51))
        watched.folder.write_json("summary.json", {})
    assert watched.lines[-1].split()[2] == "50/50"
    with watched.follower.run(watched.folder, "rmse"):
        lines = [round_line(1, ["rmse", "mae"], valid={}), round_line(2, [])]
        watched.folder.write("rounds.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert watched.lines[-2:] == [
        "0:01  round 1/5  train rmse 0.5123  mae 0.5123  exchanges 6  1.2 MB  0.31 s",
        "0:01  round 2/5  exchanges 10  1.2 MB  0.31 s",
    ]


def test_what_slows_a_run_is_a_line_once(watched):
    slow = {"warnings": ["bank: slow", "shop: slow"]}
    with watched.follower.run(watched.folder, "auc"):
        watched.stage("scoring", **slow)
        assert watched.tick() == ["0:00  ! bank: slow", "0:00  ! shop: slow", "0:00  scoring"]
        watched.training(1, **slow)
        assert watched.tick(1) == ["0:01  round 1/50: growing trees, 1 s"]


def test_an_error_in_showing_is_told_once_and_ends_nothing(watched):
    with watched.follower.run(watched.folder, "auc"):
        (watched.folder.path / "progress.json").write_text("{nonsense")
        assert len(told := watched.tick()) == 1
        assert told[0].startswith("0:00  progress cannot be shown: ")
        assert watched.tick(1) == []
        watched.stage("scoring")
        assert watched.tick() == ["0:01  scoring"]


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
        watched.follower.begin("ending Flower", ends=True)
        watched.now += 1
        watched.training(2)  # of a process that has not ended yet
        assert watched.tick(4) == ["2:56  ending Flower, 5 s"]
    assert watched.tick(1) == []  # what the run did is not shown again after it
    watched.follower.begin("writing the report")
    assert watched.lines[-1] == "2:57  writing the report"


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


def test_an_exchange_is_a_stage_with_its_round_and_who_is_waited_for():
    now, noted = [START], list[Stage]()
    stages = Stages(noted.append, lambda: now[0])

    def exchange(kind, takes, round_id=1):
        stages.begin(kind.__new__(kind), round_id=round_id, n_rounds=4)
        now[0] += takes
        return noted[-1]

    assert exchange(MaskRequest, 5) == Stage("aligning the rows", START)
    assert exchange(MatchRequest, 5) == Stage("aligning the rows", START)  # goes on
    assert exchange(SketchRequest, 5) == Stage("summarising the columns", START + 10)
    first = Stage("growing trees", START + 15, round=1, rounds=4)
    assert exchange(GrowRequest, 8) == first
    assert exchange(GrowRequest, 2) == replace(first, since=START + 23)
    assert exchange(GrowRequest, 6, round_id=2) == replace(first, since=START + 25, round=2)
    # The scores of the last round come with an exchange that would begin another.
    assert exchange(GrowRequest, 1, round_id=5).round == 4
    stages.name_waiting(["bank", "shop"])
    assert noted[-1].doing == "growing trees; waiting for bank, shop"
    stages.name_waiting(["bank", "shop"], ["shop"])
    assert noted[-1].doing == "growing trees; waiting for bank, shop (shop not connected)"
    stages.name_waiting([f"party-{n}" for n in range(300)])
    assert noted[-1].doing.endswith("party-3, party-4, party-5 and 294 more")
    assert len(noted[-1].waiting) == 300
    stages.name_waiting([])
    assert noted[-1].doing == "growing trees"
    assert exchange(GrowRequest, 0.1).doing == "growing trees"  # brief, and noted nevertheless
    stages.wait("aligning the rows")
    assert exchange(MaskRequest, 5).since == now[0] - 5


def test_parties_that_are_waited_for_are_counted_or_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    waits = []

    def find(parties, n_lost, *nodes):
        grid = SimpleNamespace(get_node_ids=lambda: nodes)
        return find_nodes(grid, parties, n_lost, 0.0, waits.append)

    for parties, n_lost, text in ((3, 2, "1 party"), (0, 0, "the parties")):
        assert find(parties, n_lost, 17) == [17]
        assert waits.pop() == f"waiting for {text}"
    (tmp_path / "sites").mkdir()
    for name, node in {"bank": 17, "shop": 4}.items():
        (tmp_path / "sites" / f"{name}.node").write_text(f"{node}\n")
    assert site_names() == {"node 17": "bank", "node 4": "shop"}
    nodes = (4, 17, 735, 736)
    for labels, names in {
        ("node 735", "node 736"): ["2 parties"],
        ("node 735",): ["1 party"],
        ("node 17", "node 735"): ["bank", "1 party without a name yet"],
        ("bank", "party-2"): ["bank", "party-2"],  # once they have introduced themselves
        (): [],
    }.items():
        assert shown_names(labels, nodes) == names
    strategy = PAX(parties=2)
    strategy.pending = Exchange({}, GreetReply)
    strategy._addresses = {"node 17": 17, "node 735": 735}
    for label, name in {"node 17": "bank", "node 735": "node 735"}.items():
        with pytest.raises(PartyError, match=rf"^{name} .*no answer within"):
            strategy._read(None, label)
    for explained_after in (9.0, -1.0):
        monkeypatch.setattr("strategies.handshake.EXPLAINED_AFTER", explained_after)
        why = ", not connected: the site's own log says why" if explained_after < 0 else ""
        rule = rf"^parties must be 2, got 1 within 0 s \(start-deadline\); waited for shop{why}$"
        with pytest.raises(ConfigError, match=rule):
            find(2, 0, 17)
    assert waits[:2] == ["waiting for 2 parties", "waiting for shop"]
    assert waits[-1] == "waiting for shop, not connected: the site's own log says why"
    (tmp_path / "sites" / "shop.node").rename(tmp_path / "sites" / "shop.node.removed")
    assert (site_names(), removed_nodes()) == ({"node 17": "bank"}, {4})


def test_a_run_says_where_it_is_at_every_exchange(settings, monkeypatch):
    monkeypatch.setattr("strategies.flower.NOTED", 0.0)
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


class Terminal(io.StringIO):
    """A stream at which a person looks."""

    def isatty(self):
        return True


@pytest.mark.parametrize("seen", ["", "sys.stderr", "sys.stdout"])
def test_a_call_shows_progress_where_a_person_looks_or_where_it_is_asked_to(
    seen, monkeypatch, capsys
):
    terminal = Terminal()
    if seen:
        monkeypatch.setattr(seen, terminal)
    with following(None) as watcher:
        watcher.begin("reading the settings")
        watcher.tell("! a column is empty")
        if seen == "sys.stderr":
            print("round 1")
    assert isinstance(watcher, Follower if seen else Silent)
    for text in ("reading the settings", "! a column is empty"):
        assert (text in terminal.getvalue()) == bool(seen)
    assert "round 1" not in terminal.getvalue()  # what goes into a pipe stays there
    assert capsys.readouterr().out == "round 1\n" * (seen == "sys.stderr")
    with following(False) as watcher:
        assert isinstance(watcher, Silent)
    if not seen:
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


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("progress", [False, None])
def test_a_run_and_a_fit_show_their_rounds_unless_they_are_to_be_silent(monkeypatch, progress):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    fedapp.run("pax", num_boost_round=1, max_depth=2, parties=2, progress=progress)
    assert ("writing the report" in terminal.getvalue()) == (progress is None)
    terminal.truncate(0)
    X, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    model = fedapp.PAXClassifier(n_estimators=1, max_depth=2, parties=2, progress=progress)
    model.fit(X, y)
    assert ("writing the report" in terminal.getvalue()) == (progress is None)
