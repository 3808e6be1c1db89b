"""Signing in with an API key or with OpenID Connect; everything else requires it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal, TypedDict
from urllib.parse import quote, unquote, urlencode

import structlog
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.client import ApiClient, ApiError, ApiKeyRefused
from breakwater.contracts.access import (
    OPENID_CALLBACK,
    EndedSession,
    KeyDetails,
    NewSession,
    OpenIdCallback,
    OpenIdRedirect,
)
from breakwater.http_server import OPEN_BODY_BYTES, OPEN_BODY_S, Shares, vouch
from breakwater.policy.callers import is_session
from breakwater.policy.sign_in import SignInLimits, TooManySignIns
from services.console.operator_actions import read_form
from services.console.pages import PageRenderer
from services.console.sessions import (
    SESSION,
    KnownSession,
    KnownSessions,
    Session,
    csrf_of,
    pack,
    session_of,
    unpack,
)

COOKIE = "breakwater_console"
NOTICES = "breakwater_notices"
NOTICES_S = 300
FLOW = "breakwater_sign_in"
"""The cookie of somebody who was sent to the OpenID provider: the flow, and where they want to go."""
FLOW_S = 600
"""How long they may take there."""
OPENID = "/sign-in/openid"
AT_ONCE = 3
"""Sign-ins of one address that are under way at the provider."""
FAILURES_A_MINUTE = 10
_AT_PROVIDER = ("openid_refused", "openid_invalid")
CHECK_EVERY_S = 10.0
"""How soon the sessions of a revoked key, and those that were ended elsewhere, are out."""
CHECK_TIMEOUT_S = 3.0
UNCHECKED_S = 300.0
"""For how long sessions can go on reading what is recorded while the HTTP API is unavailable."""

_OPEN = ("/sign-in", OPENID, OPENID_CALLBACK, "/healthz")
_BROUGHT = tuple(OpenIdCallback.model_fields.keys() - {"flow"})
MAX_WANTED = 2_000
"""Bytes of a page's path that a cookie still holds."""
_WHY = {
    "ended": "Your session has ended, or its key was revoked. Sign in again.",
    "expired": "Your session had expired, and nothing was done. Sign in and submit the form again.",
}


class RequireSignIn:
    """ASGI middleware that redirects users who are not signed in to the sign-in page."""

    def __init__(
        self,
        app: ASGIApp,
        sessions: KnownSessions,
        api: ApiClient,
        pages: PageRenderer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._api = api
        self._pages = pages
        self._clock = clock
        self._check_again_at = -math.inf
        self._shares = Shares()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its session, or answers it."""
        if scope["type"] != "http" or scope["path"] in _OPEN or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if (refusal := await self._refusal(request)) is not None:
            await refusal(scope, receive, send)
            return
        holder = session_of(request).known.key.id
        if not self._shares.take(holder):
            text = "Too many of your pages are being loaded at the same time. Close some, or wait."
            await self._pages.plain(request, 429, "Too many requests", text)(scope, receive, send)
            return
        vouch(scope)
        try:
            await self._app(scope, receive, self._with_notices(request, send))
        finally:
            self._shares.release(holder)

    async def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD") and not _same_site(request):
            return _from_another_site(self._pages, request)
        token = _cookie(request, COOKIE)
        if not is_session(token):
            return to_sign_in(request)
        known, now, problem = self._sessions.find(token), self._clock(), "the HTTP API does not respond"
        api = self._api.with_key(SecretStr(token))
        # While the API is unavailable or hangs, only one request every few seconds waits to find that out.
        if known is None or (now - known.checked_at > CHECK_EVERY_S and now >= self._check_again_at):
            try:
                key = await api.read(KeyDetails, "key", timeout_s=CHECK_TIMEOUT_S)
            except ApiKeyRefused:
                self._sessions.forget(token)
                return to_sign_in(request, "ended")
            except ApiError as error:
                self._check_again_at, problem = self._clock() + CHECK_EVERY_S, error.message
            else:
                known = self._seen(token, key, now)
        if known is None or now - known.checked_at > UNCHECKED_S:
            return self._pages.plain(request, 503, "Your session can't be checked", problem)
        notices = unpack(_cookie(request, NOTICES), token)
        request.scope[SESSION] = Session(api, known, csrf_of(token), notices)
        return None

    def _seen(self, token: str, key: KeyDetails, now: float) -> KnownSession:
        known = self._sessions.find(token)
        if known is None:
            return self._sessions.add(token, key, now)
        known.key, known.checked_at = key, now
        return known

    def _with_notices(self, request: Request, send: Send) -> Send:
        """Sends notices that are left for the next page along in a cookie."""

        async def sending(message: Message) -> None:
            session: Session | None = request.scope.get(SESSION)
            if message["type"] == "http.response.start" and session is not None and session.notices_changed:
                cookie = Response()
                if session.notices:
                    packed = pack(session.notices, _cookie(request, COOKIE))
                    _set_cookie(request, cookie, NOTICES, packed, NOTICES_S)
                else:
                    _delete_cookie(request, cookie, NOTICES)
                name, value = next(header for header in cookie.raw_headers if header[0] == b"set-cookie")
                message = {**message, "headers": [*message["headers"], (name, value)]}
            await send(message)

        return sending


class SignIn:
    """Signing in and out.

    Args:
        sessions: that are known here.
        api: the HTTP API.
        pages: what renders them.
        provider: what the OpenID provider is called now; None where there is none.
        behind_proxy: whether browsers come through a proxy, which says where from.
    """

    def __init__(
        self,
        sessions: KnownSessions,
        api: ApiClient,
        pages: PageRenderer,
        provider: Callable[[], str | None],
        behind_proxy: Callable[[], bool],
    ) -> None:
        self._behind_proxy = behind_proxy
        self._limits = SignInLimits(AT_ONCE, FAILURES_A_MINUTE, time.monotonic)
        self._sessions = sessions
        self._api = api
        self._pages = pages
        self._provider = provider

    async def show(self, request: Request) -> Response:
        """GET: the page."""
        wrong = next((text for why, text in _WHY.items() if why in request.query_params), None)
        return self._page(request, request.query_params.get("next", ""), wrong)

    async def sign_in(self, request: Request) -> Response:
        """POST: 303 to the page that was asked for, with a cookie; or the form again, with the problem."""
        if not _same_site(request):
            return _from_another_site(self._pages, request)
        fields = await read_form(request, OPEN_BODY_BYTES, OPEN_BODY_S)
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
        try:
            session = await api.act(NewSession, "sessions", {})
        except ApiError as error:
            return self._page(request, wanted, error.message, error.status)
        self._sessions.add(session.token, holder, time.monotonic())
        return await self._signed_in(request, session, wanted)

    async def begin_openid(self, request: Request) -> Response:
        """GET: 303 to the OpenID provider. A link, as the content security policy lets no form end elsewhere."""
        wanted = request.query_params.get("next", "")
        try:
            flow = await self._api.act(OpenIdRedirect, "openid/begin", {})
        except ApiError as error:
            return self._page(request, wanted, error.message, error.status)
        response = RedirectResponse(flow.url, 303, {"Cache-Control": "no-store"})
        kept = f"{flow.flow}.{quote(_local(wanted)[:MAX_WANTED], safe='')}"
        _set_cookie(request, response, FLOW, kept, FLOW_S)
        return response

    async def complete_openid(self, request: Request) -> Response:
        """GET, where the provider sends people back to: 303 to the page that was asked for; or the problem."""
        flow, _, wanted = _cookie(request, FLOW).partition(".")
        wanted, response = unquote(wanted), None
        brought = {name: request.query_params[name] for name in _BROUGHT if name in request.query_params}
        if not flow:
            text = "This sign-in took over ten minutes, or the browser kept no cookie. Sign in again."
            return self._page(request, wanted, text, 403)
        try:
            with self._limits.of(self._address(request)) as attempt:
                try:
                    session = await self._api.act(NewSession, "openid/complete", {**brought, "flow": flow})
                except ApiError as error:
                    # What was not sent to the provider costs nobody else anything.
                    attempt.failed = error.status == 502 or (error.status == 403 and error.code in _AT_PROVIDER)
                    raise
                attempt.failed = False
        except TooManySignIns:
            text = "Too many sign-ins from your address are under way, or have failed within a minute. Wait a minute."
            return self._page(request, wanted, text, 429)
        except ApiError as error:
            response = self._page(request, wanted, error.message, error.status)
        else:
            response = await self._signed_in(request, session, wanted)
        _delete_cookie(request, response, FLOW)
        return response

    async def sign_out(self, request: Request) -> Response:
        """POST: 303 to the sign-in page. Where the session can't be ended it says so, and the cookie stays.

        Who signed in at an OpenID provider is led there, to sign out of it, too.
        """
        if not _same_site(request):
            return _from_another_site(self._pages, request)
        try:
            ended = await self._end(request)
        except ApiError as error:
            text = f"{error.message}. Try again, or wait: a session ends by itself after twelve hours."
            return self._pages.plain(request, error.status, "You are still signed in", text)
        if ended is not None and ended.continue_at is not None:
            # A page, and no redirect: the content security policy lets the form of signing out end here alone.
            response = self._pages.render(request, "signed_out.html", url=ended.continue_at, provider=self._provider())
        else:
            response = RedirectResponse("/sign-in", 303)
        for name in (COOKIE, NOTICES):
            _delete_cookie(request, response, name)
        return response

    def _address(self, request: Request) -> str:
        """Where a browser is: as the proxy before the console has added it, where there is one for TLS."""
        forwarded = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        peer = request.client.host if request.client else ""
        return (forwarded or peer) if self._behind_proxy() else peer

    async def _signed_in(self, request: Request, session: NewSession, wanted: str) -> Response:
        # Signing in again in the same browser replaces the session. One that can't be ended now ends by its time.
        with suppress(ApiError):
            await self._end(request)
        response = RedirectResponse(_local(wanted), 303)
        lasts_s = int((session.ends_at - datetime.now(UTC)).total_seconds())
        _set_cookie(request, response, COOKIE, session.token, lasts_s)
        return response

    async def _end(self, request: Request) -> EndedSession | None:
        """Ends the session of the browser; None if it has none. Raises ApiError."""
        if is_session(token := _cookie(request, COOKIE)):
            self._sessions.forget(token)
            with suppress(ApiKeyRefused):
                return await self._api.with_key(SecretStr(token)).act(EndedSession, "sessions/end", {})
        return None

    def _page(self, request: Request, wanted: str, wrong: str | None, status: int = 200) -> Response:
        values = {"next": _local(wanted), "wrong": wrong, "provider": self._provider()}
        return self._pages.render(request, "sign_in.html", status=status, **values)


class _Cookie(TypedDict):
    httponly: bool
    samesite: Literal["lax"]
    secure: bool


def _cookie(request: Request, name: str) -> str:
    """A cookie that was set here; empty where there is none."""
    return request.cookies.get(_named(request, name), "")


def _set_cookie(request: Request, response: Response, name: str, value: str, lasts_s: int) -> None:
    response.set_cookie(_named(request, name), value, max_age=lasts_s, **_cookie_for(request))


def _delete_cookie(request: Request, response: Response, name: str) -> None:
    response.delete_cookie(_named(request, name), **_cookie_for(request))


def _named(request: Request, name: str) -> str:
    """The name of a cookie; where TLS is on, with the prefix that keeps other hosts of the domain from setting it."""
    return f"__Host-{name}" if _is_secure(request) else name


def _cookie_for(request: Request) -> _Cookie:
    """How a cookie is set, and deleted: for `/`, as `__Host-` demands."""
    # Lax rather than strict: who follows a link in an alert is signed in.
    return {"httponly": True, "samesite": "lax", "secure": _is_secure(request)}


def _is_secure(request: Request) -> bool:
    # Of several proxies, the first one says how the browser connected.
    return request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")[0].strip() == "https"


def _from_another_site(pages: PageRenderer, request: Request) -> Response:
    return pages.plain(request, 403, "Request refused", "It was sent by another site.")


def to_sign_in(request: Request, why: str = "") -> Response:
    """303 to the sign-in page, and from there back. `why`: one of `_WHY`."""
    query: dict[str, str] = {why: ""} if why else {}
    if request.method == "GET" and request.url.path != "/":
        query["next"] = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    elif request.method == "POST":
        query = {"expired": "", "next": _page_of_form(request)}
    response = RedirectResponse(f"/sign-in?{urlencode(query)}" if query else "/sign-in", 303)
    if _cookie(request, COOKIE):
        _delete_cookie(request, response, COOKIE)
    return response


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
