"""The audit log: what people did, the latest first."""

from __future__ import annotations

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import audit_event_of
from breakwater.analytics.window import Window
from breakwater.contracts.events import AuditEvent

MOST = 200
"""How many actions are returned at most."""

ACTIONS = """
SELECT * EXCEPT (event_sequence)
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


async def actions(
    analytics: Analytics, window: Window, *, by: str = "", action: str = "", limit: int = MOST
) -> tuple[AuditEvent, ...]:
    """The actions in a window, of one name or one kind where these are not empty. Raises as `Analytics.query` does."""
    parameters = {"start": window.start, "end": window.end, "by": by, "action": action, "limit": limit}
    return tuple(audit_event_of(row) for row in (await analytics.query(ACTIONS, parameters)).named())


async def names(analytics: Analytics, window: Window) -> tuple[list[str], list[str]]:
    """Who acted in a window, and the kinds of actions. Raises as `Analytics.query` does."""
    bounds = {"start": window.start, "end": window.end}
    people, kinds = (await analytics.query(NAMES, bounds)).rows[0]
    return sorted(people), sorted(kinds)
