"""Arguments of a method's Flower strategy: the settings that it reads, as Python writes them."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature, isfunction, signature
from typing import Any, ClassVar

from fedapp.arguments import naming_python_keywords, python_name, settings_of
from fedapp.errors import ConfigError
from fedapp.settings import (
    Settings,
    TableSettings,
    Value,
    about_settings,
    defaults,
    flatten,
    load_settings,
    setting_names,
)
from strategies.flower import FlowerStrategy
from strategies.method import LOCAL_TABLES, OF_APP, TreeStrategy

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
        ``reg_alpha``. ``**context.run_config`` works as it is.

    Raises
    ------
    ConfigError : a setting breaks its rule, or this method does not read it.
    """

    protocol_class: ClassVar[type[TreeStrategy[Any]]]
    method: ClassVar[str]

    def __init__(self, **settings: Any) -> None:
        protocol_class = self.protocol_class
        for name, member in vars(type(self)).items():
            is_of_method = isfunction(member) and hasattr(protocol_class, name)
            if is_of_method and not hasattr(MethodStrategy, name):
                base = f"{protocol_class.__module__}.{protocol_class.__name__}"
                rule = f"must be overridden in a subclass of {base}, the method that is called"
                raise ConfigError(f"{name} {rule}, got one in {type(self).__name__}")
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
    section_names = {
        _keyword(name): name for name in defaults() if "." in name and protocol.takes(name)
    }
    with naming_python_keywords({name: keyword for keyword, name in section_names.items()}):
        # A name such as max_depth may be a setting of the method's section and a general one.
        named: dict[str, Value] = {}
        for name, value in flatten(given).items():
            general = name.replace("_", "-")
            if (keyword := name.replace("-", "_")) not in section_names or protocol.takes(general):
                named[name] = value
            elif section_names[keyword] not in given:
                named[section_names[keyword]] = value
            elif value != defaults().get(general):  # a whole run config has both
                named[name] = value
        named = settings_of(protocol.method, named)
        if (method := named.setdefault("strategy", protocol.method)) != protocol.method:
            rule = f"must be {protocol.method} for {protocol.__name__}"
            raise ConfigError(f"strategy {rule}, got {method!r}")
        named.setdefault("data", LOCAL_TABLES)
        settings = load_settings(named)
        of_tables = OF_TABLES if settings.data == LOCAL_TABLES else frozenset()
        for name, value in settings.changed.items():
            if name in of_tables - {"data"} and name in named:
                rule = "must be set where the tables are read, at the parties"
            elif name in OF_APP - {"strategy"}:
                rule = "must be omitted: fedapp's own ServerApp keeps run folders"
            elif not protocol.takes(name):
                rule = f"must be omitted for {protocol.method}, which does not read it"
            else:
                continue
            raise ConfigError(f"{name} {rule}, got {value!r}")
        protocol.check_settings(settings)
        return settings
