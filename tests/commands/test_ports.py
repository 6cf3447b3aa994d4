"""Ports of commands: from 1 to 65535, and one in use names the way out."""

import socket

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli

SITE = ("site", "init", "FOLDER", "--name", "bank", "--data", "TABLE")
FEDERATION = ("federation", "init", "FOLDER", "--host", "localhost", "--sites", "a,b,c")
PORTS = [  # words before a port
    ("serve", "FOLDER", "--port"),
    ("serve", "--metrics", "--port"),
    ("serve", "--site", "FOLDER", "--port"),
    (*SITE, "--superlink", "localhost:1", "--port"),
    (*FEDERATION, "--port"),
    (*FEDERATION, "--public-port"),
    (*FEDERATION, "--users-port"),
    (*SITE, "--superlink"),
]
CASES = [(words, port) for words in PORTS for port in ("80000", "65536", "-1", "0")]
CASES.remove((PORTS[0], "0"))  # a free one


@pytest.mark.parametrize(("words", "port"), CASES, ids=lambda value: value[-1])
def test_a_port_beyond_its_range_is_refused(tmp_path, words, port):
    (table := tmp_path / "table.csv").write_text("id,y\n1,0\n")
    value = f"localhost:{port}" if words[-1] == "--superlink" else port
    places = {"FOLDER": str(tmp_path / "new"), "TABLE": str(table)}
    given = [places.get(word, word) for word in words]
    done = CliRunner().invoke(cli, [*given, value])
    text = " ".join(f"{done.output} {done.exception}".replace("│", "").split())
    rules = ("is not in the range", "--port must be 1 to 65535", "superlink must be HOST:PORT")
    assert any(rule in text for rule in rules), text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("way", ["--metrics", "RUN_DIR"])
def test_a_port_in_use_names_the_way_out(monkeypatch, tmp_path, way):
    monkeypatch.setattr("fedapp.serve.scorer.open_scorer", lambda folder: None)
    monkeypatch.setattr("fedapp.serve.app.make_app", lambda *words: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["serve", str(tmp_path) if way == "RUN_DIR" else way, "--port", str(port)]
        done = CliRunner().invoke(cli, words)
    rule = f"port {port} must be free at 127.0.0.1, got: Address already in use; --port names"
    assert rule in str(done.exception)
