"""Names that are nearly right, and what was probably meant by them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

# Our names, by the method's own first, for what XGBoost, scikit-learn, LightGBM and other methods
# call otherwise; the first that is a setting of the method, else of all methods, is the one.
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
# Exact synonyms, which are taken as the setting: one of the method's own first, else a general one.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "learning-rate": ("eta", "learning-rate"),
    "n-estimators": ("trees", "num-boost-round"),
    "reg-lambda": ("lambda",),
    "reg-alpha": ("alpha",),
    "min-split-loss": ("gamma",),
}
LEAST_ALIKE = 0.6  # of difflib's ratio, which is 1 for the same name
LEAST_STEM = 4  # letters with which a name must begin to be meant by a shorter one


def listed(text: str) -> tuple[str, ...]:
    """Names separated by commas; none in an empty text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def near(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the name spelled most alike or that begins so, or an empty text.

    Parameters
    ----------
    prefix : may be omitted from a name.
    """
    found = nearest(name, known, prefix)
    return f"; did you mean {found}?" if found else ""


def near_path(path: Path, *folders: Path) -> str:
    """The same for a path that is not there, by what is in its folder and in others. Only for
    texts that stay with who may see these folders."""
    found = [folder for folder in (*folders, path.parent) if folder.is_dir()]
    known = {one.name: one for folder in found for one in folder.iterdir()}
    meant = "" if path.exists() else nearest(path.name, known)
    return f"; did you mean {known[meant]}?" if meant else ""


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The name spelled most alike or that begins so; empty where there is none; see ``near``."""
    spelled = {_kebab(one).removeprefix(prefix): one for one in known}
    asked = _kebab(name).removeprefix(prefix)
    found = difflib.get_close_matches(asked, spelled, n=1, cutoff=LEAST_ALIKE)
    stem = asked.rstrip("s")
    if not found and len(stem) >= LEAST_STEM:
        found = sorted((one for one in spelled if one.startswith(stem)), key=len)
    return spelled[found[0]] if found else ""


def setting_of(name: str, known: Collection[str], method: str = "") -> str:
    """The setting that a name or an exact synonym stands for; the name itself where there is none.
    See ``near_setting``."""
    kebab = name.strip().replace("_", "-")
    meant = SYNONYMS.get(kebab, ()) if kebab not in known else ()
    found = [one for one in (*(f"{method}.{own}" for own in meant), *meant) if one in known]
    return found[0] if found else kebab if kebab in known else name.strip()


def alias(kebab: str, known: Collection[str], method: str) -> str:
    """The setting that other libraries, or other methods, call so; empty where there is none."""
    for meant in (kebab, *ALIASES.get(kebab, ())):
        for candidate in (f"{method}.{meant}", meant):
            if candidate in known:
                return candidate
    return ""


def near_setting(name: str, known: Collection[str], method: str = "") -> str:
    """The same for a setting, by what other libraries call it and by what the method has.

    Parameters
    ----------
    known : all settings, ``federated-forest.trees`` for the one of a method.
    method : whose settings are meant; empty if that is not said.
    """
    kebab = _kebab(name)
    if meant := alias(kebab, known, method):
        return f"; did you mean {meant}?"
    if owners := [one for one in known if one.partition(".")[2] == kebab]:
        return f"; did you mean {' or '.join(owners)}?"
    if "." in name:
        return near(name, [one for one in known if "." in one])
    general = [one for one in known if "." not in one]
    own = [one for one in known if method and one.startswith(f"{method}.")]
    return near(name, general + own, f"{method}.") or near(name, known)


def _kebab(name: str) -> str:
    return name.strip().lower().replace("_", "-")
