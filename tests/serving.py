"""Asks an application for scores, with a socket or without one."""

import asyncio
import csv
import json
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from fedapp.runs.predict import predict_table

SHORT = {"num_boost_round": 3, "max_depth": 3, "max_bin": 16, "parties": 2}
TOWNS = ["Oslo", "Rome", "Bern", ""]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=6,
)


class AppClient:
    """Asks an application as a server hands it requests (ASGI), without a socket."""

    def __init__(self, app):
        self.app, self.host = app, b"localhost:8000"
        self.headers = {}

    def ask(self, method, path, content=None):
        """Status and content: of JSON, a text, or else bytes."""
        return asyncio.run(asyncio.wait_for(self.asked(method, path, content), 60))

    async def asked(self, method, path, content=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        sent = []
        path, _, query = path.partition("?")
        # In pieces, as a network delivers a body.
        chunks = [body[at : at + 1000] for at in range(0, len(body), 1000)]

        async def receive():
            chunk = chunks.pop(0) if chunks else b""
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [
                (b"host", self.host),
                (b"content-type", b"application/json"),
                *self.headers.items(),
            ],
            "scheme": "http",
            "root_path": "",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await self.app(scope, receive, send)
        found = b"".join(message.get("body", b"") for message in sent)
        kind = dict(sent[0]["headers"]).get(b"content-type", b"")
        readers = {b"application/json": json.loads, b"application/octet-stream": bytes}
        return sent[0]["status"], readers.get(kind, bytes.decode)(found)

    def score(self, content):
        return self.ask("POST", "/score", content)

    def infer(self, model, content, length=None):
        """By the Open Inference Protocol; with the length of the JSON before binary data."""
        name = b"inference-header-content-length"
        self.headers = {} if length is None else {name: str(length).encode()}
        return self.ask("POST", f"/v2/models/{model}/infer", content)


class Client(AppClient):
    """Asks the application of a run's model."""

    def __init__(self, run, **limits):
        from fedapp.serve.app import make_app
        from fedapp.serve.scorer import open_scorer

        self.path, self.scorer = run, open_scorer(run)
        super().__init__(make_app(self.scorer, **limits))


def rows_of(path, without="y"):
    """The rows of a table as a client writes them."""

    def value(name, text):
        if text == "":
            return None
        if name in ("day", "town"):
            return text
        return {"true": True, "false": False}[text] if name == "flag" else float(text)

    with path.open() as file:
        return [
            {name: value(name, text) for name, text in row.items() if name != without}
            for row in csv.DictReader(file)
        ]


def predicted(run, path):
    """What `fedapp predict` writes, by column."""
    from pyarrow import parquet

    predict_table(run.path, str(path), "", Path("scores.parquet"))
    return parquet.read_table("scores.parquet").drop_columns(["row"]).to_pydict()


@contextmanager
def serving(app, **config):
    """The address of a real server on a free port, which ends with no connection left."""
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, **config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield "http://{}:{}".format(*listening.getsockname())
        finally:
            server.should_exit = True
            thread.join(60)
        assert not thread.is_alive()
        assert not server.server_state.connections
