"""``flower-superexec`` for a coordinator: Flower's options, fedapp's log format and executor."""

from __future__ import annotations

import os

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec import run_superexec

from fedapp.deploy.tasks import TaskExecutor
from fedapp.deploy.warm import replace
from fedapp.process import leave_no_core, start_log

if __name__ == "__main__":
    leave_no_core()
    start_log("superexec")
    # Silences Flower's log until the ServerApp sets up fedapp's.
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    replace(run_superexec, get_executor=lambda *_, **__: TaskExecutor())
    flower_superexec()
