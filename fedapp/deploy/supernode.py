"""``flower-supernode`` for a site, with short polling intervals during a run.

``python -m fedapp.deploy.supernode`` takes the options of ``flower-supernode``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from importlib.metadata import entry_points

from fedapp.deploy.health import REACHED
from fedapp.deploy.warm import apply
from fedapp.process import keep_imported, leave_no_core, start_log
from fedapp.site.certificates import warn_of_expiry
from fedapp.superlinks import flower_config, note_reached, site_fault

log = logging.getLogger("fedapp")


def run_flower(program: str) -> None:
    """Run Flower's SuperNode or SuperLink, with the patches that fit the installed Flower."""
    leave_no_core()
    (command,) = entry_points(group="console_scripts", name=f"flower-{program}")
    main = command.load()  # which sets up Flower's own log
    start_log(program)
    warn_of_expiry(sys.argv)
    apply(program)
    keep_imported()
    main()


def end(error: BaseException | None = None) -> None:
    """End the process; its threads would keep it alive, and nothing would start it again."""
    reached = flower_config().with_name(REACHED)
    cause = site_fault(error, sys.argv, reached) if error else "the SuperNode has given up"
    log.error("%s: this process ends, to be started again", cause)
    os._exit(1)


def main() -> None:
    """Run a site's SuperNode, until it is stopped or gives up."""
    threading.excepthook = lambda failed: end(failed.exc_value)
    note_reached(flower_config().with_name(REACHED))
    try:
        with suppress(ImportError):
            from flwr.supernode import fleet_http_connection

            # Flower's own has the same words for every cause.
            vars(fleet_http_connection)["flwr_exit"] = lambda *_, **__: end(sys.exc_info()[1])
        run_flower("supernode")
    except Exception as error:
        end(error)
    end()


if __name__ == "__main__":
    main()
