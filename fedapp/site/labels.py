"""A site's labels as a run sees them: with ``label-epsilon`` each is randomised once.

``fedapp.crypto.noise`` draws. Two draws of a row by one random word show more than each if what
they depend on differs: if a label stays below a threshold ``t`` of three classes, and ``t' > t`` of
two, then a word between both shows it for certain. So ``labels.json`` pins the columns, epsilon,
range and the classes of the whole table, which other parties do not choose.

A row's label may change, and draws that differ would show for certain that it did. So the number
that was drawn when an id first came stays, in ``labels.bin``. Over any runs that a site admits, all
that others see of a row's labels is computed of that one number, and two histories of labels are
distinguished with a likelihood ratio of e^epsilon at most.

Known to others: the classes, and whether a row has a label. A row that gets another id, or a site
that gets another name or home, is drawn again: what both draws show adds up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Floats
from fedapp.crypto.noise import randomised_classes, randomised_measures
from fedapp.data.labels import Labels, class_ids, class_names, merge_classes
from fedapp.data.partition import keyed_digests
from fedapp.errors import ConfigError, DataError
from fedapp.home import PRIVATE, home, secret_at, write_atomically
from fedapp.site.settings import SiteConfig, label_bounds
from fedapp.site.store import locked
from fedapp.trees.losses import REGRESSION
from fedapp.trees.objective import AUTO, is_regression

log = logging.getLogger("fedapp.site")
KEY_BYTES = 32
PINS, DRAWS = "labels.json", "labels.bin"
# Keyed digests of a row's id and of its label when it was drawn, and the number drawn.
DRAW = np.dtype([("row", "<u8"), ("label", "<u8"), ("drawn", "<f4")])
WAY = f"two draws of a label add up; to draw all again delete {PINS} of the site"


def drawn_labels(config: SiteConfig, labels: Labels, ids: Sequence[str]) -> Labels:
    """The labels of a whole table, randomised; ``ids`` are unique.

    A site draws by a secret of its own. In a simulation the secret is the party's name, so that
    runs can be repeated, and nothing is stored.
    """
    if config.event or config.qid:
        rule = f"must be 0 in the node config of {config.name}"
        raise ConfigError(f"label-epsilon {rule}, whose labels are times or ranks")
    bounds, classes = (0.0, 0.0), tuple[str, ...]()
    if config.label_range:
        bounds = label_bounds(config.label_range)
        class_names(labels, REGRESSION)  # raises for texts
    elif not (classes := _classes(config, labels)):
        label_bounds("")  # raises: these are measures
    key = hashlib.blake2b(config.name.encode(), digest_size=KEY_BYTES).digest()
    if not config.simulated:
        if not config.id_column:
            rule = "must name the column of ids, by which label-epsilon draws"
            raise ConfigError(f"id in the node config of {config.name} {rule}, got none")
        pins = _pinned(config, bounds, classes)
        key, classes = bytes.fromhex(pins["key"]), tuple(pins["classes"])
    numbers = class_ids(labels, classes)

    def draw(rows: npt.NDArray[np.int64]) -> Floats:
        taken, names = numbers[rows], [ids[row] for row in rows.tolist()]
        if classes:
            return randomised_classes(taken, classes, config.label_epsilon, names, key)
        return randomised_measures(taken, *bounds, config.label_epsilon, names, key)

    every = np.arange(len(ids))
    if config.simulated:
        drawn = draw(every)
    else:
        folder = home() / "sites" / config.name
        rows = keyed_digests(ids, key)[:, 0]
        texts = (json.dumps(pair) for pair in zip(ids, numbers.tolist(), strict=True))
        tags = keyed_digests(texts, key)[:, 0]
        with locked(folder):
            path = folder / DRAWS
            stored = np.frombuffer(path.read_bytes() if path.exists() else b"", DRAW)
            if len(new := every[~np.isin(rows, stored["row"])]):
                added = np.empty(len(new), DRAW)
                added["row"], added["label"], added["drawn"] = rows[new], tags[new], draw(new)
                stored = np.sort(np.concatenate((stored, added)), order="row")
                write_atomically(path, stored.tobytes(), PRIVATE, lasting=True)
        records = stored[np.searchsorted(stored["row"], rows)]
        drawn = records["drawn"]
        if n_changed := int((records["label"] != tags).sum()):
            rule = f"{n_changed:,} labels have changed since they were drawn, and stay as drawn"
            log.warning("%s: %s: %s", config.name, rule, WAY)
    if not classes:
        return drawn.astype(np.float64)
    named = np.array(classes)[drawn.astype(np.int64)]
    return named if labels.dtype.kind == "U" else named.astype(np.float64)


def check_kind(config: SiteConfig, objective: str) -> None:
    """Check that labels were drawn as what an objective takes them for: classes, or measures."""
    if is_regression(objective) and not config.label_range:
        label_bounds("")  # raises
    if config.label_range and not is_regression(objective):
        rule = f"must be empty for {objective} in the node config of {config.name}"
        raise ConfigError(f"label-range {rule}: it is for measures, got {config.label_range}")


def _classes(config: SiteConfig, labels: Labels) -> tuple[str, ...]:
    """Classes of a table, with those that its schema gives; none of measures."""
    listed = [
        name
        for column in config.reader.declared
        if (column.rename or column.name) == config.label
        for name in (*column.categories, *dict(column.codes).values())
    ]
    names = class_names(labels, AUTO)
    return merge_classes([listed, names]) if names else ()


def _pinned(
    config: SiteConfig, bounds: tuple[float, float], classes: tuple[str, ...]
) -> Mapping[str, Any]:
    """What the site's draws depend on, from the first on; refuses what would need others."""
    pins = {
        "label": config.label,
        "id": config.id_column,
        "label-epsilon": config.label_epsilon,
        "label-range": list(bounds),
        "classes": list(classes),
    }
    drawn = json.dumps({**pins, "key": secrets.token_hex(KEY_BYTES)}).encode
    before = json.loads(secret_at(home() / "sites" / config.name / PINS, drawn))
    rule = f"must be that by which labels of {config.name} were drawn"
    for name, value in pins.items():
        was = before.get(name, "none")
        if name != "classes" and value != was:
            here = f"{name} {rule}, {was}, got {value}: {WAY}"
            raise DataError(f"{name} {rule}, got another: {WAY}", here=here)
    if added := [name for name in classes if name not in before["classes"]]:
        rule = f"label must have the classes by which labels of {config.name} were drawn"
        here = f"{rule}, {', '.join(before['classes'])}, got also {', '.join(added)}: {WAY}"
        raise DataError(f"{rule}, got others: {WAY}", here=here)
    return dict(before)
