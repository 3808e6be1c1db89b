"""`/api/v1/sessions`: signing in and out, for the console."""

from __future__ import annotations

from breakwater.contracts.api import EndedSession, NewSession
from breakwater.contracts.types import Message, time_from_ms
from breakwater.state.sessions import Sessions, StoredSession
from services.request.audit import AuditLog
from services.request.problems import Problem
from services.request.routing import ApiRequest, actor_of


class SessionRoutes:
    """Sessions of those who have an API key."""

    def __init__(self, sessions: Sessions, audit: AuditLog) -> None:
        self._sessions = sessions
        self._audit = audit

    async def begin(self, asked: ApiRequest[Message]) -> NewSession:
        """Begins one, in which its holder has the rights of the key."""
        if asked.session is not None:
            raise Problem(409, "is_a_session", "a session is begun with an API key, and not with another session")
        begun = await self._sessions.begin(f"key:{asked.key.id}", StoredSession(key_id=asked.key.id))
        asked.log("signed_in", session=begun.id)
        await self._audit.note("sign_in", actor_of(asked.key), {"session": begun.id})
        return NewSession(token=begun.token, ends_at=time_from_ms(begun.ends_ms))

    async def end(self, asked: ApiRequest[Message]) -> EndedSession:
        """Ends the one that the request is of."""
        if asked.session is None:
            raise Problem(409, "not_a_session", "only a session can be ended; `breakwater keys revoke` revokes a key")
        await self._sessions.end(asked.session)
        asked.log("signed_out")
        await self._audit.note("sign_out", actor_of(asked.key), {"session": asked.session.split("_")[2]})
        return EndedSession()
