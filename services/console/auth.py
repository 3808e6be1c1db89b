"""Signing in with an API key, and nothing to see without."""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable
from urllib.parse import urlencode

import structlog
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.console.door import Door, DoorError, SignedOut, Unreachable
from services.console.forms import Fields, read_form
from services.console.pages import PageRenderer
from services.console.sessions import LASTS_S, SESSION, Session, SignIns, session_of

COOKIE = "breakwater_console"
CHECK_EVERY_S = 10.0
"""A revoked key is out after this long."""
CHECK_TIMEOUT_S = 3.0
UNCHECKED_S = 300.0
"""While the interface is away, who signed in before may go on reading what is recorded, for this long."""

_OPEN = ("/sign-in", "/healthz")
_WHY = {
    "revoked": "This key is not known any more: sign in with another one.",
    "over": "Your sign-in had ended, and nothing was done. Sign in, and send the form again.",
}


class NotAllowed(Exception):  # noqa: N818  an answer
    """The request is none of our own pages', or its holder may not do this; its text says why."""


async def acting(request: Request) -> tuple[Session, Fields]:
    """Who has sent a form of ours, and what stands in it.

    Raises:
        NotAllowed: the form is not from our pages, or their key does not let them do things.
    """
    session, fields = session_of(request), await read_form(request)
    if not hmac.compare_digest(fields.get("csrf", "").encode(), session.csrf.encode()):
        raise NotAllowed("This form is too old, or was sent by another site. Load the page again.")
    if not session.may_operate:
        raise NotAllowed(f"The key {session.name!r} may look, and change nothing: it lacks the scope `operate`.")
    return session, fields


class RequireSignIn:
    """ASGI middleware: who is not signed in is sent to the page where they can."""

    def __init__(
        self,
        app: ASGIApp,
        sessions: SignIns,
        door: Door,
        pages: PageRenderer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._door = door
        self._pages = pages
        self._clock = clock
        self._asked_again_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its session, or answers it."""
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = await self._refusal(request)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD") and not _from_here(request):
            return self._pages.plain(request, 403, "Refused", "This was sent by another site.")
        token = request.cookies.get(COOKIE, "")
        session = self._sessions.find(token)
        if session is None:
            return _to_sign_in(request)
        now = self._clock()
        # While the interface is away or hangs, not every page waits to find that out.
        if now - session.checked_at > CHECK_EVERY_S and now >= self._asked_again_at:
            try:
                await self._door.get(session.key, "key", timeout_s=CHECK_TIMEOUT_S)
            except SignedOut:
                self._sessions.end(token)
                return _to_sign_in(request, "revoked")
            except DoorError as error:
                self._asked_again_at = self._clock() + CHECK_EVERY_S
                if now - session.checked_at > UNCHECKED_S:
                    return self._pages.plain(request, 503, "Nobody can be let in now", error.message)
            else:
                session.checked_at = now
        elif now - session.checked_at > UNCHECKED_S:
            return self._pages.plain(request, 503, "Nobody can be let in now", "The HTTP interface does not answer.")
        request.scope[SESSION] = session
        return None


class SignIn:
    """The page where people sign in, and the way out."""

    def __init__(self, sessions: SignIns, door: Door, pages: PageRenderer) -> None:
        self._sessions = sessions
        self._door = door
        self._pages = pages

    async def show(self, request: Request) -> Response:
        """GET: the page."""
        wrong = next((text for why, text in _WHY.items() if why in request.query_params), None)
        return self._page(request, request.query_params.get("next", ""), wrong)

    async def sign_in(self, request: Request) -> Response:
        """POST: 303 to where they wanted to go, with a cookie; or the page again, saying what is wrong."""
        if not _from_here(request):
            return self._pages.plain(request, 403, "Refused", "This was sent by another site.")
        fields = await read_form(request)
        wanted, text = fields.get("next", ""), fields.get("key", "").strip()
        if not text:
            return self._page(request, wanted, "Enter an API key.", 422)
        key = SecretStr(text)
        try:
            holder = await self._door.get(key, "key") if text.isascii() and text.isprintable() else None
        except SignedOut:
            holder = None
        except Unreachable as error:
            return self._page(request, wanted, error.message, 503)
        except DoorError as error:
            return self._page(request, wanted, error.message, error.status)
        log = structlog.get_logger()
        if holder is None:
            log.warning("sign_in_refused", why="unknown key")
            return self._page(request, wanted, "This key is not known. `breakwater keys create NAME` makes one.", 403)
        scopes, name = frozenset[str](holder["scopes"]), str(holder["name"])
        if "read" not in scopes:
            log.warning("sign_in_refused", why="no scope to read", key_id=holder["id"], name=name)
            message = f"The key {name!r} may not read. `breakwater keys create NAME --scope read` makes one that may."
            return self._page(request, wanted, message, 403)
        # Who signs in anew in the same browser is one person, not two.
        self._sessions.end(request.cookies.get(COOKIE, ""))
        token = self._sessions.begin(key, str(holder["id"]), name, scopes)
        log.info("signed_in", key_id=holder["id"], name=name)
        response = RedirectResponse(_local(wanted), 303)
        # Of several proxies, the first one tells how the browser came.
        outside = request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")[0].strip()
        # Lax and not strict: who follows a link in an alert is signed in when they arrive.
        response.set_cookie(
            COOKIE, token, max_age=int(LASTS_S), httponly=True, samesite="lax", secure=outside == "https"
        )
        return response

    async def sign_out(self, request: Request) -> Response:
        """POST: 303 to the page where one signs in."""
        if _from_here(request):
            self._sessions.end(request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", 303)
        response.delete_cookie(COOKIE)
        return response

    def _page(self, request: Request, wanted: str, wrong: str | None, status: int = 200) -> Response:
        return self._pages.render(request, "sign_in.html", status=status, next=_local(wanted), wrong=wrong)


def _to_sign_in(request: Request, why: str = "") -> Response:
    query: dict[str, str] = {why: ""} if why else {}
    if request.method == "GET" and request.url.path != "/":
        query["next"] = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    elif request.method == "POST":
        query = {"over": "", "next": _came_from(request)}
    return RedirectResponse(f"/sign-in?{urlencode(query)}" if query else "/sign-in", 303)


def _came_from(request: Request) -> str:
    """The page with the form that was sent, whose address only the browser knows."""
    origin, _, path = request.headers.get("referer", "").partition("://")[2].partition("/")
    return f"/{path}" if origin == request.headers.get("host") else "/"


def _local(path: str) -> str:
    """A path of ours, whatever stands in a link that somebody was given."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"


def _from_here(request: Request) -> bool:
    """Whether a form was sent by a page of ours, as far as the browser tells."""
    # No page can forge it, and it holds behind any proxy.
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")
