"""The pages: templates, what they may use, and the headers that keep everything foreign out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Generic, TypeVar, cast
from zoneinfo import ZoneInfo

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from breakwater.analytics.client import Analytics
from breakwater.analytics.errors import AnalyticsUnavailable, QueryFailed
from services.console import charts, words
from services.console.door import Door, DoorError, SignedOut
from services.console.sessions import SESSION, Session

T = TypeVar("T")

ANSWER_S = 8.0
"""How long a page waits for any part of it."""

STATIC = files("services.console") / "static"

HEADERS: Mapping[str, str] = {
    # Nothing is fetched from elsewhere, and nothing in a page runs but our own two files, whatever an agent wrote.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

NAVIGATION = (
    ("/", "Overview"),
    ("/agents", "Agents"),
    ("/executions", "Executions"),
    ("/breakers", "Breakers"),
    ("/budgets", "Budgets"),
    ("/alerts", "Alerts"),
    ("/dead-letters", "Dead letters"),
)


class PageRenderer:
    """Writes them. Everything that is not markup of ours is escaped."""

    def __init__(self) -> None:
        self._templates = Environment(
            loader=PackageLoader("services.console", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters.update(words.FILTERS)
        known = cast("dict[str, object]", self._templates.globals)
        known["charts"], known["navigation"], known["duration"] = charts, NAVIGATION, words.duration
        # A new version has a new address, so that a browser may keep the old one for ever.
        sources = b"".join((STATIC / name).read_bytes() for name in ("console.css", "console.js"))
        known["version"] = hashlib.sha256(sources).hexdigest()[:12]

    def render(self, request: Request, template: str, *, status: int = 200, **values: object) -> Response:
        """A page, for whoever is signed in.

        Args:
            request: the request that it answers.
            template: the name of its file.
            status: HTTP's.
            values: the template's variables.
        """
        session: Session | None = request.scope.get(SESSION)
        # A page that refreshes itself, perhaps in another tab, must not use up notices: nobody would read them.
        notices = () if session is None or "x-renewal" in request.headers else session.take_notices()
        html = self._templates.get_template(template).render(
            request=request, session=session, notices=notices, path=request.url.path, **values
        )
        return HTMLResponse(html, status, HEADERS)

    def plain(self, request: Request, status: int, title: str, text: str) -> Response:
        """A page with a title and one sentence, such as why something was refused."""
        return self.render(request, "plain.html", status=status, title=title, text=text)

    def fragment(self, template: str, **values: object) -> str:
        """A piece of HTML that a script adds to an open page."""
        return self._templates.get_template(template).render(**values)


@dataclass(frozen=True, slots=True)
class PageContext:
    """The parts of the plane that pages ask, and what writes the pages."""

    api: Door
    analytics: Analytics
    """Only read: where it matters, the URL is that of a user who can do no more."""
    pages: PageRenderer
    now: Callable[[], datetime]
    stopping: asyncio.Event
    """Set when the process ends: who watches a job comes back by themselves."""
    placeholder: str
    """What stands where something was redacted."""
    zone: ZoneInfo
    """Where the days and months of budgets begin."""


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """What was asked for, or why it can't be had: a page shows the rest of itself all the same."""

    value: T | None
    problem: str | None = None


async def fetched(asked: Awaitable[T]) -> Fetched[T]:
    """Waits for an answer.

    Raises:
        SignedOut: the key is not known any more.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            return Fetched(await asked)
    except SignedOut:
        raise
    except TimeoutError:
        return Fetched(None, f"No answer came within {ANSWER_S:g} s. `breakwater doctor` tells what hangs.")
    except DoorError as error:
        return Fetched(None, error.message)
    except AnalyticsUnavailable as error:
        return Fetched(None, f"{error}. What happened is not lost: it is stored when ClickHouse is back.")
    except QueryFailed as error:
        return Fetched(None, f"ClickHouse refuses: {error.message}. `breakwater setup` brings its tables up to date.")
