"""Whether runs were scored on the same test rows, by what decides which rows these are."""

from __future__ import annotations

from collections.abc import Mapping

from fedapp.config import flatten
from fedapp.data.sources import party_sources
from fedapp.messages.methods import all_methods
from fedapp.report.summary import Fields, Run, row_counts

DEPLOYMENT = "deployment"  # an engine whose sites have tables of their own


def row_warnings(runs: Mapping[str, Run]) -> list[str]:
    """What makes scores of these runs incomparable, a sentence each.

    Parameters
    ----------
    runs : by name, two or more.
    """
    deciding = {name: _deciding(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for each in deciding.values() for key in each)
    differing = [key for key in keys if len(_owners(key, deciding)) > 1]
    if differing:
        values = "; ".join(_values(key, deciding) for key in differing)
        return [f"scores are not comparable, because the test rows differ: {values}"]
    unknown = [name for name, run in runs.items() if run.summary.get("engine") == DEPLOYMENT]
    if unknown:
        return [
            "the test rows may differ, because sites choose and may change their own tables: "
            + ", ".join(unknown)
        ]
    return []


def _deciding(run: Run) -> Fields:
    """What decides on the test rows of a run, by name, in words."""
    settings, summary = flatten(run.config), run.summary
    found: Fields = {
        "data": summary["data"],
        "seed": summary.get("seed"),
        "test-fraction": settings.get("test-fraction"),
        "number of test rows": row_counts(summary).get("test"),
    }
    if settings.get("folds"):
        found["fold"] = f"{settings['fold']} of {settings['folds']}"
    sources = party_sources(str(settings.get("data", "")), len(summary["parties"]))
    if sources or summary.get("engine") == DEPLOYMENT:
        method = all_methods().get(summary["strategy"])
        is_vertical = method is not None and method.family == "vertical"
        found["rows held back"] = (
            "of the joined table" if is_vertical else "by each party of its own table"
        )
    return found


def _owners(key: str, deciding: Mapping[str, Fields]) -> dict[str, list[str]]:
    """Names of the runs by what they have, without those of which it is not known."""
    names: dict[str, list[str]] = {}
    for name, found in deciding.items():
        if found.get(key) is not None:
            names.setdefault(str(found[key]), []).append(name)
    return names


def _values(key: str, deciding: Mapping[str, Fields]) -> str:
    """``seed 1 (a), 42 (b, c)``."""
    owners = _owners(key, deciding)
    return f"{key} " + ", ".join(f"{value} ({', '.join(own)})" for value, own in owners.items())
