"""Sign-in with an API key, a link or OpenID Connect, which all pages require."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlencode

import structlog
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakwater.client import ApiClient, ApiError, ApiKeyRefusedError
from breakwater.identity.contract import (
    OPENID_CALLBACK,
    EndedSession,
    KeyDetails,
    NewSession,
    OpenIdCallback,
    OpenIdRedirect,
)
from breakwater.identity.pages.operator_actions import read_form
from breakwater.identity.pages.rendering import PageRenderer
from breakwater.identity.pages.sessions import SESSION, Session, SessionCache, csrf_of, pack, session_of, unpack
from breakwater.identity.rules.callers import is_link, is_session
from breakwater.identity.rules.sign_in import SignInLimits, TooManySignInsError
from breakwater.kernel.http.server import OPEN_BODY_BYTES, OPEN_BODY_S, Shares

COOKIE = "breakwater_console"
NOTICES = "breakwater_notices"
NOTICES_S = 300
FLOW = "breakwater_sign_in"
"""The cookie of a user who was sent to the OpenID provider: the flow, and the page to return to."""
FLOW_S = 600
"""Seconds that a sign-in at the OpenID provider may take."""
OPENID = "/sign-in/openid"
LINK = "/sign-in/link"
MAX_CONCURRENT_SIGN_INS = 3
"""Maximum number of concurrent sign-ins from one address at the OpenID provider."""
MAX_FAILURES_PER_MINUTE = 10
_PROVIDER_REFUSALS = ("openid_refused", "openid_invalid")
CHECK_EVERY_S = 10.0
"""Seconds between checks of a session. A session that ended elsewhere, or whose key was revoked, ends by then."""
CHECK_TIMEOUT_S = 3.0
MAX_UNCHECKED_S = 300.0
"""Seconds for which sessions can still read records while the HTTP API is unavailable."""

_WITHOUT_SIGN_IN = ("/sign-in", LINK, OPENID, OPENID_CALLBACK, "/healthz")
_CALLBACK_PARAMS = tuple(OpenIdCallback.model_fields.keys() - {"flow"})
MAX_PATH_BYTES = 2_000
"""Maximum length of the path of a page in a cookie, in bytes."""
_REASONS = {
    "ended": "Your session has ended, or its key was revoked. Sign in again.",
    "expired": "Your session had expired; nothing was changed. Sign in and submit the form again.",
}


class RequireSignIn:
    """ASGI middleware that redirects users who are not signed in to the sign-in page."""

    def __init__(
        self,
        app: ASGIApp,
        sessions: SessionCache,
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
        """Passes the request on with its session, or answers it itself."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if request.method not in ("GET", "HEAD") and not _same_site(request):
            response = self._pages.plain(request, 403, "Request refused", "It was sent by another site.")
            await response(scope, receive, send)
            return
        if scope["path"] in _WITHOUT_SIGN_IN or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        refusal = await self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        key_id = session_of(request).cached.key.id
        if not self._shares.take(key_id):
            text = "Too many of your pages are being loaded at the same time. Close some, or wait."
            await self._pages.plain(request, 429, "Too many requests", text)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, self._with_notices(request, send))
        finally:
            self._shares.release(key_id)

    async def _refusal(self, request: Request) -> Response | None:
        """Checks the session of a request, and adds it to the request's scope; otherwise returns the refusal."""
        token = _cookie(request, COOKIE)
        if not is_session(token):
            return to_sign_in(request)
        cached = self._sessions.find(token)
        now = self._clock()
        problem = "the HTTP API does not respond"
        api = self._api.with_key(SecretStr(token))
        # While the API is unavailable or hangs, only one request every few seconds waits for it.
        if cached is None or (now - cached.checked_at > CHECK_EVERY_S and now >= self._check_again_at):
            try:
                key = await api.read(KeyDetails, "key", timeout_s=CHECK_TIMEOUT_S)
            except ApiKeyRefusedError:
                self._sessions.forget(token)
                return to_sign_in(request, "ended")
            except ApiError as error:
                self._check_again_at = self._clock() + CHECK_EVERY_S
                problem = error.message
            else:
                cached = self._sessions.add(token, key, now)
        if cached is None or now - cached.checked_at > MAX_UNCHECKED_S:
            return self._pages.plain(request, 503, "Your session can't be checked", problem)
        notices = unpack(_cookie(request, NOTICES), token)
        request.scope[SESSION] = Session(api, cached, csrf_of(token), notices)
        return None

    def _with_notices(self, request: Request, send: Send) -> Send:
        """Wraps `send` so that it adds a cookie with the notices for the next page."""

        async def send_with_notices(message: Message) -> None:
            session: Session | None = request.scope.get(SESSION)
            if message["type"] == "http.response.start" and session is not None and session.notices_changed:
                cookie = Response()
                packed = pack(session.notices, _cookie(request, COOKIE)) if session.notices else ""
                _set_cookie(request, cookie, NOTICES, packed, NOTICES_S)
                name, value = next(header for header in cookie.raw_headers if header[0] == b"set-cookie")
                message = {**message, "headers": [*message["headers"], (name, value)]}
            await send(message)

        return send_with_notices


class SignIn:
    """The handlers of signing in and out.

    Args:
        sessions: the cache of sessions.
        api: the HTTP API.
        pages: the renderer.
        provider: returns the current name of the OpenID provider; None if there is none.
        behind_proxy: returns True if browsers come through a proxy, which adds their address.
    """

    def __init__(
        self,
        sessions: SessionCache,
        api: ApiClient,
        pages: PageRenderer,
        provider: Callable[[], str | None],
        behind_proxy: Callable[[], bool],
    ) -> None:
        self._behind_proxy = behind_proxy
        self._limits = SignInLimits(MAX_CONCURRENT_SIGN_INS, MAX_FAILURES_PER_MINUTE, time.monotonic)
        self._sessions = sessions
        self._api = api
        self._pages = pages
        self._provider = provider

    async def show(self, request: Request) -> Response:
        """GET: 200 with the sign-in page."""
        problem = next((text for reason, text in _REASONS.items() if reason in request.query_params), None)
        return self._page(request, request.query_params.get("next", ""), problem)

    async def sign_in(self, request: Request) -> Response:
        """POST: 303 to the requested page, with a cookie; or the form again, with the problem."""
        fields = await read_form(request, OPEN_BODY_BYTES, OPEN_BODY_S)
        next_page = fields.get("next", "")
        try:
            session = await self._new_session(fields.get("key", "").strip())
        except ApiError as error:
            return self._page(request, next_page, error.message, error.status)
        return await self._begin_session(request, session, next_page)

    async def follow_link(self, request: Request) -> Response:
        """GET of a sign-in link: 303 to the page that it names, with a cookie."""
        next_page = request.query_params.get("next", "")
        token = request.query_params.get("token", "")
        if request.method == "HEAD" or not is_link(token):  # a HEAD request must not use up the link
            return self._page(request, next_page, None)
        try:
            session = await self._api.with_key(SecretStr(token)).act(NewSession, "sessions", {})
        except ApiError as error:
            return self._page(request, next_page, error.message, error.status)
        return await self._begin_session(request, session, next_page)

    async def _new_session(self, key: str) -> NewSession:
        """Begins a session with an API key. Raises ApiError with a message for the user."""
        if not key:
            raise ApiError(422, "no_key", "Enter an API key.")
        api = self._api.with_key(SecretStr(key))
        key_details = None
        with suppress(ApiKeyRefusedError):
            key_details = await api.read(KeyDetails, "key") if key.isascii() and key.isprintable() else None
        log = structlog.get_logger()
        if key_details is None:
            log.warning("sign_in_refused", why="unknown key")
            raise ApiError(
                403,
                "unknown_key",
                "This key is unknown. `breakwater keys create NAME --scope read` creates one that may read.",
            )
        if "read" not in key_details.scopes:
            log.warning("sign_in_refused", why="no scope to read", key_id=key_details.id, name=key_details.name)
            advice = "`breakwater keys create NAME --scope read` creates a key that may read"
            raise ApiError(403, "no_scope", f"The key {key_details.name!r} lacks the scope `read`; {advice}.")
        session = await api.act(NewSession, "sessions", {})
        self._sessions.add(session.token, key_details, time.monotonic())
        return session

    async def begin_openid(self, request: Request) -> Response:
        """GET: 303 to the OpenID provider. It is a link, because the content security policy refuses such a form."""
        next_page = request.query_params.get("next", "")
        try:
            flow = await self._api.act(OpenIdRedirect, "openid/begin", {})
        except ApiError as error:
            return self._page(request, next_page, error.message, error.status)
        response = RedirectResponse(flow.url, 303, {"Cache-Control": "no-store"})
        flow_and_page = f"{flow.flow}.{quote(_local(next_page)[:MAX_PATH_BYTES], safe='')}"
        _set_cookie(request, response, FLOW, flow_and_page, FLOW_S)
        return response

    async def complete_openid(self, request: Request) -> Response:
        """GET by a user who returns from the provider: 303 to the requested page; or the problem."""
        flow, _, quoted_page = _cookie(request, FLOW).partition(".")
        next_page = unquote(quoted_page)
        params = {name: request.query_params[name] for name in _CALLBACK_PARAMS if name in request.query_params}
        if not flow:
            text = "This sign-in took over ten minutes, or the browser kept no cookie. Sign in again."
            return self._page(request, next_page, text, 403)
        try:
            with self._limits.of(self._address(request)) as attempt:
                try:
                    session = await self._api.act(NewSession, "openid/complete", {**params, "flow": flow})
                except ApiError as error:
                    # A callback that did not reach the provider does not count, because it costs other users nothing.
                    is_refusal = error.status == 403 and error.code in _PROVIDER_REFUSALS
                    attempt.failed = is_refusal or error.status == 502
                    raise
                attempt.failed = False
        except TooManySignInsError:
            text = "Too many sign-ins from your address are in progress, or have failed within a minute. Wait a minute."
            return self._page(request, next_page, text, 429)
        except ApiError as error:
            response = self._page(request, next_page, error.message, error.status)
        else:
            response = await self._begin_session(request, session, next_page)
        _set_cookie(request, response, FLOW)
        return response

    async def sign_out(self, request: Request) -> Response:
        """POST: 303 to the sign-in page; an error page, and the cookie stays, if the session can't be ended.

        Users of an OpenID provider get a page that leads there, to sign out of it, too.
        """
        try:
            ended = await self._end(request)
        except ApiError as error:
            text = f"{error.message}. Try again, or wait: a session ends automatically after twelve hours."
            return self._pages.plain(request, error.status, "You are still signed in", text)
        if ended is not None and ended.continue_at is not None:
            # A page instead of a redirect, which the content security policy would refuse after a form.
            response = self._pages.render(request, "signed_out.html", url=ended.continue_at, provider=self._provider())
        else:
            response = RedirectResponse("/sign-in", 303)
        for name in (COOKIE, NOTICES):
            _set_cookie(request, response, name)
        return response

    def _address(self, request: Request) -> str:
        """The address of a browser; if there is a proxy for TLS, the one that it adds."""
        forwarded = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
        peer = request.client.host if request.client else ""
        return (forwarded or peer) if self._behind_proxy() else peer

    async def _begin_session(self, request: Request, session: NewSession, next_page: str) -> Response:
        # Signing in again in the same browser replaces the session. If it can't be ended now, it will expire.
        with suppress(ApiError):
            await self._end(request)
        response = RedirectResponse(_local(next_page), 303)
        lasts_s = int((session.ends_at - datetime.now(UTC)).total_seconds())
        _set_cookie(request, response, COOKIE, session.token, lasts_s)
        return response

    async def _end(self, request: Request) -> EndedSession | None:
        """Ends the session of the browser; None if it has none. Raises ApiError."""
        token = _cookie(request, COOKIE)
        if not is_session(token):
            return None
        self._sessions.forget(token)
        with suppress(ApiKeyRefusedError):
            return await self._api.with_key(SecretStr(token)).act(EndedSession, "sessions/end", {})
        return None

    def _page(self, request: Request, next_page: str, problem: str | None, status: int = 200) -> Response:
        values = {"next": _local(next_page), "problem": problem, "provider": self._provider()}
        return self._pages.render(request, "sign_in.html", status=status, **values)


def _cookie(request: Request, name: str) -> str:
    """The value of a cookie of the console; empty if there is none."""
    return request.cookies.get(_cookie_name(request, name), "")


def _cookie_name(request: Request, name: str) -> str:
    """The full name of a cookie. With TLS, its prefix keeps other hosts of the domain from setting it."""
    return f"__Host-{name}" if _is_secure(request) else name


def _set_cookie(request: Request, response: Response, name: str, value: str = "", lasts_s: int = 0) -> None:
    """Sets a cookie, or deletes it if the value is empty."""
    # Lax rather than strict, so that a user who follows a link in an alert is signed in. `__Host-` requires path `/`.
    response.set_cookie(
        _cookie_name(request, name),
        value,
        max_age=lasts_s if value else 0,
        httponly=True,
        samesite="lax",
        secure=_is_secure(request),
    )


def _is_secure(request: Request) -> bool:
    # If there are several proxies, the first one says how the browser connected.
    return request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")[0].strip() == "https"


def to_sign_in(request: Request, reason: str = "") -> Response:
    """Redirects (303) to the sign-in page, which leads back. `reason` is a key of `_REASONS`, or empty."""
    query: dict[str, str] = {reason: ""} if reason else {}
    if request.method == "GET" and request.url.path != "/":
        query["next"] = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    elif request.method == "POST":
        # Leads back to the page with the form, whose address only the browser knows.
        origin, _, path = request.headers.get("referer", "").partition("://")[2].partition("/")
        query = {"expired": "", "next": f"/{path}" if origin == request.headers.get("host") else "/"}
    response = RedirectResponse(f"/sign-in?{urlencode(query)}" if query else "/sign-in", 303)
    if _cookie(request, COOKIE):
        _set_cookie(request, response, COOKIE)
    return response


def _local(path: str) -> str:
    """A path on this site; `/` for any other."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local else "/"


def _same_site(request: Request) -> bool:
    """Returns whether a form was sent by a page of the console, as far as the browser says."""
    # No page can forge this header, and it is right behind any proxy.
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")
