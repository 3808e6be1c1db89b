"""Records signals as changes of incidents."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from breakwater.alerts.rules.incidents import IncidentRules, Incidents
from breakwater.alerts.rules.signals import Signal
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.nats.errors import PublishRefusedError


@dataclass(frozen=True, slots=True)
class IncidentRecorder:
    """The log of incidents, with the rules by which signals change them."""

    log: IncidentLog
    rules: IncidentRules

    @property
    def known(self) -> Incidents:
        """The incidents as they were read last."""
        return self.log.incidents

    async def apply(self, signal: Signal) -> None:
        """Records a signal. Raises PublishRefusedError, ValidationError: it can't be recorded."""
        await self.log.apply(signal, self.rules)

    async def record(self, signal: Signal) -> None:
        """Records a signal; one that can't be recorded is logged."""
        try:
            await self.apply(signal)
        except (ValidationError, PublishRefusedError) as error:
            # Names in an event may be longer than those of an alert: better one alert less than none after it.
            reason = error.title if isinstance(error, ValidationError) else str(error)
            structlog.get_logger().error("alert_impossible", key=signal.key, error=reason)
