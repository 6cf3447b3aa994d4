"""Commands of a site: ``fedapp site``.

What a site's engineer does before the first run and at its approval, how sites know the app, and
how they get to know each other's keys.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table as Grid
from typer import Argument, Option

from fedapp.commands.common import (
    AsJson,
    Command,
    Group,
    Id,
    NewFolder,
    SiteFolder,
    Target,
    console,
    node_config,
    port_option,
    print_json,
    say,
)
from fedapp.commands.site_log import log_command
from fedapp.errors import ConfigError, as_plain
from fedapp.terminal import Terminal

if TYPE_CHECKING:
    from fedapp.site.database import AskedRun


NOBODY = "no other site"
GETS = "if the coordinator keeps to the rules; docs/explanation/threat-model.md has the rest"
# What leaves a site, by aggregation; and settings with a line of their own in a plan.
LEAVES = {
    "plain": "what each party computes leaves as it is",
    "secure": "only sums over all parties leave",
    "sealed": "in letters between parties",
}
SHOWN = (
    *("aggregation", "epsilon", "delta", "multiplier", "parties", "fingerprints"),
    *("test_fraction", "valid_fraction", "seed", "fold", "folds"),
    *("group", "test_from", "valid_from", "share_label_figures"),
)
SHORT_VALUE = re.compile(r"[\w.:+-]{1,32}")  # of a setting beside others in a line
LONGEST_VALUE = 160  # characters of a setting, such as the names of all columns; more by --all
# What the label holder of a vertical run could read at a passive site, by breaking the rules.
COULD = "could show the label holder"
READABLE = "the bins of {:,} rows a round, with crafted gradients"
# What a passive party could read at the label holder's, by columns or sums that it makes up.
COULD_DISCLOSE = "could show a passive party"
LABELS = "{:,} labels a round, by which of made-up columns are chosen"
READABLE_LABELS = "labels of up to {:,} rows can be read, from figures over false sums"
SHOWS = "one-round and standing scores show the label holder"
SHOWN_SIDES = "{:.0%} of the ways that rows go at this site's splits"
site_app = typer.Typer(
    cls=Group, help="A site: init, check, approve, log, key, trust, hash.", no_args_is_help=True
)


@site_app.command("init", cls=Command)
def init_command(
    folder: NewFolder,
    name: Annotated[str, Option(help="Unique in the federation.")],
    superlink: Annotated[str, Option(help="HOST:PORT of the coordinator.")],
    data: Annotated[str, Option(help="The site's table: CSV, Parquet or LIBSVM.")],
    label: Annotated[str, Option(help="Label column, where there is one.")] = "",
    id_column: Id = "",
    ca: Annotated[
        str, Option(help="The coordinator's ca.crt; by default the system's certificates.")
    ] = "",
    policy: Annotated[str, Option(help="What may leave: sums, private or rows.")] = "",
    allow: Annotated[str, Option(help="Methods; by default those of the policy.")] = "",
    min_rows: Annotated[int, Option(help="Fewest rows to train, validate or test on.", min=0)] = 0,
    port: Annotated[int, port_option("Where the SuperNode listens, on loopback.")] = 9094,
    target: Target = "scripts",
) -> None:
    """Write the node config, the SuperNode's key and what starts it into a folder."""
    from fedapp.deploy.folders import POLICIES, write_site
    from fedapp.deploy.targets import how_started
    from fedapp.messages.methods import all_methods
    from fedapp.site.check import check_allowed
    from fedapp.site.settings import SiteConfig

    if not policy and not allow:
        for word, rules in POLICIES.items():
            say(f"--policy {word}: {rules.meaning}")
        if sys.stdin.isatty():
            policy = typer.prompt("Policy (Enter: no method is allowed)", "", show_default=False)
    methods = frozenset(allow.replace(",", " ").split())
    site = SiteConfig(name, data, label, id_column, allowed=methods, min_rows=min_rows)
    check_allowed(site, all_methods())
    write_site(folder, site, superlink, ca, port, target, policy)
    if policy:
        say(f"Policy {policy}: {f'but only {allow}' if allow else POLICIES[policy].meaning}")
    elif not allow:
        say(f"{name} allows no method yet: set allow in {folder}/site.toml, or choose a --policy")
    say(f"total-epsilon and runs-per-day count in {folder}/home: another folder has its own")
    say(f"Written to {folder}. Next:")
    say(f"  fedapp site check --site {folder}")
    say(f"  give {folder}/{name}.pub to the coordinator")
    say(f"  {how_started(target, folder, 'supernode')}")


@site_app.command("key", cls=Command)
def key_command(
    site: SiteFolder = None,
    new: Annotated[
        str,
        Option(
            metavar="identity|supernode",
            help="Draw a new key, between runs: the one that the other sites trust, or the "
            "SuperNode's, which the coordinator registers.",
        ),
    ] = "",
) -> None:
    """Print the fingerprint of this site's key, for the other sites to trust."""
    from fedapp.crypto.sealed import fingerprint_of
    from fedapp.deploy.folders import name_in, renew_key
    from fedapp.home import home
    from fedapp.site.mail import box_key
    from fedapp.site.register import renew_identity

    name = name_in(path := node_config(site))
    if not new:
        console.print(fingerprint_of(box_key(name).tobytes()), highlight=False)
    elif new == "identity":
        fingerprint = renew_identity(home() / "sites" / name)
        say(f"{name} has a new key, {fingerprint}; the old one is identity.key.old. Next:")
        say(f"  at each other site: fedapp site trust {name} {fingerprint} --site FOLDER")
    elif new == "supernode":
        fingerprint, folder = renew_key(path.parent), path.parent
        say(f"{name}'s SuperNode has a new key, {fingerprint}; the old one is supernode.key.old.")
        say(f"Next: give {folder}/{name}.pub to the coordinator, who puts it into sites and runs:")
        say(f"  fedapp federation add FOLDER {name}")
        say("  then restart the SuperNode")
    else:
        raise ConfigError(f"--new must be identity or supernode, got {new}")


@site_app.command("trust", cls=Command)
def trust_command(
    name: Annotated[str, Argument(help="The other site's name in its node config.")],
    fingerprint: Annotated[list[str], Argument(help="As fedapp site key prints it there.")],
    site: SiteFolder = None,
) -> None:
    """Trust the key of another site from now on, and no other key of that site."""
    from fedapp.home import display_path, home
    from fedapp.site.trust import PINNED, pin

    if site:
        node_config(site)
    before = pin(home(), name, "".join(fingerprint))
    path = display_path(home() / PINNED)
    replaced = f", instead of {before}" if before else ""
    console.print(f"{name} is trusted by its key{replaced}: {path}", highlight=False)


@site_app.command("hash", cls=Command)
def hash_command() -> None:
    """Print the hash of the app bundle that a coordinator with this fedapp sends."""
    from fedapp.site.bundle import installed_bundle

    print(installed_bundle())


@site_app.command("approve", cls=Command)
def approve_command(
    run: Annotated[str, Argument(help="Id of its model; without it, all that wait.")] = "",
    site: SiteFolder = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask again.")] = False,
    shows_all: Annotated[
        bool, Option("--all", help="Show in full what each kind of message reveals.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run may ask for and what leaves by its settings, and let it begin."""
    from fedapp.home import home
    from fedapp.messages.reveals import in_short
    from fedapp.site.database import DATABASE
    from fedapp.site.register import approve, runs_of, runs_on_same_data

    if site:
        node_config(site)
    if run and as_json:
        raise ConfigError(f"--json must be given without a run: it lists all that wait, got {run}")
    waiting = {
        record.model: (path.parent, record)
        for path in sorted(home().glob(f"sites/*/{DATABASE}"))
        for record in runs_of(path.parent)
        if record.reasons and not record.admitted and record.approved != record.digest
    }
    if as_json:
        print_json(
            "site approve",
            waiting=[_fields(folder.name, record) for folder, record in waiting.values()],
        )
        return
    if not run:
        for model_id, (folder, record) in waiting.items():
            line = f"{model_id}  {folder.name}  {record.method}  first asked {_first_asked(record)}"
            console.print(line, highlight=False)
        if not waiting:
            where = f"under {home()} (at a site: --site FOLDER)"
            console.print(f"no run waits {where}", highlight=False, soft_wrap=True)
        return
    if run not in waiting:
        names = ", ".join(waiting) or "none"
        where = f"under {home()} ({names}; at a site: --site FOLDER)"
        raise ConfigError(f"run must be one that waits {where}, got {run}")
    folder, record = waiting[run]
    at_site = f" --site {site}" if site else ""
    again = f"fedapp site approve {run}{at_site}"
    facts = Grid.grid(padding=(0, 2))
    lines = _plan_lines(folder.name, record, runs_on_same_data(folder, record), shows_all)
    for title, text in lines:
        facts.add_row(title, escape(text))
    console.print(facts, highlight=False)
    bound = _bound(record)
    leaves = Grid.grid(padding=(0, 1))
    for sentence in in_short(record.method, bound):
        leaves.add_row("-", escape(_shown(sentence)))
    console.print("\nWhat leaves in this run, and who could learn what:", highlight=False)
    console.print(leaves, highlight=False)
    if shows_all:
        console.print("\n" + escape(_in_full(record.method, bound)) + "\n", highlight=False)
    else:
        say(f"The rest: {again} --all")
    if not yes and not typer.confirm(f"Let {folder.name} take part?"):
        say(f"Not approved: {folder.name} takes no part in {run}.")
        say("The run asks again until the coordinator's start-deadline, and then ends. Next:")
        say(f"  to approve it until then: {again}")
        say(f"  to refuse runs of {record.method}, also after an approval, while they go on:")
        say(f"    take {record.method} out of allow in site.toml, and restart the SuperNode")
        raise typer.Exit(1)
    approve(folder, record)
    console.print(f"approved: {run}", highlight=False)


@site_app.command("check", cls=Command)
def check_command(site: SiteFolder = None, as_json: AsJson = False) -> None:
    """Show what a coordinator's run would find here; nothing is sent."""
    from clients.handshake import relevant_versions
    from fedapp.data.datasets import check_source
    from fedapp.deploy.warm import fall_backs
    from fedapp.home import home
    from fedapp.messages.methods import all_methods
    from fedapp.report.summary import print_warning
    from fedapp.settings import load_settings
    from fedapp.site.bundle import installed_bundle
    from fedapp.site.certificates import validity
    from fedapp.site.check import check_site, in_words, policy_of, who_may_read_keys
    from fedapp.site.clock import read_clock
    from fedapp.site.register import IDS_A_ROW, n_today, runs_on_table, spending, spent
    from fedapp.site.settings import read_node_config, site_config
    from fedapp.site.table import held_tables
    from fedapp.site.trust import pins_in

    path = node_config(site)
    node = read_node_config(path)
    if "data" not in node:
        raise ConfigError('data in the node config must name a table, as in data="rows.csv"')
    check_source(str(node["data"]))
    config = site_config(node, {})
    beside = path.parent
    ca = beside / "ca.crt"
    trusted = {**pins_in(home()), **pins_in(beside / "home"), **config.trusted}
    config = replace(config, trusted=trusted)
    run = load_settings({})
    # Resolved: FEDAPP_HOME may be the site's folder, whose runs would count twice.
    candidates = beside, *(folder / "sites" / config.name for folder in (home(), beside / "home"))
    folders = dict.fromkeys(folder.resolve() for folder in candidates)
    with held_tables():
        fractions = run.test_fraction, run.valid_fraction
        checked = check_site(config, all_methods(), fractions, run.max_depth)
        runs = [site_run for folder in folders for site_run in runs_on_table(folder, config)]
    charged, time = [site_run for site_run in runs if site_run.charged], read_clock(home())
    allowed = sorted(config.allowed)
    bundles = sorted(config.bundles or {installed_bundle()})
    facts: dict[str, object] = {
        "label": checked.label,
        "ids": checked.ids,
        "versions": relevant_versions(),
        "keys": who_may_read_keys(folders),
        "certificate": validity(ca) if ca.is_file() else "no ca.crt here",
        **policy_of(config),
        "align-ids-per-day": config.align_ids_per_day or IDS_A_ROW * checked.n_rows,
        "allow": allowed,
        "rows are drawn": "as a run asks" if config.draws_openly else "by a key of the site",
        "app": bundles,
        "runs today": n_today(runs, time),
    }
    warnings = [*filter(None, (*checked.notes, time.fault)), *map(str, fall_backs("site"))]
    if as_json:
        print_json(
            "site check",
            site=config.name,
            rows=checked.n_rows,
            columns=list(checked.columns),
            **{re.sub("[ -]", "_", name): value for name, value in facts.items()},
            total_epsilon=config.total_epsilon,
            spent_epsilon=spent(charged)[0],
            label_holder_could_read=checked.readable,
            passive_party_could_read=checked.disclosed,
            others_could_read_labels=checked.readable_labels,
            cells_show=checked.shown,
            trusted=trusted,
            methods=[
                {"method": method, "takes_part": answer, "coordinator_gets": gets}
                for method, (answer, gets) in checked.methods.items()
            ],
            warnings=warnings,
        )
        return
    terminal = Terminal()
    grid = Grid.grid(padding=(0, 2))
    for fact, text in {
        "site": config.name,
        "rows, columns": f"{checked.n_rows}, {len(checked.columns)}",
        **{name: in_words(value) for name, value in facts.items()},
        "allow": ", ".join(allowed) or "no method (see fedapp site init --policy)",
        "app": " or ".join(bundles),
        "runs today": str(facts["runs today"]),
        "total-epsilon": f"spent {spending(charged, config.total_epsilon)}",
        "trusted": ", ".join(" ".join(pin) for pin in sorted(trusted.items())) or NOBODY,
        **{f"{name} {COULD}": READABLE.format(n) for name, n in checked.readable.items()},
        **{f"{name} {COULD_DISCLOSE}": LABELS.format(n) for name, n in checked.disclosed.items()},
        **{
            f"{name} {COULD_DISCLOSE}": READABLE_LABELS.format(n)
            for name, n in checked.readable_labels.items()
        },
        **{f"{SHOWS}, {model}": SHOWN_SIDES.format(n) for model, n in checked.shown.items()},
    }.items():
        grid.add_row(fact, escape(text))
    terminal.print(grid)
    methods = Grid("method", "takes part", "the coordinator gets", caption=GETS)
    for method, (answer, gets) in checked.methods.items():
        methods.add_row(method, answer, gets)
    terminal.print(methods)
    for warning in warnings:
        print_warning(terminal, warning)


site_app.command("log", cls=Command)(log_command)


def _fields(site: str, run: AskedRun) -> dict[str, Any]:
    """A run that waits, in JSON, with its plan."""
    asked = datetime.fromtimestamp(run.asked, UTC).isoformat(timespec="seconds")
    facts = {"site": site, "method": run.method, "data": run.data, "first_asked": asked}
    return {"run": run.model, **facts, "waits_because": run.reasons, "plan": run.settings}


def _plan_lines(
    site: str, run: AskedRun, runs: Iterable[AskedRun], shows_all: bool
) -> Iterator[tuple[str, str]]:
    """Titles and texts of a plan's lines; texts of the coordinator are shown in ASCII.

    First what has to be decided: why it waits, between whom it is, what leaves and for how much
    epsilon. `runs` are the others on the same data.
    """
    from fedapp.data.partition import Holdout
    from fedapp.messages.methods import method_of
    from fedapp.metrics.tables import readable_labels
    from fedapp.site.check import disclosed_in_round, readable_in_round
    from fedapp.site.register import spending

    plan = run.settings
    yield "run", f"{run.model} of {run.method}, at {site} on {run.data!a}"
    yield "first asked", _first_asked(run)
    for reason in run.reasons:
        yield "waits because", _plain(reason)
    for name, key in zip(plan["parties"], plan["fingerprints"], strict=False):
        mark = "pinned here" if run.trusted.get(name) == key else "NOT PINNED HERE"
        yield "party", f"{_plain(name)}  {_plain(key)}  {'this site' if name == site else mark}"
    kind = _plain(plan["aggregation"])
    yield "aggregation", f"{kind}: {LEAVES.get(kind, 'unknown here')}"
    noise = f"{plan['epsilon']:g} for delta {plan['delta']:g}, noise {plan['multiplier']:.4g}"
    yield "epsilon", noise if plan["epsilon"] else "none: no noise is added"
    rows = f"{run.n_rows:,}, recognised by content{' and id' * bool(run.ids)} in any file"
    shared = f"{run.n_shared:,} of them" if run.n_shared else "none"
    yield "rows", f"{rows}; in the table of an earlier run: {shared}" if run.n_rows else "not read"
    others = [other for other in runs if other.charged]
    if others or run.total_epsilon:
        yield "spent", f"epsilon {spending(others, run.total_epsilon)}"
    if plan["epsilon"]:
        yield "with this run", f"epsilon {spending([*others, run], run.total_epsilon)}"
    if run.label_epsilon:
        n_same = 1 + sum(other.admitted and other.label_epsilon > 0 for other in runs)
        once = f"once, for all runs on them, with this one {n_same}"
        yield "labels", f"randomised with epsilon {run.label_epsilon:g}, {once}"
    for subset, text in Holdout.of(plan).in_words().items():
        yield {"test": "test rows"}.get(subset, subset), _plain(text)
    if group := plan.get("group"):
        yield "groups", f"rows of one {_plain(group)} are in one subset"
    elif not plan.get("test_from"):
        yield "groups", "rows that share an id are in one subset"
    if (method := method_of(run.method)) and method.sums_ciphertexts:
        n_rows = plan.get("most_rows", 1)  # 1: no opening of the method, which a site refuses
        max_leaves, n_trees = plan.get("max_leaves", 0), plan.get("trees") or 1
        depth = plan.get("levels") or plan["max_depth"]
        rows = READABLE.format(readable_in_round(n_rows, depth, max_leaves, n_trees))
        yield "label holder", f"could read {rows}; {plan['rounds']} rounds"
        labels = LABELS.format(disclosed_in_round(depth, max_leaves, n_trees))
        yield "passive party", f"could read {labels}; {plan['rounds']} rounds"
    if plan.get("share_label_figures"):
        yield "label figures", READABLE_LABELS.format(readable_labels(run.n_rows))
    short = []
    for name, value in plan.items():
        is_usual = not value and (name == "additive" or not isinstance(value, bool))
        if name in SHOWN or is_usual:
            continue
        title, text = name.replace("_", "-"), _plain(value)
        if SHORT_VALUE.fullmatch(text):
            short.append(f"{title} {text}")
        else:
            yield title, text if shows_all else as_plain(text, LONGEST_VALUE)
    yield "settings", ", ".join(short)


def _first_asked(run: AskedRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.asked))


def _plain(value: object) -> str:
    return ascii(value).strip("'\"")


def _bound(run: AskedRun) -> dict[str, str]:
    """Settings to which its opening binds a run, for the conditions of Reveals."""
    from fedapp.messages.reveals import facts_of

    plan = run.settings
    settings = {name: value for name, value in plan.items() if not isinstance(value, list)}
    settings |= {
        "parties": len(plan["parties"]),
        "min-parties": plan["threshold"] or plan["restarts"],
    }
    settings["num-parallel-tree"] = plan["trees"] or 1
    if plan.get("objective") == "auto":
        del settings["objective"]
    if "needs_ids" in plan:
        settings["align"] = "psi" if plan["needs_ids"] else "ordered"
    if run.label_epsilon:
        settings["label-epsilon"] = run.label_epsilon
    return facts_of(run.method, settings)


def _in_full(method: str, facts: dict[str, str]) -> str:
    """What each of a method's modules of messages reveals: one line for a paragraph or item."""
    from fedapp.messages.methods import modules_of_method
    from fedapp.messages.reveals import in_full

    texts = ((module.__doc__, in_full(module, facts)) for module in modules_of_method(method))
    shown = [f"{str(doc).partition('.')[0]}.\n\n{text}" for doc, text in texts if text]
    return _shown("\n\n".join(shown))


def _shown(text: str) -> str:
    return text.replace("``", "")
