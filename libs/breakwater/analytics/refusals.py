"""Calls that were held back: by a provider that limits how often it is called, or by the plane before they were made.

By when they began; money plays no part in it. How the tables are read is told in `overview.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from breakwater.analytics.client import Analytics
from breakwater.analytics.figures import CALLED, SETTINGS, within
from breakwater.analytics.window import Window

REFUSALS = f"""
SELECT
    agent,
    ifNull(error_kind, '') AS kind,
    refused_by AS by,
    NOT short_circuited AS called,
    count() AS attempts,
    max(started_at) AS last_at
{CALLED}
    AND (short_circuited OR error_kind = 'rate_limit')
GROUP BY agent, kind, by, called
ORDER BY attempts DESC, agent, kind, by
{SETTINGS}"""


@dataclass(frozen=True, slots=True)
class RefusalLine:
    """The attempts of an agent that were held back by one thing."""

    agent: str
    kind: str
    """`breakwater.contracts.execution.ErrorKind`; empty where it was not told."""
    by: str | None
    """The budget or the limit that had no room, such as `agent:writer/daily`; None where it was neither."""
    called: bool
    """Whether the provider was asked, and refused; else nothing was called."""
    attempts: int
    last_at: datetime
    """When the latest of them began."""


async def refusals(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[RefusalLine, ...]:
    """What was held back, the most frequent first. Raises as `Analytics.query` does."""
    found = await analytics.query(REFUSALS, within(window, agent))
    return tuple(RefusalLine(**row) for row in found.named())
