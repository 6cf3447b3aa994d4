"""A Ray cluster, which ``RAY_ADDRESS`` names: its nodes are checked, and work is sent to them."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar
from warnings import catch_warnings

from fedapp.errors import ConfigError
from fedapp.home import home, private_folder
from fedapp.process import versions
from fedapp.run_folder import Watcher

T = TypeVar("T")
ANSWER_SECONDS = 120  # of a node; its first process imports fedapp
CONNECT_SECONDS = 10
RETRIES = 3  # of work whose process or node has died


def ray_address() -> str:
    """The cluster to use; empty without one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def check_on(on: str, engine: str) -> None:
    """Check where runs are to be made: on Ray with the local engine, or here."""
    if on not in ("", "ray") or (on and engine != "local"):
        rule = "must be ray, with the local engine, or omitted"
        raise ConfigError(f"on {rule}, got {on} with engine={engine}")


def variables() -> dict[str, str]:
    """Environment of processes at other nodes, which inherit that of ``ray start`` there."""
    data = {"FEDAPP_DATA": os.environ["FEDAPP_DATA"]} if os.environ.get("FEDAPP_DATA") else {}
    return {"FEDAPP_HOME": str(home().resolve()), **data}


def job_variables() -> dict[str, str]:
    """Environment of another driver, from which Ray passes `variables` on."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": variables()}})}


@contextmanager
def connected() -> Iterator[Any]:
    """Yield ``ray``, connected to the cluster; without one, Ray starts on this machine."""
    import ray

    paths = os.pathsep.join(str(Path(path or ".").resolve()) for path in sys.path)
    try:
        host, _, port = ray_address().rpartition(":")
        if host and "/" not in host:  # ray.init would wait for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        # About GPUs in later versions.
        with catch_warnings(action="ignore", category=FutureWarning):
            ray.init(
                ray_address() or "local",
                runtime_env={"env_vars": {**variables(), "PYTHONPATH": paths}},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        yield ray
    except (OSError, RuntimeError, ValueError) as error:
        if ray.is_initialized():  # raised in the block
            raise
        rule = "RAY_ADDRESS must be a Ray cluster of which this machine is a node"
        way = "ray start --head, and at other machines ray start --address=HEAD:6379"
        got = f"{ray_address()}: {str(error).splitlines()[0]}"
        raise ConfigError(f"{rule}, got {got}; {way}") from None
    finally:
        ray.shutdown()


def check_nodes(ray: Any, folders: Sequence[Path], files: Sequence[Path]) -> None:
    """Check that every node has this fedapp and sees the files, and what was just written into the
    folders; ConfigError names one that does not."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sought = {str(file.resolve()): file for file in files}
    if data := os.environ.get("FEDAPP_DATA"):
        sought[data] = Path(data)
    with ExitStack() as stack:
        for folder in folders:
            private_folder(folder)
            mark = NamedTemporaryFile(prefix=".cluster-", dir=folder.resolve())  # noqa: SIM115
            sought[stack.enter_context(mark).name] = folder.resolve()
        paths = list(sought)

        def look() -> tuple[list[str], Mapping[str, str]]:  # sent by value: fedapp may be absent
            from fedapp.process import versions as installed

            return [path for path in paths if not os.path.exists(path)], installed()

        task = ray.remote(num_cpus=0)(look)
        nodes = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        asked = {node: task.options(scheduling_strategy=at).remote() for node, at in there.items()}
        for node, answer in asked.items():
            name = f"Ray's node {nodes[node]} ({node[:8]})"
            try:
                absent, installed = ray.get(answer, timeout=ANSWER_SECONDS)
            except ImportError as error:
                got = str(error).splitlines()[-1]
                raise ConfigError(f"{name} must have fedapp and its packages, got {got}") from None
            except ray.exceptions.GetTimeoutError:
                rule = f"must answer within {ANSWER_SECONDS} s, got nothing"
                raise ConfigError(f"{name} {rule}") from None
            for path in absent:
                way = "put FEDAPP_HOME, FEDAPP_DATA, tables and run folders where all nodes see"
                raise ConfigError(f"{name} must see {sought[path]} of this machine; {way} them")
            for package, version in versions().items():
                if (got := installed[package]) != version:
                    raise ConfigError(f"{name} must have {package} {version}, got {got}")


def carried_out(
    calls: Mapping[str, Callable[[], T]], folder: Path, files: Sequence[Path], watcher: Watcher
) -> Iterator[T]:
    """Call functions as Ray tasks of one CPU each; yield their results as they come.

    They write into ``folder``, read ``files``, and begin in the working folder. A call whose
    process dies is repeated; what it raises is raised here.
    """
    watcher.begin("checking the nodes of the Ray cluster")
    with connected() as ray:
        check_nodes(ray, [home(), Path(), folder], files)
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
