"""``fedapp serve``: score rows over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import Overrides, console, interruptible
from fedapp.packages import check_package
from fedapp.settings import parse_overrides


def serve(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind to; 0: a free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests may ask for beside localhost and --host, as a proxy passes it "
            "on; may be repeated."
        ),
    ] = None,
    most_rows: Annotated[int, typer.Option(help="Rows of one request.", min=1)] = 10_000,
    most_bytes: Annotated[int, typer.Option(help="Bytes of one request.", min=1)] = 16_000_000,
    inference: Annotated[
        str,
        typer.Option(
            help="For a model whose parts lie at the parties: interactive, one-round, or eini "
            "(encrypted); by default one-round for a forest, else interactive."
        ),
    ] = "",
    config: Overrides = None,
) -> None:
    """Score rows over HTTP: POST /predict, GET /schema, GET /health.

    A model whose parts lie at the parties is served where the run was a simulation on this machine:
    a row names its values by party, each party gets its own alone, and each request is an exchange
    among them. All rows pass through this one process, so that it is for trying and load tests. In
    a deployment every site puts its columns of the rows in place, and fedapp predict asks them.
    """
    for package in ("fastapi", "uvicorn"):
        check_package(package, "to serve", "serve")
    import uvicorn

    from fedapp.serve.app import LOOPBACK, make_app
    from fedapp.serve.divided import open_scorer

    scorer = open_scorer(run_dir, inference, parse_overrides(config or []))
    hosts = dict.fromkeys(name.lower() for name in (*LOOPBACK, host, *(allow_host or ())))
    app = make_app(scorer, most_rows, most_bytes, tuple(hosts))
    if host not in LOOPBACK:
        console.print(
            f"[yellow]![/] {host} can be reached from other machines, and nobody is asked who they "
            "are: put a proxy with authentication and TLS in front",
            soft_wrap=True,
        )
    with interruptible(lambda: "the server has stopped"):
        uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)
