"""Arguments of a method's Flower strategy: the settings that it reads, as Python writes them."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature, getmembers, isfunction, signature
from typing import Any, ClassVar

from fedapp.arguments import (
    check_arguments,
    in_kebab_case,
    naming_python_keywords,
    python_name,
    settings_of,
)
from fedapp.errors import ConfigError
from fedapp.known_names import setting_hint, setting_of
from fedapp.sections import setting_names
from fedapp.settings import Settings, TableSettings, Value, about_settings, defaults, load_settings
from strategies.flower import FlowerStrategy
from strategies.method import LOCAL_TABLES, OF_APP, TreeStrategy
from strategies.run import unread_error

# Settings of the tables, which are set at the parties, where the tables are.
OF_TABLES = setting_names(TableSettings) - {"positive-label"} | {
    *("base-margin", "partition", "columns", "least-bin-rows", "share-column-names"),
    "allow-export",
}
# Arguments of FedAvg that no method takes, and why or what to use.
SCORED = "training replies have the scores of all parties"
OF_FEDAVG: Mapping[str, str] = {
    "fraction_train": "a round takes all parties' rows; subsample draws from the rows of each",
    "fraction_evaluate": SCORED,
    "min_train_nodes": "min_parties is the number that a run continues with if others are lost",
    "min_evaluate_nodes": SCORED,
    "min_available_nodes": "parties is the number that a run waits for",
    "weighted_by_key": "each row counts once, or by the column that weight names at its party",
    "arrayrecord_key": "a method's messages have records of their own",
    "configrecord_key": "a method's messages have records of their own",
    "train_metrics_aggr_fn": "eval_metric names scores, which are computed over all rows",
    "evaluate_metrics_aggr_fn": "eval_metric names scores, which are computed over all rows",
    **dict.fromkeys(signature(FlowerStrategy.start).parameters, "it is an argument of start"),
}


class MethodStrategy(FlowerStrategy):
    """The Flower strategy of a method.

    Parameters
    ----------
    **settings
        Names and defaults of the run config. Settings of the method's section come without the
        section's name (``bins``, not ``pax.bins``); lambda and alpha are ``reg_lambda`` and
        ``reg_alpha``. ``**context.run_config`` works if it names a ``strategy``.

    ``start`` calls a subclass's ``configure_train``, ``aggregate_train``, ``configure_evaluate``
    and ``aggregate_evaluate`` in the order of Flower's loop.

    Raises
    ------
    ConfigError : a setting breaks its rule, or this method does not read it.
    """

    protocol_class: ClassVar[type[TreeStrategy[Any]]]
    method: ClassVar[str]

    def __init__(self, **settings: Any) -> None:
        protocol_class = self.protocol_class
        for name, member in getmembers(type(self), isfunction):
            if hasattr(protocol_class, name) and not hasattr(MethodStrategy, name):
                base = f"{protocol_class.__module__}.{protocol_class.__name__}"
                rule = f"must be overridden in a subclass of {base}, the method that is called"
                raise ConfigError(f"{name} {rule}, got {member.__qualname__}")
        super().__init__(protocol_class(settings_from(protocol_class, settings)))


def strategy_of(protocol: type[TreeStrategy[Any]]) -> type[MethodStrategy]:
    """The Flower strategy of a method; its signature and docstring have the method's settings."""
    about = about_settings()
    lines = list[str]()
    parameters = dict[str, Parameter]()
    for name, value in defaults().items():
        if protocol.takes(name) and name not in OF_APP | OF_TABLES:
            keyword = _keyword(name)
            if keyword not in parameters:
                lines.append(f"    {keyword} : {about[name].text}")
            parameters[keyword] = Parameter(keyword, Parameter.KEYWORD_ONLY, default=value)
    text = (protocol.__doc__ or "").rstrip()
    members = {
        "protocol_class": protocol,
        "method": protocol.method,
        "__doc__": "\n".join([text, "", "    Parameters", "    ----------", *lines, "    "]),
        "__signature__": Signature([*parameters.values()]),
        "__module__": "strategies",
    }
    return type(protocol.__name__, (MethodStrategy,), members)


def _keyword(setting: str) -> str:
    return python_name(setting.rpartition(".")[2])


def settings_from(protocol: type[TreeStrategy[Any]], given: Mapping[str, Any]) -> Settings:
    """Settings from the arguments of a ``MethodStrategy``."""
    for name in OF_FEDAVG.keys() & given.keys():
        raise ConfigError(f"{name} must be omitted: {OF_FEDAVG[name]}, got {given[name]!r}")
    check_arguments(given)
    in_section = {
        name.rpartition(".")[2]: name for name in defaults() if "." in name and protocol.takes(name)
    }
    keywords = {setting: python_name(name) for name, setting in in_section.items()}
    written = in_kebab_case(given)
    named: dict[str, Value] = {}
    with naming_python_keywords(keywords):
        for name, value in written.items():
            setting = in_section.get(name, name)
            # A name such as max-depth may be a setting of the method's section and a general one,
            # and a whole run config has both.
            if name in defaults() and (protocol.takes(name) or setting in written):
                setting = name
            if setting in named:
                raise ConfigError(f"{setting} must be given once, got {named[setting]} and {value}")
            if _is_taken(protocol, setting, value, of_run_config="strategy" in written):
                named[setting] = value
        typed = settings_of(protocol.method, named, keywords)
        settings = load_settings({"strategy": protocol.method, "data": LOCAL_TABLES, **typed})
        protocol.check_settings(settings)
        return settings


def _is_taken(
    protocol: type[TreeStrategy[Any]], name: str, value: object, of_run_config: bool
) -> bool:
    """Whether a constructor takes a setting; of a run config it ignores defaults of others.

    ConfigError if it must be omitted. The tables' settings in a run config are for the parties.
    """
    method, cls = protocol.method, protocol.__name__
    setting = setting_of(name, defaults(), method)
    taken = [each for each in defaults() if protocol.takes(each)]
    if setting == "strategy" and value != method:
        raise ConfigError(f"strategy must be {method} for {cls}, got {value!r}")
    if setting in OF_TABLES and not of_run_config:
        rule = "must be set where the tables are read, at the parties"
        raise ConfigError(f"{setting} {rule}, got {value!r}")
    if setting == "strategy" or (setting in taken and setting not in OF_APP):
        return True
    if of_run_config and value == defaults().get(setting):
        return False
    if setting in OF_APP:
        rule = "must be omitted: fedapp's own ServerApp keeps run folders"
        raise ConfigError(f"{setting} {rule}, got {value!r}; fedapp run {method} has it")
    with_section = {each.replace(".", "-"): each for each in defaults() if "." in each}
    setting = with_section.get(setting, setting)
    if setting in taken:  # pax_bins
        raise ConfigError(f"{name} is not a setting; did you mean {setting}?")
    if any(setting in (each, each.partition(".")[2]) for each in defaults()):
        raise unread_error(setting, value, method, taken)
    hint = setting_hint(setting, taken, method, value) or f"; help({cls}) lists them"
    raise ConfigError(f"{name} is not a setting{hint}")
