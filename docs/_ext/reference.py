"""Pages that the code writes: settings, node config, command line, messages, what they reveal."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import click
import typer.main
from sphinx.application import Sphinx

from fedapp import messages as wire
from fedapp import run_files
from fedapp import settings as of_run
from fedapp.commands import cli, json_documents
from fedapp.commands.json_documents import DOCUMENTS as PRINTED
from fedapp.commands.run import in_words, list_settings
from fedapp.messages.fields import Form, OneOf, Range, Reply, Request
from fedapp.messages.fields import Message as WireMessage
from fedapp.run_files import Message, RoundInfo, Summary, adapter
from fedapp.sections import declared, method_sections
from fedapp.site.settings import SiteConfig

COMMENTED = re.compile(r"^    (\w+): .*  # (.+)$", re.MULTILINE)  # a field, and its comment
OBJECTS = {**vars(run_files), **vars(json_documents)}  # by name, those in documents
TYPES = {str: "text", tuple: "texts", bool: "true or false", int: "whole number", float: "number"}
TITLES = {  # of modules of messages; the others follow, with the first line of each
    "handshake": "Opening of a run",
    "scoring": "Scores",
    "secagg": "Secure aggregation",
    "pax": "PAX",
    "pax_secure": "PAX with differential privacy",
    "fedxgbllr": "FedXGBllr",
    "local_boosting": "Bagging and cyclic training",
    "fedavg_linear": "FedAvg of linear models",
    "vertical": "Opening of a vertical run",
    "secureboost": "SecureBoost",
    "federated_forest": "Federated Forest",
    "horizontal_forest": "Forest over rows",
    "inference": "Prediction: interactive and in one round",
    "describe": "Descriptions of tables",
    "eini": "Prediction: Fed-EINI",
    "standing": "Standing scores",
}
MESSAGES = TITLES | {
    name: (module.__doc__ or "").partition("\n")[0].rstrip(".")
    for _, name, _ in iter_modules(wire.__path__)
    if "\nReveals" in ((module := importlib.import_module(f"{wire.__name__}.{name}")).__doc__ or "")
    and name not in TITLES
}
ABOUT = "Tree models trained across organisations that may not pool their rows, as one Flower app."
EDITED = "It is generated from the code; the command `fedapp` and errors use the same words."

INTROS = {
    "Run settings": f"""Settings of one run: `-c NAME=VALUE` of the command, keywords in Python
with underscores, keys of `config.toml`. A name or value of XGBoost, LightGBM or scikit-learn that
is not supported is refused with the reason and the nearest setting. {EDITED}""",
    "Node config": f"""What a site allows: keys of `site.toml`, which `fedapp site init` writes and
`fedapp site check` checks. {EDITED}""",
    "JSON documents": f"""What programs read: a run's `summary.json`, which `fedapp run --json`
prints in `summary`, lines of its `rounds.jsonl` and `ledger.jsonl`, and what commands print with
`--json`. They are checked when written. A field that is not always there is absent where its
sentence says so, of other methods, and in runs of earlier versions. Sizes are bytes, times seconds,
unless the sentence says otherwise; numbers that are not finite are null.
{EDITED}""",
    "Command line": """`fedapp --help` lists the commands; `fedapp COMMAND --help` shows what is
below.""",
    "Messages": """Every field that a method sends, with its form, which both sides check. Who
learns what from it: [What each method reveals](../explanation/what-each-method-reveals.md).""",
    "What each method reveals": """The annex of the [threat model](threat-model.md): who learns what
from the messages of each method, and what a server that breaks the rules could learn or cause. A
paragraph that begins with settings, as in `(aggregation=secure)`, holds by these only; approvals,
model cards and documents show those that hold in their run. It is the text at the head of each
module in `fedapp/messages`.""",
}
DOCUMENTS: dict[str, tuple[Any, str]] = {
    "summary.json": (Summary, "Results and costs of a finished run."),
    "A line of rounds.jsonl": (RoundInfo, "A finished round."),
    "A line of ledger.jsonl": (Message, "A message between the server and a party."),
    **{f"fedapp {name} --json": (kind, kind.__doc__) for name, kind in PRINTED.items()},
}
LISTED = list_settings()  # imports the methods, which declare their sections
SECTIONS = method_sections()
GROUPS: dict[str, tuple[str, tuple[type[Any], ...]]] = {
    "Run": ("What is run, and where its results go.", (of_run.RunSettings,)),
    "Table": ("How tables are read.", (of_run.TableSettings,)),
    "Rows held back, parties": ("", (of_run.SplitSettings, of_run.PartSettings)),
    "Horizontal methods": ("", (of_run.HorizontalSettings,)),
    "Boosting": ("Names and defaults are XGBoost's where it has them.", (of_run.BoostingSettings,)),
    "Growth": ("", (of_run.GrowthSettings,)),
    "Constraints": ("", (of_run.ConstraintSettings,)),
    "PAX": ("", (SECTIONS["pax"], SECTIONS["privacy"])),
    "FedXGBllr": ("", (SECTIONS["fedxgbllr"],)),
    "Forest over rows": ("", (SECTIONS["horizontal-forest"],)),
    "Bagging, FedAvg": ("", (SECTIONS["bagging"], SECTIONS["fedavg-linear"])),
    "Vertical methods": ("", (of_run.VerticalSettings,)),
    "SecureBoost": ("", (SECTIONS["secureboost"],)),
    "Federated Forest": ("", (SECTIONS["federated-forest"],)),
    "Descriptions": ("", (SECTIONS["describe-rows"], SECTIONS["describe-columns"])),
    "Prediction with a divided model": (
        "",
        (of_run.InferenceSettings, SECTIONS["interactive"], SECTIONS["eini"], SECTIONS["standing"]),
    ),
}


def head_of(title: str) -> Iterator[str]:
    yield f"# {title}\n\n{INTROS[title]}\n"


def run_settings() -> Iterator[str]:
    yield from head_of("Run settings")
    for title, (about, sections) in GROUPS.items():
        yield f"\n## {title}\n\n{about}\n"
        yield "| setting | default | values | what it does |\n|---|---|---|---|"
        for section in sections:
            for about_setting in declared(section).values():
                one = LISTED[f"{section.table}.{about_setting.name}".removeprefix(".")]
                is_shared = "." in one.name or len(one.methods) == len(LISTED["seed"].methods)
                only = "" if is_shared else f" *Read by {', '.join(one.methods)}.*"
                default = in_words(one.default)
                yield f"| `{one.name}` | {default} | {one.values} | {one.text}{only} |"


def node_config() -> Iterator[str]:
    yield from head_of("Node config")
    yield "| key | default | what it does |\n|---|---|---|"
    values = {one.name: "" if one.default is MISSING else one.default for one in fields(SiteConfig)}
    for name, about in declared(SiteConfig).items():
        default = about.default or ("" if name in ("name", "data") else in_words(values[name]))
        yield f"| `{about.name}` | {default} | {about.text} |"


def all_commands() -> Iterator[tuple[str, click.Command]]:
    commands: Any = typer.main.get_command(cli)
    for name, command in commands.commands.items():
        for of_group, one in getattr(command, "commands", {"": command}).items():
            yield f"fedapp {name} {of_group}".strip(), one


def command_line() -> Iterator[str]:
    yield from head_of("Command line")
    for name, command in all_commands():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([name, *(p.make_metavar(click.Context(command)) for p in arguments)])
        yield f"\n## {name}\n\n```text\n{usage} [OPTIONS]\n```\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        for parameter in command.params:
            options = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                options = f"`{parameter.make_metavar(click.Context(command))}`"
            text = getattr(parameter, "help", None) or ""
            if not getattr(parameter, "hidden", False):
                yield f"{options}\n: {text}\n"


def in_form(base: Any, form: Any) -> str:
    """A field's form in words."""
    if isinstance(form, Form):
        return f"{form.dtype}, ({', '.join(map(str, form.shape))})"
    kind = TYPES.get(base, getattr(base, "__name__", str(base)))
    if isinstance(form, Range):
        low, high = (
            f"{one:,}" if isinstance(one, int) else f"{one:g}" for one in (form.low, form.high)
        )
        of = {"texts": " of them", "text": " characters"}.get(kind, "")
        return f"{kind}, {low} to {high}{of}"
    if isinstance(form, OneOf):
        return f"{kind}: {', '.join(map(str, form.values))}"
    return kind


def messages() -> Iterator[str]:
    yield from head_of("Messages")
    for name, title in MESSAGES.items():
        module = importlib.import_module(f"fedapp.messages.{name}")
        about = (module.__doc__ or "").partition("\n")[0]
        yield f"\n## {title}\n\n`fedapp.messages.{name}`\n\n{about}\n"
        for each in vars(module).values():
            if not (inspect.isclass(each) and issubclass(each, WireMessage)):
                continue
            if each.__module__ != module.__name__ or not each.__dict__.get("forms", True):
                continue
            if each in (Request, Reply) or "forms" not in vars(each):
                continue
            text = inspect.cleandoc(each.__doc__ or "").replace("``", "`").partition("\n")[0]
            if issubclass(each, Request):
                text = f"`{each.kind}`: {text[0].lower()}{text[1:]}"
            yield f"\n### {each.__name__}\n\n{text}\n"
            if each.forms:
                yield "| field | form |\n|---|---|"
                for field, (base, form) in each.forms.items():
                    yield f"| `{field}` | {in_form(base, form)} |"


def reveals() -> Iterator[str]:
    yield from head_of("What each method reveals")
    for name, title in MESSAGES.items():
        text = inspect.cleandoc(importlib.import_module(f"fedapp.messages.{name}").__doc__ or "")
        yield f"\n({name})=\n## {title}\n\n`fedapp.messages.{name}`\n"
        # Conditions, as ``fedapp.messages.reveals`` reads them.
        text = re.sub(r"^(- |)\[([a-z-]+!?=[^\]]+)\] ", r"\1(``\2``) ", text, flags=re.MULTILINE)
        yield f"```{{eval-rst}}\n{text}\n```\n"


def in_kind(schema: dict[str, Any]) -> str:
    """The JSON type of a field in words."""
    if "anyOf" in schema:
        return " or ".join(map(in_kind, schema["anyOf"]))
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    inner = schema.get("items") or schema.get("additionalProperties")
    of = f" of {in_kind(inner)}" if isinstance(inner, dict) and inner else ""
    return f"{schema.get('type', 'value')}{of}"


def json_documents() -> Iterator[str]:
    yield from head_of("JSON documents")
    shown = {"Summary"}
    for name, (kind, about) in DOCUMENTS.items():
        schema = adapter(kind).json_schema()
        yield f"\n## {name}\n\n{about}"
        yield from fields_of(schema, kind)
        for inner, of_inner in schema.get("$defs", {}).items():
            if inner not in shown:
                yield f"\n### {inner}"
                yield from fields_of(of_inner, OBJECTS[inner])
            shown.add(inner)


def fields_of(schema: dict[str, Any], kind: Any) -> Iterator[str]:
    """A line for each field of an object: its description, or the comment behind it."""
    comments = dict(COMMENTED.findall(inspect.getsource(kind) if kind is not Message else ""))
    yield "\n| field | type | always | what it is |\n|---|---|---|---|"
    for field, of_field in schema["properties"].items():
        comment = comments.get(field, "").replace("``", "`")
        text = of_field.get("description") or f"{comment[:1].upper()}{comment[1:]}."
        always = "yes" if field in schema.get("required", ()) else ""
        yield f"| `{field}` | {in_kind(of_field)} | {always} | {' '.join(text.split())} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "reference/run-settings.md": run_settings,
    "reference/node-config.md": node_config,
    "reference/json.md": json_documents,
    "reference/command-line.md": command_line,
    "reference/messages.md": messages,
    "explanation/what-each-method-reveals.md": reveals,
}


def write_pages(app: Sphinx) -> None:
    for path, page in PAGES.items():
        text, file = "\n".join(page()) + "\n", Path(app.srcdir) / path
        if not file.exists() or file.read_text() != text:  # unchanged pages are not read again
            file.write_text(text)


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """llms.txt: every page with its title, in the order of the toctree."""
    if error or app.builder.name != "html":
        return
    lines = [f"# {app.config.project}\n", f"> {ABOUT}\n"]
    for name, title in app.env.titles.items():
        if not name.startswith("gallery/sg_") and name != "index":
            lines.append(f"- [{title.astext()}]({name}.html)")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


# Sections of docstrings whose entries are "name : text", not numpydoc's "name : type".
ENTRY_SECTIONS = ("Parameters", "Attributes", "Raises", "Returns", "Yields", "Other Parameters")
ENTRY = re.compile(r"([\w*., ]+) : (.*)")


def entries_as_numpydoc(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Put the text of an entry below its name, where napoleon expects it."""
    section, changed = "", list[str]()
    for number, line in enumerate(lines):
        if line.strip() and set(line.strip()) == {"-"} and number:
            section = lines[number - 1].strip()
        if section in ENTRY_SECTIONS and (match := ENTRY.fullmatch(line)):
            changed += [match[1], f"    {match[2]}"]
        else:
            changed.append(line)
    lines[:] = changed


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", entries_as_numpydoc, priority=400)  # before napoleon
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True}
