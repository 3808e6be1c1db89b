"""Signed links to incidents, and links to traces."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime, timedelta
from urllib.parse import quote, urlencode

from breakwater.kernel.telemetry.settings import TRACE_ID


def incident_link(base_url: str, secret: str, incident_id: str, valid: timedelta, now: datetime) -> str:
    """Returns a link to an incident's page, below the public `base_url` of the HTTP API."""
    # The expiry is in whole hours, so that the messages of an incident mostly have the same link.
    expires = (int((now + valid).timestamp()) // 3600 + 1) * 3600
    query = urlencode({"expires": expires, "signature": _signature(secret, incident_id, expires)})
    return f"{base_url.rstrip('/')}/alerts/{quote(incident_id, safe='')}?{query}"


def link_objection(secret: str, incident_id: str, expires: str, signature: str, now: datetime) -> str | None:
    """Returns the reason why a link is refused, in words for its holder; None if it is valid."""
    if not expires.isascii() or not expires.isdigit() or len(expires) > 15:
        return "this link is not whole; copy it again from the message"
    if not hmac.compare_digest(_signature(secret, incident_id, int(expires)).encode(), signature.encode()):
        return "this link is not whole, or its key was changed since; copy it again from a newer message"
    if int(expires) < now.timestamp():
        return "this link has expired; `breakwater alerts` shows the incident, and newer messages have newer links"
    return None


def _signature(secret: str, incident_id: str, expires: int) -> str:
    message = f"breakwater.incident\n{incident_id}\n{expires}"
    return hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()


def trace_url(template: str | None, trace_id: str | None) -> str | None:
    """Returns the URL of a trace; None without a template or a trace.

    Args:
        template: `tracing.url_template` of the config, with `{trace_id}` one or more times; None if it is not set.
        trace_id: 32 hex digits, as in a record; None if the trace was not sampled.
    """
    return None if template is None or trace_id is None else template.replace(TRACE_ID, trace_id)
