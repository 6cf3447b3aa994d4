"""Tables of settings: their declaration, and the words for a value that breaks a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from fedapp.errors import ConfigError, rule_of
from fedapp.known_names import value_hint
from fedapp.trees.losses import LOSSES

S = TypeVar("S")
Value = bool | int | float | str


class HasSections(Protocol):
    """Settings of a run, with the methods' tables."""

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]: ...


class Section(BaseModel):
    """Settings; their names are in kebab-case in files and commands.

    ``table`` is the name of a method's section in the run config.
    """

    table: ClassVar[str] = ""
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def of(cls, settings: HasSections) -> Self:
        """The section of a run's settings; ConfigError if one breaks its rule."""
        return check(cls, settings.sections[cls.table], f"{cls.table}.")


def check(section: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Validate a section; raise ConfigError for the first setting that breaks its rule."""
    try:
        return cast(S, cast(Any, section).__pydantic_validator__.validate_python(values))
    except ValidationError as error:
        errors = error.errors()
        first, field = errors[0], errors[0]["loc"][:1]
        if first["type"] == "value_error" and not field:  # of several settings
            raise ConfigError(str(first["ctx"]["error"])) from None
        of_field = [fault for fault in errors if fault["loc"][:1] == field]  # one for each type
        name = prefix + str(*field)
        rule = " or ".join(rule_of(fault["type"], fault.get("ctx", {})) for fault in of_field)
        got = f"{first['input']!r}{value_hint(name, first['input'], LOSSES)}"
        raise ConfigError(f"{name} must be {rule}, got {got}") from None


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Flatten nested tables; names are joined by a dot."""
    flat: dict[str, Value] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


@dataclass(frozen=True, slots=True)
class About:
    """What a setting is: its name in files, its sentence, an example, and its default in words."""

    name: str
    text: str
    example: Value | None
    default: str


def declared(section: type) -> dict[str, About]:
    """The documented fields of a section, by their names in Python."""
    fields: Mapping[str, FieldInfo] = section.__pydantic_fields__  # type: ignore[attr-defined]
    return {
        name: About(
            field.alias or name,
            " ".join(field.description.split()),
            next(iter(field.examples or ()), None),
            str((cast(Any, field.json_schema_extra) or {}).get("default") or ""),
        )
        for name, field in fields.items()
        if field.description
    }


def setting_names(*sections: type) -> frozenset[str]:
    """Names of the settings of sections, as files have them."""
    return frozenset(about.name for section in sections for about in declared(section).values())


def method_sections() -> dict[str, type[Section]]:
    """The sections of the methods that are imported, by the names of their tables."""
    return {section.table: section for section in Section.__subclasses__() if section.table}
