"""The audit log: what people did, the latest first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic_core import from_json

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import Window

MOST = 200
"""How many actions are returned at most."""

ACTIONS = """
SELECT at, by, actor, actor_id, action, outcome, error, reason, details
FROM audit FINAL
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
    AND ({by:String} = '' OR by = {by:String}) AND ({action:String} = '' OR action = {action:String})
ORDER BY at DESC, audit_id DESC
LIMIT {limit:UInt32}
"""

NAMES = """
SELECT groupUniqArray(by) AS people, groupUniqArray(action) AS actions
FROM audit
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
"""


@dataclass(frozen=True, slots=True)
class Action:
    """A person's action."""

    at: datetime
    by: str
    actor: str
    """`key`, `person` or `link`."""
    actor_id: str | None
    action: str
    outcome: str
    error: str | None
    reason: str | None
    details: dict[str, Any]


async def actions(
    analytics: Analytics, window: Window, *, by: str = "", action: str = "", limit: int = MOST
) -> tuple[Action, ...]:
    """The actions in a window, of one name or one kind where these are not empty. Raises as `Analytics.query` does."""
    parameters = {"start": window.start, "end": window.end, "by": by, "action": action, "limit": limit}
    rows = (await analytics.query(ACTIONS, parameters)).named()
    return tuple(Action(**{**row, "details": from_json(row["details"])}) for row in rows)


async def names(analytics: Analytics, window: Window) -> tuple[list[str], list[str]]:
    """Who acted in a window, and the kinds of actions. Raises as `Analytics.query` does."""
    bounds = {"start": window.start, "end": window.end}
    people, kinds = (await analytics.query(NAMES, bounds)).rows[0]
    return sorted(people), sorted(kinds)
