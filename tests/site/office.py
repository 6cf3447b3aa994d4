"""The office of a site: its register of runs, a person who approves them, and a clock."""

import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.crypto.noise import budget_for
from fedapp.data.table import Table
from fedapp.errors import FedappError, WaitingError
from fedapp.home import home
from fedapp.messages import methods
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.methods import all_methods
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.site import account, clock, register
from fedapp.site.rows import hash_rows
from fedapp.site.settings import SiteConfig, site_config
from tests.plans import planned
from tests.sites import answer

NODE = {"name": "bank", "data": "rows.csv", "allow": ",".join(all_methods()), "runs-per-day": 100}
ASKS = {**NODE, "approve": "ask"}
PARTIES = ("bank", "insurer", "shop")
DAY = 86_400


def hello(parties=("bank",), **fields):
    """An opening between parties whose keys are in this home."""
    opening = HelloRequest("binary:logistic", 0.2, 0.1, 42, False)
    return replace(opening, **(planned(parties) | fields))


def vertical_hello(parties=("bank",), model="", **fields):
    return VerticalHelloRequest(True, 1000, 42, model, False, **(planned(parties) | fields))


def private(epsilon=1.0, delta=1e-05, **fields):
    """The opening of a private run of three parties."""
    if "multiplier" not in fields:
        fields["multiplier"] = budget_for(epsilon, delta, 50, 3).multiplier
    plan = {"aggregation": "secure", "rounds": 50, "epsilon": epsilon, "delta": delta}
    return replace(hello(PARTIES), **(plan | fields))


def model_id(number):
    return f"{number:016x}"


def ask(config, number, request=None, step=1, method="pax"):
    """What a site answers to a coordinator; by default to the opening of a run."""
    request = request or hello((config.name,))
    envelope = Envelope(model_id(number), step, method=method)
    return answer(config, request.kind, envelope, to_content(request, config.name))


def rows_at(path):
    """Rows that no table at another path has."""
    values = np.random.default_rng(zlib.crc32(path.encode())).normal(size=(40, 2))
    return hash_rows(Table(("a", "b"), values.astype(np.float32)), b"key")


def admit(config, number, opening=None, method="pax"):
    """Admit a run on a table that need not exist."""
    opening = opening or hello()
    register.admit(config, model_id(number), method, opening, rows_at(config.data))


def waits(config, number, opening, method="pax"):
    """A run that begins only if a person approves it."""
    with pytest.raises(WaitingError, match=r"^waits for approval at bank"):
        admit(config, number, opening, method)


def runs(name="bank"):
    return register.runs_of(home() / "sites" / name)


def approve(*words, answer=""):
    """``fedapp site approve``."""
    return CliRunner().invoke(site_app, ["approve", *words], input=answer, env={"COLUMNS": "200"})


def set_clock(patch, wall, up=None, boot="one"):
    """From here on a site's clock says this; by default the machine has run as long."""
    home().mkdir(exist_ok=True)
    (home() / clock.CLOCK).touch()
    got = clock.Reading(wall, wall if up is None else up, boot)
    patch.setattr(clock, "reading", lambda: got)


def read(result):
    """What a command prints, in one line."""
    return " ".join(result.output.split())


@dataclass
class Scene:
    """A site, what happens there, and the time; each event is a function of the scene."""

    config: SiteConfig
    now: list[float] = field(default_factory=lambda: [1e9])
    off: float = 0.0  # seconds that its clock is ahead

    def play(self, events):
        with pytest.MonkeyPatch.context() as patch:
            for happens in events:
                set_clock(patch, self.now[0] + self.off, self.now[0])
                happens(self)


def asks(number, method="pax", waits="", refused="", opening=hello, node=(), **fields):
    """A run asks: it is admitted, waits for this reason, or is refused by this rule."""

    def happens(scene):
        begin = partial(admit, replace(scene.config, **dict(node)), number, opening(**fields))
        if not waits and not refused:
            begin(method)
            return
        with pytest.raises(FedappError, match=waits or f"^{refused}") as caught:
            begin(method)
        assert isinstance(caught.value, WaitingError) == bool(waits)

    return happens


def charged(number, refused=""):
    """A noised sum of the run leaves, or is not charged and so does not."""

    def happens(scene):
        expected = pytest.raises(FedappError, match=f"^{refused}") if refused else nullcontext()
        with expected:
            register.charge(scene.config, model_id(number))

    return happens


def approved(number, because=""):
    """A person approves the run, and has read why it waits."""

    def happens(scene):
        result = approve(model_id(number), "--yes")
        assert result.exit_code == 0
        assert f"waits because {because}" in read(result)

    return happens


def clock_is_off(seconds):
    """From here on the clock is ahead."""
    return lambda scene: setattr(scene, "off", seconds)


def later(seconds):
    def happens(scene):
        scene.now[0] += seconds

    return happens


def recorded(*numbers):
    """The register has these runs."""

    def happens(scene):
        assert [run.model for run in runs()] == [model_id(number) for number in numbers]

    return happens


def scene_of(**node):
    return Scene(site_config({**NODE, **{key.replace("_", "-"): v for key, v in node.items()}}, {}))


def declare_group(monkeypatch, name, handlers):
    """Add a method's messages and their handlers; its runs have any rounds and restarts."""
    module = ModuleType(f"clients.{name}")
    vars(module)["HANDLERS"] = handlers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    method = methods.Method("inference", {"": "sizes"}, memory=None)
    groups = {**methods._groups(), name: (ModuleType(f"fedapp.messages.{name}"), method)}
    monkeypatch.setattr(methods, "_groups", lambda: groups)
    monkeypatch.setattr(account, "_check_rounds", lambda *given: None)
