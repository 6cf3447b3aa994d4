"""An audit of a run's folder: which attacks fit, how long they take, and what they reach.

Of a simulated run the tables are on this machine, so every seat can be taken: the run is trained
again, from the recorded settings, and must give the same model. At a site of a deployment only its
own rows are, so only they can be asked for, by ``at_site``; a coordinator has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.audit.attacks import (
    CLEAR,
    Attack,
    Measured,
    Subject,
    against_membership,
    attacks_on,
    of_auc,
)
from fedapp.audit.listening import Trained, Transcript, trained
from fedapp.audit.membership import certainty, learnt, predictions
from fedapp.data.labels import class_ids
from fedapp.errors import ConfigError, DataError
from fedapp.messages.methods import all_methods
from fedapp.records.document import model_text, to_text
from fedapp.report import write_report
from fedapp.report.progress import Silent, Watcher
from fedapp.report.summary import DEPLOYMENT
from fedapp.run_files import AUDIT, Audit, Finding, Unmeasured
from fedapp.run_folder import RunFolder, read_run
from fedapp.runs.predict import model_of_text, parts_of, trained_settings
from fedapp.runs.retrain import parts_digest
from fedapp.settings import Settings, load_settings
from fedapp.site.settings import read_node_config, site_config
from fedapp.site.table import read_subsets

SAME = "the run, trained again to the same model"
NOISED = "the run's model; a training draws noise anew, so it could not be compared"
PART = "the model on one site's own rows; other rows of the federation are not here"


@dataclass(frozen=True, slots=True, eq=False)
class Auditing:
    """An audit that has not begun."""

    folder: RunFolder
    subject: Subject
    attacks: list[Attack]
    unmeasured: list[Unmeasured]

    @classmethod
    def of(cls, run_dir: Path, quick: bool = False) -> Auditing:
        """Read a run's folder; ConfigError if it is not of a simulation, or did not train."""
        summary = read_run(run_dir).summary
        if summary["engine"] == DEPLOYMENT:
            rule = "run must be simulated, for its tables to be here, got one of sites"
            raise ConfigError(f"{rule}: a site audits its own rows with --site site.toml")
        settings = _settings_of(run_dir, summary)
        subject = Subject(settings, summary, quick)
        return cls(RunFolder(run_dir), subject, *attacks_on(subject))

    @property
    def _is_noised(self) -> bool:
        return bool(self.subject.settings.sections["privacy"]["epsilon"])

    @property
    def seconds(self) -> float:
        """Expected."""
        training = 0.0 if self._is_noised else 1.5 * self.subject.seconds  # with listeners
        return training + sum(attack.seconds for attack in self.attacks)

    def carry_out(self, watcher: Watcher | None = None) -> Audit:
        """Attack, and write ``audit.json``, report and model card.

        Raises
        ------
        DataError : the run trained again gives another model.
        """
        start, watcher, run_dir = time.monotonic(), watcher or Silent(), self.folder.path
        run = Trained(
            self.subject.settings, self.subject.summary, model_text(run_dir / "model.json")
        )
        findings, missing = list[Finding](), list(self.unmeasured)
        failures: dict[str, str] = {}  # of those that listened, by seat
        with ExitStack() as stack:
            if not self._is_noised:
                watcher.begin("training the run again")
                listeners = [
                    (party, _safe(note, attack.seat, failures))
                    for attack in self.attacks
                    for party, note in attack.listeners
                ]
                coordinators = (attack.coordinator for attack in self.attacks if attack.coordinator)
                again = trained(self.subject.settings, listeners, next(coordinators, None))
                run = stack.enter_context(again)
                _check_same(run_dir, run)
            for attack in self.attacks:
                watcher.begin(f"attacking: {attack.name}, {attack.seat}")
                results = attack.carried_out(run, failures)
                findings += [one for one in results if isinstance(one, Finding)]
                missing += [one for one in results if isinstance(one, Unmeasured)]
        subject = NOISED if self._is_noised else SAME
        quick = self.subject.quick
        return _written(run_dir, start, quick, subject, tuple(findings), tuple(missing))


def at_site(run_dir: Path, node_config: Path) -> Audit:
    """Audit the membership of one site's rows in a whole model, by a threshold.

    Raises
    ------
    ConfigError : the model is divided: a site has only its part, which predicts nothing by itself.
    """
    start, summary = time.monotonic(), read_run(run_dir).summary
    if parts_of(run_dir) is not None:
        rule = "run must have a whole model, which --site can score, got a divided one"
        raise ConfigError(f"{rule}: its parts predict only together")
    settings = _settings_of(run_dir, summary)
    site = site_config(read_node_config(node_config), {})
    subsets, text = read_subsets(site, settings.holdout), model_text(run_dir / "model.json")
    classes, objective = getattr(model_of_text(text), "classes", ()), settings.objective
    certain, planted = [], []
    for subset in ("train", "test"):
        table = subsets[subset]
        if table.labels is None or not table.n_rows:
            rule = "site must have labelled rows that trained and others that were held back"
            raise DataError(f"{rule}, got none: see test-fraction and label")
        guesses = predictions(text, table, np.arange(table.n_rows))
        certain.append(certainty(guesses, class_ids(table.labels, classes), objective))
        labels = learnt(guesses, objective, subset == "train")
        planted.append(certainty(guesses, labels, objective))
    scores, members = np.concatenate(certain), np.arange(sum(map(len, certain))) < len(certain[0])
    seat = f"whoever has the model, and labelled rows of {site.name}"
    measure = f"AUC of {len(certain[0]):,} training and {len(certain[1]):,} other rows"
    measured = Measured(measure, *of_auc(members, scores), 0.5)
    is_found = of_auc(members, np.concatenate(planted))[0] > CLEAR
    name, lowered_by = "membership (threshold)", against_membership(settings)
    attack = Attack(name, seat, *lowered_by, 0.0, lambda _: [measured], lambda _: is_found)
    (result,) = attack.carried_out(Trained(settings, summary, text), {})
    why = "it takes what other parties and the coordinator have received"
    missing = Unmeasured("rows, bins, labels", "every other seat", why)
    if isinstance(result, Finding):
        return _written(run_dir, start, False, PART, (result,), (missing,))
    return _written(run_dir, start, False, PART, (), (result, missing))


def _safe(
    note: Callable[[Transcript], None], seat: str, failures: dict[str, str]
) -> Callable[[Transcript], None]:
    """A listener that does not end the run that it listens to: what it raises is a failure."""

    def safe(transcript: Transcript) -> None:
        try:
            note(transcript)
        except Exception as error:
            failures[seat] = f"it could not listen ({type(error).__name__}: {error})"

    return safe


def _settings_of(run_dir: Path, summary: Mapping[str, Any]) -> Settings:
    """The recorded settings; a divided model is written as a whole, too."""
    config, method = trained_settings(run_dir), all_methods()[str(summary["strategy"])]
    if not method.trains:
        raise ConfigError(f"run must be one that trains, got one of {summary['strategy']}")
    if method.family == "vertical" and summary["engine"] != DEPLOYMENT:
        config["allow-export"] = True
        whole = f"{summary['strategy']}.master-keeps-model"
        config |= {whole: True} if whole in config else {}
    return load_settings(config).settled(summary["objective"])


def _check_same(run_dir: Path, again: Trained) -> None:
    """Check that a second training gave the run's model, or all parts of it."""
    if (divided := parts_of(run_dir)) is None:
        first, second = model_text(run_dir / "model.json"), again.model
    else:
        names = (divided.active, *divided.passive)
        model_ids = divided.model_id, again.summary["model_id"]
        first, second = (parts_digest(names, model_id) for model_id in model_ids)
    if not first:
        rule = "run must have the parts of its model on this machine, got none"
        raise DataError(f"{rule}: audit it where FEDAPP_HOME is that of the run")
    if first != second:
        rule = "run must give the same model when it is trained again, got another"
        way = "its tables, or the versions of fedapp and its packages, have changed since"
        raise DataError(f"{rule}: {way}; audit a new run")


def _written(run_dir: Path, start: float, *content: Any) -> Audit:
    """Write an audit that began at ``start``; ``content``: its fields after the seconds."""
    audit = Audit(time.strftime("%Y-%m-%d"), round(time.monotonic() - start, 1), *content)
    RunFolder(run_dir).write(AUDIT, to_text(audit))
    write_report(run_dir)
    return audit
