"""Log lines of one form."""

import json
import logging
import re

import pytest
import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import FLOWER_LOGGER

from fedapp import process
from fedapp.errors import ConfigError

FLOWER, FEDAPP = logging.getLogger("flwr"), logging.getLogger("fedapp")
RUN = 7270070455849061505


@pytest.fixture
def begun(monkeypatch):
    """``begun(**environment)``: as in a worker of the site bank; undone in the end."""
    loggers = [logging.getLogger(), FLOWER, FEDAPP]
    before = [(each, each.handlers[:], each.level, each.propagate) for each in loggers]
    monkeypatch.setattr(process, "_about", {})
    monkeypatch.setattr(uvicorn.Config, "configure_logging", uvicorn.Config.configure_logging)

    def begin(**environment):
        for name, value in {"FEDAPP_NAME": "bank", **environment}.items():
            monkeypatch.setenv(name, value)
        process.start_log("worker")

    yield begin
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_line_has_time_level_site_process_and_run_and_looks_like_no_other(begun, capsys):
    begun()
    FLOWER.info("Started task %d of run %d", 1, RUN)
    process.log_run(RUN)
    FEDAPP.warning("min-rows must be %d", 20)
    FEDAPP.error("refused\n2026-11-23T19:05:28.499Z INFO bank worker: approved\x1b[2J\rx")
    of_flower, warning, first, second = capsys.readouterr().err.splitlines()
    assert of_flower.endswith(f" run={RUN}: Started task 1 of run {RUN}")
    time, rest = warning.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == f"WARNING bank worker run={RUN}: min-rows must be 20"
    assert first.endswith(": refused")
    assert second == "    2026-11-23T19:05:28.499Z INFO bank worker: approved?[2J?x"


def test_json_has_the_same_fields(begun, capsys):
    begun(FEDAPP_LOG="json")
    FEDAPP.info("two\nlines")
    line = json.loads(capsys.readouterr().err)
    assert list(line) == ["time", "level", "site", "process", "run", "message"]
    assert [*line.values()][1:] == ["INFO", "bank", "worker", "", "two\nlines"]
    with pytest.raises(ConfigError, match="FEDAPP_LOG must be text or json, got 'xml'"):
        begun(FEDAPP_LOG="xml")


def say_what_flower_says_of_messages():
    FLOWER.info("")
    FLOWER.info("[RUN %s, ROUND %s]", RUN, 1)
    FLOWER.info("Receiving: %s message (ID: %s)", "train.pax_grow", "ab")
    FLOWER.info("Received successfully")
    FLOWER.info("[Fleet.PushMessages] Push replies from node_id=%s", 1)
    FLOWER.info("ControlServicer.ListRuns")
    access = logging.getLogger("uvicorn.access")
    access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "POST", "/v1/fleet", "1.1", 200)
    logging.getLogger("httpx").info("HTTP Request: POST http://127.0.0.1")


def test_what_flower_says_of_each_message_is_shown_at_debug_only(begun, capsys):
    begun()
    say_what_flower_says_of_messages()
    assert capsys.readouterr().err == ""
    access = logging.getLogger("uvicorn.access")  # refused requests, and what else it says
    access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "POST", "/v1/fleet", "1.1", 412)
    FLOWER.info("[Fleet.ActivateNode] Activated node_id=%s", 1)
    FLOWER.warning("Connection attempt failed, retrying in %.2f seconds", 0.5)
    levels = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert levels == ["INFO", "INFO", "WARNING"]
    begun(FLWR_LOG_LEVEL="debug")
    logging.getLogger("httpcore.http11").debug("send_request_headers: authorization")
    say_what_flower_says_of_messages()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8
    assert all(" DEBUG bank worker" in line for line in lines)


def test_uvicorn_and_flower_leave_their_lines_to_these_handlers(begun, capsys):
    begun()
    uvicorn.Config(app="none", log_config=get_uvicorn_log_config(logging.INFO))
    assert FLOWER_LOGGER is FLOWER
    for name in ("flwr", "uvicorn", "uvicorn.access", "uvicorn.error"):
        assert not logging.getLogger(name).handlers
        logging.getLogger(name).error("%s", 500)
    assert capsys.readouterr().err.count(" ERROR bank worker: 500\n") == 4
