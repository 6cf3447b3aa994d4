"""``flower-superexec`` for a site, running the locally installed fedapp.

``python -m fedapp.deploy.superexec`` takes the options of ``flower-superexec``. Where one process a
run does not fit the installed Flower, each message is answered by a process of its own, as Flower
does; and where a bundle's code could be read by it, the site does not start.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fedapp.deploy import warm
from fedapp.deploy.health import ALIVE
from fedapp.home import home
from fedapp.process import FALL_BACKS, leave_no_core, start_log

try:
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import (
        ExecutionSpec,
        LaunchResult,
        SubprocessExecutor,
        subprocess_executor,
    )
except ImportError as error:
    raise SystemExit(warm.without_bundles(error)) from error

log = logging.getLogger("fedapp")
CODE = "from fedapp.deploy.superexec import answer_message; answer_message()"
PROGRAM = (sys.executable, "-P", "-c", CODE)  # in place of flwr-clientapp


class SiteExecutor(SubprocessExecutor):
    """Starts the site's ClientApp and refuses every other task."""

    streams: Mapping[str, int] = {"stdout": subprocess.PIPE}  # closed by `answer_message`

    def get_eligible_capacity(self, *args: Any, **kwargs: Any) -> tuple[set[TaskType], set[str]]:
        """Touch the file that ``fedapp.deploy.health`` checks."""
        (home() / ALIVE).touch()
        return super().get_eligible_capacity(*args, **kwargs)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start answering a message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a site runs no {spec.task_type}, only its ClientApp")
        return super().launch(spec)

    def program(self, _: ExecutionSpec) -> list[str]:
        """Command of :func:`answer_message`."""
        return [*PROGRAM]


def for_a_site(make: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``get_executor``: makes Flower's executor, or that of a patch, a site's."""

    def make_for_a_site(*given: Any, **named: Any) -> Any:
        executor = make(*given, **named)
        executor.__class__ = type("Executor", (SiteExecutor, type(executor)), {})
        return executor

    return make_for_a_site


def start_answering(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """Replaces ``subprocess.Popen`` in Flower's executor, which would start ``flwr-clientapp``."""
    return subprocess.Popen([*PROGRAM, *command[1:]], **how)


class Bundle:
    """Bundle of a run, used only for its hash and its signature."""

    content = b""

    def hold(self, content: bytes, **_: object) -> None:
        """Replaces ``install_from_fab``."""
        self.content = content

    def loader(self, **_: object) -> Callable[..., Any]:
        """Replaces ``get_load_client_app_fn``."""
        from fedapp.client_app import SiteApp

        return lambda *_: SiteApp(self.content)


def refuse_to_install(*_: object, **__: object) -> None:
    """Replaces ``install_app_dependencies``: installing a package may run its code."""
    raise PermissionError("a site installs nothing that a bundle asks for")


def answer_message() -> None:
    """Answer one message: ``flwr-clientapp`` with the locally installed fedapp.

    Flower would unpack the coordinator's bundle and import its code; here the bundle is only hashed
    and its signature checked. SystemExit if this Flower could do otherwise.
    """
    for refusal in warm.bundles_read():
        raise SystemExit(str(refusal))
    # Not at the top: a SuperExec stays up for months and needs neither Flower's ClientApp nor ours.
    try:
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
        from flwr.supernode.runtime import run_clientapp

        bundle = Bundle()
        warm.replace(
            run_clientapp,
            install_from_fab=bundle.hold,
            get_load_client_app_fn=bundle.loader,
            install_app_dependencies=refuse_to_install,
        )
    except (ImportError, AttributeError) as error:
        raise SystemExit(warm.without_bundles(error)) from error
    start_log("clientapp")
    os.dup2(2, 1)  # ends the pipe: from here Flower sends the task's heartbeats
    flwr_clientapp()


def main() -> None:
    """Run a site's SuperExec. SystemExit if a bundle's code could be read."""
    leave_no_core()
    start_log("superexec")
    # Before a function that is replaced differs too.
    os.environ[FALL_BACKS] = "\n".join(map(str, warm.fall_backs("site")))
    warm.apply("superexec")
    for refusal in warm.bundles_read() if "executor" in warm.causes("site") else ():
        raise SystemExit(str(refusal))
    try:
        warm.wrap(run_superexec, get_executor=for_a_site)
        popen = SimpleNamespace(Popen=start_answering, DEVNULL=subprocess.DEVNULL)
        warm.replace(subprocess_executor, subprocess=popen)
    except AttributeError as error:
        raise SystemExit(warm.without_bundles(error)) from error
    # Compile before asking for tasks, so that the first round does not wait for the compiler.
    command = [sys.executable, "-P", "-m", "fedapp.runs.kernels", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as compiling:
        status = compiling.wait()
    is_done = "runs compile their kernels" if status else "kernels are compiled"
    log.info("%s: the site is ready", is_done)
    # Flower's default is 1 s. The patched SuperNode holds a request until a task arrives.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    flower_superexec()


if __name__ == "__main__":
    main()
