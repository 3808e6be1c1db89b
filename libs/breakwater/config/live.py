"""The config of a running service, which is immutable and replaced as a whole, and the changes from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from breakwater.config.models import Config
from breakwater.errors import ConfigError
from breakwater.policy.budget import Caps, CapTable


class LiveConfig:
    """The present config."""

    def __init__(self, config: Config) -> None:
        self.now = config
        self._caps = config.caps

    def caps(self) -> CapTable:
        """Returns the present caps. An agent that is configured no more keeps its last one, as its jobs may wait."""
        return self._caps

    def reload(self, config: Config) -> None:
        """Replaces the config."""
        caps = config.caps
        self._caps = CapTable(caps.total, {**self._caps.agents, **caps.agents}, caps.tenants)
        self.now = config

    def keep(self, agent: str, caps: Caps) -> None:
        """Keeps an agent under a cap that is configured no more."""
        self._caps = CapTable(self._caps.total, {agent: caps, **self._caps.agents}, self._caps.tenants)


def require_reloadable(before: Config, after: Config) -> None:
    """Raises ConfigError where a running plane can't change from one config to another."""
    if before.budgets.timezone != after.budgets.timezone:
        raise ConfigError(
            "budgets.timezone: it would shift days and months of spend that is already counted; "
            "stop all services before you change it"
        )
    if before.encryption != after.encryption:
        raise ConfigError("encryption.keys: services read them only at their start; restart the services one by one")


MOST = 50
"""Lines that are listed, which is enough for a config that is rewritten as a whole."""

_LONGEST = 80
_UNSHOWN = frozenset(
    {"system_prompt", "params", "providers", "channels", "templates", "links", "output", "environment"}
)
"""Settings whose values are not shown: they are long, or may hold secrets, prompts or addresses of providers."""


def changes(before: Config, after: Config) -> tuple[str, ...]:
    """Returns a line for each changed setting: `agents.writer.model: "gpt-4o" → "gpt-5"`."""
    left, right = (config.model_dump(mode="json", by_alias=True) for config in (before, after))
    # Agents hold the values of `defaults`: a change there is one of each agent that it concerns.
    lines = list(_changes((), {**left, "defaults": None}, {**right, "defaults": None}))
    return tuple(lines if len(lines) <= MOST else [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more"])


def _changes(path: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        here = (*path, name)
        if name not in before or name not in after:
            yield f"{'.'.join(here)}: {'removed' if name in before else 'added'}"
        elif before[name] == after[name]:
            continue
        elif isinstance(before[name], dict) and isinstance(after[name], dict) and name not in {"params", "output"}:
            yield from _changes(here, cast(dict[str, Any], before[name]), cast(dict[str, Any], after[name]))
        else:
            yield f"{'.'.join(here)}: {_step(here, before[name], after[name])}"


def _step(path: tuple[str, ...], before: object, after: object) -> str:
    shown = f"{_shown(before)} → {_shown(after)}"
    return "changed" if _UNSHOWN.intersection(path) or len(shown) > _LONGEST else shown


def _shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case str():
            return value
        case list():
            return "[" + ", ".join(map(_shown, cast(list[object], value))) + "]"
        case _:
            return str(value)
