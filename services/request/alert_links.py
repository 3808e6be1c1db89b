"""`/alerts/{incident_id}`: where a signed link in a message leads, for people without an API key.

Looking changes nothing, as mail scanners and previews in chats follow links too; what the form on the page sends does.
The form needs no token against forged requests: no cookie stands for a person here, the signature in the address is the
whole permission, and a foreign page that knew it could do the same by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlencode

import structlog
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.errors import BusError
from breakwater.contracts.alerts import Alert
from breakwater.contracts.api import ReasonText
from breakwater.contracts.types import Message
from breakwater.contracts.validation import problems
from breakwater.incidents import IncidentLog, Incidents
from breakwater.policy.incidents import acknowledge, resolve
from breakwater.policy.links import link_objection
from breakwater.policy.redact import Redactor
from services.request.alert_pages import Pages
from services.request.alerts import decided, utc_now
from services.request.body import read_body
from services.request.by_hand import MAX_BYTES
from services.request.problems import Problem

_MOST_FIELDS = 10
_LABELS = {"name": "Your name", "reason": "Reason", "action": "What to do"}


class LinkForm(Message):
    """What a person fills in."""

    name: Annotated[ReasonText, Field(min_length=1, max_length=80)]
    reason: ReasonText = ""
    action: Literal["acknowledge", "resolve"]


class LinkRoutes:
    """The page of an incident, for whoever has a link to it."""

    def __init__(
        self, secret: str, log: IncidentLog, redactor: Redactor, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._secret = secret
        self._log = log
        self._redactor = redactor
        self._now = now
        self._pages = Pages()

    async def show(self, request: Request) -> Response:
        """GET: 200 with the incident as it is."""
        if (objection := self._objection(request)) is not None:
            return objection
        try:
            known = await self._log.catch_up()
            return self._pages.incident(_linked(known, request))
        except (Problem, BusError) as error:
            return self._trouble(error)

    async def act(self, request: Request) -> Response:
        """POST: 303 to the page once it is done; 200 where there was nothing to do."""
        if (objection := self._objection(request)) is not None:
            return objection
        try:
            return await self._act(request, _fields(await read_body(request, MAX_BYTES, "this is too long")))
        except (Problem, BusError) as error:
            return self._trouble(error)

    async def _act(self, request: Request, given: dict[str, str]) -> Response:
        try:
            form = LinkForm.model_validate(given)
        except ValidationError as error:
            alert = _linked(await self._log.catch_up(), request)
            return self._pages.incident(alert, status=422, wrong=_in_words(error), given=given)
        by = f"{self._redactor.text(form.name)} (by link)"
        why = self._redactor.text(form.reason) or None
        step = acknowledge if form.action == "acknowledge" else resolve
        alert, changed = await decided(
            self._log, lambda known: _linked(known, request), lambda alert: step(alert, by, why, self._now())
        )
        structlog.get_logger().info(
            "incident_acted_on_by_link",
            action=form.action,
            by=by,
            why=why,
            incident_id=alert.incident_id,
            changed=changed,
        )
        if not changed:
            return self._pages.incident(alert, wrong="Nothing was changed: it is so already.")
        # Relative, as a proxy may serve us below a path of its own; and of the query, only what is signed.
        signed = {name: request.query_params.get(name, "") for name in ("expires", "signature")}
        return self._pages.seen(f"?{urlencode(signed)}")

    def _objection(self, request: Request) -> Response | None:
        """Comes before anything is read or looked up: what has no signature costs nothing."""
        asked = request.query_params
        why = link_objection(
            self._secret,
            request.path_params["incident_id"],
            asked.get("expires", ""),
            asked.get("signature", ""),
            self._now(),
        )
        return None if why is None else self._pages.message("This link can't be followed", why, 403)

    def _trouble(self, error: Problem | BusError) -> Response:
        if isinstance(error, Problem):
            return self._pages.message("This was not done", error.message, error.status, error.headers)
        why = f"whether it is done can't be known now: {error}; load this page again"
        return self._pages.message("Breakwater can't answer now", why, 503, {"Retry-After": "1"})


def _linked(known: Incidents, request: Request) -> Alert:
    """The incident that a link is of: all of its id is signed. Raises Problem: it is not known."""
    alert = known.get(request.path_params["incident_id"])
    if alert is None:
        raise Problem(404, "unknown_incident", "nothing is known of this incident any more: it is over for long")
    return alert


def _fields(body: bytes) -> dict[str, str]:
    """What a form sent. Raises Problem: it is none."""
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as error:
        raise Problem(400, "not_a_form", "this is not what the form on this page sends") from error


def _in_words(error: ValidationError) -> str:
    found = problems(error, LinkForm)
    return "; ".join(f"{_LABELS.get(problem.path, problem.path)}: {problem.message}" for problem in found) + "."
