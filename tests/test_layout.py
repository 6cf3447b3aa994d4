"""The rules of the house: who may import what, and names on both sides."""

import ast
import gc
import importlib
import re
from dataclasses import is_dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from io import StringIO
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from tokenize import COMMENT, generate_tokens
from types import MappingProxyType

import pytest

from fedapp import kernels, trees
from fedapp.messages.fields import Reply, Request
from fedapp.messages.methods import _groups, all_methods, module_of_group
from strategies.run import all_strategies

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fedapp", "strategies", "clients", "simulations")
MAY_IMPORT_FLOWER = (
    "fedapp/server_app.py",
    "fedapp/client_app.py",
    "fedapp/audit/listening.py",
    "fedapp/deploy/",
    "fedapp/messages/wire.py",
    "fedapp/runs/",
    "fedapp/site/bundle.py",  # what Flower hashes
    "fedapp/superlinks.py",
    "strategies/delivery.py",
    "strategies/flower.py",
    "strategies/run.py",
    "simulations/",
)
METHODS = {name.replace("-", "_") for name in all_strategies()}
ANSWERING = sorted(
    path.stem
    for path in (ROOT / "clients").iterdir()
    if not path.stem.startswith("_")
    and hasattr(importlib.import_module(f"clients.{path.stem}"), "HANDLERS")
)
# What may know methods by name: attacks on single ones, studies, a command that says which it takes
# where none is named, and what starts the process of one.
STUDIES = (
    "fedapp/audit/",
    "simulations/__main__.py",
    "simulations/paper.py",
    "simulations/attacks/",
    "simulations/papers/",
    "simulations/bench/",
    "simulations/reference.py",
    "simulations/examples/",
)
ESTIMATORS = "fedapp/sklearn/"  # two classes a method, by its name
FAMILIES = {"HorizontalStrategy", "VerticalStrategy", "InferenceStrategy"}
DEFAULTS = {
    "fedapp/runs/run.py": ["interactive"] * 3,
    "fedapp/commands/predict.py": ["interactive"],
}


# The file of each method, which some share.
FILES = {method: module_of_group(method).__name__.rpartition(".")[2] for method in METHODS}


@cache
def texts_of_all():
    """Every source's text, read once."""
    return MappingProxyType(
        {
            path.relative_to(ROOT).as_posix(): path.read_text()
            for package in PACKAGES
            for path in sorted((ROOT / package).rglob("*.py"))
        }
    )


# What rules ask for: most of a tree's nodes are others.
ASKED_FOR = (
    *(ast.Import, ast.ImportFrom, ast.Call, ast.Constant),
    *(ast.Module, ast.ClassDef, ast.FunctionDef),
)


@cache
def nodes_of(code):
    """The nodes of code that rules ask for, parsed once."""
    gc.disable()  # which would look for garbage among all trees again and again
    try:
        return tuple(node for node in ast.walk(ast.parse(code)) if isinstance(node, ASKED_FOR))
    finally:
        gc.enable()


@cache
def imports_of(code):
    """Modules that code imports anywhere, each with a name from it, or none."""
    pairs = set()
    for node in nodes_of(code):
        if isinstance(node, ast.Import):
            pairs |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            pairs |= {(node.module or "", alias.name) for alias in node.names}
    return frozenset(pairs)


def imported(code):
    return {module for module, _ in imports_of(code)}


def begins(module, *packages):
    return any(module == package or module.startswith(package + ".") for package in packages)


# Room and floor in the drawing of ARCHITECTURE.md.
DRAWN = re.compile(r"^(?:floor (\d+) +| {10})(\S+) ", re.MULTILINE)
MOST_FLOORS = 11


def drawn_floors():
    """The floor of each room in the drawing of ARCHITECTURE.md."""
    floor, floors = 0, {}
    for number, room in DRAWN.findall((ROOT / "ARCHITECTURE.md").read_text().split("```")[1]):
        floor = int(number or floor)
        floors[room] = floor
    return floors


def room_of(source):
    """The room of a source: a folder of fedapp, one of its loose files, or a top-level folder."""
    top, *rest = source.split("/")
    if top != "fedapp":
        return f"{top}/"
    return f"{top}/{rest[0]}/" if len(rest) > 1 else source


def import_graph(texts):
    """The sources that each source imports, anywhere in it."""
    sources = {
        source.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source
        for source in texts
    }
    graph = {}
    for source, text in texts.items():
        others = (
            sources.get(f"{module}.{name}", sources.get(module))
            for module, name in imports_of(text)
        )
        graph[source] = {*others} - {source, None}
    return graph


def faults_of(texts, floors):
    """Imports that run up, and circles of files and of rooms."""
    graph = import_graph(texts)
    faults = [
        f"{source} imports {other} above it"
        for source, others in graph.items()
        for other in sorted(others)
        if room_of(source) != room_of(other) and floors[room_of(source)] <= floors[room_of(other)]
    ]
    rooms = {}
    for source, others in graph.items():
        rooms.setdefault(room_of(source), set()).update(map(room_of, others))
    for each in (graph, {room: others - {room} for room, others in rooms.items()}):
        try:
            TopologicalSorter(each).prepare()
        except CycleError as error:
            faults.append(f"circle: {' -> '.join(error.args[1])}")
    return faults


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|toml|md))`", text) if "NAME" not in name}
    paths = [
        *ROOT.glob("*"),
        *(path for top in (*PACKAGES, "tests", "docs") for path in (ROOT / top).rglob("*.*")),
    ]
    ends = tuple(f"/{path.relative_to(ROOT).as_posix()}" for path in paths)
    assert len(named) > 30
    assert not [name for name in named if not any(end.endswith(f"/{name}") for end in ends)]


def test_everything_that_the_page_of_xgboosts_bits_names_exists():
    named = re.findall(r"``((?:trees|histograms)(?:\.\w+){2,})``", trees.__doc__)
    assert len(named) >= 30
    assert all(resolve_name(f"fedapp.{name}") is not None for name in named)


def test_imports_go_down_and_never_in_a_circle():
    texts, floors = texts_of_all(), drawn_floors()
    assert {room_of(source) for source in texts} == floors.keys()
    assert max(floors.values()) <= MOST_FLOORS
    assert faults_of(texts, floors) == []


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_has_the_same_name_on_both_sides_and_in_its_messages_and_tests(method):
    file = FILES[method]
    for place in (f"strategies/{file}", f"clients/{file}", f"fedapp/messages/{file}"):
        assert (ROOT / f"{place}.py").exists() or (ROOT / place / "__init__.py").exists()
    tests = {f"tests/strategies/test_{name}.py" for name in (method, file)}
    assert any((ROOT / test).exists() for test in tests)


def test_every_group_of_messages_is_one_methods_or_shared_by_families():
    families = {method.family for method in all_methods().values()}
    groups = _groups()
    assert {module.__name__.rpartition(".")[2] for module, _ in groups.values()} == set(ANSWERING)
    for declared in (
        declared for _, declared in groups.values() if isinstance(declared, frozenset)
    ):
        assert declared
        assert declared <= families
    assert all_methods().keys() == all_strategies().keys()
    for name, method in all_methods().items():
        bases = {base.__name__ for base in all_strategies()[name].__mro__} & FAMILIES
        assert (f"{method.family.title()}Strategy") in bases, name
        assert ("InferenceStrategy" in bases) == method.uses_model, name


@pytest.mark.parametrize("module", ANSWERING)
def test_messages_say_what_they_reveal_and_have_handlers(module):
    messages = importlib.import_module(f"fedapp.messages.{module}")
    handlers = importlib.import_module(f"clients.{module}").HANDLERS
    assert "Reveals" in (messages.__doc__ or "")
    own = [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Request | Reply) and is_dataclass(kind)
    ]
    requests = [kind for kind in own if issubclass(kind, Request)]
    assert requests
    assert set(handlers) == set(requests)
    for request in requests:
        assert request.kind.partition(".")[0] in {"train", "evaluate", "query"}


def imports_flower(source, code):
    """Flower is imported where the house allows it."""
    is_allowed = source.startswith(MAY_IMPORT_FLOWER)
    return [] if is_allowed else [name for name in imported(code) if begins(name, "flwr")]


def knows_files(source, code):
    """A method at the server knows neither Flower nor files."""
    places = {f"strategies/{file}.py" for file in (*FILES.values(), "pax_sums", "pax_dp", "drive")}
    known = ("flwr", "pathlib", "os")
    return [name for name in imported(code) if begins(name, *known)] if source in places else []


# Rooms on lower floors that a room must not import all the same.
FORBIDDEN = {
    "clients/": ("fedapp.conversation", "fedapp.settings", "fedapp.run_folder"),
    "strategies/": ("fedapp.site.store", "fedapp.site.answer"),
    "fedapp/messages/": ("fedapp.histograms", "fedapp.crypto"),
}


def imports_forbidden(source, code):
    """Rooms know nothing of what is none of their business."""
    names = next((names for room, names in FORBIDDEN.items() if source.startswith(room)), ())
    return [module for module in imported(code) if begins(module, *names)]


def imports_another_role(source, code):
    """No role imports another."""
    role = next((role for role in ROLES if Path(source).stem.endswith(role)), "")
    modules = [module for module in imported(code) if module.startswith("clients.")]
    names = {module: module.rpartition(".")[2] for module in modules}
    is_role = role and source.startswith("clients/")
    others = [name for name in names if names[name].endswith(ROLES) and not name.endswith(role)]
    return others if is_role else []


ROLES = ("active", "passive")
KERNEL_ROOMS = tuple(f"fedapp/{room}/" for room in kernels.ROOMS)


def hides_kernels(source, code):
    """Kernels are where a change of their sources is noticed.

    numba's own cache notices only changes of the function's file.
    """
    has_kernels = re.search("^@(kernel|inlined)$", code, re.M) and not source.startswith(
        KERNEL_ROOMS
    )
    caches = "numba" in code and re.search("cache=|Cache", code) and source != "fedapp/kernels.py"
    return ["kernel"] * bool(has_kernels) + ["cache"] * bool(caches)


def knows_methods(source, code):
    """No module but its own knows a method by name: imports its modules, or compares its name."""
    if source.startswith((*STUDIES, ESTIMATORS, "strategies/__init__.py")):
        return []
    own = {Path(source).stem, Path(source).parent.name}  # a module, or a folder of them
    own |= {method for method, file in FILES.items() if file in own}
    paths = [path for module, name in imports_of(code) for path in (module, f"{module}.{name}")]
    places = ("strategies", "clients", "fedapp.messages")
    names = [name for place, _, name in (path.rpartition(".") for path in paths) if place in places]
    nodes = [node.value for node in nodes_of(code) if isinstance(node, ast.Constant)]
    names += [value.replace("-", "_") for value in nodes if isinstance(value, str)]
    others = [name for name in names if name in METHODS]
    return [name for name in others if not any(place.startswith(name) for place in own)]


def knows_families(source, code):
    """Families are known by what methods declare."""
    if source.startswith(("strategies/", *STUDIES)):
        return []
    pairs = ((module, name) for module, name in imports_of(code) if name in FAMILIES)
    return [name for module, name in pairs if begins(module, "strategies")]


# Modules whose readers run what they read, and the sources that talk through pipes, but to
# processes they have started themselves.
UNPICKLERS = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
PIPES = ("fedapp/crypto/workers.py", "simulations/bench/", "simulations/study.py")
WRITERS = {  # what sources import of such a module, and no more
    "fedapp/commands/predict.py": "from joblib import dump",
    "fedapp/report/progress.py": "from multiprocessing import parent_process",
}


def dotted(called):
    """A called name with its modules, as it is written; empty where it is an expression."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def runs_what_it_reads(source, code):
    """No source unpickles or evaluates."""
    code = code.replace(WRITERS.get(source, code), "pass") if source in WRITERS else code
    modules = UNPICKLERS if source.startswith(PIPES) else (*UNPICKLERS, "multiprocessing")
    faults = [module for module in imported(code) if begins(module, *modules)]
    for call in (node for node in nodes_of(code) if isinstance(node, ast.Call)):
        name = dotted(call.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in {"eval", "exec", "builtins.eval", "builtins.exec"}:
            faults.append(name)
        if options.get("allow_pickle", "False") != "False":
            faults.append(f"{name}(allow_pickle)")
        if name == "torch.load" and options.get("weights_only") != "True":
            faults.append(name)
    return faults


def guesses_fields(source, code):
    """A site reads no field of a message by a name of its own, whatever class it is of.

    It reads what the message declares (``RoundId``, limits), or its class.
    """
    asks = {"getattr", "hasattr"}
    calls = (node for node in nodes_of(code) if isinstance(node, ast.Call))
    calls = [call for call in calls if dotted(call.func) in asks] if of_site(source) else []
    return [ast.unparse(call) for call in calls if isinstance(call.args[1], ast.Constant)]


def of_site(source):
    return Path(source).parent == Path("fedapp/site")


TEXTS = re.compile(
    r"\b(un)?told\b|\bsays? of\b|\bhold that\b|\bheld against\b|\boddit(y|ies)\b|\banew\b"
    r"|\bso many\b",
    re.IGNORECASE,
)
VAGUE = {"found", "known", "kept", "made", "given", "own"}  # as the name of a variable
DIALECT = {"told", "untold", "oddities", "alike", "heard"}  # in any name


def docstrings_of(code):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(n) or "" for n in nodes_of(code) if isinstance(n, documented)]


def speaks_dialect(source, code):
    """Words of docstrings, comments and names are plain English."""
    words = [match.group() for text in docstrings_of(code) for match in TEXTS.finditer(text)]
    for node in nodes_of(code):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            words += [node.name] if DIALECT & set(node.name.lower().split("_")) else []
        if isinstance(node, ast.FunctionDef):
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            names = {each.id for each in stored if isinstance(each.ctx, ast.Store)}
            words += [name for name in names if name in VAGUE or DIALECT & set(name.split("_"))]
    for token in generate_tokens(StringIO(code).readline) if TEXTS.search(code) else ():
        if token.type == COMMENT:
            words += [match.group() for match in TEXTS.finditer(token.string)]
    return words


RULES = (
    *(imports_flower, knows_files, imports_forbidden, imports_another_role, hides_kernels),
    *(knows_methods, knows_families, runs_what_it_reads, guesses_fields, speaks_dialect),
)


@pytest.mark.parametrize("rule", RULES, ids=attrgetter("__name__"))
def test_all_sources_keep_to_a_rule_of_the_house(rule):
    faults = {source: rule(source, code) for source, code in texts_of_all().items()}
    allowed = DEFAULTS if rule is knows_methods else {}
    assert {source: names for source, names in faults.items() if names} == allowed


@pytest.mark.parametrize("planted", ["from pickle import loads", "eval(text)", "torch.load(path)"])
def test_what_runs_what_it_reads_is_found(planted):
    assert len(runs_what_it_reads("fedapp/new.py", planted)) == 1
