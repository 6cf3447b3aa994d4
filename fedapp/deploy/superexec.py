"""``flower-superexec`` for a site, running the locally installed fedapp.

``python -m fedapp.deploy.superexec`` takes the options of ``flower-superexec``. Where the SuperNode
is not patched, each message is answered by a process of its own, as Flower does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from fedapp.deploy.health import ALIVE
from fedapp.deploy.tasks import TaskExecutor
from fedapp.deploy.warm import SITE, replace, version_error
from fedapp.home import home
from fedapp.process import leave_no_core, start_log

try:
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
except ImportError as error:
    raise SystemExit(version_error(error)) from error

log = logging.getLogger("fedapp")


class SiteExecutor(TaskExecutor):
    """Starts the site's ClientApp and refuses every other task."""

    def get_eligible_capacity(self, *args: Any, **kwargs: Any) -> tuple[set[TaskType], set[str]]:
        """Touch the file that ``fedapp.deploy.health`` checks."""
        (home() / ALIVE).touch()
        return super().get_eligible_capacity(*args, **kwargs)

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start answering a message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a site runs no {spec.task_type}, only its ClientApp")
        return super().launch(spec)

    def program(self, spec: ExecutionSpec) -> list[str]:
        """Command of :func:`answer_message`."""
        code = "from fedapp.deploy.superexec import answer_message; answer_message()"
        return [sys.executable, "-P", "-c", code]


class Bundle:
    """Bundle of a run, used only for its hash and its signature."""

    def __init__(self) -> None:
        self.content = b""

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
    and its signature checked. SystemExit if Flower lacks one of the functions replaced here.
    """
    # Not at the top: a SuperExec stays up for months and needs neither Flower's ClientApp nor ours.
    try:
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
        from flwr.supernode.runtime import run_clientapp
    except ImportError as error:
        raise SystemExit(version_error(error)) from error
    start_log("clientapp")
    bundle = Bundle()
    replace(
        run_clientapp,
        install_from_fab=bundle.hold,
        get_load_client_app_fn=bundle.loader,
        install_app_dependencies=refuse_to_install,
    )
    flwr_clientapp()


def main() -> None:
    """Run a site's SuperExec. SystemExit if Flower lacks ``get_executor``."""
    leave_no_core()
    start_log("superexec")
    executor = SiteExecutor()
    replace(run_superexec, get_executor=lambda *_, **__: executor)
    # Compile before asking for tasks, so that the first round does not wait for the compiler.
    command = [sys.executable, "-P", "-m", "fedapp.runs.kernels", "-"]
    status = subprocess.Popen(command, stdin=subprocess.PIPE).wait()
    is_done = "runs compile their kernels" if status else "kernels are compiled"
    log.info("%s: the site is ready", is_done)
    # Flower's default is 1 s. The patched SuperNode holds a request until a task arrives.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    if warm := SITE.load("executor"):
        executor = warm.warm_executor()
    flower_superexec()


if __name__ == "__main__":
    main()
