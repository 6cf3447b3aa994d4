"""Check a site before any run: its table, and its policy against every method."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE

import numpy as np

from fedapp.cluster import workers_at
from fedapp.crypto.packing import grouped_layouts, readable_rows
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError
from fedapp.histograms.claimed import disclosed_labels
from fedapp.home import home
from fedapp.messages.methods import Method, missing_extra
from fedapp.metrics.tables import readable_labels
from fedapp.site.policy import check_policy
from fedapp.site.rows_to_predict import read_to_predict
from fedapp.site.settings import (
    BINS_A_COLUMN,
    MOST_COLUMNS,
    NODE_KEYS,
    OF_TABLE,
    SUBSET_NAMES,
    SiteConfig,
)
from fedapp.site.store import PART_FILE
from fedapp.site.table import notes_on_classes, notes_on_workers, read_columns, row_ids, split_table
from fedapp.trees.cells import open_cells, share_open

SHARED = frozenset(("share-column-names", "allow-export", "least-bin-rows", "label-epsilon"))
TRUST = "others' keys (fedapp site trust)"
KEY_BITS = 2048  # the default of every method
MOST_MODELS = 3


@dataclass(frozen=True, slots=True)
class Findings:
    """Facts about a site's table that contain no rows."""

    n_rows: int
    columns: tuple[str, ...]  # features
    label: str  # description, or what is wrong
    ids: str  # the same
    # by name: ``yes`` or why not, and what the coordinator gets
    methods: Mapping[str, tuple[str, str]]
    # By method: rows a round whose bins the label holder could read; labels a round that a passive
    # party could; rows whose labels figures of a description could disclose
    readable: Mapping[str, int]
    disclosed: Mapping[str, int]
    readable_labels: Mapping[str, int]
    # Share of the sides of rows at the site's splits that cells would show the label holder, of its
    # newest models by their ids.
    shown: Mapping[str, float]
    notes: tuple[str, ...]  # warnings about the table


def check_site(
    config: SiteConfig,
    methods: Mapping[str, Method],
    fractions: tuple[float, float],
    max_depth: int,
) -> Findings:
    """Read the site's table as a run does, and check every method against it and the policy.

    `fractions` and `max_depth` are the defaults of runs. Raises ConfigError or
    DataError if the table or the policy is invalid.
    """
    check_allowed(config, methods)
    if config.workers:
        workers_at(config.workers).connected()
    table = read_columns(config, seed=0)
    holdout = Holdout(*fractions, seed=0)
    # Without labels the site is a passive party, for which another one splits the matched rows.
    split = holdout.split(table.n_rows) if table.labels is None else split_table(table, holdout)
    n_rows = {subset: len(getattr(split, subset)) for subset in SUBSETS}
    ids, has_ids = _ids(table, config)
    keys = ("least-bin-rows", "least-parties", "run-epsilon", "encrypted-labels")
    in_force = {key for key in keys if getattr(config, NODE_KEYS[key])}
    answers = {
        name: (
            _obstacle(name, config) or _takes_part(config, table, method, n_rows, has_ids),
            method.gets_with(in_force),
        )
        for name, method in methods.items()
    }
    n_readable = readable_in_round(table.n_rows, max_depth)
    n_disclosed = disclosed_in_round(max_depth, most_columns=config.most_columns)
    possible = {
        name: methods[name] for name, (answer, _) in answers.items() if not answer.startswith("no:")
    }
    summing = [name for name, method in possible.items() if method.sums_ciphertexts]
    readable = dict.fromkeys(summing if table.labels is None else (), n_readable)
    disclosed = dict.fromkeys(summing if table.labels is not None else (), n_disclosed)
    shares = table.labels is not None and config.shares_label_figures
    labels = {
        name: readable_labels(n_rows["train"])
        for name, method in possible.items()
        if shares and method.shows_label_figures
    }
    every = (*table.notes, *notes_on_classes(config, table.labels), *notes_on_workers(config))
    notes = tuple(note.text(shares_names=True) for note in every)
    shown = _shown(config) if table.labels is None else {}
    figures = (readable, disclosed, labels, shown, notes)
    return Findings(table.n_rows, table.columns, _label(table), ids, answers, *figures)


def _shown(config: SiteConfig) -> dict[str, float]:
    """By model, what a passive site's cells of its rows would show."""
    paths = (home() / "sites" / config.name).glob(f"*/{PART_FILE}")
    shown = {}
    for path in sorted(paths, key=lambda path: path.stat().st_mtime)[-MOST_MODELS:]:
        with suppress(DataError, ConfigError):  # of another table
            part, rows = read_to_predict(config, path.parent.name)
            cells = open_cells(part.nesting, part.lookup, rows.values)
            shown[path.parent.name] = share_open(cells, rows.n_rows)
    return shown


def readable_in_round(n_rows: int, max_depth: int, max_leaves: int = 0, n_trees: int = 1) -> int:
    """``readable_rows`` of boosting with one output under a usual key; of a round's parallel trees,
    each has the sums of all that share its ciphertexts."""
    layouts = grouped_layouts(KEY_BITS, n_rows, n_trees)
    return sum(
        layout.n_outputs * readable_rows([layout], max_depth, max_leaves) for layout in layouts
    )


def disclosed_in_round(
    max_depth: int, max_leaves: int = 0, n_trees: int = 1, most_columns: int = MOST_COLUMNS
) -> int:
    """``disclosed_labels`` of boosting with one output and all bins that another party may have."""
    return disclosed_labels(BINS_A_COLUMN * most_columns, max_depth, max_leaves, n_trees)


def check_allowed(config: SiteConfig, methods: Collection[str]) -> None:
    """Check that the policy names known methods; raises ConfigError."""
    unknown = config.allowed - set(methods)
    if unknown:
        names, got = ", ".join(sorted(methods)), ", ".join(sorted(unknown))
        raise ConfigError(f"allow must name methods ({names}), got {got}")


def policy_of(config: SiteConfig) -> dict[str, object]:
    """What a site allows, by the keys of its node config."""
    hidden = {"name", "allow", "app", "draws-secret", "trusted", "total-epsilon"}
    shown = [name for name in NODE_KEYS if name not in OF_TABLE | hidden or name in SHARED]
    values = {name: getattr(config, NODE_KEYS[name]) for name in shown}
    lists = {name: sorted(value) for name, value in values.items() if isinstance(value, frozenset)}
    return {**values, **lists}


def in_words(value: object) -> str:
    """A fact of a site as a text; what is empty or 0 is ``none``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        value = ", ".join(value)
    return f"{value:g}" if isinstance(value, float) and value else str(value or "none")


def who_may_read_keys(folders: Iterable[Path]) -> str:
    """Describe whether anyone but the owner can read keys and secrets in these folders."""
    files = (
        path for folder in folders for form in ("*.key", "*.secret") for path in folder.glob(form)
    )
    modes = {path: S_IMODE(path.stat().st_mode) for path in sorted(files)}
    if not modes:
        return "none here yet"
    exposed = [f"{path} (mode {mode:04o})" for path, mode in modes.items() if mode & 0o077]
    if exposed:
        return f"chmod 600: others may read {', '.join(exposed)}"
    return "readable by the owner only"


def _label(table: Table) -> str:
    if table.labels is None:
        return "none: a passive party"
    n_distinct = len(np.unique(table.labels))
    form = "numbers" if table.labels.dtype.kind == "f" else "texts"
    return f"{form}, {n_distinct} distinct"


def _ids(table: Table, config: SiteConfig) -> tuple[str, bool]:
    """Describe the ids, and whether rows can be matched by them."""
    if table.ids is None:
        return "none", False
    try:
        row_ids(table, config, needs_ids=True)
    except DataError as error:
        return str(error), False
    return "unique in every row", True


def _obstacle(name: str, config: SiteConfig) -> str:
    """Why the site cannot take part with any table; empty if it can."""
    if name not in config.allowed:
        return "no: not in allow"
    try:
        check_policy(config, f"train.{name.replace('-', '_')}_begin", name)
    except ConfigError as error:
        return f"no: would ignore {str(error).partition(' must ')[0]}"
    command = missing_extra(name)
    return f"no: needs {command}" if command else ""


def _takes_part(
    config: SiteConfig, table: Table, method: Method, n_rows: Mapping[str, int], has_ids: bool
) -> str:
    """``yes``, or the reason why not."""
    for subset, count in n_rows.items() if not method.uses_model else ():
        if count < config.min_rows and (count or subset == "train"):
            few = f"{count} {SUBSET_NAMES[subset]} rows"
            return f"no: {few}, fewer than {config.min_rows} (min-rows)"
    if method.needs_label and table.labels is None:
        return "no: needs a label"
    if method.needs_label:
        return _takes_part_in_sums(config, method)
    role = "passive" if table.labels is None else "active"
    wanted = [] if has_ids else ["align=ordered (needs ids else)"]
    if method.codes_labels and config.encrypts_labels and role == "active":
        wanted.append("labels=paillier (encrypted-labels)")
    if not config.trusted:
        wanted.append(TRUST)
    return f"{role}, but only with {' and '.join(wanted)}" if wanted else f"yes, {role}"


def _takes_part_in_sums(config: SiteConfig, method: Method) -> str:
    """``_takes_part`` for methods between parties with the same columns."""
    wanted, epsilon = [], config.run_epsilon
    for setting, value, way in (
        ("least-parties", config.least_parties, "aggregation=secure"),
        ("run-epsilon", epsilon, f"privacy.epsilon up to {epsilon:g}"),
    ):
        if value and setting not in method.gets:
            return f"no: the coordinator gets more than {setting} allows"
        wanted += [f"{way} ({setting})"] if value else []
    if wanted and not config.trusted:
        wanted.append(TRUST)
    return f"yes, but only with {' and '.join(wanted)}" if wanted else "yes"
