"""A SuperNode's connection: never given up, heard often, and its clock compared.

Flower's SuperNode sends a heartbeat every 30 s, and a SuperLink refuses its replacement until two
intervals after the last one.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from flwr.supercore import heartbeat
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import (
    RetryInvoker,
    RetryState,
    exponential,
    make_simple_http_retry_invoker,
)
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import fleet_http_connection
from httpx import Response

from fedapp.deploy.health import REACHED
from fedapp.deploy.warm import connected, replace, wrap
from fedapp.superlinks import site_fault
from strategies.delivery import clock_text, seconds_ahead

log = logging.getLogger("fedapp")

LONGEST_PAUSE = 5  # seconds between two tries to reach the SuperLink; 20 in Flower
QUICK = 1.0  # seconds of a response whose date is compared with the clock
HEARTBEAT = 10  # seconds; the smallest interval that a SuperLink accepts


class ClockWarning:
    """Warns once of a clock that is off."""

    def __init__(self) -> None:
        self._noted = False
        self._off_since = math.inf

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Response:
        """Send a request and compare its response's date, in whole seconds, with the clock."""
        sent_at = time.time()
        response = call_next(context)
        received_at = time.time()
        date = response.headers.get("date", "")
        with suppress(ValueError):
            server_time = parsedate_to_datetime(date).timestamp()
            behind = seconds_ahead(sent_at, received_at, server_time, server_time + 1)
            text = clock_text("this machine's", -behind, "the SuperLink's")
            # A SuperLink that was stopped for a while sends an old date, late or for a second.
            if received_at - sent_at < QUICK:
                self._off_since = min(self._off_since, sent_at) if text else math.inf
            is_sure = response.is_error or sent_at - self._off_since > 2 * QUICK
            if text and is_sure and not self._noted:
                self._noted = True
                log.warning("%s: set it, as timedatectl set-ntp true does", text)
        return response


def patient_retry() -> RetryInvoker:
    """Replaces ``make_simple_http_retry_invoker``: gives up what is refused, and nothing else.

    Flower also gives up where a certificate has expired or a proxy fails, and forgets the reply.
    """
    retry = make_simple_http_retry_invoker()
    is_refused = retry.should_giveup
    causes = set[str]()

    def should_giveup(error: Exception) -> bool:
        response = getattr(error, "response", None)
        return bool(response and response.is_client_error and is_refused and is_refused(error))

    def log_cause(state: RetryState) -> None:
        if state.tries == 1:
            causes.clear()
        if (kind := str(state.exception).partition("\n")[0]) not in causes:
            causes.add(kind)
            cause = site_fault(state.exception, sys.argv, get_flwr_home() / REACHED)
            log.warning("no connection to the SuperLink, tried again until it works: %s", cause)

    retry.should_giveup, retry.on_backoff = should_giveup, log_cause
    retry.wait_function = time.sleep
    retry.wait_gen_factory = partial(exponential, max_delay=LONGEST_PAUSE)
    return retry


def supernode() -> None:
    """Connect by a client that compares its clock, and retries."""

    def note(client: Any) -> None:
        client._interceptors = (ClockWarning(), *client._interceptors)

    wrap(fleet_http_connection, FleetHttpClient=partial(connected, note))
    replace(fleet_http_connection, make_simple_http_retry_invoker=patient_retry)
    replace(fleet_http_connection, HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT)
    replace(heartbeat, HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT)
