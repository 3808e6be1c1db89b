"""Authorization: requests below /api and /v1, and for metrics, need an API key with one of the scopes they require.

The token of a session has the rights of the key that began it, or those of a person with roles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from breakwater.identity.api_keys import KeyRing
from breakwater.identity.contract import KeyScope
from breakwater.identity.rules.callers import (
    OPEN_TO_ALL,
    OPENAI,
    Attribution,
    Caller,
    is_link,
    is_openai,
    is_session,
    is_token,
    person,
    roles_of,
    roles_that_may,
    scopes_for,
)
from breakwater.identity.settings import OpenId, ProxyHeaders, TokenSettings
from breakwater.identity.store import KeySession, PersonSession, Sessions
from breakwater.kernel.http.parsing import invalid_job
from breakwater.kernel.http.problems import RequestError, not_read, unauthorized_error, unavailable
from breakwater.kernel.http.server import CLIENT, ClientPresence, Shares
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.security.addresses import is_in
from breakwater.kernel.types import is_identifier, time_from_ms
from breakwater.kernel.validation import FieldError

GUARDED = ("/api", "/metrics", OPENAI)

_BELOW = tuple(f"{path}/" for path in GUARDED)
_CALLER = "breakwater.caller"
_SESSION = "breakwater.session"
_WATCH = "breakwater.caller.watch"
_DISCONNECT: Message = {"type": "http.disconnect"}


def caller_of(request: Request) -> Caller:
    """Returns the holder of the key or session of a request to a guarded path."""
    return request.scope[_CALLER]


def session_of(request: Request) -> str | None:
    """Returns the token of the request's session; None if it came with a key."""
    return request.scope[_SESSION]


async def wait_until_refused(request: Request, every_s: float) -> str:
    """Waits until the caller of a long request has lost its access, and returns the reason.

    Changes of keys that the plane keeps are noticed at once, all others by a check.

    Args:
        request: a request to a guarded path.
        every_s: the interval of the checks, in seconds.
    """
    watch: CallerWatch = request.scope[_WATCH]
    return await watch.wait(every_s)


def on_leaving(request: Request, leave: Callable[[], None]) -> Callable[[], None]:
    """Calls `leave` when the client has left or its caller has lost its access, until the returned function is called.

    Args:
        request: a request to a guarded path.
        leave: called at most twice; must not block.
    """
    watch: CallerWatch = request.scope[_WATCH]
    presence: ClientPresence = request.scope[CLIENT]

    def stop() -> None:
        watch.leaving.discard(leave)
        presence.unwatch(leave)

    watch.leaving.add(leave)
    presence.watch(leave)
    watch.end_if_refused()
    return stop


def why_refused(request: Request) -> str | None:
    """Returns why the caller of a request has lost its access since the request began; None if it has not."""
    watch: CallerWatch = request.scope[_WATCH]
    return watch.why


class CallerWatch:
    """A request that is being answered, whose caller may lose its access.

    Waiting for the client's disconnect then ends as if the client had left, so that everything that waits with it ends.

    Attributes:
        caller: the caller.
        why: the reason why the caller has lost its access; None while it has it.
        ended_wait: True if a wait was ended for that reason.
        leaving: called when the caller has lost its access.
    """

    __slots__ = ("_check", "_looks", "_refused", "_waiting", "caller", "ended_wait", "leaving", "why")

    def __init__(self, caller: Caller, check: Callable[[], Awaitable[str | None]]) -> None:
        self.caller = caller
        self.why: str | None = None
        self.ended_wait = False
        self.leaving: set[Callable[[], None]] = set()
        self._check = check
        self._waiting: set[asyncio.Task[Any]] = set()
        self._refused: asyncio.Event | None = None
        self._looks: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        """Has the caller's access checked, because it may have changed."""
        look = asyncio.create_task(self._look())
        # The loop itself does not keep its tasks alive.
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look(self) -> None:
        why = await self._check() if self.why is None else None
        if why is None or self.why is not None:
            return
        self.why = why
        for task in self._waiting:
            task.cancel()
        self.end_if_refused()
        if self._refused is not None:
            self._refused.set()

    def end_if_refused(self) -> None:
        """Ends what waits if the caller has lost its access, perhaps before it began to wait."""
        for leave in tuple(self.leaving) if self.why is not None else ():
            self.ended_wait = True
            leave()

    async def wait(self, every_s: float) -> str:
        """Waits until the caller has lost its access, checks that regularly, and returns the reason."""
        self._refused = self._refused or asyncio.Event()
        while self.why is None:
            try:
                async with asyncio.timeout(every_s):
                    await self._refused.wait()
            except TimeoutError:
                await self._look()
        return self.why

    def receive_from(self, receive: Receive) -> Receive:
        """Returns the function for the next message of the client, or its disconnect once its caller has no access."""
        return partial(self._receive, receive)

    async def _receive(self, receive: Receive) -> Message:
        # A task is cancelled to end its wait, as a second task for each request would cost more than all the rest here.
        task = asyncio.current_task()
        assert task is not None
        if self.why is None:
            self._waiting.add(task)
            try:
                return await receive()
            except asyncio.CancelledError:
                # If somebody else has cancelled the task as well, it has to end.
                if self.why is None or task.uncancel():
                    raise
            finally:
                self._waiting.discard(task)
        self.ended_wait = True
        return _DISCONNECT


class TokenVerifier(Protocol):
    """A verifier of JSON Web Tokens."""

    async def caller(self, token: str) -> Caller:
        """Returns the holder of a token. Raises RequestError: it is not valid."""
        ...


@dataclass(slots=True)
class AcceptedTokens:
    """The verifier by the current config; None if it accepts no tokens. Requests that began before it use it, too."""

    current: TokenVerifier | None = None
    settings: TokenSettings | None = None
    looks: set[Callable[[], None]] = field(default_factory=set[Callable[[], None]])
    """Called when other settings may have ended the access of a request in progress."""

    def watch(self, caller: Caller, look: Callable[[], None]) -> None:
        """Calls `look` for the holder of a token when other settings apply, until `unwatch`."""
        if caller.kind == "token":
            self.looks.add(look)

    def unwatch(self, look: Callable[[], None]) -> None:
        """Undoes `watch`."""
        self.looks.discard(look)

    def reload(self, settings: TokenSettings | None) -> None:
        """Uses other settings. The keys of an issuer whose settings stay are not read again."""
        if settings == self.settings:
            return
        self.settings = settings
        self.current = None
        if settings is not None:
            from breakwater.identity.api_tokens import ApiTokens

            self.current = ApiTokens(settings)
        for look in self.looks:
            look()


@dataclass(frozen=True, slots=True)
class KeyGuard:
    """Admits requests to guarded paths only with a valid `Authorization: Bearer bw_…`.

    Below `/v1`, the key may be in `x-api-key` instead. It must have one of the scopes that `scopes_for` returns. The
    token of a session has the current rights of the key that began it, or of the roles that the config gives its
    person.

    Args:
        keys: the known keys.
        sessions: the known sessions.
        openid: the config's OpenID settings; without them, sessions of persons have ended.
        tokens: the verifier of JSON Web Tokens that the current config accepts.
        proxy_headers: the headers in which a trusted proxy names users and teams.
        shares: the limit of concurrent requests by key.
    """

    keys: KeyRing
    sessions: Sessions
    openid: OpenId | None
    tokens: AcceptedTokens
    proxy_headers: ProxyHeaders | None
    shares: Shares

    async def admit(self, scope: Scope) -> CallerWatch:
        """Admits a request until `release`. Raises RequestError: 401, 403, 429 or 503."""
        key = _key_of(scope)
        caller = await self._caller(key)
        if self.proxy_headers is not None:
            caller = with_forwarded(caller, scope, self.proxy_headers)
        scope[_CALLER] = caller
        scope[_SESSION] = key if is_session(key) else None
        raw_path = (scope.get("raw_path") or b"").decode("latin-1")
        needed = scopes_for(scope["method"], scope["path"], raw_path)
        if not caller.may(needed):
            raise _forbidden_error(caller, needed)
        if not self.shares.take(caller.id):
            raise _too_many()
        watch = scope[_WATCH] = CallerWatch(caller, partial(self._why_no_longer, key, needed))
        self.keys.watch(caller, watch.look)
        self.tokens.watch(caller, watch.look)
        return watch

    def release(self, watch: CallerWatch) -> None:
        """Ends a request that has been answered."""
        self.keys.unwatch(watch.caller, watch.look)
        self.tokens.unwatch(watch.look)
        self.shares.release(watch.caller.id)

    async def _caller(self, key: str) -> Caller:
        try:
            caller = await self._find(key)
        except StateUnavailableError as error:
            raise not_read(error) from error
        if caller is None and not self.keys.is_filled:
            raise unavailable("unavailable", "the API keys can't be read yet; retry")
        if caller is None and is_link(key):
            message = (
                "this sign-in link was used before, is over ten minutes old, or its key was revoked; "
                "`breakwater console` prints a new one"
            )
            raise unauthorized_error(message)
        if caller is None and is_session(key):
            raise unauthorized_error("this session has ended; sign in again")
        if caller is None:
            unknown = "this API key is unknown; `breakwater keys create NAME` creates one"
            raise unauthorized_error(self.keys.why_refused(key) or unknown)
        return caller

    async def _find(self, token: str) -> Caller | None:
        """Returns the sender of a token; None if it is unknown. Raises RequestError: a JSON Web Token is not valid."""
        if is_token(token):
            if (verifier := self.tokens.current) is None:
                raise unauthorized_error("JSON Web Tokens are not accepted here (identity.jwt); send an API key")
            return await verifier.caller(token)
        if not is_session(token):
            offered = await self.sessions.redeem(token) if is_link(token) else None
            return self.keys.holder_by_digest(*offered) if offered else self.keys.holder(token)
        stored = await self.sessions.find(token)
        if stored is None:
            return None
        match stored.session:
            case KeySession(key_id, digest):
                return self.keys.holder_by_digest(key_id, digest)
            case PersonSession() as session:
                return self._person(session, time_from_ms(stored.began_ms))

    def _person(self, session: PersonSession, signed_in_at: datetime) -> Caller | None:
        """Returns the person of a session, with their current roles; None if the config gives them no role any more."""
        openid = self.openid
        if openid is None or openid.issuer != session.issuer:
            return None
        roles = roles_of(session.values, openid.roles, openid.default_role)
        return person(session.subject, session.name, roles, signed_in_at) if roles else None

    async def _why_no_longer(self, key: str, needed: tuple[KeyScope, ...]) -> str | None:
        try:
            caller = await self._find(key)
        except StateUnavailableError:
            return None
        except RequestError as problem:
            return problem.message if problem.status == 401 else None
        if caller is None and is_session(key):
            return "this session has ended; sign in again"
        if caller is None:
            return self.keys.why_refused(key) or "this API key was revoked"
        return None if caller.may(needed) else "this API key no longer has access to this"


def is_guarded(path: str) -> bool:
    """Returns True if a path needs a key."""
    return path not in OPEN_TO_ALL and (path.startswith(_BELOW) or path in GUARDED)


def _key_of(scope: Scope) -> str:
    """Returns the key that a request was sent with, in `Authorization: Bearer` or, as Anthropic's SDKs do, `x-api-key`.

    Empty if `Authorization` has another scheme. Raises RequestError: 401, there is no key.
    """
    header = _first(scope, b"authorization")
    if header is None:
        sdk_header = _first(scope, b"x-api-key")
        if sdk_header is not None and is_openai(scope["path"]):
            return sdk_header.decode("latin-1").strip()
        raise unauthorized_error("an API key is needed: send the header `Authorization: Bearer bw_…`")
    scheme, _, key = header.decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def with_forwarded(caller: Caller, scope: Scope, headers: ProxyHeaders) -> Caller:
    """Returns the sender of a request with the names that a trusted proxy has set on it.

    Raises:
        RequestError: 403, the key is bound to another user or team; 422, a name is invalid, or was sent twice.
    """
    client = scope.get("client")
    if client is None or not is_in(client[0], headers.networks):
        return caller
    user, team = (None if name is None else _forwarded_name(scope, name) for name in (headers.user, headers.team))
    for header, name, bound in ((headers.user, user, caller.user), (headers.team, team, caller.team)):
        if name is not None and bound not in (None, name):
            message = f"{header}: names {name!r}, and {caller.name!r} is bound to {bound!r}"
            raise RequestError(403, "forbidden", message, [FieldError(str(header), f"is not {bound!r}")])
    return replace(caller, forwarded=Attribution(user, team))


def _forwarded_name(scope: Scope, header: str) -> str | None:
    """Returns the name in a header, which is UTF-8; None without one. Raises RequestError: 422."""
    header_key = header.lower().encode()
    values = [value.strip() for name, value in scope["headers"] if name == header_key]
    if len(values) > 1:
        raise invalid_job([FieldError(header, "was sent twice: the proxy must replace what its clients send")])
    if not values or not values[0]:
        return None
    try:
        name = values[0].decode()
    except UnicodeDecodeError:
        raise invalid_job([FieldError(header, "is not UTF-8")]) from None
    if not is_identifier(name):
        raise invalid_job([FieldError(header, "must have 1 to 128 characters, none of them a control")])
    return name


def _first(scope: Scope, header: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == header:
            return value
    return None


def _forbidden_error(caller: Caller, needed: tuple[KeyScope, ...]) -> RequestError:
    if caller.kind == "person":
        message = (
            f"this needs the role {' or '.join(roles_that_may(needed))}; {caller.name!r} is {_in_words(caller.roles)}"
        )
    else:
        # Only a key with the scope `limits` can make keys over the API.
        file_option = " --file FILE" if needed[0] == "limits" else ""
        message = (
            f"this needs an API key with the scope {' or '.join(needed)}; the key {caller.name!r} "
            f"has the scope {_in_words(caller.scopes)}; "
            f"`breakwater keys create NAME --scope {needed[0]}{file_option}` creates one"
        )
    challenge = f'Bearer realm="breakwater", error="insufficient_scope", scope="{needed[0]}"'
    return RequestError(403, "forbidden", message, headers={"WWW-Authenticate": challenge})


def _too_many() -> RequestError:
    message = (
        "this API key has reached its limit of concurrent requests; most of them wait for "
        "results. Retry when some have ended, or wait for fewer results at a time"
    )
    return RequestError(429, "too_many_requests", message, retry_after_s=1.0)


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(names)
