"""The pages that a link in a message opens: plain HTML, without scripts and without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from html import escape
from importlib.resources import files
from string import Template

from starlette.responses import Response

from breakwater.contracts.alerts import Alert
from breakwater.contracts.types import format_time
from breakwater.policy.alert_texts import moment, sentence

_STATE = {
    "firing": "Firing",
    "pending": "Waits for somebody",
    "acknowledged": "Acknowledged",
    "resolved": "Resolved",
}
_BUTTONS = {
    "acknowledge": '<button name="action" value="acknowledge">Acknowledge</button>',
    "resolve": '<button name="action" value="resolve">Resolve</button>',
}


class Pages:
    """Writes them. Everything that comes from an incident or a person is escaped here."""

    def __init__(self) -> None:
        folder = files("services.request") / "pages"
        self._page, self._incident, self._form = (
            Template((folder / f"{name}.html").read_text("utf-8")) for name in ("page", "incident", "form")
        )
        self._style = (folder / "page.css").read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(self._style.encode()).digest()).decode()
        self._headers = {
            # Nothing is loaded and nothing runs, whatever stands in a title: only this style and our own form.
            "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; form-action 'self'; "
            "base-uri 'none'; frame-ancestors 'none'",
            "X-Frame-Options": "DENY",
            "X-Content-Type-Options": "nosniff",
            # The address is the permission: it is told to nobody, and kept nowhere.
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "X-Robots-Tag": "noindex",
        }

    def incident(
        self, alert: Alert, *, status: int = 200, wrong: str | None = None, given: Mapping[str, str] | None = None
    ) -> Response:
        """An incident, with a form for what may be done about it.

        Args:
            alert: the newest of the incident.
            status: of the answer.
            wrong: why what was sent was not done, in words.
            given: what was sent, to be mended.
        """
        body = self._incident.substitute(
            colour=_colour(alert),
            state=escape(f"{_STATE[alert.status]} · {alert.severity} · {alert.event.replace('_', ' ')}"),
            title=escape(alert.title),
            notices="\n".join(_notices(alert, wrong)),
            text=_with_code(alert.text),
            facts="\n".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in _facts(alert).items()),
            form=self._form_of(alert, given or {}),
        )
        return self._answer(alert.title, body, status)

    def message(self, title: str, text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
        """A page that says why there is nothing else."""
        body = f'<h1>{escape(title)}</h1>\n<p class="text">{_with_code(sentence(text))}</p>'
        return self._answer(title, body, status, headers)

    def seen(self, location: str) -> Response:
        """303: to the page, by GET, so that loading it again does nothing again."""
        return Response(status_code=303, headers={**self._headers, "Location": location})

    def _form_of(self, alert: Alert, given: Mapping[str, str]) -> str:
        if alert.status == "resolved":
            return ""
        possible = ["resolve"] if alert.status == "acknowledged" else ["acknowledge", "resolve"]
        return self._form.substitute(
            name=escape(given.get("name", "")),
            reason=escape(given.get("reason", "")),
            buttons="\n".join(_BUTTONS[action] for action in possible),
        )

    def _answer(self, title: str, body: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
        page = self._page.substitute(title=escape(title), style=self._style, body=body)
        return Response(page, status, {**self._headers, **(headers or {})}, "text/html")


def last_act(alert: Alert) -> str | None:
    """What was done about an incident last, by whom and when; None where nobody did anything."""
    why = f": {alert.reason}" if alert.reason else ""
    if alert.status == "resolved" and alert.resolved_at is not None:
        by = f" by {alert.resolved_by}" if alert.resolved_by else ", by itself,"
        return f"Resolved{by} at {moment(alert.resolved_at)}{why}"
    if alert.status == "acknowledged" and alert.acknowledged_at is not None:
        return f"Acknowledged by {alert.acknowledged_by} at {moment(alert.acknowledged_at)}{why}"
    return None


def _notices(alert: Alert, wrong: str | None) -> list[str]:
    told = last_act(alert)
    return [
        *([] if wrong is None else [f'<p class="wrong" role="alert">{escape(wrong)}</p>']),
        *([] if told is None else [f'<p class="told" role="status">{escape(told)}</p>']),
    ]


def _facts(alert: Alert) -> dict[str, str]:
    """Of an incident, by name, as HTML."""
    where = {"Agent": alert.agent, "Model": alert.model, "Tenant": alert.tenant}
    facts = {name: escape(value) for name, value in where.items() if value is not None}
    facts["Since"] = _time(alert.opened_at)
    facts["Happened"] = "once" if alert.count == 1 else f"{alert.count:,} times, the last at {_time(alert.last_at)}"
    if alert.ends_at is not None and alert.status != "resolved":
        facts["Ends"] = f"by itself at {_time(alert.ends_at)}"
    if alert.acknowledged_by is not None and alert.acknowledged_at is not None and alert.status == "resolved":
        facts["Acknowledged"] = f"by {escape(alert.acknowledged_by)} at {_time(alert.acknowledged_at)}"
    facts["Incident"] = escape(alert.incident_id)
    return facts


def _time(at: datetime) -> str:
    return f'<time datetime="{format_time(at)}">{moment(at)}</time>'


def _with_code(text: str) -> str:
    """Escaped, and what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _colour(alert: Alert) -> str:
    if alert.status == "resolved":
        return "good"
    return alert.severity if alert.severity in ("critical", "warning") else ""
