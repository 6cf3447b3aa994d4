"""Runs of honest parties in this process; some parties record what they may read.

A party opens the letters addressed to it with its key, and reads its own state. All messages are
those of an honest run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fedapp import client_app
from fedapp.home import home
from fedapp.messages.fields import Request
from fedapp.messages.wire import Content, Envelope, from_content, parcels_of
from fedapp.runs.baselines import temporary_run
from fedapp.settings import Settings, load_settings
from fedapp.site.answer import Site, answered, find_handler
from fedapp.site.mail import Mail, open_mail
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Stores

Overrides = Mapping[str, Any]
Note = Callable[["Heard"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """One message to a recording party.

    ``site`` has the state from before the answer (an answer that ends a run deletes it); ``mail``
    are the letters that came with the request, opened.
    """

    site: Site
    request: Request
    mail: Mail


@contextmanager
def listening(listeners: Collection[str], note: Note) -> Iterator[None]:
    """Call ``note`` with every message to the parties in ``listeners``, before they answer it."""

    def answering(
        config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores
    ) -> bytes:
        if config.name in listeners:
            request_class, _ = find_handler(kind, config.name)
            request = from_content(request_class, content, config.name)
            folder = home() / "sites" / config.name / envelope.model_id
            site = Site(config, stores.open(folder, lasting=False).copy())
            parcels = parcels_of(content) if request.carries_letters else []
            mail = (
                open_mail(config.name, site.store, envelope, parcels) if parcels else Mail("", [])
            )
            note(Heard(site, request, mail))
        return answered(config, kind, envelope, content, stores)

    with patch.object(client_app, "answered", answering):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A finished run."""

    settings: Settings
    summary: dict[str, Any]
    model: str  # text of model.json

    @property
    def score(self) -> float:  # test AUC
        return float(self.summary["metrics"]["test"]["auc"])


@contextmanager
def trained(overrides: Overrides, listeners: Collection[str], note: Note) -> Iterator[Trained]:
    """Train while parties record their messages; delete the run's files at the end."""
    settings = load_settings(dict(overrides))
    with listening(listeners, note), temporary_run(settings) as run:
        yield Trained(settings, run.summary, (run.path / "model.json").read_text())
