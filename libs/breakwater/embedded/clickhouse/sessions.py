"""Sessions: the SET and USE statements that later requests with the same session_id run under.

They are kept as text and run again on each request's own handle, so concurrent requests of one session cannot disturb
each other. Temporary tables do not outlive their request.
"""

from dataclasses import dataclass

_MOST_STATEMENTS = 1000


@dataclass(frozen=True, slots=True)
class _Session:
    statements: tuple[bytes, ...]
    expires_at: float


class QuerySessions:
    """All sessions of the process; times are seconds of a monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def touch(self, session_id: str, timeout_s: float, now: float) -> tuple[bytes, ...] | None:
        """Give a session's statements and keep it alive.

        Returns:
            Its statements, or None for a session that is new or has expired; it exists from now on.
        """
        for known in [known for known, session in self._sessions.items() if session.expires_at < now]:
            del self._sessions[known]
        found = self._sessions.get(session_id)
        statements = found.statements if found is not None else ()
        self._sessions[session_id] = _Session(statements, now + timeout_s)
        return statements if found is not None else None

    def keep(self, session_id: str, statement: bytes, timeout_s: float, now: float) -> None:
        """Remember a statement that succeeded; said again, only the last place counts."""
        found = self._sessions.get(session_id)
        before = found.statements if found is not None else ()
        statements = (*(known for known in before if known != statement), statement)[-_MOST_STATEMENTS:]
        self._sessions[session_id] = _Session(statements, now + timeout_s)
