"""The figures next to links of the navigation: open incidents and dead letters."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from breakwater.alerts.contract import AlertList
from breakwater.client import ApiClient, ApiKeyRefusedError
from breakwater.identity.pages.rendering import fetch_part
from breakwater.identity.pages.sessions import Badge, CachedSession, Session
from breakwater.jobs.contract.dead_letters import DeadLetterList
from breakwater.kernel.formats import quantity

FRESH_S = 10.0
"""Seconds after which a session's figures are read again."""
FIRST_WAIT_S = 0.3
"""Seconds for which the first page of a session waits for the figures; later pages show the previous ones meanwhile."""
MAX_INCIDENTS = 99
"""Maximum number of incidents that are read; more are shown as `99+`."""


async def renew(session: Session) -> None:
    """Reads the figures of a session again if they are old. No page fails or waits long because of them."""
    cached = session.cached
    now = time.monotonic()
    if now - cached.badges_read_at > FRESH_S:
        cached.badges_read_at = now
        cached.reading_badges = asyncio.create_task(_read(session.api, cached))
        if not cached.badges:
            await asyncio.wait([cached.reading_badges], timeout=FIRST_WAIT_S)


async def _read(api: ApiClient, cached: CachedSession) -> None:
    with suppress(ApiKeyRefusedError):  # the next page reports it
        incidents, dead_letters = await asyncio.gather(
            fetch_part(api.read(AlertList, "alerts", {"limit": MAX_INCIDENTS})),
            fetch_part(api.read(DeadLetterList, "dlq", {"limit": 1})),
        )
        alerts = incidents.value
        if alerts is not None:
            text = f"{len(alerts.alerts)}{'+' * alerts.more}"
            _, noun = quantity(len(alerts.alerts), "open incident").split(" ", 1)
            tone = "bad" if any(alert.severity == "critical" for alert in alerts.alerts) else "warn"
            cached.badges["/alerts"] = Badge(text if alerts.alerts else "", noun, tone)
        dead_letter_list = dead_letters.value
        if dead_letter_list is not None:
            total = sum(count.count for count in dead_letter_list.counts)
            text, noun = quantity(total, "dead letter").split(" ", 1)
            cached.badges["/dead-letters"] = Badge(text if total else "", noun, "")
