"""`/api/v1/openid`: people sign in with OpenID Connect. Whoever asks has no key, and gets a session at the end."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import structlog
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from breakwater.config import OpenId
from breakwater.contracts.api import NewSession, OpenIdCallback, OpenIdRedirect
from breakwater.contracts.types import Event, time_from_ms
from breakwater.policy.callers import claim_values, name_of, roles_of
from breakwater.policy.openid_flow import SignInFlow
from breakwater.state.connection import StateUnavailable
from breakwater.state.sessions import PersonSession, Sessions
from services.request.audit import Actor, AuditLog
from services.request.parsing import read_body, read_command
from services.request.problems import Problem, not_done

if TYPE_CHECKING:
    from services.request.openid_provider import OpenIdProvider, SignedIn

MAX_BYTES = 32_768
LONGEST_ID_TOKEN = 4_096
"""Bytes of an ID token that is kept for signing out: longer ones do not fit into a URL."""


class OpenIdRoutes:
    """The two ends of a sign-in. Without a provider, both say that there is none."""

    def __init__(
        self, settings: OpenId | None, provider: OpenIdProvider | None, sessions: Sessions, audit: AuditLog
    ) -> None:
        self._known = None if settings is None or provider is None else (settings, provider)
        self._sessions = sessions
        self._audit = audit

    async def begin(self, _: Request) -> Response:
        """Where the browser goes."""
        provider = self._configured()[1]
        flow = SignInFlow(secrets.token_urlsafe(32))
        return _response(OpenIdRedirect(url=await provider.authorization_url(flow), flow=flow.secret))

    async def complete(self, request: Request) -> Response:
        """What the browser has brought back becomes a session."""
        settings, provider = self._configured()
        body = await read_body(request, MAX_BYTES, "a request like this may have at most {limit:,} bytes")
        brought = read_command(body, OpenIdCallback)
        flow = SignInFlow(brought.flow)
        # First: nothing else that a browser was sent here with is looked at, unless the browser has asked for it.
        if not flow.is_state(brought.state):
            message = "this answer is not for a sign-in of this browser, or it was begun again meanwhile; sign in again"
            raise Problem(403, "openid_state", message)
        if brought.error is not None or brought.code is None:
            raise _denied(brought)
        signed_in = await provider.redeem(flow, brought.code, brought.iss)
        return _response(await self._begin(settings, signed_in))

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
            settings.issuer, subject, name, tuple(value for value in values if value in known), id_token
        )
        try:
            begun = await self._sessions.begin(f"person:{settings.issuer} {subject}", session)
        except StateUnavailable as error:
            raise not_done(error) from error
        structlog.get_logger().info("signed_in", by=name, subject=subject, session=begun.id)
        await self._audit.note("sign_in", actor, {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    def _configured(self) -> tuple[OpenId, OpenIdProvider]:
        if self._known is None:
            raise Problem(
                404, "no_openid", "no OpenID provider is configured (console.openid); sign in with an API key"
            )
        return self._known


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
