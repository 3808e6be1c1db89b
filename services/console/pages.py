"""The pages: templates, what they may use, and the headers that keep everything foreign out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from services.console import charts, words
from services.console.sessions import Session

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


class Pages:
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

    def render(
        self, request: Request, template: str, *, status: int = 200, session: Session | None = None, **told: object
    ) -> Response:
        """A page.

        Args:
            request: what asks for it.
            template: its file.
            status: of the answer.
            session: who is signed in; None for pages that are for everybody.
            told: what the template shows.
        """
        # Not for a page that only renews itself, perhaps in another tab: nobody would read them.
        notices = () if session is None or "x-renewal" in request.headers else session.told()
        html = self._templates.get_template(template).render(
            request=request, session=session, notices=notices, path=request.url.path, **told
        )
        return HTMLResponse(html, status, HEADERS)

    def plain(
        self, request: Request, status: int, title: str, text: str, *, session: Session | None = None
    ) -> Response:
        """A page that only says something, such as why something was not done."""
        return self.render(request, "plain.html", status=status, session=session, title=title, text=text)

    def fragment(self, template: str, **told: object) -> str:
        """A piece of a page, for what is put into it while it is open."""
        return self._templates.get_template(template).render(**told)
