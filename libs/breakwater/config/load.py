"""Reads the config file: one YAML document, checked as a whole, every mistake named by its path and what is right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from breakwater.config.errors import hint
from breakwater.config.models import Config
from breakwater.errors import ConfigError
from breakwater.providers.registry import KINDS


def load_config(path: Path) -> Config:
    """Reads and checks the config file.

    Raises:
        ConfigError: the file can't be read or something in it is wrong; its text says where and what would be right.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; name one with --config FILE") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str = "config") -> Config:
    """Checks a config given as YAML text. `source` is named in errors.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{where}: is not YAML: {problem}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be a mapping with at least `providers` and `agents`")
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        lines = [line for problem in _without_inherited(error.errors()) for line in _explain(problem)]
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))) from None


def _without_inherited(problems: Iterable[Any]) -> list[Any]:
    """Drops what an agent only inherited from `defaults`, where the same mistake is reported once."""
    kept: list[Any] = []
    in_defaults: set[tuple[Any, ...]] = set()
    for problem in sorted(problems, key=lambda problem: problem["loc"][:1] != ("defaults",)):
        location = problem["loc"]
        if location[:1] == ("defaults",):
            in_defaults.add((*location[1:], problem["msg"]))
        elif location[:1] == ("agents",) and (*location[2:], problem["msg"]) in in_defaults:
            continue
        kept.append(problem)
    return kept


def _explain(problem: Mapping[str, Any]) -> list[str]:
    location, kind = _written(problem["loc"])
    path = ".".join(location)
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "union_tag_invalid":
        wrong = str(problem["ctx"]["tag"])
        return [f"{path}.kind: {wrong!r} is not a kind of provider{hint(wrong, KINDS)}"]
    if problem["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1], kind)
        return [f"{path}: is not a setting here{hint(location[-1], fields)}"]
    if problem["type"] == "missing":
        return [f"{path}: is missing"]
    if problem["type"] == "model_attributes_type":
        return [f"{path}: should be a mapping of settings"]
    if not path:
        return message.splitlines()
    message = re.sub(r"^Input should be", "should be", message)
    message = re.sub(
        r"^should be a valid dictionary or instance of \w+$", "should be settings, as in {name: value}", message
    )
    message = re.sub(r"^should be a valid (tuple|list)$", "should be a list, as in [one, two]", message)
    message = re.sub(
        r"^(Tuple|List) should have at least (\d+) items? after .*$", r"should have at least \2 item", message
    )
    given = None if problem["type"] == "value_error" else problem.get("input")  # our own texts say what may be shown
    shown = f" (found {given!r})" if isinstance(given, str | int | float | bool) else ""
    return [f"{path}: {message}{shown}"]


_WORDS = (
    (re.compile(r"^Input should be"), "should be"),
    (re.compile(r"^should be a valid dictionary( or instance of \w+)?$"), "should be settings, as in {name: value}"),
    (re.compile(r"^should be a valid (tuple|list)$"), "should be a list, as in [one, two]"),
    (re.compile(r"^(Tuple|List) should have at least (\d+) items? after .*$"), r"should have at least \2 item"),
)
"""What pydantic says of Python's types, as said of YAML's."""


def _written(location: Iterable[object]) -> tuple[tuple[str, ...], type[BaseModel] | None]:
    """A location as it stands in the file, and what can be set for the kind of provider that it is in.

    Pydantic's own steps are left out, and so is the kind, which it puts after a provider's name.
    """
    parts = tuple(str(part) for part in location if not str(part).startswith(("function-", "constrained-")))
    if parts[:1] == ("providers",) and len(parts) > 2 and parts[2] in KINDS:
        return (*parts[:2], *parts[3:]), KINDS[parts[2]]
    return parts, None


def _fields_at(location: tuple[str, ...], kind: type[BaseModel] | None) -> list[str]:
    """The settings that may stand at a path of the document; `kind` is that of the provider at its beginning."""
    annotation: Any = Config
    if kind is not None:
        annotation, location = kind, location[2:]
    for part in location:
        model = _model_in(annotation)
        if model is None:
            # A mapping of names to models: the name is the person's own.
            values = [item for item in get_args(annotation) if _model_in(item)]
            annotation = values[-1] if values else None
            continue
        named = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        annotation = named.get(part)
    model = _model_in(annotation)
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, also where it is optional; None for mappings and plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next((model for item in get_args(annotation) if (model := _model_in(item))), None)
