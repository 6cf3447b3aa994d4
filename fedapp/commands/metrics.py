"""``fedapp metrics``: what a coordinator or a site counts, for Prometheus."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapp import log_lines
from fedapp.commands.common import interruptible
from fedapp.packages import check_package

log = logging.getLogger("fedapp")


def metrics(
    port: Annotated[int, typer.Option(help="Port on loopback.", min=1, max=65535)] = 9464,
    runs: Annotated[
        list[Path] | None, typer.Option(help="Folder of runs beside $FEDAPP_HOME/runs.")
    ] = None,
) -> None:
    """Show Prometheus what the files of a coordinator or a site count: GET /metrics.

    It reads $FEDAPP_HOME and the certificates beside it: . env.sh first. Names of runs and parties,
    counts and sizes are shown to everyone on this machine; no row, label, id or key.
    """
    check_package("prometheus-client", "for fedapp metrics", "metrics")
    from prometheus_client import CollectorRegistry, start_http_server

    from fedapp.deploy.exporter import FolderCollector
    from fedapp.home import home

    registry = CollectorRegistry(auto_describe=True)
    collector: Any = FolderCollector(runs or ())
    registry.register(collector)
    start_http_server(port, "127.0.0.1", registry)
    log_lines.begin("metrics")
    log.info("metrics of %s at http://127.0.0.1:%d/metrics", home(), port)
    with interruptible(lambda: "the exporter has stopped"):
        threading.Event().wait()
