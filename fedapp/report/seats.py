"""Who could see what in a run, by seat: what a report says below its result.

It is a summary. What leaves a party is in the messages' **Reveals**, which the model card has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedapp.crypto.paillier_keys import SMALLEST_BITS
from fedapp.messages.methods import Method, method_of
from fedapp.report.summary import DEPLOYMENT
from fedapp.run_files import RunFiles
from fedapp.settings import Value, flatten, setting_names
from fedapp.site.settings import SiteConfig

COORDINATOR, OTHERS, HOLDER = "The coordinator", "The other parties", "Whoever gets the model"
OPEN = "no measure hides what a party sends: no masks over sums, no noise, no fewest rows a bin"
GUESSES = "its cuts and names of categories; it may guess whether a row trained the model"


def unmet(run: RunFiles) -> list[str]:
    """Measures that the run has switched off, or does not have."""
    lines = [f"{rule}: it is for tests only" for rule in weak_keys(flatten(run.config))]
    if _setting(run, "unguarded"):
        lines.append("unguarded: sums of few leaves may give the ways of rows away")
    method = method_of(run.summary["strategy"])
    is_known = run.summary.get("engine") != DEPLOYMENT  # where sites have least-bin-rows
    is_horizontal = method and method.trains and method.family == "horizontal"
    if method and is_horizontal and is_known and not _measures(run, method):
        lines.append(OPEN)
    return lines


def weak_keys(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of a run with these settings."""
    bits = [
        int(settings.get(f"{name.partition('.')[0]}.key-bits", 0))
        for name, value in settings.items()
        if name.endswith(".insecure-small-key") and value
    ]
    return [f"a Paillier key of {n} bits can be broken" for n in bits if n < SMALLEST_BITS]


def seats(run: RunFiles) -> dict[str, str]:
    """What each seat could see, by its name; empty for a run that trains nothing."""
    method = method_of(run.summary["strategy"])
    if method is None or not method.trains or not run.summary["parties"]:
        return {}
    return dict(_vertical(run, method) if method.family == "vertical" else _horizontal(run, method))


def settings_in_force(run: RunFiles) -> dict[str, Value]:
    """Settings of a run, without those that real sites have in their node configs instead."""
    of_sites = setting_names(SiteConfig) if run.summary.get("engine") == DEPLOYMENT else ()
    return {name: v for name, v in flatten(run.config).items() if name not in of_sites}


def _setting(run: RunFiles, name: str) -> Any:
    """A setting of the run's method."""
    return flatten(run.config).get(f"{run.summary['strategy']}.{name}")


def _measures(run: RunFiles, method: Method) -> set[str]:
    """The settings in force that change what the coordinator gets, as ``Method.gets`` has them."""
    if run.summary.get("privacy"):
        return {"run-epsilon"}
    measures = {
        "least-parties": _setting(run, "aggregation") == "secure",
        "least-bin-rows": method.merges_bins and settings_in_force(run).get("least-bin-rows"),
    }
    return {name for name, is_in_force in measures.items() if is_in_force}


def _horizontal(run: RunFiles, method: Method) -> Iterator[tuple[str, str]]:
    measures = _measures(run, method)
    yield COORDINATOR, method.gets_with(measures)
    others = "the model as it grew"
    if len(run.summary["parties"]) == 2 and "least-parties" in measures:
        others += "; of two, each knows that the rest of a sum is the other's"
    yield OTHERS, others
    promised = run.summary.get("privacy")
    bound = f"no more than epsilon {promised['epsilon']:g} allows" if promised else GUESSES
    yield HOLDER, bound


def _vertical(run: RunFiles, method: Method) -> Iterator[tuple[str, str]]:
    active = run.summary.get("active", "The active party")
    exports = bool(settings_in_force(run).get("allow-export"))
    is_paillier = _setting(run, "labels") == "paillier"
    gets = method.gets_with({"encrypted-labels"} if is_paillier else set())
    is_encrypted = method.sums_ciphertexts or is_paillier
    yield COORDINATOR, gets + ", and the whole model (allow-export)" * exports
    bins = "sums of its labels over bins of the others' columns, from which it may find rows' bins"
    yield active, f"which of its rows the others have; {bins * is_encrypted}".rstrip("; ")
    labels = "codes of the labels: which rows share one"
    groups = "which rows go the same way in the trees, and so roughly which share a label"
    yield OTHERS, f"which of its rows all have; {groups if is_encrypted else labels}"
    if exports:
        yield HOLDER, GUESSES
