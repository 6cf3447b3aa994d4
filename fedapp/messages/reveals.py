"""Read **Reveals** of messages: what a run discloses, by its settings.

A section is a list "in short", for a person who decides on a run, and the rest in full. A paragraph
or an item of a list may begin with the conditions under which it holds, all of them::

    - [aggregation=secure, objective!=survival:cox] The server learns only sums over all parties.

A condition is a setting of the run config, without its method's section, the method's ``family``,
whether it ``trains``, or the number of ``parties``; then ``=`` or ``!=``; then values, of which
``|`` separates several, and ``none`` is an empty one.
Conditions before a list are those of its items, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import ModuleType
from typing import Any

from fedapp.messages.methods import method_of, modules_of_method

NONE = "none"
SHORT = "in short:"
BLOCK = re.compile(r"(?P<mark>- )?(\[(?P<conditions>[^\]]+)\] )?(?P<text>.*)")
CONDITION = re.compile(r"(?P<name>[a-z-]+)(?P<sign>!?=)(?P<values>\S+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a setting has one of some values, or none of them."""

    name: str
    is_equal: bool
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}{'' if self.is_equal else '!'}={' or '.join(self.values)}"

    def is_false(self, facts: Mapping[str, str]) -> bool:
        """Whether the facts contradict it; an unknown setting contradicts nothing."""
        return self.name in facts and (facts[self.name] in self.values) != self.is_equal


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of a section, or an item of a list, in one line."""

    text: str
    conditions: tuple[Condition, ...]
    is_item: bool
    is_short: bool

    @property
    def is_head(self) -> bool:
        """Whether a list follows."""
        return self.text.endswith(":") and not self.is_item


def paragraphs_of(module: ModuleType) -> Iterator[Paragraph]:
    """All paragraphs of a module's section; an item has the conditions before its list, too."""
    section = (inspect.getdoc(module) or "").partition("\nReveals")[2].lstrip(":, \n")
    before, is_short = tuple[Condition, ...](), False
    for block in re.split(r"\n\n|\n(?=- )", section):
        parts = BLOCK.fullmatch(" ".join(block.split()))
        assert parts
        text, is_item = parts["text"], bool(parts["mark"])
        conditions = _read(parts["conditions"])
        if not is_item:
            before, is_short = conditions, text == SHORT
            yield Paragraph(text, conditions, is_item, is_short)
        else:
            yield Paragraph(text, before + conditions, is_item, is_short)


def _read(text: str | None) -> tuple[Condition, ...]:
    conditions = []
    for condition in text.split(", ") if text else ():
        parts = CONDITION.fullmatch(condition)
        assert parts, f"{condition} must be NAME=VALUE"
        values = tuple(parts["values"].split("|"))
        conditions.append(Condition(parts["name"], parts["sign"] == "=", values))
    return tuple(conditions)


def facts_of(method: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """What decides conditions: a method, and the settings of a run that are known."""
    facts: dict[str, object] = {"strategy": method, "aggregation": "plain"}
    if declared := method_of(method):
        facts |= {"family": declared.family, "trains": declared.trains}
    for name, value in settings.items():
        section, _, short = name.rpartition(".")
        if section in ("", method, "privacy"):
            facts[short.replace("_", "-")] = value
    return {name: _as_text(value) for name, value in facts.items()}


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value) or NONE


def revealed(module: ModuleType, facts: Mapping[str, str]) -> list[Paragraph]:
    """Paragraphs of a section that hold; the text names conditions that the facts leave open."""
    shown = list[Paragraph]()
    for paragraph in reversed([*paragraphs_of(module)]):
        if any(condition.is_false(facts) for condition in paragraph.conditions):
            continue
        if paragraph.is_head and not (shown and shown[-1].is_item):
            continue  # nothing of its list holds
        unknown = [
            str(condition)
            for condition in paragraph.conditions
            if condition.name not in facts and f"``{condition.name}" not in paragraph.text
        ]
        text = f"With {', '.join(unknown)}: {paragraph.text}" if unknown else paragraph.text
        shown.append(replace(paragraph, text=text))
    return shown[::-1]


def in_short(method: str, facts: Mapping[str, str]) -> list[str]:
    """Sentences that hold, of all modules of a method, the method's first."""
    every = (p for module in modules_of_method(method) for p in revealed(module, facts))
    return [paragraph.text for paragraph in every if paragraph.is_short and paragraph.is_item]


def in_full(module: ModuleType, facts: Mapping[str, str]) -> str:
    """The rest of a module's section that holds, in Markdown."""
    rest = [paragraph for paragraph in revealed(module, facts) if not paragraph.is_short]
    blocks = groupby(rest, lambda paragraph: paragraph.is_item)
    return "\n\n".join(
        "\n".join(f"- {item.text}" for item in block)
        if is_list
        else "\n\n".join(paragraph.text for paragraph in block)
        for is_list, block in blocks
    )
