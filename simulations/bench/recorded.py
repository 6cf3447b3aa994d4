"""Small runs of every method, recorded for ``simulations.bench.fuzz``."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode

from fedapp.client_app import SiteApp
from fedapp.errors import StoppedError
from fedapp.home import home
from fedapp.messages.fields import all_methods
from fedapp.messages.secagg import LeftRequest
from fedapp.messages.wire import Content, Envelope, from_records, to_bytes
from fedapp.runs.engines import LocalGrid, site_contexts
from fedapp.settings import Settings, load_settings
from fedapp.site import answer as answer_module
from fedapp.site.mail import Mail
from fedapp.site.trust import IDENTITY
from strategies.run import train

N_ROWS = 60
NODES = ("bank", "shop", "mill", "port")  # the first of them, as many as a run has
PARTIES = 2  # by default
VERTICAL = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
FOREST = {
    "federated-forest.trees": 3,
    "federated-forest.max-depth": 3,
    "federated-forest.key-bits": 256,
    "federated-forest.insecure-small-key": True,
}
SECURE = {"strategy": "pax", "pax.aggregation": "secure", "parties": 3}
PRIVATE = {"privacy.epsilon": 1000.0}
LINEAR = {"fedavg-linear.rounds": 2, "fedavg-linear.local-epochs": 1}
SECURE_LINEAR = {**LINEAR, "fedavg-linear.aggregation": "secure", "parties": 3}
SHARES = {"parties": 4, "min-parties": 3}
EINI = {"eini.key-bits": 512, "eini.insecure-small-key": True, "eini.unguarded": True}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "pax": {},
    "pax classes": {"strategy": "pax", "objective": "multi:softprob"},
    "bagging": {},
    "cyclic": {},
    "pax secure": SECURE,
    "pax shares": {**SECURE, **SHARES},
    "pax private": {**SECURE, **PRIVATE},
    "pax greedy": {**SECURE, **PRIVATE, "privacy.trees": "greedy"},
    "fedavg-linear": LINEAR,
    "fedavg-linear secure": SECURE_LINEAR,
    "fedavg-linear shares": {**SECURE_LINEAR, **SHARES},
    "fedxgbllr": {"fedxgbllr.trees": 6, "fedxgbllr.rounds": 1, "fedxgbllr.epochs": 1},
    "secureboost": VERTICAL,
    "federated-forest": FOREST,
    "federated-forest paillier": {**FOREST, "federated-forest.labels": "paillier"},
}
# Step from which the last party of a run no longer answers: the first sum of the second round.
LOST_AT = {"pax shares": 17, "fedavg-linear shares": 11}
PREDICTIONS = {"interactive": {}, "one-round": {}, "eini": EINI}


@dataclass(frozen=True, slots=True)
class Seed:
    """A recorded message."""

    kind: str
    node: Mapping[str, Any]  # the site's node config
    envelope: Envelope
    data: bytes
    home: Path  # copy of the site's folder before the message
    letters: tuple[str, ...]  # classes of the letters that came with it


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run: its settings, the request at each step, and the replies by step and node."""

    settings: Settings
    kinds: Mapping[int, str]
    replies: Mapping[tuple[int, int], bytes]


class Recorder(SiteApp):
    """Sites that record every message, with the site's folder before it.

    The site ``lost`` stops answering at step ``lost_at``; 0: never.
    """

    def __init__(self, folder: Path, lost: str = "", lost_at: int = 0) -> None:
        super().__init__()
        self.folder, self.seeds, self.replies = folder, list[Seed](), dict[tuple[int, int], bytes]()
        self.kinds = dict[int, str]()
        self._lost, self._lost_at = lost, lost_at
        self._lock = threading.Lock()

    def __call__(self, message: Message, context: Context) -> Message:
        name = str(context.node_config["name"])
        envelope, content = from_records(message.content, name)
        if name == self._lost and 0 < self._lost_at <= envelope.step:
            return no_answer(message)
        with self._lock:  # one site at a time, so that other sites' folders do not change
            here = self.folder / f"{len(self.seeds)}"
            _copy_home(name, here)
            with watching_letters() as seen:
                reply = super().__call__(message, context)
            kind, data = message.metadata.message_type, to_bytes(content)
            node = dict(context.node_config)
            self.seeds.append(Seed(kind, node, envelope, data, here, tuple(seen)))
            self.kinds[envelope.step] = kind
        if not reply.has_error():
            reply_bytes = to_bytes(from_records(reply.content, name)[1])
            self.replies[envelope.step, context.node_id] = reply_bytes
        return reply


def no_answer(message: Message) -> Message:
    """The reply of a lost party."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=message)


def _copy_home(name: str, to: Path) -> None:
    """Copy a site's folder, and of the other sites on this machine only the keys."""
    (to / "sites").mkdir(parents=True)
    for folder in home().glob("sites/*"):
        if folder.name == name:
            shutil.copytree(folder, to / "sites" / name)
        elif (folder / IDENTITY).exists():
            (to / "sites" / folder.name).mkdir()
            shutil.copy(folder / IDENTITY, to / "sites" / folder.name / IDENTITY)


@contextmanager
def watching_letters(
    change: Callable[[str, Content], Content] | None = None,
) -> Iterator[list[str]]:
    """Change letters after they were opened; yield the classes of the letters."""
    honest, seen = vars(answer_module)["open_mail"], list[str]()

    def opened(*arguments: Any) -> Mail:
        mail = honest(*arguments)
        letters = mail._letters
        seen.extend(letter.name for _, letter in letters)
        changed = [(sender, change(sender, one) if change else one) for sender, one in letters]
        return Mail(mail._name, changed)

    with patch.object(answer_module, "open_mail", opened):
        yield seen


def record(
    folder: Path, methods: str = ""
) -> tuple[list[Seed], dict[str, Recorded], dict[str, str]]:
    """Run all methods on small tables; messages, replies by run, and texts of models by method."""
    seeds, runs, models = list[Seed](), dict[str, Recorded](), dict[str, str]()
    for name, overrides in METHODS.items():
        method = str(overrides.get("strategy", name.split()[0]))
        if methods and name not in methods.split(","):
            continue
        settings = {"strategy": method, "parties": PARTIES, "num-boost-round": 2, "max-depth": 3}
        config = {**settings, "max-bin": 16, "explain": "", **overrides}
        names = NODES[: config["parties"]]
        nodes = _write_tables(folder / name, method, names, "classes" in name)
        if "min-parties" in config:
            nodes = [{**node, "least-parties": 2} for node in nodes]
        contexts = site_contexts(nodes)
        predictions = PREDICTIONS if method in ("secureboost", "federated-forest") else {}
        if "paillier" in name or (method == "secureboost"):
            predictions = {
                key: settings_of_way
                for key, settings_of_way in predictions.items()
                if key != "one-round"
            }
        for run, more in {name: config, **predictions}.items():
            if run != name:
                model = json.loads((folder / name / "run" / "summary.json").read_text())["model_id"]
                base = {"strategy": run, "parties": PARTIES, "model": model, "explain": "r3,r9"}
                more, run = {**base, **more}, f"{run} after {name}"
            app = Recorder(folder / name / f"homes {run}", names[-1], LOST_AT.get(run, 0))
            loaded = load_settings(
                {**more, "run-dir": str(folder / name / run.replace(name, "run"))}
            )
            with closing(LocalGrid(contexts, app)) as grid:
                trained = train(grid, loaded)
            if run in LOST_AT:
                seeds += _record_resumed(folder / name, contexts, loaded)
            seeds += app.seeds
            runs[run] = Recorded(loaded, app.kinds, app.replies)
            if run == name:
                models[name] = (trained.path / "model.json").read_text()
    return seeds, runs, models


def _record_resumed(folder: Path, contexts: list[Context], settings: Settings) -> list[Seed]:
    """Requests to single parties when a masked run that tolerates lost parties is resumed."""
    app = Recorder(folder / "homes resumed")
    with closing(LocalGrid(contexts, app)) as grid:
        stopped = settings.model_copy(update={"run_dir": str(folder / "resumed")})
        with suppress(StoppedError):
            train(grid, stopped, on_round=lambda _: False)
        train(grid, load_settings({"resume": stopped.run_dir}))
    return [seed for seed in app.seeds if seed.kind == LeftRequest.kind]


def _write_tables(
    folder: Path, method: str, names: Sequence[str], has_classes: bool
) -> list[dict[str, Any]]:
    (folder / "tables").mkdir(parents=True)
    is_vertical, nodes = method in ("secureboost", "federated-forest"), []
    for index, name in enumerate(names):
        rng = np.random.default_rng(index)
        rows = rng.normal(size=(N_ROWS, 3)).round(2)
        labels = rng.integers(0, 3 if has_classes else 2, N_ROWS)
        has_label = not (is_vertical and index)
        header = ["id", *(f"{name if is_vertical else 'c'}{c}" for c in range(3))]
        lines = [",".join([*header, "y"] if has_label else header)]
        for number, row in enumerate(rows):
            values = [f"r{number}", *map(str, row), *([str(labels[number])] if has_label else [])]
            lines.append(",".join(values))
        path = folder / "tables" / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n")
        node = {"name": name, "data": str(path), "id": "id", "allow-insecure": "true"}
        policy = {"allow": ",".join(all_methods()), "runs-per-day": 10**9}
        nodes.append({**node, **policy, **({"label": "y"} if has_label else {})})
    return nodes
