"""Who works on a job, and how far it is: a leased claim with fencing, and the checkpoint it carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from breakwater.state.connection import Redis, Script, ScriptCall

CLAIM_LEASE_MS = 60_000
"""Longer than the bus waits for a silent worker, so that a redelivery finds the claim and not a stranger."""

LINGER_MS = 10_000
"""How long a finished job stays taken, for duplicates that looked for its record a moment too early."""

KEEP_MS = 72 * 3_600_000

_CLAIM = Script.named("claim")
_CHECKPOINT = Script.named("checkpoint")
_FINISH = Script.named("finish")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run a job: held by one delivery of one stored message, and fenced by both numbers."""

    execution_id: str
    sequence: int
    delivery: int

    @property
    def key(self) -> str:
        """The execution's key in Redis."""
        return f"bw:execution:{{{self.execution_id}}}"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The job is ours. `checkpoint` is what an earlier claim saved."""

    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Another message with the same job id is being worked on."""

    for_ms: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later delivery of the same message has the job."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id is that of another job."""


class Executions:
    """Claims and checkpoints of jobs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def claim(self, claim: Claim, digest: str = "") -> Claimed | Taken | Superseded | Conflict:
        """Takes the job, unless somebody else has it. Raises StateUnavailable.

        Args:
            claim: which.
            digest: of what the job asks; a job with the same id and another one is a conflict. Empty: any.
        """
        call = ScriptCall(_CLAIM, [claim.key], [claim.sequence, claim.delivery, CLAIM_LEASE_MS, KEEP_MS, digest])
        [(verdict, detail)] = await self._redis.run([call])
        match verdict:
            case "yours":
                return Claimed(detail or None)
            case "taken":
                return Taken(int(detail))
            case "conflict":
                return Conflict()
            case _:
                return Superseded()

    def checkpoint_call(self, claim: Claim, checkpoint: str, *, lease_ms: int = CLAIM_LEASE_MS) -> ScriptCall:
        """Saves how far the job is; its answer is 1, or 0 when the claim is lost. An empty text renews the lease."""
        arguments = [claim.sequence, claim.delivery, lease_ms, KEEP_MS + lease_ms, checkpoint]
        return ScriptCall(_CHECKPOINT, [claim.key], arguments)

    async def checkpoint(self, claim: Claim, checkpoint: str, *, lease_ms: int = CLAIM_LEASE_MS) -> bool:
        """Saves how far the job is. False when the claim is lost. Raises StateUnavailable."""
        [kept] = await self._redis.run([self.checkpoint_call(claim, checkpoint, lease_ms=lease_ms)])
        return bool(kept)

    async def renew(self, claims: Iterable[Claim]) -> None:
        """Renews the leases of claims in one round trip; one that is lost stays lost. Raises StateUnavailable."""
        if calls := [self.checkpoint_call(claim, "") for claim in claims]:
            await self._redis.run(calls)

    async def finish(self, claim: Claim) -> None:
        """Lets go of a job whose record stands; a moment later it is forgotten. Raises StateUnavailable."""
        await self._redis.run([ScriptCall(_FINISH, [claim.key], [claim.sequence, claim.delivery, LINGER_MS])])
