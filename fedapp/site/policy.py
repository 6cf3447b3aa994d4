"""What a site allows: which methods, and which settings of theirs."""

from __future__ import annotations

from fedapp.errors import ConfigError
from fedapp.messages.fields import Request
from fedapp.messages.methods import messages_of, method_of
from fedapp.site.config import SiteConfig


def module_of(kind: str) -> str:
    """The module of a message kind, ``<category>.<module>[_<name>]``."""
    action = kind.partition(".")[2]
    return action.rpartition("_")[0] or action


def check_policy(config: SiteConfig, kind: str, method: str) -> None:
    """Hold that the site allows the method a run names, and the one its message belongs to.

    A server that names another method than it runs gets no further than what those two share.

    Raises
    ------
    ConfigError : it does not allow one of them, or the method sends no such messages.
    """
    if not config.allowed:
        return
    module = module_of(kind)
    shared_by = getattr(messages_of(module), "SHARED_BY", None)
    wanted = {method} if shared_by else {method, module.replace("_", "-")}
    if refused := wanted - config.allowed:
        allowed = ", ".join(sorted(config.allowed))
        got = ", ".join(sorted(refused))
        raise ConfigError(f"strategy must be one that the site allows ({allowed}), got {got}")
    declared = method_of(method)
    if shared_by and (declared is None or declared.family not in shared_by):
        families = " or ".join(sorted(shared_by))
        raise ConfigError(f"strategy must be {families} to send {kind}, got {method}")


def check_secure(config: SiteConfig, request: Request) -> None:
    """Hold that a run, whose settings are the coordinator's, does not switch a site's safety off.

    Raises
    ------
    ConfigError : a field has a value for trials alone, and the site does not allow that.
    """
    if config.simulated or config.allows_insecure:
        return
    for name, rule in request.for_trials.items():
        if rule.covers(value := getattr(request, name)):
            setting, got = name.replace("_", "-"), str(value).lower()
            raise ConfigError(
                f"{setting} must be {rule.safe}, or allow-insecure true in the node config, "
                f"got {got}"
            )
