"""The audit log: each action of a person is recorded before it is done, and again with its outcome.

An action that can't be recorded is not done. If the process crashes in between, the record of the action stays `begun`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from pydantic import JsonValue

from breakwater.identity.contract import ActorKind, AuditEvent, AuditOutcome
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.redaction.rules.redact import Redactor


@dataclass(frozen=True, slots=True)
class Actor:
    """A person, or the holder of a key."""

    name: str
    kind: ActorKind
    id: str | None = None


def actor_of(caller: Caller) -> Actor:
    """Returns the caller of a request as the audit log names it."""
    return Actor(caller.name, caller.kind, caller.id)


@dataclass(frozen=True, slots=True)
class AuditLog:
    """Records actions."""

    publisher: Publisher
    redactor: Redactor

    @asynccontextmanager
    async def action(
        self, action: str, actor: Actor, details: Mapping[str, JsonValue], reason: str | None
    ) -> AsyncGenerator[None]:
        """Records an action that the block carries out. A block that raises has refused the action, or has failed.

        Args:
            action: the operation's id.
            actor: the person.
            details: the input.
            reason: the actor's reason, already redacted.

        Raises:
            BusError: the action can't be recorded, and the block is not entered.
        """
        event = self._event(action, actor, "begun", details, reason)
        await self._publish(event)
        try:
            yield
        except RequestError as problem:
            await self._end(event, "failed" if problem.status >= 500 else "refused", problem.code)
            raise
        except (BusError, UnavailableError):
            await self._end(event, "failed", "unavailable")
            raise
        except Exception:
            await self._end(event, "failed", "internal")
            raise
        await self._end(event, "done", None)

    async def note(
        self, action: str, actor: Actor, details: Mapping[str, JsonValue], *, error: str | None = None
    ) -> None:
        """Records an action that happens even if it can't be recorded, such as signing in.

        Args:
            action: the operation's id.
            actor: the person.
            details: the input.
            error: the code of the error with which the action was refused; None if it was done.
        """
        outcome: AuditOutcome = "done" if error is None else "refused"
        event = self._event(action, actor, outcome, details, None).model_copy(update={"error": error})
        try:
            await self._publish(event)
        except BusError as failure:
            structlog.get_logger().warning("not_audited", action=action, by=actor.name, error=str(failure))

    def _event(
        self,
        action: str,
        actor: Actor,
        outcome: AuditOutcome,
        details: Mapping[str, JsonValue],
        reason: str | None,
    ) -> AuditEvent:
        return AuditEvent(
            audit_id=new_id(),
            action=action,
            outcome=outcome,
            by=actor.name,
            actor=actor.kind,
            actor_id=actor.id,
            details={name: self.redactor.json(value) for name, value in details.items()},
            reason=reason or None,
            at=time_from_ms(ms_from_time(datetime.now(UTC))),
        )

    async def _end(self, begun: AuditEvent, outcome: AuditOutcome, error: str | None) -> None:
        try:
            await self._publish(begun.model_copy(update={"outcome": outcome, "error": error}))
        except BusError as failure:
            # This changes nothing about the outcome, and the record already shows that the action was begun.
            log = structlog.get_logger()
            log.warning("audit_outcome_not_recorded", audit_id=begun.audit_id, outcome=outcome, error=str(failure))

    async def _publish(self, event: AuditEvent) -> None:
        await self.publisher.event(
            subjects.audit(event.action), event, id=f"{event.audit_id}/{event.outcome}", at=event.at
        )
