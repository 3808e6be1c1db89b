"""Reads the config file: one YAML document, checked as a whole, every mistake named by its path and what is right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from yaml.composer import ComposerError

from breakwater.callables import load_callable
from breakwater.config.models import Config, hint
from breakwater.contracts.validation import about_controls
from breakwater.encryption import Cipher
from breakwater.errors import ConfigError
from breakwater.providers.registry import KINDS
from breakwater.secret_refs import SecretRef

DECRYPTING = frozenset({"worker", "request", "console"})
"""The services that read or show texts; the others pass on what is encrypted."""


MAX_DEPTH, MAX_NODES = 100, 1_000_000
"""How deep a config may be nested, and how many values it may have, each alias counted as what it stands for."""


class _Loader(yaml.SafeLoader):
    """Refuses what no config is: nested without end, or grown by aliases.

    And a key that stands twice in one mapping, of which YAML would keep the last in silence.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._deepest = self._nodes = 0
        self._measured: dict[int, tuple[int, int]] = {}
        """How many nodes are in one that was read, and how deep they go: an alias stands for all of them."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = cast(Any, self.peek_event()).start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        outer, before, self._deepest = self._deepest, self._nodes, self._depth
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"is nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        if not is_alias:
            self._nodes += 1
            self._measured[id(node)] = self._nodes - before, self._deepest - self._depth
        elif id(node) not in self._measured:
            raise ComposerError(None, None, "an alias stands inside what it stands for", mark)
        else:
            nodes, deep = self._measured[id(node)]
            self._nodes, self._deepest = self._nodes + nodes, self._depth + deep
        if self._deepest > MAX_DEPTH:
            raise ComposerError(None, None, f"is nested more than {MAX_DEPTH} deep", mark)
        if self._nodes > MAX_NODES:
            raise ComposerError(None, None, f"stands for more than {MAX_NODES:,} values", mark)
        self._depth, self._deepest = self._depth - 1, max(outer, self._deepest)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.value != "<<":
                problem = f"{key.value!r} is set twice, first in line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


def load_config(path: Path) -> Config:
    """Reads and checks the config file.

    Raises:
        ConfigError: the file can't be read or something in it is wrong; its text says where and what would be right.
    """
    return parse_config(read_config(path), source=str(path))


def read_config(path: Path) -> str:
    """The text of the config file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; name another, or write one with `breakwater init`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error


def parse_config(text: str, *, source: str = "config") -> Config:
    """Checks a config given as YAML text. `source` is named in errors.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        document = yaml.load(text, _Loader)  # noqa: S506  a safe one
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        ours = isinstance(error, yaml.constructor.ConstructorError | ComposerError)
        what = "" if ours else "is not YAML: "
        raise ConfigError(f"{source}{where}: {what}{problem}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be a mapping with at least `providers` and `agents`")
    try:
        return Config.of(cast(dict[str, Any], document), text)
    except ValidationError as error:
        lines = [line for problem in _without_inherited(error.errors()) for line in _explain(problem)]
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        root = yaml.compose(text, _Loader)
        listed = "\n".join(f"  {line}{_line_of(root, line)}" for line in dict.fromkeys(lines))
        raise ConfigError(f"{source}: {count}\n{listed}") from None


def _line_of(node: yaml.Node | None, mistake: str) -> str:
    """The line of the file where the path begins to be wrong that a mistake starts with; "" where none is known."""
    line, path = None, mistake.partition(": ")[0]
    while path:
        if isinstance(node, yaml.MappingNode):
            inside = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inside = [(str(index), item, item) for index, item in enumerate(node.value)]
        else:
            break
        # Names have dots, too: the longest that fits.
        fits = [one for one in inside if path == one[0] or path.startswith(f"{one[0]}.")]
        if not fits:
            break
        name, marked, node = max(fits, key=lambda one: len(one[0]))
        line, path = marked.start_mark.line + 1, path[len(name) + 1 :]
    return "" if line is None else f" (line {line})"


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
    if (refused := about_controls(problem)) is not None:
        return [f"{path}: {refused}"]
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


def unreadable_secrets(config: Config) -> tuple[str, ...]:
    """The secrets that the config names and that can't be read here: where each is named, and what is wrong."""
    problems: list[str] = []
    for path, secret in named_secrets(config):
        try:
            secret.read()
        except ConfigError as error:
            problems.append(f"  {path}: {error}")
    return tuple(problems)


def unusable_programs(config: Config) -> tuple[str, ...]:
    """The programs and callables that the config names and that can't be used here, and why."""
    problems: list[str] = []
    for name, provider in config.providers.items():
        if provider.local:
            try:
                provider.open()
            except ConfigError as error:
                problems.append(f"  providers.{name}: {error}")
    for name, channel in config.alerts.channels.items():
        if channel.python is not None:
            try:
                load_callable(channel.python.callable)
            except ConfigError as error:
                problems.append(f"  alerts.channels.{name}.python.callable: {error}")
    return tuple(problems)


def named_secrets(config: Config) -> Iterator[tuple[str, SecretRef]]:
    """Every secret that the config names, with its place there."""
    for name, provider in config.providers.items():
        for place, secret in provider.secrets().items():
            yield f"providers.{name}.{place}", secret
    yield from config.alerts.secrets()
    yield from config.console.secrets()
    yield from _encryption_keys(config)


def _encryption_keys(config: Config) -> Iterator[tuple[str, SecretRef]]:
    return ((f"encryption.keys.{place}", key) for place, key in enumerate(config.encryption.keys))


def cipher_of(config: Config, own: SecretStr | None = None) -> Cipher:
    """What encrypts and decrypts by the keys that a config names, and the plane's own.

    Raises ConfigError: one can't be read, or is none.
    """
    keys: list[str] = []
    for path, key in _encryption_keys(config):
        try:
            keys.append(key.read())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return Cipher(keys, None if own is None else own.get_secret_value())


def variables_of(config: Config, service: str) -> frozenset[str]:
    """The environment variables that a service reads because of the config: its secrets, and what `environment` names.

    Secrets of providers are the worker's, those of alerts the alerter's; `request` checks the links in alerts, and is
    the client of the OpenID provider. The keys that texts are encrypted with are for those services that read or show
    them.
    """
    named: Iterable[tuple[str, SecretRef]]
    match service:
        case "worker":
            named = (secret for secret in named_secrets(config) if secret[0].startswith("providers."))
        case "alerter":
            named = config.alerts.secrets()
        case "request":
            links = config.alerts.links
            named = (*config.console.secrets(), *(() if links is None else (("alerts.links.secret", links.secret),)))
        case _:
            named = ()
    keys = _encryption_keys(config) if service in DECRYPTING else ()
    secrets = {secret.env for _, secret in (*named, *keys) if secret.env is not None}
    return frozenset(secrets.union(*(names for name, names in config.environment.items() if name == service)))
