"""``--engine``: which there are, what each is, and what Flower calls its SuperLinks."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapp.config import Settings
from fedapp.errors import ConfigError
from fedapp.names import near
from fedapp.run_folder import RunFolder

if TYPE_CHECKING:
    from simulations.engines import Tell

SIMULATED = ("local", "simulation")
HELP = (
    "local (the parties are simulated in this process), simulation (in Flower's own runtime), or "
    "the name of a SuperLink in Flower's configuration."
)


def flower_config() -> Path:
    """Flower's list of SuperLinks; a coordinator's env.sh names the folder it lies in."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def superlinks() -> Mapping[str, Mapping[str, Any]]:
    """The SuperLinks that Flower's configuration names.

    Raises
    ------
    ConfigError : the file is no TOML.
    """
    path = flower_config()
    if not path.is_file():
        return {}
    try:
        listed = tomllib.loads(path.read_text()).get("superlink", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML, got: {error}") from None
    return {
        name: link
        for name, link in listed.items()
        if isinstance(link, Mapping) and name not in SIMULATED
    }


def check_engine(name: str) -> None:
    """Hold that an engine is known.

    Raises
    ------
    ConfigError : it is not; says which are, and what a coordinator has to do first.
    """
    known = [*SIMULATED, *superlinks()]
    if name not in known:
        rule = f"must be {', '.join(known)}, or another SuperLink in {flower_config()}"
        hint = near(name, known) or "; a coordinator first sources its own: . FOLDER/env.sh"
        raise ConfigError(f"engine {rule}, got {name!r}{hint}")


def told(name: str) -> str:
    """Which engine carries the messages, in a line."""
    if name == "local":
        return "engine local: the parties are simulated in this process"
    if name == "simulation":
        return (
            "engine simulation: Flower's own runtime, whose start takes some 15 s; "
            "--engine local makes the same model without it"
        )
    # A user's address holds the password.
    address = str(superlinks()[name].get("address", "no address")).rpartition("@")[2]
    return f"engine {name}: the SuperLink at {address}"


def engine_of(name: str, tell: Tell) -> Callable[[Settings], RunFolder | None]:
    """What carries the messages; ``tell`` is told what it does beside that.

    Raises
    ------
    ConfigError : there is no such engine.
    """
    from simulations import engines, local

    check_engine(name)
    if name == "local":
        return local.run_local
    if name == "simulation":
        return lambda settings: engines.run_simulation(settings, tell)
    return lambda settings: engines.run_superlink(settings, name, tell)
