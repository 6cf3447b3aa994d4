"""Suggest the intended name for a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

# Our settings, and their names in XGBoost, scikit-learn, LightGBM and other methods. The first of
# ours that is a setting of the method, or else of all methods, is suggested.
_CALLED = {
    ("learning-rate", "eta"): "learning-rate shrinkage shrinkage-rate step-size lr eta",
    ("trees", "rounds", "num-boost-round"): (
        "boosting-rounds iterations max-iter n-estimators n-iter n-rounds n-trees nrounds "
        "num-boost-round num-boost-rounds num-iterations num-parallel-tree num-round num-rounds "
        "num-trees rounds trees"
    ),
    ("l2", "lambda"): "reg-lambda lambda-l2 l2-regularization l2 lambda",
    ("alpha",): "reg-alpha lambda-l1 l1",
    ("gamma",): "min-split-loss min-split-gain min-gain-to-split",
    ("min-child-weight",): "min-sum-hessian-in-leaf",
    ("min-samples-leaf", "min-child-rows"): (
        "min-samples-leaf min-data-in-leaf min-child-samples min-child-rows"
    ),
    ("max-depth",): "max-leaves max-leaf-nodes num-leaves depth",
    ("subsample",): "bagging-fraction row-sample",
    ("colsample-bytree",): "colsample feature-fraction",
    ("bins", "max-bin"): "max-bins bins n-bins num-bins",
    ("early-stopping-rounds",): "early-stopping n-iter-no-change",
    ("seed",): "random-state random-seed",
    ("label",): "target target-column label-column y",
    ("weight",): "sample-weight weight-column",
    ("test-fraction",): "test-size test-share",
    ("valid-fraction",): "validation-fraction valid-size",
    ("parties",): "clients n-clients num-clients n-parties sites",
    ("objective",): "loss loss-function",
}
ALIASES = {name: ours for ours, names in _CALLED.items() for name in names.split()}
# Exact synonyms, accepted as the setting: a setting of the method first, or else a general one.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "learning-rate": ("eta", "learning-rate"),
    "n-estimators": ("trees", "num-boost-round"),
    "reg-lambda": ("lambda",),
    "reg-alpha": ("alpha",),
    "min-split-loss": ("gamma",),
}
LEAST_ALIKE = 0.6  # difflib's ratio, which is 1 for equal names
LEAST_STEM = 4  # characters that suggest a longer name which begins so


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas; none for an empty text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def near(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the most similar name or one that begins so, or an empty text.

    ``prefix`` may be omitted from a name.
    """
    suggestion = nearest(name, known, prefix)
    return f"; did you mean {suggestion}?" if suggestion else ""


def near_path(path: Path, *folders: Path) -> str:
    """``near`` for a missing path, by the files of its folder and of others.

    Only for texts shown to people who may see these folders.
    """
    searched = [folder for folder in (*folders, path.parent) if folder.is_dir()]
    paths = {one.name: one for folder in searched for one in folder.iterdir()}
    meant = "" if path.exists() else nearest(path.name, paths)
    return f"; did you mean {paths[meant]}?" if meant else ""


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The most similar name or one that begins so, or an empty text; see ``near``."""
    spelled = {_kebab(one).removeprefix(prefix): one for one in known}
    asked = _kebab(name).removeprefix(prefix)
    matches = difflib.get_close_matches(asked, spelled, n=1, cutoff=LEAST_ALIKE)
    stem = asked.rstrip("s")
    if not matches and len(stem) >= LEAST_STEM:
        matches = sorted((one for one in spelled if one.startswith(stem)), key=len)
    return spelled[matches[0]] if matches else ""


def setting_of(name: str, known: Collection[str], method: str = "") -> str:
    """The setting that a name or an exact synonym refers to; else the name itself."""
    kebab = name.strip().replace("_", "-")
    meant = SYNONYMS.get(kebab, ()) if kebab not in known else ()
    settings = [one for one in (*(f"{method}.{own}" for own in meant), *meant) if one in known]
    return settings[0] if settings else kebab if kebab in known else name.strip()


def alias(kebab: str, known: Collection[str], method: str) -> str:
    """The setting that other libraries or methods call so; empty if there is none."""
    for meant in (kebab, *ALIASES.get(kebab, ())):
        for candidate in (f"{method}.{meant}", meant):
            if candidate in known:
                return candidate
    return ""


def near_setting(name: str, known: Collection[str], method: str = "") -> str:
    """``near`` for a setting, also by its names in other libraries.

    ``known`` are all settings, with the method's name before its settings:
    ``federated-forest.trees``.
    """
    kebab = _kebab(name)
    if meant := alias(kebab, known, method):
        return f"; did you mean {meant}?"
    if owners := [one for one in known if one.partition(".")[2] == kebab]:
        return f"; did you mean {' or '.join(owners)}?"
    if "." in name:
        return near(name, [one for one in known if "." in one])
    general = [one for one in known if "." not in one]
    of_method = [one for one in known if method and one.startswith(f"{method}.")]
    return near(name, general + of_method, f"{method}.") or near(name, known)


def _kebab(name: str) -> str:
    return name.strip().lower().replace("_", "-")
