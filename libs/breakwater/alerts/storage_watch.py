"""Reports a server that can't store: one incident for each server, however many processes see it fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules, Incidents, decide
from breakwater.alerts.rules.signals import Firing, StorageServer, storage_failing, storage_recovered
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage

PATIENCE_S = 30.0
"""The time that an outage must last: a restart takes less."""
LOOK_EVERY_S = 5.0
REPEAT_EVERY = timedelta(minutes=5)
"""The interval at which an outage that lasts is reported again, so that its incident does not fade."""


def lasting_failure(server: StorageServer, outage: Outage | None, at: datetime, patience_s: float) -> Firing | None:
    """Returns the signal that a server can't store; None if it can, or has failed for a short time only."""
    if outage is None or outage.error is None or outage.lasts_s < patience_s:
        return None
    error = outage.error
    if isinstance(error, UnavailableError):
        return storage_failing(server, str(error), error.remedy, at) if error.server == server else None
    return storage_failing(server, str(error) or type(error).__name__, None, at)


class StorageWatch:
    """Reports the outages of one server that a process meets in its work.

    Args:
        server: the server.
        outage: returns the server's outage; None if it has had none.
        incidents: opens the log of incidents, with the rules of the config.
        now: the clock.
        patience_s: the seconds that an outage must last.
    """

    def __init__(
        self,
        server: StorageServer,
        outage: Callable[[], Outage | None],
        incidents: Callable[[], tuple[IncidentLog, IncidentRules]],
        now: Callable[[], datetime],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._server: StorageServer = server
        self._outage = outage
        self._incidents = incidents
        self._now = now
        self._patience_s = patience_s
        self._reported_at: datetime | None = None

    async def run(self) -> None:
        """Looks every few seconds until it is cancelled."""
        outage = Outage(f"reporting that {self._server} can't store")
        while True:
            await outage.run_logged(self.look, expected=BusError)
            await asyncio.sleep(background.aligned_delay(LOOK_EVERY_S))

    async def look(self) -> None:
        """Reports what has changed. Raises BusError: look again."""
        now = self._now()
        failure = lasting_failure(self._server, self._outage(), now, self._patience_s)
        if failure is None:
            if self._reported_at is not None:
                log, rules = self._incidents()
                await log.apply(storage_recovered(self._server, now), rules)
                self._reported_at = None
        elif self._reported_at is None or now - self._reported_at >= REPEAT_EVERY:
            log, rules = self._incidents()
            await log.decide(lambda incidents: _unless_reported(failure, incidents, rules))
            self._reported_at = now


def _unless_reported(failure: Firing, incidents: Incidents, rules: IncidentRules) -> Alert | None:
    """Returns the next alert of the incident; None if another process has reported the outage just now."""
    current = incidents.of(failure.key)
    is_reported = current is not None and current.status != "resolved" and failure.at - current.last_at < REPEAT_EVERY
    return None if is_reported else decide(failure, current, rules)
