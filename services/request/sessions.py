"""`/api/v1/sessions`: signing in with an API key, and signing out, for the console."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from breakwater.contracts.access import EndedSession, NewSession
from breakwater.contracts.types import Message, time_from_ms
from breakwater.state.sessions import KeySession, PersonSession, Sessions
from services.request.audit import AuditLog
from services.request.problems import Problem
from services.request.routing import ApiRequest, actor_of

EndAtProvider = Callable[[PersonSession], Awaitable[str | None]]
"""Where a browser ends the session at the OpenID provider, too; None where it can't."""


class SessionRoutes:
    """Sessions: begun with an API key; ended whoever has begun them."""

    def __init__(self, sessions: Sessions, audit: AuditLog, end_at_provider: EndAtProvider) -> None:
        self._sessions = sessions
        self._audit = audit
        self._end_at_provider = end_at_provider

    async def begin(self, asked: ApiRequest[Message]) -> NewSession:
        """Begins one, in which its holder has the rights of the key."""
        key = asked.caller
        if asked.session is not None:
            raise Problem(409, "is_a_session", "a session is begun with an API key, and not with another session")
        begun = await self._sessions.begin(KeySession(key.id))
        asked.log("signed_in", session=begun.id)
        await self._audit.note("sign_in", actor_of(key), {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    async def end(self, asked: ApiRequest[Message]) -> EndedSession:
        """Ends the one that the request is of."""
        if asked.session is None:
            raise Problem(409, "not_a_session", "only a session can be ended; `breakwater keys revoke` revokes a key")
        known = await self._sessions.end(asked.session)
        asked.log("signed_out")
        await self._audit.note("sign_out", actor_of(asked.caller), {"session": asked.session.split("_")[2]})
        if known is None or isinstance(known.session, KeySession):
            return EndedSession()
        return EndedSession(continue_at=await self._end_at_provider(known.session))
