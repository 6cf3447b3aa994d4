"""Tables of settings in the READMEs, made from the code: ``python -m tests.setting_tables``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import partial
from typing import Annotated, Any

from pydantic import TypeAdapter

from fedapp import settings as of_run
from fedapp.settings import SECTIONS, app_folder, declared, defaults
from fedapp.site.settings import SiteConfig
from strategies.run import all_strategies

BLOCK = re.compile(r"(?<=<!-- settings: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
READMES = ("strategies/README.md", "fedapp/deploy/README.md")
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
KINDS = {"integer": "whole number", "number": "number", "boolean": "true or false"}


def in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str("none" if value == "" else value)


def rule_of(schema: dict[str, Any]) -> str:
    """The rule of a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(map(rule_of, schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]) if one)
    limits = [f"{sign} {schema[key]:g}" for key, sign in LIMITS.items() if key in schema]
    return " ".join([KINDS.get(schema["type"], "text"), ", ".join(limits)]).strip()


def node_lines() -> Iterator[str]:
    yield "| node config (`site.toml`) | default | what it does |"
    yield "|---|---|---|"
    values = {one.name: "" if one.default is MISSING else one.default for one in fields(SiteConfig)}
    for name, about in declared(SiteConfig).items():
        default = about.default or ("" if name in ("name", "data") else in_words(values[name]))
        yield f"| `{about.name}` | {default} | {about.text} |"


def run_lines(*sections: type[of_run.Section]) -> Iterator[str]:
    yield "| setting | default | values | what it does |"
    yield "|---|---|---|---|"
    for section in sections:
        for field, about in declared(section).items():
            info = section.model_fields[field]
            kind = Annotated[(info.annotation, *info.metadata, "")]  # type: ignore[valid-type]
            name = f"{section.table}.{about.name}".removeprefix(".")
            rule = rule_of(TypeAdapter(kind).json_schema())
            yield f"| `{name}` | {in_words(defaults()[name])} | {rule} | {about.text} |"


all_strategies()  # imports the methods, which declare their sections
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "node": node_lines,
    "general": partial(
        run_lines,
        *(of_run.RunSettings, of_run.TableSettings, of_run.SplitSettings, of_run.PartSettings),
        of_run.HorizontalSettings,
    ),
    "trees": partial(run_lines, of_run.BoostingSettings, of_run.ConstraintSettings),
    "vertical": partial(run_lines, of_run.VerticalSettings),
    "pax": partial(run_lines, SECTIONS["pax"], SECTIONS["privacy"]),
    "compared": partial(run_lines, SECTIONS["bagging"], SECTIONS["fedavg-linear"]),
    "prediction": partial(
        run_lines, SECTIONS["interactive"], SECTIONS["eini"], of_run.InferenceSettings
    ),
    **{
        name: partial(run_lines, SECTIONS[name])
        for name in ("fedxgbllr", "secureboost", "federated-forest")
    },
}


def with_tables(text: str) -> str:
    """The text of a README, its tables written anew."""

    def table(match: re.Match[str]) -> str:
        return "\n".join([match[1] + match[2].rstrip(), *TABLES[match[1]](), ""])

    return BLOCK.sub(table, text)


if __name__ == "__main__":
    for name in READMES:
        path = app_folder() / name
        path.write_text(with_tables(path.read_text()))
