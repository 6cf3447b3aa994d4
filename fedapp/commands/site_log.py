"""The command `fedapp site log`: what a security officer reads of a site, checks and exports."""

from __future__ import annotations

import csv
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fedapp.commands.common import AsJson, print_json, say
from fedapp.errors import ConfigError, as_plain, listed

CSV_COLUMNS = ("number", "time", "event", "run", "kind", "rows", "sent", "epsilon", "reason")
# RFC 5424: facility 13 (log audit), severities warning and informational.
FACILITY, WARNING, INFORMATIONAL = 13, 4, 6
LONGEST_MESSAGE = 100_000  # characters of a line on a terminal


def log_command(
    folder: Annotated[Path, typer.Argument(help="The site's folder, or a file of JSON lines.")],
    last: Annotated[int, typer.Option(help="Lines to show, the newest.", min=0)] = 10,
    run: Annotated[str, typer.Option(help="Only lines of this run.")] = "",
    event: Annotated[str, typer.Option(help="Only these events, separated by commas.")] = "",
    since: Annotated[str, typer.Option(help="Only since then, UTC: 2026-11-28T09:30.")] = "",
    export: Annotated[
        str, typer.Option(help="Print all these lines as jsonl, csv or syslog (RFC 5424).")
    ] = "",
    head: Annotated[
        Path | None, typer.Option(help="A signed line that was kept elsewhere: it must be there.")
    ] = None,
    signs: Annotated[
        bool, typer.Option("--sign", help="Add a signed line, and print it: keep it elsewhere.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a site's log line by line, and show its end; exit with 1 if anything is wrong."""
    from fedapp.deploy.folders import name_of
    from fedapp.site.log import LOG, Audit, sign
    from fedapp.site.register import logged_head

    if export not in (*EXPORTS, ""):
        raise ConfigError(f"export must be {', '.join(EXPORTS)}, got {export}")
    earliest, events = _seconds(since), listed(event)
    heads = [(str(head), *_head_in(head))] if head else []
    if folder.is_file():
        name, audit = folder.stem, Audit(folder, heads)
    else:
        name = name_of(folder)
        site = folder / "home" / "sites" / name
        if not (site / LOG).is_file():
            raise ConfigError(f"{site / LOG} must be the log of {name}, got none")
        if at_register := logged_head(site):
            heads.append(("register.db", *at_register))
        audit = Audit.of_site(site, heads)
    n_lines, chosen = 0, deque[dict[str, Any]](maxlen=last)
    write = EXPORTS[export](name) if export else None
    for line, fields in audit:
        n_lines += 1
        is_chosen = fields and fields["time"] >= earliest and run in ("", fields.get("run"))
        if is_chosen and (not events or fields["event"] in events):
            chosen.append(fields)
            if write:
                write(line, fields)
    if as_json:
        counts = {"lines": n_lines, "signed": audit.signed, "key": audit.key}
        print_json(**counts, faults=audit.faults, last=list(chosen))
    elif not write and not signs:
        for fields in chosen:
            shown = {**fields, "time": _time(fields)}
            for field in ("before", "key", "signature"):
                shown.pop(field, None)
            say(as_plain(json.dumps(shown, ensure_ascii=False), LONGEST_MESSAGE))
    audit.check()
    if signs:
        if folder.is_file():
            raise ConfigError(f"--sign must come with the site's folder, got {folder}")
        print(sign(site, "signed").decode(), end="")
    elif not write and not as_json:
        by = f", signed to line {audit.signed} by {audit.key or 'a key'}" if audit.signed else ""
        say(f"{n_lines:,} lines, each as it was written{by}")


def _seconds(since: str) -> float:
    try:
        return datetime.fromisoformat(since).replace(tzinfo=UTC).timestamp() if since else 0.0
    except ValueError:
        raise ConfigError(f"since must be a date, as in 2026-11-28T09:30, got {since}") from None


def _head_in(path: Path) -> tuple[int, str]:
    """Number and digest of the signed line in a file."""
    from fedapp.site.log import is_signed, line_digest

    line = path.read_bytes().strip() + b"\n"
    try:
        fields = json.loads(line)
        number, key = int(fields["number"]), str(fields["key"])
    except (ValueError, KeyError, TypeError):
        key = ""
    if not key or not is_signed(line, key):
        raise ConfigError(f"head must be a signed line of the log, got another in {path}")
    return number, line_digest(line)


def _time(fields: Mapping[str, Any]) -> str:
    """RFC 3339."""
    moment = datetime.fromtimestamp(fields["time"], UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


Write = Callable[[bytes, Mapping[str, Any]], object]


def _as_jsonl(_: str) -> Write:
    """Lines as they are in the log, so that the chain of all can be checked elsewhere."""
    return lambda line, _: sys.stdout.write(line.decode())


def _as_csv(_: str) -> Write:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow((*CSV_COLUMNS, "details"))

    def cells(fields: Mapping[str, Any]) -> Iterator[object]:
        shown = {**fields, "time": _time(fields)}
        for column in CSV_COLUMNS:
            value = shown.pop(column, "")
            yield value if isinstance(value, int | float) else _harmless(value)
        yield json.dumps(shown)

    return lambda _, fields: table.writerow(cells(fields))


def _harmless(value: object) -> str:
    """A text that no spreadsheet takes for a formula."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _as_syslog(site: str) -> Write:
    def text(fields: Mapping[str, Any]) -> str:
        is_warning = fields["event"] in ("refused", "failed") or "refused" in str(
            fields.get("outcome")
        )
        priority = 8 * FACILITY + (WARNING if is_warning else INFORMATIONAL)
        head = f"<{priority}>1 {_time(fields)} {site} fedapp - {fields['event']} -"
        return f"{head} {json.dumps(fields)}\n"

    return lambda _, fields: sys.stdout.write(text(fields))


EXPORTS: Mapping[str, Callable[[str], Write]] = {
    "jsonl": _as_jsonl,
    "csv": _as_csv,
    "syslog": _as_syslog,
}
