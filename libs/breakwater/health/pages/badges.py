"""Figures next to links of the navigation: open incidents and dead letters."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from breakwater.alerts.contract import AlertList
from breakwater.client import ApiClient, ApiKeyRefusedError
from breakwater.identity.pages.pages import fetched
from breakwater.identity.pages.sessions import Badge, KnownSession, Session
from breakwater.jobs.contract.dead_letters import DeadLetterList
from breakwater.kernel.formats import counted

FRESH_S = 10.0
"""The time for which a session's figures are shown before they are read again."""
FIRST_WAIT_S = 0.3
"""The longest time that the first page of a session waits for them; later ones show those of before meanwhile."""
MOST = 99
"""Incidents that are read; more are shown as `99+`."""


async def renew(session: Session) -> None:
    """Reads the figures of a session again, if they are old. No page fails or waits because of them."""
    known, now = session.known, time.monotonic()
    if now - known.badges_read_at > FRESH_S:
        known.badges_read_at = now
        known.reading_badges = asyncio.create_task(_read(session.api, known))
        if not known.badges:
            await asyncio.wait([known.reading_badges], timeout=FIRST_WAIT_S)


async def _read(api: ApiClient, known: KnownSession) -> None:
    with suppress(ApiKeyRefusedError):  # the next page says so
        incidents, dead_letters = await asyncio.gather(
            fetched(api.read(AlertList, "alerts", {"limit": MOST})),
            fetched(api.read(DeadLetterList, "dlq", {"limit": 1})),
        )
        if (alerts := incidents.value) is not None:
            text = f"{len(alerts.alerts)}{'+' * alerts.more}"
            _, of = counted(len(alerts.alerts), "open incident").split(" ", 1)
            tone = "bad" if any(one.severity == "critical" for one in alerts.alerts) else "warn"
            known.badges["/alerts"] = Badge(text if alerts.alerts else "", of, tone)
        if (listed := dead_letters.value) is not None:
            number = sum(one.count for one in listed.counts)
            text, of = counted(number, "dead letter").split(" ", 1)
            known.badges["/dead-letters"] = Badge(text if number else "", of, "")
