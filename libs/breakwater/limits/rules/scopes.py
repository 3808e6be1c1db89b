"""Scopes: the calls that a budget counts, the names that a call counts under, and the combinations that are counted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, get_args

from breakwater.kernel.immutable import immutable
from breakwater.limits.contract import Window

if TYPE_CHECKING:
    from breakwater.jobs.contract.execution import Attempt

EACH = "*"
"""The name that stands for each name by itself."""

WITHIN = " within "
_NAMED = frozenset({"agent", "model", "deployment", "provider", "tenant", "key", "user", "team"})
_MADE_UP = frozenset({"tenant", "user", "team"})
_JOINT = "\v"
"""Between the two parts of a key: no name has a control character."""
_CONTROLS = re.compile(r"[\x00-\x1f]")


def _text_of(kind: str, name: str) -> str:
    if not name:
        return kind
    return f"{kind}={name}" if kind.startswith("tag:") else f"{kind}:{name}"


class ScopePart(NamedTuple):
    """One condition of a scope: `key` and `acme-bot`, or `tag:project` and `web`. The name of `global` is empty."""

    kind: str
    name: str

    def __str__(self) -> str:
        return _text_of(self.kind, self.name)


PLANE = (ScopePart("global", ""),)
"""The scope of all calls."""


def parse_scope(text: str) -> tuple[ScopePart, ...]:
    """Parses a scope as people write it: `key:acme-bot`, `tag:project=web`, `user:* within team:research`, `plane`.

    Raises ValueError, with what a scope looks like.
    """
    parts: list[ScopePart] = []
    for part in text.split(WITHIN):
        if part == "plane" and not parts:
            parts.append(ScopePart("global", ""))
            continue
        kind, colon, name = part.partition(":")
        if kind == "tag":
            tag, colon, name = name.partition("=")
            kind = f"tag:{tag}"
        is_known = kind in _NAMED or kind.startswith("tag:")
        if not (is_known and colon and name and kind != "tag:"):
            raise ValueError(
                f"{part!r} is no scope: it is `plane`, or agent, model, deployment, provider, tenant, key, user or "
                "team with a name (`key:acme-bot`, `user:*` for each), or `tag:<name>=<value>`"
            )
        parts.append(ScopePart(kind, name))
    if len(parts) > 2 or len({part.kind for part in parts}) < len(parts):
        raise ValueError("a scope has at most two different parts: `user:* within team:research`")
    if len(parts) == 2 and parts[1].kind == "global":
        raise ValueError("everything is within the plane")
    return tuple(parts)


def key_of(parts: Iterable[ScopePart]) -> str:
    """Returns the key of a scope among the counters of a period, such as `agent:writer`."""
    return _JOINT.join(map(str, parts))


def parts_of(key: str) -> tuple[ScopePart, ...]:
    """Returns the parts of a scope, by its key."""
    return tuple(_part_of(part) for part in key.split(_JOINT))


def _part_of(text: str) -> ScopePart:
    kind, _, name = text.partition(":")
    if kind != "tag":
        return ScopePart(kind, name)
    tag, _, value = name.partition("=")
    return ScopePart(f"tag:{tag}", value)


def may_be_made_up(parts: Iterable[ScopePart]) -> bool:
    """Returns True if the senders of jobs may make up a name of a scope."""
    return any(part.kind in _MADE_UP or part.kind.startswith("tag:") for part in parts)


def scope_text(key: str) -> str:
    """Returns a scope's key as people write it."""
    return key.replace(_JOINT, WITHIN)


def scope_of(parts: tuple[ScopePart, ...]) -> str:
    """Returns a scope as `parse_scope` reads it: `plane`, `user:* within team:research`."""
    return "plane" if parts == PLANE else scope_text(key_of(parts))


def patterns_of(parts: tuple[ScopePart, ...]) -> Iterable[tuple[ScopePart, ...]]:
    """Returns the scopes whose limit may be that of a scope, the most particular first."""
    choices = [(part, ScopePart(part.kind, EACH)) if part.name else (part,) for part in parts]
    return product(*choices)


def scope_in_words(key: str) -> str:
    """Returns a scope as a part of a sentence: `the plane`, `agent writer`, `user ann within team research`."""
    parts = [str(part).replace(":", " ", 1) for part in parts_of(key)]
    return "the plane" if parts == ["global"] else WITHIN.join(parts)


def key_from_text(text: str) -> str:
    """Returns the key of a scope that is written as `scope_text` writes it."""
    if text == "plane":
        return "global"
    scope, _, within = text.rpartition(WITHIN)
    is_part = within.partition(":")[0] in {*_NAMED, "tag"}  # names may have that word, too
    return f"{scope}{_JOINT}{within}" if scope and is_part else text


def dimension_of(key: str, window: Window) -> Dimension:
    """Returns the dimension that a scope is counted in."""
    return Dimension(tuple(part.kind for part in parts_of(key)), window)


@immutable()
class CallNames:
    """The names that a call counts under."""

    agent: str
    tenant: str | None = None
    model: str | None = None
    provider: str | None = None
    key: str | None = None
    user: str | None = None
    team: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    deployment: str | None = None

    @classmethod
    def of(cls, attempt: Attempt) -> CallNames:
        """Returns the names of a recorded call."""
        return cls(
            attempt.agent,
            attempt.tenant,
            attempt.model,
            attempt.provider,
            attempt.submitted_by,
            attempt.user,
            attempt.team,
            tuple(attempt.cost_tags.items()),
            attempt.deployment,
        )

    def of_kind(self, kind: str) -> str | None:
        """Returns the call's name of a kind: empty for `global`, None if it has none.

        A tag is any text of a job's metadata. One with a control character names nothing, as keys of scopes and
        reservations are separated by those.
        """
        if kind == "global":
            return ""
        if kind.startswith("tag:"):
            tag = kind.removeprefix("tag:")
            value = next((value for name, value in self.tags if name == tag), None)
            return None if value is not None and _CONTROLS.search(value) else value
        return getattr(self, kind)


class Dimension(NamedTuple):
    """A combination of kinds of names whose calls are counted by window: `("user", "team")` and `monthly`."""

    kinds: tuple[str, ...]
    window: Window

    def key(self, names: CallNames) -> str | None:
        """Returns the scope in which a call counts; None if it lacks a name."""
        return key_of_call(self.kinds, names)


def key_of_call(kinds: Iterable[str], names: CallNames) -> str | None:
    """Returns the key of the scope of some kinds in which a call counts; None if it lacks a name."""
    key = ""
    for kind in kinds:
        name = names.of_kind(kind)
        if name is None:
            return None
        part = _text_of(kind, name)
        key = f"{key}{_JOINT}{part}" if key else part
    return key


DAY_AND_MONTH: tuple[Window, Window] = ("daily", "monthly")
BASE: tuple[Dimension, ...] = tuple(
    Dimension((kind,), window) for kind in ("global", "agent", "tenant") for window in DAY_AND_MONTH
)
"""The dimensions that are always counted."""

MAX_DIMENSIONS = 20
"""The most further combinations of kinds of names and windows that are counted: a call counts in each of them."""

_PENDING = "+"


@dataclass(frozen=True)
class Dimensions:
    """The dimensions that are counted beside those of `BASE`.

    Attributes:
        complete: those whose counters have all of the record.
        pending: those that are counted from now on, and lack the past.
    """

    complete: frozenset[Dimension] = frozenset()
    pending: frozenset[Dimension] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Dimensions:
        """Parses the text of `text`."""
        dimensions: dict[bool, set[Dimension]] = {False: set(), True: set()}
        for line in text.split("\n") if text else ():
            kinds, _, window = line.removeprefix(_PENDING).partition("\t")
            dimension = Dimension(tuple(kinds.split(_JOINT)), _WINDOWS[window])
            dimensions[line.startswith(_PENDING)].add(dimension)
        return cls(frozenset(dimensions[False]), frozenset(dimensions[True]))

    @cached_property
    def text(self) -> str:
        """The dimensions as Redis has them: equal for equal ones."""
        lines = (
            f"{mark}{_JOINT.join(dimension.kinds)}\t{dimension.window}"
            for mark, dimensions in (("", self.complete), (_PENDING, self.pending))
            for dimension in dimensions
        )
        return "\n".join(sorted(lines))

    @cached_property
    def all(self) -> tuple[Dimension, ...]:
        """All that are counted, those of `BASE` first."""
        return (*BASE, *sorted(self.complete | self.pending))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of names that matter."""
        return tuple(sorted({kind for dimension in self.all for kind in dimension.kinds}))

    def including(self, needed: frozenset[Dimension]) -> Dimensions:
        """Returns these and the needed ones, of which new ones are pending; if those are too many, the needed ones."""
        every = Dimensions(self.complete, self.pending | (needed - self.complete))
        if len(every.complete) + len(every.pending) <= MAX_DIMENSIONS:
            return every
        return Dimensions(every.complete & needed, every.pending & needed)

    def keys(self, names: CallNames) -> tuple[tuple[Window, str], ...]:
        """Returns the scopes in which a call counts, each with its window."""
        keys = ((dimension, dimension.key(names)) for dimension in self.all)
        return tuple((dimension.window, key) for dimension, key in keys if key is not None)


_WINDOWS: dict[str, Window] = {window: window for window in get_args(Window)}
ONLY_BASE = Dimensions()
