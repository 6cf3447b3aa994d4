"""``flower-superexec`` for a coordinator: Flower's options, fedapp's log format and executor."""

from __future__ import annotations

import os

from flwr.supercore.cli import flower_superexec

from fedapp.deploy.warm import apply
from fedapp.process import leave_no_core, start_log

if __name__ == "__main__":
    leave_no_core()
    start_log("superexec")
    # Silences Flower's log until the ServerApp sets up fedapp's.
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    apply("coordinator")
    flower_superexec()
