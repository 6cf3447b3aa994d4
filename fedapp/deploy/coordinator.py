"""Flower's ``flower-superexec`` for a coordinator, with its options and log lines of our form."""

from __future__ import annotations

import os

from flwr.supercore.cli import flower_superexec

from fedapp import log_lines
from fedapp.start import leave_no_core

if __name__ == "__main__":
    leave_no_core()
    log_lines.begin("superexec")
    # A ServerApp's lines have this form from its own first one on.
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    flower_superexec()
