"""Flower's ``flower-superexec`` for a site: it answers with the fedapp that is installed here.

``python -m fedapp.deploy.superexec`` takes the options of ``flower-superexec``.
"""

from __future__ import annotations

import subprocess
import sys

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor


class SiteExecutor(SubprocessExecutor):
    """Starts the site's own ClientApp, and nothing else that a coordinator may ask for."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a process that answers one message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a site runs no {spec.task_type}, only its own ClientApp")
        command = [sys.executable, "-P", "-m", "fedapp.deploy.clientapp"]
        command += ["--runtime-api-address", spec.runtime_api_address, "--token", spec.token]
        command += ["--parent-pid", str(spec.parent_pid)]
        if spec.insecure:
            command.append("--insecure")
        elif spec.root_certificates_path:
            command += ["--root-certificates", spec.root_certificates_path]
        subprocess.Popen(command)
        return LaunchResult.accepted()


def main() -> None:
    """Run Flower's SuperExec with the site's own executor.

    Raises
    ------
    SystemExit : Flower gets its executor by other means than the one that is replaced here.
    """
    if not hasattr(run_superexec, "get_executor"):
        raise SystemExit("flwr must be a version with run_superexec.get_executor, as 1.41 is")
    run_superexec.get_executor = lambda *_, **__: SiteExecutor()
    flower_superexec()


if __name__ == "__main__":
    main()
