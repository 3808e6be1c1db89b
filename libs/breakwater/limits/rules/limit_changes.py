"""Changes of limits that the plane keeps: what is refused, and the record of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from pydantic_core import from_json

from breakwater.identity.rules.callers import Caller
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.types import is_identifier
from breakwater.limits.contract import Enforcement, LimitEvent, LimitRaise, LimitRecord, LimitSettings
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.rules.limit import OF_SETTINGS, Limit, amount_of
from breakwater.limits.rules.limit_index import PlaneLimit
from breakwater.limits.rules.scopes import BASE, EACH, MAX_DIMENSIONS, PLANE, ScopePart, parse_scope, patterns_of

MAX_PLANE_LIMITS = 30_000
"""The most limits that the plane keeps. Every worker has them in memory."""

MAX_RAISES = 1_000
"""The most raises of one limit at the same time, each for another name."""


class LimitRefusedError(BreakwaterError):
    """A change of a limit is refused. Status, code and field are those of the HTTP API."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field


def invalid(field: str, message: str) -> LimitRefusedError:
    """Returns the refusal of a request whose field is wrong."""
    return LimitRefusedError(422, "invalid_request", message, field)


def check_id(limit_id: str) -> None:
    """Raises LimitRefusedError: a limit that the plane keeps can't have the id."""
    if not is_identifier(limit_id):
        raise invalid("limit_id", "an id has 1 to 128 characters, and no control characters")
    if limit_id.startswith(OF_SETTINGS):
        message = f"ids that begin with {', '.join(OF_SETTINGS)} are those of settings in the config; choose another"
        raise invalid("limit_id", message)


def check_rights(caller: Caller, parts: Collection[ScopePart]) -> None:
    """Checks that a caller may set, delete or raise a limit on a scope.

    Raises LimitRefusedError: the caller is bound to a team, a user or tags, and the scope is not a part of that; or the
    limit holds for its own key, and it may not raise limits.
    """
    if _is_held(caller) and any(part in _own_key(caller) for part in parts):
        message = (
            f"{caller.name!r} can't change limits that hold for its own key; a caller with the scope approve or "
            "operate can"
        )
        raise LimitRefusedError(403, "forbidden", message)
    check_binding(caller, parts)


def check_loosening(caller: Caller, limit: Limit, earlier: Limit) -> None:
    """Checks that a limit is as strict as one that holds, which it replaces or counts instead of.

    Raises LimitRefusedError: it is looser, and the caller may not change the other one.
    """
    modes = get_args(Enforcement)
    ends_earlier = limit.until_ms is not None and limit.until_ms < (earlier.until_ms or limit.until_ms + 1)
    is_looser = (
        limit.amount > earlier.amount
        or modes.index(limit.enforcement) < modes.index(earlier.enforcement)
        or (limit.id == earlier.id and ends_earlier)
    )
    if is_looser and (binding := _binding_beyond(caller, earlier.parts)):
        message = (
            f"{caller.name!r} is bound to {binding}, and can't loosen {earlier.id!r}, which holds for {earlier.scope}"
        )
        raise LimitRefusedError(403, "forbidden", message)


def check_binding(caller: Caller, parts: Collection[ScopePart]) -> None:
    """Raises LimitRefusedError: the caller is bound to a team, a user or tags, and the scope is not a part of that."""
    if binding := _binding_beyond(caller, parts):
        message = (
            f"{caller.name!r} is bound to {binding}, and so may only limit parts of it: `agent:* within {binding}`"
        )
        raise LimitRefusedError(403, "forbidden", message)


def _binding_beyond(caller: Caller, parts: Collection[ScopePart]) -> str:
    """Returns what a caller is bound to, if a scope is not a part of it; otherwise an empty text."""
    required = {ScopePart(kind, name) for kind, name in _binding(caller).items()}
    return "" if required < set(parts) or not required else " and ".join(str(part) for part in sorted(required))


def objection_to_keys(caller: Caller, limits: Iterable[Limit]) -> str | None:
    """Returns why a caller may have no secrets of other keys; None if it may.

    What another key uses does not count for a limit on the caller's own. It does for limits on a user, a team or a tag
    that the caller is bound to, as its keys are bound to the same: one of the same unit holds them. Rates hold nobody.

    Args:
        caller: who makes or rotates a key.
        limits: all that hold.
    """
    if not _is_held(caller):
        return None
    limits = [limit for limit in limits if limit.unit == "usd" or not limit.is_rate]
    binding = _binding(caller)
    bound_units = {
        limit.unit for limit in _refusing(limits, binding) if all(part.kind in binding for part in limit.parts)
    }
    own = next((limit for limit in _refusing(limits, {"key": caller.name}) if limit.unit not in bound_units), None)
    if own is None:
        return None
    return (
        f"{caller.name!r} is limited itself ({own.id}), which the calls of its keys would not count for; bind it to a "
        "user, a team or a tag, and limit that"
    )


def _is_held(caller: Caller) -> bool:
    """Returns True if limits on its key hold a caller: it may not raise them."""
    return caller.kind == "key" and not caller.may(("operate", "approve"))


def _own_key(caller: Caller) -> tuple[ScopePart, ScopePart]:
    return ScopePart("key", caller.name), ScopePart("key", EACH)


def _binding(caller: Caller) -> dict[str, str]:
    """Returns the names that a caller, and so all keys that it makes, are bound to, by their kinds."""
    binding = {"team": caller.team, "user": caller.user}
    binding |= {f"tag:{tag}": value for tag, value in caller.tags.items()}
    return {kind: name for kind, name in binding.items() if name is not None}


def _refusing(limits: Iterable[Limit], names: Mapping[str, str]) -> Iterator[Limit]:
    """Yields the limits that refuse calls with these names, whatever their other names are."""
    of_names = [
        limit
        for limit in limits
        if any(part.kind in names for part in limit.parts)
        and all(part.name in (EACH, names.get(part.kind, part.name)) for part in limit.parts)
    ]
    # One on each name by itself does not count for a name that has a limit of its own.
    particular = {_combination(limit) for limit in of_names if _is_particular(limit, names)}
    for limit in of_names:
        if limit.enforcement == "hard" and (_is_particular(limit, names) or _combination(limit) not in particular):
            yield limit


def _is_particular(limit: Limit, names: Mapping[str, str]) -> bool:
    return all(part.name != EACH for part in limit.parts if part.kind in names)


def _combination(limit: Limit) -> tuple[object, ...]:
    return *(part.kind for part in limit.parts), limit.unit, limit.window


def check_end(until: datetime | None, now: datetime) -> None:
    """Raises LimitRefusedError: the end is over."""
    if until is not None and until <= now:
        message = f"is over: by the clock of the plane it is {now:%Y-%m-%d %H:%M:%S} UTC"
        raise invalid("until", message)


def check_place(limit: Limit, table: LimitTable) -> None:
    """Checks that a limit may be added or changed, given all limits that hold.

    Raises:
        LimitRefusedError: another limit is on the same scope, unit and window; or there are too many limits, or too
            many combinations of kinds of scopes and windows.
    """
    same = table.limit_like(limit)
    if same is not None and same.id != limit.id:
        message = (
            f"the limit {same.id!r} is on the same scope, unit and window; change that one, or raise it if it is in "
            "the config"
        )
        raise LimitRefusedError(409, "limit_exists", message)
    plane_limits = table.plane_limits.limits
    if limit.id not in plane_limits and len(plane_limits) >= MAX_PLANE_LIMITS:
        message = f"the plane keeps {MAX_PLANE_LIMITS:,} limits, which is the most; delete some, or use `*` for each"
        raise LimitRefusedError(409, "too_many_limits", message)
    dimension = limit.calendar_dimension
    combinations: Collection[object] = table.kinds_of_rates if dimension is None else table.dimensions
    combination = limit.kinds if dimension is None else dimension
    if combination not in (*combinations, *BASE) and len(combinations) >= MAX_DIMENSIONS:
        message = (
            f"limits are of {len(combinations)} combinations of kinds of scopes and windows; a call counts in each of "
            f"them, so at most {MAX_DIMENSIONS} are allowed: use one of those, or delete the limits of another"
        )
        raise LimitRefusedError(409, "too_many_dimensions", message)


@dataclass(frozen=True, slots=True)
class Author:
    """The author of a change, with a unique id of the change, the reason and the time."""

    change_id: str
    by: str
    reason: str | None
    at: datetime


def set_limit(limit_id: str, settings: LimitSettings, before: PlaneLimit | None, author: Author) -> LimitRecord:
    """Returns the record of a limit that is made or changed. Raises of another amount end."""
    at = author.at
    record = None if before is None else before.record
    earlier = None if record is None or not _holds(record.limit, at) else record.limit
    raises = () if record is None else record.raises
    return LimitRecord(
        id=limit_id,
        limit=settings,
        before=earlier,
        raises=tuple(
            limit_raise
            for limit_raise in raises
            if limit_raise.until > at and amount_of(settings.unit, limit_raise.configured) == settings.amount
        ),
        change="created" if earlier is None else "changed",
        **_stated(author),
    )


def delete_limit(limit_id: str, before: PlaneLimit, author: Author) -> LimitRecord:
    """Returns the record of a limit that is deleted."""
    record = before.record
    settings = None if record is None else record.limit
    return LimitRecord(id=limit_id, limit=None, before=settings, change="deleted", **_stated(author))


def raise_limit(
    limit_id: str,
    limit_raise: LimitRaise,
    raised_from: str,
    before: PlaneLimit | None,
    author: Author,
    *,
    ends: bool,
) -> LimitRecord:
    """Returns the record of a limit that is raised, from an amount, or whose raise ends.

    Raises LimitRefusedError: there are too many raises.
    """
    record = None if before is None else before.record
    raises = () if record is None else record.raises
    other_raises = tuple(
        earlier for earlier in raises if earlier.scope != limit_raise.scope and earlier.until > author.at
    )
    if len(other_raises) >= MAX_RAISES:
        message = f"the limit is raised for {MAX_RAISES:,} names, which is the most"
        raise LimitRefusedError(409, "too_many_raises", message)
    settings = None if record is None else record.limit
    return LimitRecord(
        id=limit_id,
        limit=settings,
        before=settings,
        raises=other_raises if ends else (*other_raises, limit_raise),
        raised=limit_raise,
        raised_from=raised_from,
        change="raise_ended" if ends else "raised",
        **_stated(author),
    )


def unreadable_limit(document: bytes, before: PlaneLimit | None) -> PlaneLimit | None:
    """Returns what stands for a limit whose record is not readable here, such as that of a later version.

    Its scope is that of the record, or else the one it had before. If neither is readable, it may hold for any call.

    Returns:
        None if there is no limit: it was deleted, or only raises one of the config, which allows less without that.
    """
    scope: tuple[ScopePart, ...] = ()
    try:
        settings = from_json(document)["limit"]
        if settings is None:
            return None
        scope = parse_scope(settings["scope"])
    except (ValueError, LookupError, TypeError, AttributeError):
        if before is not None:
            scope = before.unreadable_scope or (() if before.limit is None else before.limit.parts)
    return PlaneLimit(None, (), b"", scope or PLANE)


def raised_scope(limit: Limit, scope: str | None) -> tuple[ScopePart, ...]:
    """Returns the scope that a limit is to be raised for. Raises LimitRefusedError: the limit is not on it."""
    if {"task", "job"}.intersection(limit.kinds):
        message = f"limits of tasks and jobs can't be raised; change {limit.id} in the config"
        raise LimitRefusedError(409, "not_raisable", message)
    if scope is None:
        if not limit.is_named:
            raise invalid("scope", f"is missing: {limit.scope!r} is each by itself; say whose limit is raised")
        return limit.parts
    try:
        parts = parse_scope(scope)
    except ValueError as error:
        raise invalid("scope", str(error)) from None
    if any("*" in part.name for part in parts) or limit.parts not in set(patterns_of(parts)):
        raise invalid("scope", f"the limit is on {limit.scope!r}, which {scope!r} is no name of")
    return parts


def event_of(record: LimitRecord, scope: str) -> LimitEvent:
    """Returns the event of a change of a limit on a scope."""
    raised = record.raised
    return LimitEvent(
        event_id=record.change_id,
        kind=record.change,
        limit_id=record.id,
        scope=scope if raised is None or raised.scope is None else raised.scope,
        before=record.before,
        after=record.limit,
        raised=raised,
        by=record.by,
        reason=record.reason,
        at=record.at,
    )


def _stated(author: Author) -> dict[str, Any]:
    return {"change_id": author.change_id, "by": author.by, "reason": author.reason, "at": author.at}


def _holds(settings: LimitSettings | None, at: datetime) -> bool:
    return settings is not None and (settings.until is None or settings.until > at)
