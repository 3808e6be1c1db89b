"""The config of a running service, which is immutable and replaced as a whole, and the changes from one to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from breakwater.config.document import Config
from breakwater.kernel.errors import ConfigError
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.limit import limits_of_agent
from breakwater.limits.rules.limit_index import PlaneLimit
from breakwater.limits.settings import Caps


class LiveConfig:
    """The current config."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self.now = config
        self._limits = config.limit_table
        self._clock = clock
        self._states: Mapping[str, PlaneLimit] = {}

    def limits(self) -> LimitTable:
        """Returns the current limits. A removed agent keeps its last budgets, because its jobs may still wait."""
        if self._limits.next_end_ms <= (now_ms := self._clock() * 1000):
            self._limits = self._limits.at(int(now_ms), self._states)
        return self._limits

    def reload(self, config: Config) -> None:
        """Replaces the config."""
        plane_limits = {"plane_limits": self._limits.plane_limits, "version": self._limits.version}
        self._limits = replace(config.limit_table, **plane_limits).with_removed_agents(self._limits)
        self.now = config

    def change_limits(self, changed_ids: Iterable[str], states: Mapping[str, PlaneLimit], version: str) -> None:
        """Takes changes of the limits that the plane keeps.

        Args:
            changed_ids: the ids of changed limits.
            states: all of them, by their ids.
            version: of all of them, as Redis has it.
        """
        self._states = states
        changed = {limit_id: states.get(limit_id) for limit_id in changed_ids}
        self._limits.plane_limits.change(changed, int(self._clock() * 1000))
        self._limits = replace(self._limits, version=version)

    def keep(self, agent: str, caps: Caps) -> None:
        """Keeps the budgets of an agent that the config no longer has."""
        removed = LimitTable(tuple(limits_of_agent(agent, caps)), (agent,))
        self._limits = self._limits.with_removed_agents(removed)


def require_reloadable(before: Config, after: Config) -> None:
    """Raises ConfigError if a running plane can't change from one config to the other."""
    if before.budgets.timezone != after.budgets.timezone:
        raise ConfigError(
            "budgets.timezone: it would shift the periods of spend that is already counted; "
            "stop all services before you change it, and run `breakwater setup` before they start"
        )
    if before.encryption != after.encryption:
        raise ConfigError(
            "encryption.keys: services read them only at their start; run `breakwater setup`, and restart the services "
            "one by one"
        )


MAX_LINES = 50
"""The number of changes that are listed, which suffices even for a config that is rewritten as a whole."""

_MAX_LENGTH = 80
_HIDDEN = frozenset({"system_prompt", "params", "providers", "channels", "templates", "links", "output", "environment"})
"""Settings whose values are not shown: they are long, or may hold secrets, prompts or addresses of providers."""


def changes(before: Config, after: Config) -> tuple[str, ...]:
    """Returns a line for each changed setting: `agents.writer.model: "gpt-4o" → "gpt-5"`."""
    # Agents inherit from `defaults`: a change there is listed as a change of each agent that it affects.
    old, new = ({**config.model_dump(mode="json", by_alias=True), "defaults": None} for config in (before, after))
    lines = list(_changes((), old, new))
    if len(lines) <= MAX_LINES:
        return tuple(lines)
    return (*lines[: MAX_LINES - 1], f"and {len(lines) - MAX_LINES + 1} more")


def _changes(path: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        path_of_setting = (*path, name)
        if name not in before or name not in after:
            yield f"{'.'.join(path_of_setting)}: {'removed' if name in before else 'added'}"
        elif before[name] == after[name]:
            continue
        elif isinstance(before[name], dict) and isinstance(after[name], dict) and name not in {"params", "output"}:
            yield from _changes(path_of_setting, cast(dict[str, Any], before[name]), cast(dict[str, Any], after[name]))
        else:
            yield f"{'.'.join(path_of_setting)}: {_step(path_of_setting, before[name], after[name])}"


def _step(path: tuple[str, ...], before: object, after: object) -> str:
    step = f"{_as_text(before)} → {_as_text(after)}"
    return "changed" if _HIDDEN.intersection(path) or len(step) > _MAX_LENGTH else step


def _as_text(value: object) -> str:
    match value:
        case None:
            return "none"
        case str():
            return value
        case list():
            return "[" + ", ".join(map(_as_text, cast(list[object], value))) + "]"
        case _:
            return str(value)
