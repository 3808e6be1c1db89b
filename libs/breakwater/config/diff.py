"""What two configs differ in, as lines that may be shown: no secret, no prompt, no address of a provider."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from breakwater.config.models import Config

MOST = 50
"""Lines. Of a config that is rewritten as a whole, nobody reads more."""

_LONGEST = 80
_UNSHOWN = frozenset(
    {"system_prompt", "params", "providers", "channels", "templates", "links", "output", "environment"}
)
"""Settings whose values are not shown: they are long, or may hold what only their owner should read."""


def changes(before: Config, after: Config) -> tuple[str, ...]:
    """What has changed, a line for each setting: `agents.writer.model: "gpt-4o" → "gpt-5"`."""
    left, right = (config.model_dump(mode="json", by_alias=True) for config in (before, after))
    # Agents hold what `defaults` says: a change there is one of each agent that it concerns.
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
