"""`/alerts/{incident_id}`: the page of a signed link in a message, for people without an API key.

A GET changes nothing, because mail scanners and link previews follow links, too; only submitting the form does. The
form needs no CSRF token: there are no cookies, and the signature in the URL is the whole permission. A foreign page
that knew the signature could act without the form.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.resources import files
from typing import Annotated, Literal
from urllib.parse import parse_qsl, urlencode

import structlog
from jinja2 import Environment
from markupsafe import Markup, escape
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from breakwater.alerts.api.alerts import apply_to_incident
from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import began_with, concerned_agents, highest_severity
from breakwater.alerts.rules.incidents import Incidents, acknowledge, resolve
from breakwater.alerts.rules.links import link_objection
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.identity.audit import Actor, AuditLog
from breakwater.identity.operations import utc_now
from breakwater.kernel.formats import moment, sentence
from breakwater.kernel.http.bodies import read_open_body
from breakwater.kernel.http.contract import ReasonText
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.types import Message, format_time
from breakwater.kernel.validation import problems
from breakwater.redaction.rules.redact import Redactor

_MAX_FIELDS = 10
_STATE = {
    "firing": "Firing",
    "pending": "Needs an operator",
    "acknowledged": "Acknowledged",
    "resolved": "Resolved",
}
_ACTIONS = {"acknowledged": ("resolve",), "resolved": ()}
"""Possible actions by status; for any other status, both."""
_LABELS = {"name": "Your name", "reason": "Reason", "action": "What to do"}


class LinkForm(Message):
    """The fields of the form."""

    name: Annotated[ReasonText, Field(min_length=1, max_length=80)]
    reason: ReasonText = ""
    action: Literal["acknowledge", "resolve"]


class LinkRoutes:
    """The page of an incident, for those who have a signed link to it."""

    def __init__(
        self,
        secret: str,
        log: IncidentLog,
        redactor: Redactor,
        audit: AuditLog,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._secret = secret
        self._log = log
        self._redactor = redactor
        self._audit = audit
        self._now = now
        self._pages = _Pages()

    async def show(self, request: Request) -> Response:
        """Responds to a GET with 200 and the incident."""
        if (objection := self._objection(request)) is not None:
            return objection
        try:
            incidents = await self._log.catch_up()
            return self._pages.incident(_incident_of(incidents, request))
        except (RequestError, BusError) as error:
            return self._error_page(error)

    async def act(self, request: Request) -> Response:
        """Responds to a POST with 303 to the page once the action is done, or with 200 if there was nothing to do."""
        if (objection := self._objection(request)) is not None:
            return objection
        try:
            return await self._act(request, _fields(await read_open_body(request)))
        except (RequestError, BusError) as error:
            return self._error_page(error)

    async def _act(self, request: Request, fields: dict[str, str]) -> Response:
        try:
            form = LinkForm.model_validate(fields)
        except ValidationError as error:
            alert = _incident_of(await self._log.catch_up(), request)
            return self._pages.incident(alert, status=422, problem=_explanation(error), fields=fields)
        name = self._redactor.text(form.name)
        by = f"{name} (by link)"
        why = self._redactor.text(form.reason) or None
        change = acknowledge if form.action == "acknowledge" else resolve
        details = {"incident_id": request.path_params["incident_id"]}
        async with self._audit.action(f"{form.action}_incident", Actor(name, "link"), details, why):
            alert, changed = await apply_to_incident(
                self._log,
                lambda incidents: _incident_of(incidents, request),
                lambda alert: change(alert, by, why, self._now()),
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
            return self._pages.incident(alert, problem="Nothing was changed: it is already in this state.")
        # The URL is relative, as a proxy may serve us below a path of its own. Only the signed parameters are kept.
        signed = {name: request.query_params.get(name, "") for name in ("expires", "signature")}
        return self._pages.see_other(f"?{urlencode(signed)}")

    def _objection(self, request: Request) -> Response | None:
        """Checks the signature before anything is read or looked up, so that a request without one costs nothing."""
        query = request.query_params
        why = link_objection(
            self._secret,
            request.path_params["incident_id"],
            query.get("expires", ""),
            query.get("signature", ""),
            self._now(),
        )
        return None if why is None else self._pages.message("This link is not valid", why, 403)

    def _error_page(self, error: RequestError | BusError) -> Response:
        if isinstance(error, RequestError):
            return self._pages.message("This was not done", error.message, error.status, error.headers)
        why = f"it is unknown whether it was done: {error}; reload this page"
        return self._pages.message("Breakwater can't respond now", why, 503, {"Retry-After": "1"})


def _incident_of(incidents: Incidents, request: Request) -> Alert:
    """Returns the incident of a link, whose whole id is signed. Raises RequestError: it is not known."""
    alert = incidents.get(request.path_params["incident_id"])
    if alert is None:
        raise RequestError(404, "unknown_incident", "this incident is no longer known: it was resolved long ago")
    return alert


def _fields(body: bytes) -> dict[str, str]:
    """Parses the fields of a form. Raises RequestError: the body is not a form."""
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError as error:
        raise RequestError(400, "not_a_form", "this request does not come from the form on this page") from error


def _explanation(error: ValidationError) -> str:
    field_errors = problems(error, LinkForm)
    return "; ".join(f"{_LABELS.get(problem.path, problem.path)}: {problem.message}" for problem in field_errors) + "."


class _Pages:
    """Writes the pages. The template escapes everything that comes from an incident or a person."""

    def __init__(self) -> None:
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"code": _with_code, "moment": moment, "iso": format_time}
        self._template = environment.from_string(
            (files("breakwater.alerts") / "templates" / "incident.html").read_text("utf-8")
        )
        self._style = (files("breakwater.kernel.pages") / "page.css").read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(self._style.encode()).digest()).decode()
        self._headers = {
            # Whatever a title contains, the page loads and runs nothing but this style and our own form.
            "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'self'; "
            "base-uri 'none'; frame-ancestors 'none'",
            "X-Frame-Options": "DENY",
            "X-Content-Type-Options": "nosniff",
            # The URL is the permission, so it must reach neither other sites nor caches.
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "X-Robots-Tag": "noindex",
        }

    def incident(
        self, alert: Alert, *, status: int = 200, problem: str | None = None, fields: Mapping[str, str] | None = None
    ) -> Response:
        """Returns the page of an incident, with a form for the possible actions.

        Args:
            alert: the newest alert of the incident.
            status: the HTTP status.
            problem: the reason why nothing was done, in words.
            fields: the fields that were sent, to be corrected.
        """
        context = {
            "colour": "good" if alert.status == "resolved" else alert.severity,
            "state": f"{_STATE[alert.status]} · {highest_severity(alert)} · {began_with(alert).replace('_', ' ')}",
            "actions": _ACTIONS.get(alert.status, ("acknowledge", "resolve")),
            "last_action": last_action(alert),
            "agents": ", ".join(concerned_agents(alert)).replace("*", "all agents") or None,
        }
        return self._page(alert.title, status, None, alert=alert, problem=problem, fields=fields or {}, **context)

    def message(self, title: str, text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
        """Returns a page that only says why there is no incident on it."""
        return self._page(title, status, headers, text=sentence(text))

    def see_other(self, location: str) -> Response:
        """Returns a 303 to the page: the browser gets it by GET, and reloading it repeats no action."""
        return Response(status_code=303, headers={**self._headers, "Location": location})

    def _page(self, title: str, status: int, headers: Mapping[str, str] | None, **content: object) -> Response:
        page = self._template.render(title=title, style=Markup(self._style), **content)  # noqa: S704  ours
        return Response(page, status, {**self._headers, **(headers or {})}, "text/html")


def last_action(alert: Alert) -> str | None:
    """Describes the last action on an incident, with its actor and time; None if there was none."""
    why = f": {alert.reason}" if alert.reason else ""
    if alert.status == "resolved" and alert.resolved_at is not None:
        by = f" by {alert.resolved_by}" if alert.resolved_by else ", by itself,"
        return f"Resolved{by} at {moment(alert.resolved_at)}{why}"
    if alert.status == "acknowledged" and alert.acknowledged_at is not None:
        return f"Acknowledged by {alert.acknowledged_by} at {moment(alert.acknowledged_at)}{why}"
    return None


def _with_code(text: str) -> Markup:
    """Escapes a text and marks everything between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  is escaped
