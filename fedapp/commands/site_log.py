"""The command `fedapp site log`: what a security officer reads of a site, checks and exports."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import click
from typer import Argument, Option

from fedapp.commands.common import AsJson, SiteFolder, node_config, print_json, say
from fedapp.errors import ConfigError, listed

FORMS, CSV = ("jsonl", "csv", "syslog"), "number,time,event,run,line"
OK = "answered"  # outcome of a request for scores
# RFC 5424: facility 13 (log audit), severity warning or informational.
WARNING, INFORMATIONAL = 13 * 8 + 4, 13 * 8 + 6
HIDDEN = ("before", "key", "signature")


def log_command(
    file: Annotated[Path | None, Argument(help="A log's JSON lines, instead of a site's.")] = None,
    site: SiteFolder = None,
    last: Annotated[int, Option(help="Lines to show, the newest.", min=0)] = 10,
    run: Annotated[str, Option(help="Only lines of this run.")] = "",
    event: Annotated[str, Option(help="Only these events, separated by commas.")] = "",
    since: Annotated[datetime | None, Option(help="Only since then, UTC.")] = None,
    export: Annotated[
        str | None, Option(click_type=click.Choice(FORMS), help="Print all; syslog is of RFC 5424.")
    ] = None,
    head: Annotated[
        Path | None, Option(help="A signed line that was kept elsewhere: it must be there.")
    ] = None,
    signs: Annotated[
        bool, Option("--sign", help="Add a signed line, and print it: keep it elsewhere.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a site's log line by line, and show its end; exit with 1 if anything is wrong."""
    from fedapp.deploy.folders import name_in
    from fedapp.home import home
    from fedapp.site.log import LOG, Audit, append
    from fedapp.site.register import logged_head

    earliest = since.replace(tzinfo=UTC).timestamp() if since else 0.0
    events = listed(event)
    heads = [(str(head), *_signed_in(head))] if head else []
    if file:
        if site or signs:
            option = "--site" if site else "--sign"
            raise ConfigError(f"{option} must be omitted with a file of lines, got {file}")
        name, audit = file.stem, Audit(file, heads)
    else:
        name = name_in(node_config(site))
        folder = home() / "sites" / name
        if not (folder / LOG).is_file():
            raise ConfigError(f"{folder / LOG} must be the log of {name}, got none")
        audit = Audit.of_site(folder, [*heads, *logged_head(folder)])
    if export == "csv":
        print(CSV)
    n_lines, first, chosen = 0, 0, deque[dict[str, Any]](maxlen=last)
    for line, fields in audit:
        n_lines, first = n_lines + 1, first or fields.get("number", 1)
        is_chosen = fields and fields["time"] >= earliest and run in ("", fields.get("run"))
        if is_chosen and (not events or fields["event"] in events):
            chosen.append(fields)
            if export:
                print(line.decode()[:-1] if export == "jsonl" else _exported(export, name, fields))
    if as_json:
        counts = {"lines": n_lines, "signed": audit.signed, "key": audit.key}
        print_json("site log", **counts, faults=audit.faults, last=list(chosen))
    elif not export and not signs:
        for fields in chosen:
            shown = {key: value for key, value in fields.items() if key not in HIDDEN}
            say(json.dumps({**shown, "time": _time(fields)}))
    audit.check()
    if head and heads[0][1] < first:
        rule = f"head must be of a line that is there, from {first} on"
        raise ConfigError(f"{rule}, got an older one")
    if signs:
        print(append(folder, "signed").decode(), end="")
    elif not export and not as_json:
        by = f", signed to line {audit.signed} by {audit.key or 'a key'}" if audit.signed else ""
        say(f"{n_lines:,} lines, each as it was written{by}")


def _signed_in(path: Path) -> tuple[int, str]:
    """Number and digest of the signed line in a file."""
    from fedapp.site.log import is_signed, line_digest

    line = path.read_bytes().strip() + b"\n"
    try:
        if is_signed(fields := json.loads(line)):
            return fields["number"], line_digest(line)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"head must be a signed line of a log, got another file: {path}")


def _time(fields: Mapping[str, Any]) -> str:
    """RFC 3339."""
    moment = datetime.fromtimestamp(fields["time"], UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def _exported(form: str, site: str, fields: Mapping[str, Any]) -> str:
    """A line as one of CSV, which has all fields in one more column, or of syslog."""
    text, event = json.dumps(fields), fields["event"]
    if form == "csv":
        quoted = text.replace('"', '""')
        return f'{fields["number"]},{_time(fields)},{event},{fields.get("run", "")},"{quoted}"'
    is_refused = event in ("refused", "failed") or fields.get("outcome", OK) != OK
    priority = WARNING if is_refused else INFORMATIONAL
    return f"<{priority}>1 {_time(fields)} {site} fedapp - {event} - {text}"
