"""What Prometheus is shown of incidents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from breakwater.bus.incidents import IncidentLog
from breakwater.contracts.alerts import Alert, IncidentStatus
from breakwater.metrics import INCIDENTS, Readings
from breakwater.policy.alert_rules import SEVERITY_OF, began_with, highest_severity


class IncidentGauges:
    """Reads them from ALERTS; only what is new, once it was read through."""

    def __init__(self, log: IncidentLog) -> None:
        self._log = log

    async def read(self) -> Readings:
        """Those that are not over. Raises BusUnavailable."""
        return {INCIDENTS: by_labels((await self._log.catch_up()).unresolved())}


def by_labels(incidents: Iterable[Alert]) -> dict[tuple[str, ...], float]:
    """How many incidents there are of each event, severity and status: 0 of those that there are none of."""
    counts = {
        (event, severity, status): 0.0
        for event, severity in SEVERITY_OF.items()
        for status in get_args(IncidentStatus)
        if status != "resolved"
    }
    return counts | Counter((began_with(one), highest_severity(one), one.status) for one in incidents)
