"""Reads the config file: one YAML document, checked as a whole, every mistake named by its path and its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from yaml._yaml import CParser
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from breakwater.calls.providers.registry import KINDS
from breakwater.config.document import Config
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.formats import hint
from breakwater.kernel.process.callables import load_callable
from breakwater.kernel.security.encryption import Cipher
from breakwater.kernel.security.secret_refs import ENV_FILE, SecretRef, variable
from breakwater.kernel.surrogates import whole_value
from breakwater.kernel.validation import about_controls

SECRETS_OF = {
    "worker": ("providers.", "models.", "encryption."),
    "alerter": ("alerts.",),
    "request": ("console.", "alerts.links.", "encryption."),
    "console": ("encryption.",),
}
"""The prefixes of the paths of the secrets that each service reads. `request` checks the links in alerts, and is the
client of the OpenID provider. Only services that read or show texts need the keys of `encryption`; others pass
encrypted texts on."""

MAX_DEPTH = 100
"""The deepest nesting of a config."""
MAX_NODES = 1_000_000
"""The most values of a config. An alias counts as all values of its anchor."""


class _Constructor(SafeConstructor):
    """Refuses a key that a mapping has twice; YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        line_of_key: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in line_of_key and key.value != "<<":
                problem = f"{key.value!r} is set twice, first in line {line_of_key[key.value]}"
                raise ConstructorError(None, None, problem, key.start_mark)
            line_of_key[key.value] = line
        return super().construct_mapping(node, deep=deep)


class _QuickLoader(Composer, CParser, _Constructor, Resolver):
    """Parses with libyaml, in a sixth of the time. `yaml.CLoader` also composes with it, and dies of deep nesting."""

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        _Constructor.__init__(self)
        Resolver.__init__(self)


class _WordyLoader(_Constructor, yaml.SafeLoader):
    """Says best what is wrong, and where."""


def _parts(node: yaml.Node) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """Returns the values in a node, each with its name and the node of its name."""
    if isinstance(node, yaml.MappingNode):
        return [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    if isinstance(node, yaml.SequenceNode):
        return [(str(index), item, item) for index, item in enumerate(node.value)]
    return []


def _measure(node: yaml.Node, measured: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Returns the number of values in a node, and their depth. Raises ComposerError if a limit is exceeded."""
    if id(node) in measured:
        size = measured[id(node)]
        if size is None:
            raise ComposerError(None, None, "an alias is inside its own anchor", node.start_mark)
        return size
    measured[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    inner = [_measure(child, measured) for child in children]
    nodes = 1 + sum(nodes for nodes, _ in inner)
    depth = 1 + max((depth for _, depth in inner), default=0)
    if depth > MAX_DEPTH:
        raise ComposerError(None, None, f"is nested more than {MAX_DEPTH} deep", node.start_mark)
    if nodes > MAX_NODES:
        raise ComposerError(None, None, f"has more than {MAX_NODES:,} values, aliases included", node.start_mark)
    measured[id(node)] = nodes, depth
    return nodes, depth


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Returns the node of a document, and its value. Raises yaml.YAMLError."""
    with suppress(yaml.YAMLError, UnicodeEncodeError, RecursionError):
        return _document(_QuickLoader(text), text)
    loader = _WordyLoader(text)
    try:
        return _document(loader, text)
    except RecursionError as error:
        raise ComposerError(None, None, f"is nested more than {MAX_DEPTH} deep", loader.get_mark()) from error


def _document(loader: _QuickLoader | _WordyLoader, text: str) -> tuple[yaml.Node | None, Any]:
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _measure(node, {})
        value = loader.construct_document(node)
        # An escape in YAML can stand for half of a surrogate pair, which no message can hold.
        return node, whole_value(value) if re.search(r"\\u", text, re.I) else value
    finally:
        loader.dispose()


def load_config(path: Path) -> Config:
    """Reads and checks the config file.

    Raises:
        ConfigError: the file can't be read, or has mistakes; the message names each with its path and line.
    """
    return parse_config(read_config(path), source=str(path))


def read_config(path: Path) -> str:
    """Returns the text of the config file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; create one with `breakwater init`, or name another file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error


def parse_config(text: str, *, source: str = "config") -> Config:
    """Checks a config in YAML. Error messages name it by `source`.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        root, document = read_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        begin = "" if isinstance(error, ConstructorError | ComposerError) else "is not YAML: "
        raise ConfigError(f"{source}{where}: {begin}{problem}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must be a mapping with at least `providers` and `agents`")
    try:
        return Config.of(cast(dict[str, Any], document), text)
    except ValidationError as error:
        problems = error.errors()
        problems += _problems_between_sections(cast(dict[str, Any], document), problems)
        lines = list(dict.fromkeys(line for problem in _without_inherited(problems) for line in _explain(problem)))
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        listed = "\n".join(f"  {line}{_line_of(root, line)}" for line in lines)
        raise ConfigError(f"{source}: {count}\n{listed}") from None


def _problems_between_sections(document: dict[str, Any], problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Returns what is wrong between the sections of a document, which pydantic checks only if each value is right.

    So that a user learns all mistakes at once, the document is checked again without its wrong values. None is
    returned if a provider, a model or an agent is wrong as a whole: without it, others would seem to lack it.
    """
    remainder = deepcopy(document)
    for problem in problems:
        path, _ = _path_in_file(problem["loc"])
        if problem["type"] == "union_tag_invalid":
            path = (*path, "kind")
        if len(path) < 2 or (len(path) == 2 and path[0] in {"providers", "models", "agents"}):
            return []
        section: Any = remainder
        for name in path[:-1]:
            section = cast(dict[str, Any], section).get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        if problem["type"] == "missing" or path[-1] == "base_url":
            cast(dict[str, Any], section)[path[-1]] = "http://missing.invalid"  # providers need a URL, if anything
        else:
            cast(dict[str, Any], section).pop(path[-1], None)
    try:
        Config.model_validate(remainder)
    except ValidationError as error:
        return [problem for problem in error.errors() if not problem["loc"]]
    return []


def _line_of(node: yaml.Node | None, mistake: str) -> str:
    """Returns the line, as ` (line 3)`, of the path that a mistake starts with, or of the longest part in the file."""
    line = None
    path = mistake.partition(": ")[0]
    while path and node is not None:
        # Names may contain dots: the longest name that fits wins, and the mapping's own key wins over merged ones.
        fits = [part for part in reversed(_parts(node)) if path == part[0] or path.startswith(f"{part[0]}.")]
        if not fits:
            break
        name, marked, node = max(fits, key=lambda part: len(part[0]))
        line = marked.start_mark.line + 1
        path = path[len(name) + 1 :]
    return "" if line is None else f" (line {line})"


def _without_inherited(problems: Iterable[Any]) -> list[Any]:
    """Drops the mistakes that agents inherited from `defaults`, which are reported once, there."""
    reported: list[Any] = []
    in_defaults: set[tuple[Any, ...]] = set()
    for problem in sorted(problems, key=lambda problem: problem["loc"][:1] != ("defaults",)):
        location = problem["loc"]
        if location[:1] == ("defaults",):
            in_defaults.add((*location[1:], problem["msg"]))
        elif location[:1] == ("agents",) and (*location[2:], problem["msg"]) in in_defaults:
            continue
        reported.append(problem)
    return reported


_CLEARER = {
    "missing": "is missing",
    "model_attributes_type": "should be a mapping of settings",
    "model_type": "should be a mapping of settings",
    "list_type": "should be a list, as in [one, two]",
    "tuple_type": "should be a list, as in [one, two]",
}
"""Messages that replace pydantic's, by its types of errors."""


def _explain(problem: Mapping[str, Any]) -> list[str]:
    location, kind = _path_in_file(problem["loc"])
    path = ".".join(location)
    problem_type = problem["type"]
    message = re.sub(r"^(Value error,|Input) ", "", str(problem["msg"]))
    if problem_type == "union_tag_invalid":
        wrong = str(problem["ctx"]["tag"])
        return [f"{path}.kind: {wrong!r} is not a known kind of provider{hint(wrong, KINDS)}"]
    if problem_type == "extra_forbidden":
        return [f"{path}: is not a known setting{hint(location[-1], _fields_at(location[:-1], kind))}"]
    if not path:
        return message.splitlines()
    if (clearer := _CLEARER.get(problem_type) or about_controls(problem)) is not None:
        return [f"{path}: {clearer}"]
    value = (
        None if problem_type == "value_error" else problem.get("input")
    )  # our own messages contain the value if it may be shown
    value_note = f" (found {value!r})" if isinstance(value, str | int | float | bool) else ""
    return [f"{path}: {message}{value_note}"]


def _path_in_file(location: Iterable[object]) -> tuple[tuple[str, ...], type[BaseModel] | None]:
    """Returns a location as the file has it, and the settings class of the provider that it is in, if any.

    Pydantic's location has extra steps, such as the kind after a provider's name and the way of its `auth`; these are
    left out.
    """
    parts = tuple(str(part) for part in location if not str(part).startswith(("function-", "constrained-", "auth:")))
    if parts[:1] == ("providers",) and len(parts) > 2 and parts[2] in KINDS:
        return (*parts[:2], *parts[3:]), KINDS[parts[2]]
    return parts, None


def _fields_at(location: tuple[str, ...], kind: type[BaseModel] | None) -> list[str]:
    """Returns the settings at a path of the document; `kind` is the settings class of the provider in the path."""
    annotation: Any = Config
    if kind is not None:
        annotation = kind
        location = location[2:]
    for part in location:
        model = _model_in(annotation)
        if part.isdigit() and model is not None:
            continue  # an item of a list of these
        if model is None:
            # A mapping of names to models: the name is the user's own.
            values = [item for item in get_args(annotation) if _model_in(item)]
            annotation = values[-1] if values else None
            continue
        named = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        annotation = named.get(part)
    model = _model_in(annotation)
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model class of a field, optional or not; None for mappings and plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next((model for item in get_args(annotation) if (model := _model_in(item))), None)


def unreadable_secrets(config: Config) -> tuple[str, ...]:
    """Returns the secrets of the config that can't be read here, each with its place and its problem."""
    problems: list[str] = []
    for path, secret in named_secrets(config):
        try:
            secret.read()
        except ConfigError as error:
            problems.append(f"  {path}: {error}")
    return tuple(problems)


def unset_variables(config: Config) -> dict[str, str]:
    """Returns the environment variables that must have a secret and are not set here, by the path in the config."""
    return {
        path: secret.env
        for path, secret in named_secrets(config)
        if secret.env is not None and not variable(secret.env)
    }


def require_secrets(path: Path, config: Config) -> None:
    """Raises ConfigError if secrets of the config can't be read here."""
    if problems := unreadable_secrets(config):
        raise ConfigError("\n".join([f"{path}: secrets in the config are missing", *problems]))


def require_usable(path: Path, config: Config, *, simulate: bool = False) -> None:
    """Raises ConfigError if secrets are missing here, or providers can't be used. Simulated ones need no secrets."""
    if not simulate:
        require_secrets(path, config)
    if problems := missing_parts(config):
        raise ConfigError("\n".join([f"{path}: providers in the config are unusable", *problems]))


def missing_parts(config: Config) -> tuple[str, ...]:
    """Returns the problems of programs, callables and packages that the config needs, and that can't be used here."""
    problems: list[str] = []
    for name, provider in config.providers.items():
        try:
            provider.check()
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
    """Yields every secret that the config names, with its place there."""
    for section in ("providers", "models", "alerts", "console", "encryption"):
        yield from _secrets_in(section, getattr(config, section))


def _secrets_in(place: str, value: object) -> Iterator[tuple[str, SecretRef]]:
    if isinstance(value, SecretRef):
        yield place, value
        return
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(value, BaseModel):
        inner = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, dict):
        inner = cast(dict[object, object], value).items()
    elif isinstance(value, tuple):
        inner = enumerate(cast(tuple[object, ...], value))
    for name, item in inner:
        yield from _secrets_in(f"{place}.{name}", item)


def cipher_of(config: Config, plane_key: SecretStr | None = None) -> Cipher:
    """Returns a cipher with the keys that a config names, and with the plane's own key.

    Raises:
        ConfigError: a key can't be read, or is not a valid key.
    """
    keys: list[str] = []
    for path, key in _secrets_in("encryption", config.encryption):
        try:
            keys.append(key.read())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return Cipher(keys, None if plane_key is None else plane_key.get_secret_value())


def variables_of(config: Config, service: str) -> frozenset[str]:
    """Returns the environment variables that a service needs: those of its secrets, and those in `environment`."""
    places = SECRETS_OF.get(service, ())
    secrets = {secret.env for place, secret in named_secrets(config) if secret.env and place.startswith(places)}
    if "providers.".startswith(places):
        secrets.update(name for provider in config.providers.values() for name in provider.variables)
    if secrets:
        secrets.add(ENV_FILE)
    return frozenset(secrets.union(*(names for name, names in config.environment.items() if name == service)))
