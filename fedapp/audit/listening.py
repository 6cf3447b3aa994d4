"""Runs in this process whose messages are recorded at some parties, and at the coordinator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message

from fedapp.client_app import SiteApp
from fedapp.home import home
from fedapp.messages.fields import Request
from fedapp.messages.wire import from_content, from_records, parcels_of
from fedapp.run_files import Summary
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.answer import Site, find_handler
from fedapp.site.mail import Mail, open_mail
from fedapp.site.store import LiveStores
from strategies.method import TreeStrategy


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """One message to a recording party.

    ``site`` has the state from before the answer (an answer that ends a run deletes it); ``mail``
    are the letters that came with the request, opened.
    """

    site: Site
    request: Request
    mail: Mail


Listeners = Sequence[tuple[str, Callable[[Transcript], None]]]  # by the party's name


class ListeningApp(SiteApp):
    """Honest parties that pass every message to their listeners before they answer it."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        super().__init__(stores=LiveStores())

    def _answer(self, message: Message, context: Context) -> Message:
        config = self._config_of(context)
        notes = [note for name, note in self._listeners if name == config.name]
        if notes:
            envelope, content = from_records(message.content, config.name)
            request_class, _ = find_handler(message.metadata.message_type, config.name)
            request = from_content(request_class, content, config.name)
            folder = home() / "sites" / config.name / envelope.model_id
            site = Site(config, self.stores.open(folder, lasting=False).copy())
            parcels = parcels_of(content) if request.carries_letters else []
            mail = (
                open_mail(config.name, site.store, envelope, parcels) if parcels else Mail("", [])
            )
            for note in notes:
                note(Transcript(site, request, mail))
        return super()._answer(message, context)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A finished run."""

    settings: Settings
    summary: Summary
    model: str  # text of model.json

    @property
    def score(self) -> float:  # test AUC
        return float(self.summary["metrics"]["test"]["auc"])


@contextmanager
def trained(
    settings: Settings,
    listeners: Listeners = (),
    coordinator: TreeStrategy[Any] | None = None,
) -> Iterator[Trained]:
    """Train while parties pass their messages to listeners; delete the run's files after the block.

    ``coordinator`` may be the method's strategy, of this run's settings, that records replies.
    """
    with tempfile.TemporaryDirectory() as folder:
        placed = settings.model_copy(update={"run_dir": f"{folder}/run", "resume": ""})
        app = ListeningApp(listeners)
        run = run_local(placed, client_app=app, strategy=coordinator)
        try:
            yield Trained(settings, run.summary, (run.path / "model.json").read_text())
        finally:
            forget_model(run.summary["model_id"])
