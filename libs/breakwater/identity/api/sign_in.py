"""Signing in and out: with an API key (`/api/v1/sessions`), and with OpenID Connect (`/api/v1/openid`).

Requests to `/api/v1/openid` carry no key. So a sign-in that was not begun here costs no more than an HMAC, nothing is
redeemed twice, and failures are counted for the address that they come from.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from breakwater.identity.audit import Actor, AuditLog, actor_of
from breakwater.identity.contract import (
    BackChannelLogout,
    EndedSession,
    EndedSessions,
    KeyDetails,
    NewSession,
    OpenIdCallback,
    OpenIdRedirect,
)
from breakwater.identity.operations import REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.identity.rules.callers import claim_values, name_of, roles_of
from breakwater.identity.rules.sign_in import (
    ENTROPY_BYTES,
    LASTS_S,
    SignInFlow,
    SignInLimits,
    SignInTry,
    TooManySignInsError,
)
from breakwater.identity.settings import OpenId
from breakwater.identity.store import KeySession, PersonSession, Sessions, SignIns
from breakwater.kernel.http.bodies import read_open_body
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError, not_done
from breakwater.kernel.redis.connection import StateUnavailableError
from breakwater.kernel.types import Event, Message, time_from_ms

if TYPE_CHECKING:
    from breakwater.identity.openid_provider import OpenIdProvider, SignedIn

AT_ONCE = 10
"""The most concurrent sign-ins from one address. All people at a console share its address; it limits them itself."""
FAILURES_A_MINUTE = 100
LOGOUT_REMEMBERED_S = 900
"""Time for which a used logout token is remembered, longer than it is valid."""
LONGEST_ID_TOKEN = 4_096
"""The most bytes of an ID token that is kept for signing out. Longer ones do not fit into a URL."""


EndAtProvider = Callable[[PersonSession], Awaitable[str | None]]
"""Returns the URL at which a browser ends the session at the OpenID provider, too; None if there is none."""


@dataclass(frozen=True, slots=True)
class SessionRoutes:
    """The API key of a request, and sessions: they begin with a key here, and all of them end here."""

    sessions: Sessions
    audit: AuditLog
    end_at_provider: EndAtProvider

    @operation(
        "GET",
        "/api/v1/key",
        tag="sessions",
        summary="The API key of this request, and what it may be used for",
        description="For programs that sign people in by their key. With a session's token, whose session it is.",
        result="The key or the person.",
    )
    async def show_key(self, request: ApiRequest[Message]) -> KeyDetails:
        """Shows the key or the person of the request."""
        return KeyDetails.model_validate(asdict(request.caller))

    @operation(
        "POST",
        "/api/v1/sessions",
        tag="sessions",
        summary="Begin a session",
        description="For programs that sign people in, such as the console: a session's token has the rights of the "
        "key, and may be kept where the key may not. It lasts for twelve hours, until it is ended, or until the secret "
        "that began it is no longer valid. Of one key there are at most 20; beyond them, the oldest ends.",
        result="The session.",
        errors={409: "The request was sent with a session's token (`is_a_session`).", 503: REDIS_UNAVAILABLE},
    )
    async def sign_in(self, request: ApiRequest[Message]) -> NewSession:
        """Begins a session with the rights of the key."""
        key = request.caller
        if request.session is not None:
            raise RequestError(409, "is_a_session", "a session starts with an API key, not with another session")
        begun = await self.sessions.begin(KeySession(key.id, key.digest))
        request.log("signed_in", session=begun.id)
        await self.audit.note("sign_in", actor_of(key), {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    @operation(
        "POST",
        "/api/v1/sessions/end",
        tag="sessions",
        summary="End the session whose token the request is sent with",
        result="The session has ended everywhere.",
        errors={409: "It was sent with an API key (`not_a_session`).", 503: REDIS_UNAVAILABLE},
    )
    async def sign_out(self, request: ApiRequest[Message]) -> EndedSession:
        """Ends the session of the request."""
        if request.session is None:
            raise RequestError(
                409, "not_a_session", "only a session can be ended; `breakwater keys revoke` revokes a key"
            )
        ended = await self.sessions.end(request.session)
        request.log("signed_out")
        await self.audit.note("sign_out", actor_of(request.caller), {"session": request.session.split("_")[2]})
        if ended is None or isinstance(ended.session, KeySession):
            return EndedSession()
        return EndedSession(continue_at=await self.end_at_provider(ended.session))


NO_OPENID = "The config names no OpenID provider (`no_openid`)."
OPENID_UNAVAILABLE = (
    "The OpenID provider is unavailable (`openid_unavailable`), or too many people are signing in (`openid_busy`)."
)


class OpenIdRoutes:
    """Signing in and out with OpenID Connect. Without a provider in the config, requests get 404."""

    def __init__(
        self,
        settings: OpenId | None,
        provider: OpenIdProvider | None,
        sessions: Sessions,
        sign_ins: SignIns,
        audit: AuditLog,
    ) -> None:
        self._configuration = None if settings is None or provider is None else (settings, provider)
        self._sessions = sessions
        self._sign_ins = sign_ins
        self._audit = audit
        self._limits = SignInLimits(AT_ONCE, FAILURES_A_MINUTE, time.monotonic)
        self._logout_limits = SignInLimits(AT_ONCE, FAILURES_A_MINUTE, time.monotonic)

    @operation(
        "POST",
        "/api/v1/openid/begin",
        tag="openid",
        summary="Begin a sign-in with OpenID Connect",
        description="For the console, which keeps `flow` in a cookie, and sends the browser to `url`.",
        results={200: ("URL for the browser.", OpenIdRedirect)},
        errors={404: NO_OPENID, 503: OPENID_UNAVAILABLE},
    )
    async def begin_openid(self, _: Request) -> Response:
        """Responds with the URL for the browser."""
        provider = self._openid()[1]
        with _redis_outages_as_503():
            key = await self._sign_ins.key()
        flow = SignInFlow.begin(key, secrets.token_bytes(ENTROPY_BYTES), int(time.time()))
        return _response(OpenIdRedirect(url=await provider.authorization_url(flow), flow=flow.secret))

    @operation(
        "POST",
        "/api/v1/openid/complete",
        tag="openid",
        summary="Complete a sign-in at the OpenID provider",
        description="The session has the name of the person, and the scopes that the config gives their roles at the "
        "time of each request. It lasts for twelve hours, until it is ended, or until the config gives it no role.",
        body=OpenIdCallback,
        results={200: ("The session.", NewSession)},
        errors={
            403: "This browser has not asked for it (`openid_state`); the person has no role (`no_role`); the provider "
            "refused (`openid_denied`, `openid_refused`); its answer can't be trusted (`openid_invalid`); the clocks "
            "differ (`openid_clock_skew`).",
            404: NO_OPENID,
            409: "It was completed before, or tried (`openid_refused`).",
            502: "The provider does not accept the client (`openid_client_refused`), or refuses in another way "
            "(`openid_refused`).",
            429: (
                "Too many sign-ins from this address have failed within a minute, or are in progress "
                "(`too_many_sign_ins`)."
            ),
            503: f"{OPENID_UNAVAILABLE} Or Redis is (`unavailable`).",
        },
    )
    async def complete_openid(self, request: Request) -> Response:
        """Begins a session with the parameters that the browser has brought back."""
        settings, provider = self._openid()
        callback = read_command(await read_open_body(request), OpenIdCallback)
        flow = SignInFlow(callback.flow)
        # The state is checked first: the other parameters are ignored unless this browser has begun the sign-in.
        if not flow.is_state(callback.state):
            message = (
                "this response does not belong to a sign-in of this browser, or the sign-in was "
                "restarted; sign in again"
            )
            raise RequestError(403, "openid_state", message)
        with _redis_outages_as_503():
            if not flow.is_begun(await self._sign_ins.key(), int(time.time())):
                raise RequestError(403, "openid_state", "this sign-in took over ten minutes; sign in again")
            if await self._sign_ins.is_used(flow.secret):
                raise _link_used_error()
        if callback.error is not None or callback.code is None:
            raise _denial(callback)
        with _attempt(self._limits, request) as attempt:
            with _redis_outages_as_503():
                # A used sign-in is remembered for twice as long as one may last, as clocks may differ.
                if not await self._sign_ins.use(flow.secret, 2 * LASTS_S):
                    raise _link_used_error()
            signed_in = await provider.redeem(flow, callback.code, callback.iss)
            attempt.failed = False
        return _response(await self._begin(settings, signed_in))

    @operation(
        "POST",
        "/api/v1/openid/backchannel-logout",
        tag="openid",
        summary="End the sessions of a person who has signed out at the OpenID provider",
        description="For the provider, by OpenID Connect Back-Channel Logout 1.0: `sid` ends the sessions that have "
        "come from its own one, and `sub` alone all of the person.",
        body=BackChannelLogout,
        body_type="application/x-www-form-urlencoded",
        results={200: ("The sessions have ended everywhere.", EndedSessions)},
        errors={
            400: "The logout token is not signed by the provider, is for another client, too old, or was used before "
            "(`invalid_logout_token`).",
            404: NO_OPENID,
            429: "Too many tokens from this address were wrong within a minute (`too_many_sign_ins`).",
            503: "The OpenID provider (`openid_unavailable`) or Redis (`unavailable`) is unavailable.",
        },
    )
    async def logout_openid(self, request: Request) -> Response:
        """Ends the sessions of a person who has signed out at the provider."""
        settings, provider = self._openid()
        form = parse_qs((await read_open_body(request)).decode("latin-1"), max_num_fields=10)
        try:
            sent = BackChannelLogout(logout_token=form["logout_token"][0])
        except (KeyError, ValueError):
            raise RequestError(400, "invalid_logout_token", "the form has no usable field logout_token") from None
        with _attempt(self._logout_limits, request) as attempt:
            signed_out = await provider.read_logout_token(sent.logout_token)
            with _redis_outages_as_503():
                if not await self._sign_ins.use(f"logout {signed_out.token_id}", LOGOUT_REMEMBERED_S):
                    raise RequestError(400, "invalid_logout_token", "this logout token was used before")
                ended = await self._sessions.end_of_person(settings.issuer, signed_out.subject, signed_out.session)
            attempt.failed = False
        for session in ended:
            person = session.session
            if isinstance(person, PersonSession):
                structlog.get_logger().info("signed_out_at_provider", by=person.name, session=session.id)
                actor = Actor(person.name, "person", person.subject)
                await self._audit.note("sign_out", actor, {"session": session.id, "at": "provider"})
        return _response(EndedSessions(ended=len(ended)))

    async def _begin(self, settings: OpenId, signed_in: SignedIn) -> NewSession:
        claims = signed_in.claims
        subject = str(signed_in.claims["sub"])
        name = name_of(claims, settings.name_claim)
        values = claim_values(claims, settings.roles_claim)
        actor = Actor(name, "person", subject)
        if not roles_of(values, settings.roles, settings.default_role):
            structlog.get_logger().warning("sign_in_refused", why="no role", by=name, subject=subject)
            await self._audit.note("sign_in", actor, {}, error="no_role")
            reason = f"the claim {settings.roles_claim!r} has no value that maps to a role"
            message = (
                f"{name!r} has no role in Breakwater: {reason}. An administrator can add one (console.openid.roles)"
            )
            raise RequestError(403, "no_role", message)
        role_values = settings.role_values
        id_token = signed_in.id_token if len(signed_in.id_token) <= LONGEST_ID_TOKEN else None
        session = PersonSession(
            settings.issuer,
            subject,
            name,
            tuple(value for value in values if value in role_values),
            id_token,
            claims["sid"] if isinstance(claims.get("sid"), str) else None,
        )
        with _redis_outages_as_503():
            begun = await self._sessions.begin(session)
        structlog.get_logger().info("signed_in", by=name, subject=subject, session=begun.id)
        await self._audit.note("sign_in", actor, {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    def _openid(self) -> tuple[OpenId, OpenIdProvider]:
        if self._configuration is None:
            raise RequestError(
                404, "no_openid", "no OpenID provider is configured (console.openid); sign in with an API key"
            )
        return self._configuration


@contextmanager
def _redis_outages_as_503() -> Generator[None]:
    """Turns an outage of Redis in the block into a RequestError (503)."""
    try:
        yield
    except StateUnavailableError as error:
        raise not_done(error) from error


@contextmanager
def _attempt(limits: SignInLimits, request: Request) -> Generator[SignInTry]:
    """Counts one attempt of a request's address. Raises RequestError: 429, there were too many."""
    try:
        with limits.of(request.client.host if request.client else "") as attempt:
            try:
                yield attempt
            except RequestError as problem:
                attempt.failed = problem.status != 503
                raise
    except TooManySignInsError:
        message = "too many sign-ins from this address are in progress, or have failed within a minute; wait a minute"
        raise RequestError(429, "too_many_sign_ins", message, retry_after_s=60.0) from None


def _link_used_error() -> RequestError:
    return RequestError(409, "openid_refused", "this sign-in was used before; sign in again")


def _denial(callback: OpenIdCallback) -> RequestError:
    """Returns the error for a response without a code, in the provider's words, as this browser began the sign-in."""
    if callback.error == "access_denied":
        return RequestError(
            403, "openid_denied", "the sign-in was cancelled or not permitted at the provider; sign in again"
        )
    words = ": ".join(part for part in (callback.error, callback.error_description) if part) or "no code"
    printable = "".join(character for character in words[:300] if character.isprintable())
    return RequestError(403, "openid_refused", f"the provider refused the sign-in: {printable}")


def _response(event: Event) -> Response:
    return Response(to_json(event), headers={"Cache-Control": "no-store"}, media_type="application/json")
