"""Shared parts of all pages: templates, headers, and reading from several sources that may be unavailable."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast
from zoneinfo import ZoneInfo

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import breakwater
from breakwater.client import ApiError, ApiKeyRefusedError, ApiUnavailableError
from breakwater.identity.pages.sessions import SESSION, Session
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.pages import charts, words
from breakwater.kernel.pages.shared_reads import SharedReads
from breakwater.kernel.security.encryption import OFF, Cipher

T = TypeVar("T")

PART_TIMEOUT_S = 8.0
"""Seconds for which a page waits for a part. Requests to the HTTP API have a shorter limit."""
API_CLICKHOUSE_S = PART_TIMEOUT_S + 1
"""Time limit of requests for which the HTTP API reads from ClickHouse, so that `fetch_part` gives up first."""

CLICKHOUSE_AWAY = (
    "ClickHouse does not respond, so figures, charts and past records are missing on this page. Jobs still run, and no "
    "records are lost: they are stored once it is back. `breakwater doctor` shows the cause."
)
"""The problem of all parts that are read from ClickHouse. A page shows it once, and does not refresh itself then."""

ROOMS = Path(breakwater.__file__).parent
TEMPLATES = (ROOMS / "kernel" / "pages" / "templates", *sorted(ROOMS.glob("*/templates")))
"""The folders of templates: what all pages share, and what each room shows."""
STATIC = ROOMS / "kernel" / "pages" / "static"

HEADERS: Mapping[str, str] = {
    # Whatever an agent wrote, a page loads nothing from elsewhere and runs only the console's own script.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class NavigationLink(NamedTuple):
    """A link to a page in the navigation."""

    path: str
    title: str
    key: str
    """The key that opens the page after `g`."""


class PageRenderer:
    """The renderer of the templates. It escapes all values except the console's own markup."""

    def __init__(self, navigation: Sequence[NavigationLink]) -> None:
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters.update(words.FILTERS)
        template_globals = cast("dict[str, object]", self._templates.globals)
        template_globals |= {"charts": charts, "navigation": navigation, "duration": words.duration}
        # The URLs of static files name their version, so that browsers may cache them indefinitely.
        sources = b"".join((STATIC / name).read_bytes() for name in ("console.css", "console.js", "charts.js"))
        template_globals["clickhouse_away"] = CLICKHOUSE_AWAY
        template_globals["version"] = hashlib.sha256(sources).hexdigest()[:12]
        template_globals["library_version"] = charts.library_version()

    def render(self, request: Request, template: str, *, status: int = 200, **values: object) -> Response:
        """Renders a page for the user who is signed in.

        Args:
            request: the request for the page.
            template: file name of the template.
            status: HTTP status.
            values: variables of the template.
        """
        session: Session | None = request.scope.get(SESSION)
        # A page that refreshes itself, perhaps in another tab, must not take notices that no user would read.
        notices = () if session is None or "x-refresh" in request.headers else session.take_notices()
        html = self._templates.get_template(template).render(
            request=request,
            session=session,
            notices=notices,
            path=request.url.path,
            is_away=CLICKHOUSE_AWAY
            in [values.get("problem"), *(value.problem for value in values.values() if isinstance(value, PagePart))],  # pyright: ignore[reportUnknownMemberType]
            **values,
        )
        return HTMLResponse(html, status, HEADERS)

    def plain(self, request: Request, status: int, title: str, text: str) -> Response:
        """Renders a page with a title and a short text, such as why a request was refused."""
        return self.render(request, "plain.html", status=status, title=title, text=text)

    def fragment(self, template: str, **values: object) -> str:
        """Renders a piece of HTML that a script adds to an open page."""
        return self._templates.get_template(template).render(**values)


@dataclass(slots=True)
class PageContext:
    """The dependencies of the pages."""

    analytics: Analytics
    """ClickHouse, which is only read: in production, as a user without other rights."""
    pages: PageRenderer
    now: Callable[[], datetime]
    stopping: asyncio.Event
    """An event that is set when the process ends, so that pages of running jobs reconnect."""
    placeholder: str
    """The replacement of redacted text in the current config."""
    trace_template: str | None
    """The template of a trace's URL in the current config."""
    zone: ZoneInfo
    """The time zone of the days and months of budgets."""
    cipher: Cipher = OFF
    """The cipher that decrypts stored texts."""
    shared: SharedReads = field(default_factory=SharedReads)
    """Reads that all viewers share."""


@dataclass(frozen=True, slots=True)
class PagePart(Generic[T]):
    """A part of a page: its value, or the problem that the page shows instead."""

    value: T | None
    problem: str | None = None
    pending: bool = False
    """True if the page's script requests the part once the page is shown."""


async def pending(read: Coroutine[Any, Any, T]) -> PagePart[T]:
    """Returns a pending part, which the page's script requests later."""
    read.close()
    return PagePart(None, pending=True)


async def fetch_part(read: Awaitable[T]) -> PagePart[T]:
    """Waits for a part of a page. Most errors become the part's problem.

    Raises:
        ApiKeyRefusedError: if the key is no longer valid.
    """
    try:
        async with asyncio.timeout(PART_TIMEOUT_S):
            return PagePart(await read)
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
    return PagePart(None, problem)


def problems_of(*parts: PagePart[Any]) -> tuple[str, ...]:
    """The reasons why parts of a page are missing, each once; without the one that the page shows at its top."""
    return tuple(dict.fromkeys(part.problem for part in parts if part.problem not in (None, CLICKHOUSE_AWAY)))
