"""Runs on a Ray cluster, which ``RAY_ADDRESS`` names: see ``fedapp.cluster``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fedapp.cluster import RETRIES, check_nodes, connected, variables
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.process import ray_address
from fedapp.report.progress import Watcher

T = TypeVar("T")


def check_on(on: str, engine: str) -> None:
    """Check where runs are to be made: on Ray with the local engine, or here."""
    if on not in ("", "ray") or (on and engine != "local"):
        rule = "must be ray, with the local engine, or omitted"
        raise ConfigError(f"on {rule}, got {on} with engine={engine}")


def data_folder() -> list[Path]:
    """Where data sets are, if a variable names it: all nodes must see it."""
    return [Path(data)] if (data := os.environ.get("FEDAPP_DATA")) else []


def job_variables() -> dict[str, str]:
    """Environment of another driver, from which Ray passes `variables` on."""
    of_job = {**variables(), "RAY_ADDRESS": ray_address()}  # whose parties share the cluster
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": of_job}})}


def carried_out(
    calls: Mapping[str, Callable[[], T]], folder: Path, files: Sequence[Path], watcher: Watcher
) -> Iterator[T]:
    """Call functions as Ray tasks of one CPU each; yield their results as they come.

    They write into ``folder``, read ``files``, and begin in the working folder. A call whose
    process dies is repeated; what it raises is raised here.
    """
    watcher.begin("checking the nodes of the Ray cluster")
    with connected() as ray:
        check_nodes(ray, [home(), Path(), folder], [*files, *data_folder()])
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_called)
        here = os.getcwd()
        names = {task.remote(here, call): name for name, call in calls.items()}
        while names:
            watcher.begin(f"{len(names)} of {len(calls)} tasks on Ray are not done")
            (done,), _ = ray.wait(list(names))
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            watcher.tell(f"{names.pop(done)}: done")


def _called(folder: str, call: Callable[[], T]) -> T:
    os.chdir(folder)  # relative paths are from the command's folder
    return call()
