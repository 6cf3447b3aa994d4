"""Runs of honest parties in this process, of whose messages some keep what they may read.

A party opens the letters that are for it with its own key, and reads its own state. Nobody sends
anything else than it would anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fedapp import client_app
from fedapp.config import Settings, load_settings
from fedapp.home import home
from fedapp.messages.fields import Request
from fedapp.site.answer import Site, answered, find_handler
from fedapp.site.config import SiteConfig
from fedapp.site.mail import Mail, open_mail
from fedapp.site.stores import Stores
from fedapp.wire.codec import Envelope
from fedapp.wire.content import Content, enclosed, put_together
from simulations.scored import temporary_run

Overrides = Mapping[str, Any]
Note = Callable[["Heard"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """One message, to whoever listens.

    Parameters
    ----------
    site : who answers, as it is before it does: an answer that ends a run deletes what it was.
    request : what the coordinator sends.
    mail : the letters that came with the request, opened.
    """

    site: Site
    request: Request
    mail: Mail


@contextmanager
def listening(listeners: Collection[str], note: Note) -> Iterator[None]:
    """Tell ``note`` of every message to some parties, before they answer it.

    Parameters
    ----------
    listeners : names of the parties.
    """

    def answering(
        config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores
    ) -> bytes:
        if config.name in listeners:
            request_class, _ = find_handler(kind, config.name)
            request = put_together(request_class, content, config.name)
            folder = home() / "sites" / config.name / envelope.model_id
            site = Site(config, stores.open(folder, lasting=False).copy())
            parcels = enclosed(content) if request.carries_letters else []
            mail = (
                open_mail(config.name, site.store, envelope, parcels) if parcels else Mail("", [])
            )
            note(Heard(site, request, mail))
        return answered(config, kind, envelope, content, stores)

    with patch.object(client_app, "answered", answering):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A finished run.

    Parameters
    ----------
    settings, summary : of the run.
    model : text of ``model.json``.
    """

    settings: Settings
    summary: dict[str, Any]
    model: str

    @property
    def score(self) -> float:
        """AUC of the test rows."""
        return float(self.summary["metrics"]["test"]["auc"])


@contextmanager
def trained(overrides: Overrides, listeners: Collection[str], note: Note) -> Iterator[Trained]:
    """One run, of which no file is left in the end."""
    settings = load_settings(dict(overrides))
    with listening(listeners, note), temporary_run(settings) as run:
        yield Trained(settings, run.summary, (run.path / "model.json").read_text())
