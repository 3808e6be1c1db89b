"""Common to all pages: templates, headers, and reading from several sources of which some may be unavailable."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any, Generic, TypeVar, cast
from zoneinfo import ZoneInfo

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from breakwater.client import ApiError, ApiKeyRefusedError, ApiUnavailableError
from breakwater.identity.pages.sessions import SESSION, Session
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.pages import charts, words
from breakwater.kernel.security.encryption import OFF, Cipher

T = TypeVar("T")

PART_TIMEOUT_S = 8.0
"""The time for which a page waits for any of its parts. Requests to the HTTP API give up earlier."""
API_CLICKHOUSE_S = PART_TIMEOUT_S + 1
"""Time limit of requests for what the HTTP API reads from ClickHouse: if that hangs, `fetched` gives up first."""

CLICKHOUSE_AWAY = (
    "ClickHouse does not respond, so figures, charts and past records are missing on this page. Jobs still run, and no "
    "records are lost: they are stored once it is back. `breakwater doctor` shows the cause."
)
"""The problem of all parts that are read from it. A page shows it once, and is not live while it holds."""

STATIC = files("services.console") / "static"

HEADERS: Mapping[str, str] = {
    # Nothing is loaded from elsewhere, and no script runs except our own file, whatever an agent wrote.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

NAVIGATION = (
    ("/", "Overview", "o"),
    ("/agents", "Agents", "a"),
    ("/executions", "Executions", "e"),
    ("/plans", "Plans", "p"),
    ("/breakers", "Breakers", "b"),
    ("/budgets", "Budgets", "u"),
    ("/costs", "Costs", "c"),
    ("/alerts", "Alerts", "l"),
    ("/dead-letters", "Dead letters", "d"),
    ("/audit", "Audit log", "t"),
)
"""Links to the pages, with the key that opens each after `g`."""


class PageRenderer:
    """Renders the templates. Everything in them that is not our own markup is escaped."""

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
        # A new version has a new URL, so that browsers may cache the old one indefinitely.
        sources = b"".join((STATIC / name).read_bytes() for name in ("console.css", "console.js", "charts.js"))
        known["clickhouse_away"] = CLICKHOUSE_AWAY
        known["version"] = hashlib.sha256(sources).hexdigest()[:12]
        known["library_version"] = charts.library_version()

    def render(self, request: Request, template: str, *, status: int = 200, **values: object) -> Response:
        """A page, for the user who is signed in.

        Args:
            request: the request that it answers.
            template: the name of its file.
            status: HTTP's.
            values: the template's variables.
        """
        session: Session | None = request.scope.get(SESSION)
        # A page that refreshes itself, perhaps in another tab, must not use up notices: they would not be read.
        notices = () if session is None or "x-refresh" in request.headers else session.take_notices()
        html = self._templates.get_template(template).render(
            request=request,
            session=session,
            notices=notices,
            path=request.url.path,
            is_away=CLICKHOUSE_AWAY
            in [values.get("problem"), *(one.problem for one in values.values() if isinstance(one, Fetched))],  # pyright: ignore[reportUnknownMemberType]
            **values,
        )
        return HTMLResponse(html, status, HEADERS)

    def plain(self, request: Request, status: int, title: str, text: str) -> Response:
        """A page with a title and a short text, such as why a request was refused."""
        return self.render(request, "plain.html", status=status, title=title, text=text)

    def fragment(self, template: str, **values: object) -> str:
        """A piece of HTML that a script adds to an open page."""
        return self._templates.get_template(template).render(**values)


@dataclass(slots=True)
class PageContext:
    """The dependencies of the pages."""

    analytics: Analytics
    """Only read: in production, its URL is that of a user without other rights."""
    pages: PageRenderer
    now: Callable[[], datetime]
    stopping: asyncio.Event
    """Set when the process ends, so that the pages of running jobs reconnect."""
    placeholder: str
    """The replacement of redacted text, as the config has it now."""
    trace_template: str | None
    """URL of a trace, as the config has it now."""
    zone: ZoneInfo
    """The time zone of the days and months of budgets."""
    cipher: Cipher = OFF
    """Decrypts stored texts."""


@dataclass(frozen=True, slots=True)
class Fetched(Generic[T]):
    """One part of a page: its value, or the problem that is shown in its place."""

    value: T | None
    problem: str | None = None
    pending: bool = False
    """True if the script of the page asks for it, once the page is shown."""


async def pending(asked: Coroutine[Any, Any, T]) -> Fetched[T]:
    """A part of a page that the script of the page asks for later."""
    asked.close()
    return Fetched(None, pending=True)


async def fetched(asked: Awaitable[T]) -> Fetched[T]:
    """Waits for one part of a page.

    Raises:
        ApiKeyRefusedError: the key is not valid any more.
    """
    try:
        async with asyncio.timeout(PART_TIMEOUT_S):
            return Fetched(await asked)
    except ApiKeyRefusedError:
        raise
    except (TimeoutError, AnalyticsUnavailableError):
        problem = CLICKHOUSE_AWAY
    except ApiUnavailableError as error:
        problem = f"The HTTP API is unavailable: {error.message}. `breakwater doctor` shows what is down."
    except ApiError as error:
        problem = CLICKHOUSE_AWAY if error.code == "unavailable" and "ClickHouse" in error.message else error.message
    except QueryError as error:
        problem = f"ClickHouse refused the query: {error.message}. `breakwater setup` brings its tables up to date."
    return Fetched(None, problem)


def problems_of(*parts: Fetched[Any]) -> tuple[str, ...]:
    """The reasons why parts of a page are missing, each one once, without that which the page shows at its top."""
    return tuple(dict.fromkeys(part.problem for part in parts if part.problem not in (None, CLICKHOUSE_AWAY)))
