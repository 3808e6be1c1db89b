"""`/api/v1/openid`: people sign in with OpenID Connect, and the provider says when they have signed out of it.

Whoever asks has no key. So what was not begun here costs no more than an HMAC, nothing is redeemed twice, and what
fails is counted for the address that it comes from.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import OpenId
from breakwater.contracts.access import BackChannelLogout, EndedSessions, NewSession, OpenIdCallback, OpenIdRedirect
from breakwater.contracts.types import Event, time_from_ms
from breakwater.policy.callers import claim_values, name_of, roles_of
from breakwater.policy.sign_in import ENTROPY_BYTES, LASTS_S, SignInFlow, SignInLimits, SignInTry, TooManySignIns
from breakwater.state.connection import StateUnavailable
from breakwater.state.sessions import PersonSession, Sessions, SignIns
from services.request.audit import Actor, AuditLog
from services.request.parsing import read_command, read_open_body
from services.request.problems import Problem, not_done

if TYPE_CHECKING:
    from services.request.openid_provider import OpenIdProvider, SignedIn

AT_ONCE = 10
"""Sign-ins of one address, which is the console's for all who sign in there. It has a limit for each of them."""
FAILURES_A_MINUTE = 100
LOGOUT_REMEMBERED_S = 900
"""Longer than a logout token is taken."""
LONGEST_ID_TOKEN = 4_096
"""Bytes of an ID token that is kept for signing out: longer ones do not fit into a URL."""


class OpenIdRoutes:
    """The two ends of a sign-in. Without a provider, both say that there is none."""

    def __init__(
        self,
        settings: OpenId | None,
        provider: OpenIdProvider | None,
        sessions: Sessions,
        sign_ins: SignIns,
        audit: AuditLog,
    ) -> None:
        self._known = None if settings is None or provider is None else (settings, provider)
        self._sessions = sessions
        self._sign_ins = sign_ins
        self._audit = audit
        self._limits = SignInLimits(AT_ONCE, FAILURES_A_MINUTE, time.monotonic)
        self._logout_limits = SignInLimits(AT_ONCE, FAILURES_A_MINUTE, time.monotonic)

    async def begin(self, _: Request) -> Response:
        """Where the browser goes."""
        provider = self._configured()[1]
        with _stored():
            key = await self._sign_ins.key()
        flow = SignInFlow.begin(key, secrets.token_bytes(ENTROPY_BYTES), int(time.time()))
        return _response(OpenIdRedirect(url=await provider.authorization_url(flow), flow=flow.secret))

    async def complete(self, request: Request) -> Response:
        """What the browser has brought back becomes a session."""
        settings, provider = self._configured()
        brought = read_command(await read_open_body(request), OpenIdCallback)
        flow = SignInFlow(brought.flow)
        # First: nothing else that a browser was sent here with is looked at, unless the browser has asked for it.
        if not flow.is_state(brought.state):
            message = "this answer is not for a sign-in of this browser, or it was begun again meanwhile; sign in again"
            raise Problem(403, "openid_state", message)
        with _stored():
            if not flow.is_begun(await self._sign_ins.key(), int(time.time())):
                raise Problem(403, "openid_state", "this sign-in took over ten minutes; sign in again")
            if await self._sign_ins.is_used(flow.secret):
                raise _used()
        if brought.error is not None or brought.code is None:
            raise _denied(brought)
        with _attempt(self._limits, request) as attempt:
            with _stored():
                # Twice as long as a sign-in lasts, whose clocks may differ.
                if not await self._sign_ins.use(flow.secret, 2 * LASTS_S):
                    raise _used()
            signed_in = await provider.redeem(flow, brought.code, brought.iss)
            attempt.failed = False
        return _response(await self._begin(settings, signed_in))

    async def log_out(self, request: Request) -> Response:
        """What the provider says of somebody who has signed out ends their sessions here."""
        settings, provider = self._configured()
        form = parse_qs((await read_open_body(request)).decode("latin-1"), max_num_fields=10)
        try:
            sent = BackChannelLogout(logout_token=form["logout_token"][0])
        except (KeyError, ValueError):
            raise Problem(400, "invalid_logout_token", "the form has no usable field logout_token") from None
        with _attempt(self._logout_limits, request) as attempt:
            said = await provider.signed_out(sent.logout_token)
            with _stored():
                if not await self._sign_ins.use(f"logout {said.token_id}", LOGOUT_REMEMBERED_S):
                    raise Problem(400, "invalid_logout_token", "this logout token was used before")
                ended = await self._sessions.end_of_person(settings.issuer, said.subject, said.session)
            attempt.failed = False
        for known in ended:
            person = known.session
            if isinstance(person, PersonSession):
                structlog.get_logger().info("signed_out_at_provider", by=person.name, session=known.id)
                actor = Actor(person.name, "person", person.subject)
                await self._audit.note("sign_out", actor, {"session": known.id, "at": "provider"})
        return _response(EndedSessions(ended=len(ended)))

    async def _begin(self, settings: OpenId, signed_in: SignedIn) -> NewSession:
        claims, subject = signed_in.claims, str(signed_in.claims["sub"])
        name = name_of(claims, settings.name_claim)
        values = claim_values(claims, settings.roles_claim)
        actor = Actor(name, "person", subject)
        if not roles_of(values, settings.roles, settings.default_role):
            structlog.get_logger().warning("sign_in_refused", why="no role", by=name, subject=subject)
            await self._audit.note("sign_in", actor, {}, error="no_role")
            what = f"the claim {settings.roles_claim!r} has no value that gives a role"
            message = f"{name!r} has no role in Breakwater: {what}. Whoever runs it can add one (console.openid.roles)"
            raise Problem(403, "no_role", message)
        known = settings.role_values
        id_token = signed_in.id_token if len(signed_in.id_token) <= LONGEST_ID_TOKEN else None
        session = PersonSession(
            settings.issuer,
            subject,
            name,
            tuple(value for value in values if value in known),
            id_token,
            claims["sid"] if isinstance(claims.get("sid"), str) else None,
        )
        with _stored():
            begun = await self._sessions.begin(session)
        structlog.get_logger().info("signed_in", by=name, subject=subject, session=begun.id)
        await self._audit.note("sign_in", actor, {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    def _configured(self) -> tuple[OpenId, OpenIdProvider]:
        if self._known is None:
            raise Problem(
                404, "no_openid", "no OpenID provider is configured (console.openid); sign in with an API key"
            )
        return self._known


@contextmanager
def _stored() -> Generator[None]:
    """Asks Redis in the block. Raises Problem: 503, it is unavailable."""
    try:
        yield
    except StateUnavailable as error:
        raise not_done(error) from error


@contextmanager
def _attempt(limits: SignInLimits, request: Request) -> Generator[SignInTry]:
    """One attempt of the address that a request comes from."""
    try:
        with limits.of(request.client.host if request.client else "") as attempt:
            try:
                yield attempt
            except Problem as problem:
                attempt.failed = problem.status != 503
                raise
    except TooManySignIns:
        message = "too many sign-ins from this address are under way, or have failed within a minute; wait a minute"
        raise Problem(429, "too_many_sign_ins", message, headers={"Retry-After": "60"}) from None


def _used() -> Problem:
    return Problem(409, "openid_refused", "this sign-in was used before; sign in again")


def _denied(brought: OpenIdCallback) -> Problem:
    """What the provider says instead of giving a code. Its words are shown: this browser has asked it."""
    if brought.error == "access_denied":
        return Problem(
            403, "openid_denied", "the sign-in was cancelled or not permitted at the provider; sign in again"
        )
    said = ": ".join(part for part in (brought.error, brought.error_description) if part) or "no code"
    printable = "".join(character for character in said[:300] if character.isprintable())
    return Problem(403, "openid_refused", f"the provider refused the sign-in: {printable}")


def _response(event: Event) -> Response:
    return Response(to_json(event), headers={"Cache-Control": "no-store"}, media_type="application/json")
