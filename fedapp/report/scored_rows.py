"""Check that runs were scored on the same test rows, by the settings that select these rows."""

from __future__ import annotations

from collections.abc import Mapping

from fedapp.data.datasets import party_sources
from fedapp.messages.fields import all_methods
from fedapp.report.summary import Fields, Run, row_counts
from fedapp.settings import flatten

DEPLOYMENT = "deployment"  # engine whose sites bring their tables


def row_warnings(runs: Mapping[str, Run]) -> list[str]:
    """Why scores of two or more runs are not comparable, one sentence per reason."""
    deciding = {name: _deciding(run) for name, run in runs.items()}
    differing = []
    for key in dict.fromkeys(key for facts in deciding.values() for key in facts):
        owners: dict[str, list[str]] = {}  # value -> names of runs; unknown values are omitted
        for name, facts in deciding.items():
            if facts.get(key) is not None:
                owners.setdefault(str(facts[key]), []).append(name)
        if len(owners) > 1:  # as in "seed 1 (a), 42 (b, c)"
            parts = (f"{value} ({', '.join(names)})" for value, names in owners.items())
            differing.append(f"{key} {', '.join(parts)}")
    if differing:
        values = "; ".join(differing)
        return [f"scores are not comparable, because the test rows differ: {values}"]
    deployed = [name for name, run in runs.items() if run.summary.get("engine") == DEPLOYMENT]
    if deployed:
        return [
            "the test rows may differ, because sites choose and may change their own tables: "
            + ", ".join(deployed)
        ]
    return []


def _deciding(run: Run) -> Fields:
    settings, summary = flatten(run.config), run.summary
    facts: Fields = {
        "data": summary["data"],
        "seed": summary.get("seed"),
        "test-fraction": settings.get("test-fraction"),
        "number of test rows": row_counts(summary).get("test"),
    }
    if settings.get("folds"):
        facts["fold"] = f"{settings['fold']} of {settings['folds']}"
    sources = party_sources(str(settings.get("data", "")), len(summary["parties"]))
    if sources or summary.get("engine") == DEPLOYMENT:
        method = all_methods().get(summary["strategy"])
        is_vertical = method is not None and method.family == "vertical"
        facts["rows held back"] = (
            "of the joined table" if is_vertical else "by each party of its own table"
        )
    return facts
