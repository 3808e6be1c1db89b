"""Signing in with an API key; everything else requires it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from urllib.parse import urlencode

import structlog
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from breakwater.api_client import ApiClient, ApiError, ApiKeyRefused
from breakwater.contracts.api import KeyDetails
from services.console.operator_actions import read_form
from services.console.pages import PageRenderer
from services.console.sessions import LASTS_S, SESSION, SignIns

COOKIE = "breakwater_console"
CHECK_EVERY_S = 10.0
"""How soon a revoked key is signed out."""
CHECK_TIMEOUT_S = 3.0
UNCHECKED_S = 300.0
"""For how long sessions can go on reading what is recorded while the HTTP API is unavailable."""

_OPEN = ("/sign-in", "/healthz")
_WHY = {
    "revoked": "This key is not valid any more: sign in with another one.",
    "expired": "Your session had expired, and nothing was done. Sign in and submit the form again.",
}


class RequireSignIn:
    """ASGI middleware that redirects users who are not signed in to the sign-in page."""

    def __init__(
        self, app: ASGIApp, sign_ins: SignIns, pages: PageRenderer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._sign_ins = sign_ins
        self._pages = pages
        self._clock = clock
        self._check_again_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its session, or answers it."""
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = await self._refusal(request)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD") and not _same_site(request):
            return _from_another_site(self._pages, request)
        token = request.cookies.get(COOKIE, "")
        session = self._sign_ins.find(token)
        if session is None:
            return _to_sign_in(request)
        now, problem = self._clock(), "the HTTP API does not respond"
        # While the API is unavailable or hangs, only one request every few seconds waits to find that out.
        if now - session.checked_at > CHECK_EVERY_S and now >= self._check_again_at:
            try:
                await session.api.get("key", timeout_s=CHECK_TIMEOUT_S)
                session.checked_at = now
            except ApiKeyRefused:
                self._sign_ins.end(token)
                return _to_sign_in(request, "revoked")
            except ApiError as error:
                self._check_again_at, problem = self._clock() + CHECK_EVERY_S, error.message
        if now - session.checked_at > UNCHECKED_S:
            return self._pages.plain(request, 503, "Your key can't be checked", problem)
        request.scope[SESSION] = session
        return None


class SignIn:
    """Signing in and out."""

    def __init__(self, sign_ins: SignIns, api: ApiClient, pages: PageRenderer) -> None:
        self._sign_ins = sign_ins
        self._api = api
        self._pages = pages

    async def show(self, request: Request) -> Response:
        """GET: the page."""
        wrong = next((text for why, text in _WHY.items() if why in request.query_params), None)
        return self._page(request, request.query_params.get("next", ""), wrong)

    async def sign_in(self, request: Request) -> Response:
        """POST: 303 to the page that was asked for, with a cookie; or the form again, with the problem."""
        if not _same_site(request):
            return _from_another_site(self._pages, request)
        fields = await read_form(request)
        wanted, key = fields.get("next", ""), fields.get("key", "").strip()
        if not key:
            return self._page(request, wanted, "Enter an API key.", 422)
        api = self._api.with_key(SecretStr(key))
        try:
            holder = await api.read(KeyDetails, "key") if key.isascii() and key.isprintable() else None
        except ApiKeyRefused:
            holder = None
        except ApiError as error:
            return self._page(request, wanted, error.message, error.status)
        log = structlog.get_logger()
        if holder is None:
            log.warning("sign_in_refused", why="unknown key")
            return self._page(request, wanted, "This key is unknown. `breakwater keys create NAME` makes one.", 403)
        if "read" not in holder.scopes:
            log.warning("sign_in_refused", why="no scope to read", key_id=holder.id, name=holder.name)
            how = "`breakwater keys create NAME --scope read` makes a key that may read"
            return self._page(request, wanted, f"The key {holder.name!r} lacks the scope `read`; {how}.", 403)
        # Signing in again in the same browser replaces the session.
        self._sign_ins.end(request.cookies.get(COOKIE, ""))
        token = self._sign_ins.begin(api, holder)
        log.info("signed_in", key_id=holder.id, name=holder.name)
        response = RedirectResponse(_local(wanted), 303)
        # Of several proxies, the first one says how the browser connected.
        outside = request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")[0].strip()
        # Lax rather than strict: who follows a link in an alert is signed in.
        response.set_cookie(
            COOKIE, token, max_age=int(LASTS_S), httponly=True, samesite="lax", secure=outside == "https"
        )
        return response

    async def sign_out(self, request: Request) -> Response:
        """POST: 303 to the sign-in page."""
        if _same_site(request):
            self._sign_ins.end(request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", 303)
        response.delete_cookie(COOKIE)
        return response

    def _page(self, request: Request, wanted: str, wrong: str | None, status: int = 200) -> Response:
        return self._pages.render(request, "sign_in.html", status=status, next=_local(wanted), wrong=wrong)


def _from_another_site(pages: PageRenderer, request: Request) -> Response:
    return pages.plain(request, 403, "Request refused", "It was sent by another site.")


def _to_sign_in(request: Request, why: str = "") -> Response:
    query: dict[str, str] = {why: ""} if why else {}
    if request.method == "GET" and request.url.path != "/":
        query["next"] = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    elif request.method == "POST":
        query = {"expired": "", "next": _page_of_form(request)}
    return RedirectResponse(f"/sign-in?{urlencode(query)}" if query else "/sign-in", 303)


def _page_of_form(request: Request) -> str:
    """The page with the form, whose address only the browser knows."""
    origin, _, path = request.headers.get("referer", "").partition("://")[2].partition("/")
    return f"/{path}" if origin == request.headers.get("host") else "/"


def _local(path: str) -> str:
    """A path on this site, whatever a link says."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"


def _same_site(request: Request) -> bool:
    """Whether a form was sent by one of our pages, as far as the browser says."""
    # No page can forge this header, and it holds behind any proxy.
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")
