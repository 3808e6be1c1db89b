"""What breakers did in a window of time: their changes of state, how long each was open, and operator actions.

All is read with FINAL: a change that was stored twice counts once. These tables are small, as a breaker that works
changes rarely.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import Window
from breakwater.contracts.events import BreakerTransition
from breakwater.contracts.types import ms_from_time

MOST = 200
"""How many changes, or operator actions, are returned at most: the latest."""

TRANSITIONS = """
SELECT * EXCEPT (event_sequence)
FROM breaker_transitions FINAL
WHERE agent = {agent:String} AND model = {model:String}
    AND at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
ORDER BY at DESC, version DESC, event_sequence DESC
LIMIT {limit:UInt32}
"""

OPENINGS = """
SELECT agent, model, rule, reason, opened_at, closed_at
FROM breaker_openings
WHERE opened_at < {end:DateTime64(3, 'UTC')}
    AND (closed_at IS NULL OR closed_at > {start:DateTime64(3, 'UTC')})
    AND ({agent:String} = '' OR agent = {agent:String})
    AND ({model:String} = '' OR model = {model:String})
ORDER BY opened_at DESC, agent, model
"""

OPERATOR_ACTIONS = """
SELECT at, by, what, agent, model, task_id, tenant, reason
FROM (
    SELECT at, ifNull(by, '') AS by, if(to_state = 'isolated', 'isolated', 'reset') AS what, agent,
        toNullable(toString(model)) AS model, CAST(NULL, 'Nullable(String)') AS task_id,
        CAST(NULL, 'Nullable(String)') AS tenant, reason, event_sequence
    FROM breaker_transitions FINAL
    WHERE breaker_transitions.by IS NOT NULL
    UNION ALL
    SELECT at, ifNull(by, '') AS by, 'reset' AS what, agent, CAST(NULL, 'Nullable(String)') AS model,
        toNullable(guard_events.task_id) AS task_id, CAST(tenant, 'Nullable(String)') AS tenant, reason, event_sequence
    FROM guard_events FINAL
    WHERE kind = 'reset'
)
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
ORDER BY at DESC, event_sequence DESC
LIMIT {limit:UInt32}
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """A stretch of time in which a breaker was not closed: open, isolated, or probed."""

    agent: str
    model: str
    rule: str | None
    """What opened it; None where a person did."""
    reason: str
    opened_at: datetime
    closed_at: datetime | None
    """None while it goes on."""
    open_ms: int
    """How long it lasted, or has lasted."""
    in_window_ms: int
    """How much of that lies in the window."""


@dataclass(frozen=True, slots=True)
class Act:
    """An operator action on a breaker or a stopped task."""

    at: datetime
    by: str
    what: str
    """`isolated` or `reset`."""
    agent: str
    model: str | None
    """None where it is a task's."""
    task_id: str | None
    tenant: str | None
    reason: str


async def transitions(
    analytics: Analytics, window: Window, agent: str, model: str, *, limit: int = MOST
) -> tuple[BreakerTransition, ...]:
    """The latest changes of one breaker in a window, the last one first. Raises as `Analytics.query` does."""
    parameters = {**_within(window, agent, model), "limit": limit}
    return await analytics.read(BreakerTransition, TRANSITIONS, parameters)


async def openings(
    analytics: Analytics, window: Window, now: datetime, agent: str = "", model: str = ""
) -> tuple[Opening, ...]:
    """The times that breakers were open in a window, the latest first.

    Args:
        analytics: the database.
        window: those count that have a moment in it.
        now: until when one that goes on has lasted.
        agent: only this one's; `*` for those that agents share.
        model: only on this one.

    Raises as `Analytics.query` does.
    """
    rows = await analytics.read(dict[str, Any], OPENINGS, _within(window, agent, model))
    return tuple(_opening(row, window, now) for row in rows)


async def operator_actions(analytics: Analytics, window: Window, *, limit: int = MOST) -> tuple[Act, ...]:
    """What people did in a window, the latest first. Raises as `Analytics.query` does."""
    return await analytics.read(Act, OPERATOR_ACTIONS, {"start": window.start, "end": window.end, "limit": limit})


def _within(window: Window, agent: str, model: str) -> dict[str, object]:
    return {"start": window.start, "end": window.end, "agent": agent, "model": model}


def _opening(row: dict[str, Any], window: Window, now: datetime) -> Opening:
    start, end = ms_from_time(row["opened_at"]), ms_from_time(row["closed_at"] or now)
    inside = min(end, window.end_ms) - max(start, window.start_ms)
    return Opening(**row, open_ms=max(end - start, 0), in_window_ms=max(inside, 0))
