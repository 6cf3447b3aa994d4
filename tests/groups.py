"""A group of messages that only a test has."""

import sys
from types import ModuleType

from fedapp.messages import methods
from fedapp.site import account


def declare_group(monkeypatch, name, handlers):
    """Add a method's messages and their handlers; its runs have any rounds and restarts."""
    module = ModuleType(f"clients.{name}")
    vars(module)["HANDLERS"] = handlers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    declared = ModuleType(f"fedapp.messages.{name}"), methods.Method("inference", {"": "sizes"})
    groups = {**methods._groups(), name: declared}
    monkeypatch.setattr(methods, "_groups", lambda: groups)
    monkeypatch.setattr(account, "_check_rounds", lambda *given: None)
