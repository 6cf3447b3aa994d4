"""A federation in process whose messages get lost, whose parties fail, whose server dies."""

import json
from collections import Counter
from pathlib import Path

import pytest
from flwr.app import Error, Message

from fedapp.client_app import SiteApp
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.settings import load_settings
from strategies.run import train

NODE = 3  # party-2


def step_of(message):
    return int(message.content.config_records["envelope"]["step"])


class Network(LocalGrid):
    """A grid that loses or repeats what one node is sent or sends, and whose server may die.

    Each fault is asked with the step, and how often the message was sent before.
    """

    loses_request = staticmethod(lambda step, before: False)
    loses_reply = staticmethod(lambda step, before: False)
    repeats_replies = False
    dies_before_sending = None
    dies_before_reading = None

    def __init__(self, contexts, app):
        super().__init__(contexts, app)
        self._sent = Counter()
        self._muted = set()

    def push_messages(self, messages):
        ids = []
        for message in messages:
            step = step_of(message)
            if step == self.dies_before_sending:
                raise KeyboardInterrupt
            faulty = message.metadata.dst_node_id == NODE
            before = self._sent[step]
            self._sent[step] += faulty
            if faulty and self.loses_request(step, before):
                ids.append(f"lost-{step}-{before}")
                continue
            ids += super().push_messages([message])
            if faulty and self.loses_reply(step, before):
                self._muted.add(ids[-1])
        return ids

    def pull_messages(self, message_ids):
        ids = [one for one in message_ids if one not in self._muted]
        if self.dies_before_reading in self._steps(ids):
            for one in ids:
                self._running[one].result()
            raise KeyboardInterrupt
        replies = list(super().pull_messages(ids))
        return replies * 2 if self.repeats_replies else replies

    def _steps(self, ids):
        return {max(self._sent)} if self._sent and list(ids) else set()


class FaultyApp(SiteApp):
    """Sites of which one has a fault: it changes the replies of that node.

    Parameters
    ----------
    fault : the step, the request and the reply to the reply that is sent.
    """

    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def __call__(self, message, context):
        reply = super().__call__(message, context)
        if context.node_id != NODE:
            return reply
        return self._fault(step_of(message), message, reply)


def run(settings, contexts=None, app=None, **faults):
    grid = Network(contexts or simulated_contexts(settings), app or SiteApp())
    for name, fault in faults.items():
        setattr(grid, name, fault)
    try:
        return train(grid, settings)
    finally:
        grid.close()


def error_from(step, code=1001, reason="party-2: broke"):
    """A fault: an error is answered from a step on."""

    def fault(now, request, reply):
        return Message(Error(code, reason), reply_to=request) if now >= step else reply

    return fault


def fails_from(*given, **more):
    """Party-2 answers an error from a step on."""
    return FaultyApp(error_from(*given, **more))


def die(settings, contexts=None, **how):
    with pytest.raises(KeyboardInterrupt):
        run(settings, contexts, **how)
    folder = Path(settings.resume or settings.run_dir)
    assert not (folder / "summary.json").exists()
    assert json.loads((folder / "failure.json").read_text())["error"] == "KeyboardInterrupt"


def one_of_each_kind(kinds):
    """The last step of each kind of message in a run."""
    return sorted({kind: step for step, kind in kinds.items()}.values())


def resumed(settings):
    return load_settings({"resume": settings.resume or settings.run_dir})
