"""`/api/v1/alerts`: the incidents, and operator actions on them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from itertools import islice

from breakwater.bus.incidents import IncidentLog, Incidents
from breakwater.contracts.alerts import Alert, AlertList, AlertQuery, AlertRequest, UnchangedAlert
from breakwater.contracts.types import Message, ms_from_time, time_from_ms
from breakwater.contracts.validation import FieldError
from breakwater.policy.alert_rules import began_with
from breakwater.policy.incidents import acknowledge, resolve
from services.request.parsing import suggestion
from services.request.problems import Problem
from services.request.routing import ApiRequest

LEAST_OF_ID = len("inc_") + 6
"""What must be given of an incident's id, at the least."""

Act = Callable[[Alert, str, "str | None", datetime], "Alert | None"]
"""An operator action on an incident: by whom, why and when. It returns None where there is nothing to do."""


def utc_now() -> datetime:
    """In whole milliseconds, as times are on the wire."""
    return time_from_ms(ms_from_time(datetime.now(UTC)))


class AlertRoutes:
    """The incidents of the fleet, for people."""

    def __init__(self, log: IncidentLog, agents: Collection[str], now: Callable[[], datetime] = utc_now) -> None:
        self._log = log
        self._agents = agents
        self._now = now

    async def show(self, asked: ApiRequest[AlertQuery]) -> AlertList:
        """Those that match, the one that was opened last first."""
        wanted, known = asked.form, (await self._log.catch_up()).all()
        if wanted.agent is not None:
            agents = {*self._agents, *(alert.agent for alert in known if alert.agent is not None)}
            if wanted.agent not in agents:
                message = f"no agent {wanted.agent!r} is known{suggestion(wanted.agent, agents)}"
                raise Problem(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        newest = sorted(known, key=lambda alert: alert.opened_at, reverse=True)
        found = tuple(islice((alert for alert in newest if _is_wanted(alert, wanted)), wanted.limit + 1))
        return AlertList(alerts=found[: wanted.limit], more=len(found) > wanted.limit)

    async def show_one(self, asked: ApiRequest[Message]) -> Alert:
        """The newest alert of one."""
        return named(await self._log.catch_up(), asked.path["incident_id"])

    async def acknowledge(self, asked: ApiRequest[AlertRequest]) -> Alert:
        """Acknowledges an incident, and publishes that."""
        return await self._act(asked, "incident_acknowledged", acknowledge)

    async def resolve(self, asked: ApiRequest[AlertRequest]) -> Alert:
        """Resolves an incident, and publishes that."""
        return await self._act(asked, "incident_resolved", resolve)

    async def _act(self, asked: ApiRequest[AlertRequest], what: str, act: Act) -> Alert:
        alert, changed = await decided(
            self._log,
            lambda known: named(known, asked.form.incident_id),
            lambda alert: act(alert, asked.by, asked.why or None, self._now()),
        )
        asked.log(what, incident_id=alert.incident_id, changed=changed)
        return alert if changed else UnchangedAlert.model_validate({**alert.model_dump(), "unchanged": True})


async def decided(
    log: IncidentLog, which: Callable[[Incidents], Alert], act: Callable[[Alert], Alert | None]
) -> tuple[Alert, bool]:
    """Applies an operator action to an incident.

    Args:
        log: of all incidents.
        which: picks the incident; what it raises is raised here.
        act: the action. It may be called repeatedly, where others decide at the same time.

    Returns:
        The incident as it is then, and whether this call changed it.

    Raises:
        BusError: whether it is done is not known; to do it again does no harm.
    """
    incident_id = which(await log.catch_up()).incident_id
    current: Alert | None = None

    def decide(known: Incidents) -> Alert | None:
        nonlocal current
        current = known.get(incident_id) or which(known)
        return act(current)

    alert = await log.decide(decide)
    if alert is not None:
        return alert, True
    assert current is not None  # `decide` was called at least once
    return current, False


def named(known: Incidents, name: str) -> Alert:
    """The incident of an id, or of the beginning of one. Raises Problem: there is none, or more than one."""
    if (alert := known.get(name)) is not None:
        return alert
    long_enough = len(name) >= LEAST_OF_ID
    begin_so = [alert for alert in known.all() if alert.incident_id.startswith(name)] if long_enough else []
    if len(begin_so) == 1:
        return begin_so[0]
    if begin_so:
        details = [
            FieldError(path="incident_id", message=f"{alert.incident_id} is {alert.title!r}") for alert in begin_so[:20]
        ]
        message = f"{len(begin_so)} incidents begin with {name!r}; give more of the id"
        raise Problem(409, "ambiguous_incident", message, details)
    hint = (
        "those resolved long ago are only in ClickHouse; `breakwater alerts list --status all` lists what is known"
        if long_enough
        else "give its id, or the beginning of it: `inc_` and at least 6 characters"
    )
    message = f"no incident {name!r} is known; {hint}"
    raise Problem(404, "unknown_incident", message, [FieldError(path="incident_id", message=hint)])


def _is_wanted(alert: Alert, wanted: AlertQuery) -> bool:
    match wanted.status:
        case "all":
            pass
        case "unresolved":
            if alert.status == "resolved":
                return False
        case status:
            if alert.status != status:
                return False
    if wanted.event is not None and wanted.event not in (alert.event, began_with(alert)):
        return False
    return wanted.agent is None or alert.agent == wanted.agent
