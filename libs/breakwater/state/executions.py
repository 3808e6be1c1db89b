"""Who works on a job, and how far it is: a claim with a fencing token and a lease, and the checkpoint it carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from breakwater.state.connection import Redis, Script, ScriptCall, translated

CLAIM_LEASE_MS = 12_000
"""A worker renews its claims every three seconds."""

GRACE_MS = 4_000
"""How long a holder whose lease has ended may still renew it, from when somebody else first asks for the job."""

LINGER_MS = 60_000
"""How long a finished job stays taken: longer than a message can be on its way to a worker that is still connected."""

KEEP_MS = 72 * 3_600_000

_CLAIM = Script.named("claim")
_CHECKPOINT = Script.named("checkpoint")
_FINISH = Script.named("finish")
_SAY = Script.named("say")
_SAID = Script.of("return redis.call('HMGET', KEYS[1], 'said', 'messages')")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run a job, held by one handling of one delivery."""

    execution_id: str
    token: str
    """Fences the handling off from any other, of whichever worker and delivery."""

    @classmethod
    def new(cls, execution_id: str) -> Claim:
        """One that nobody has had before."""
        return cls(execution_id, uuid4().hex)

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
    """Somebody else works on the job, or has just ended it."""

    for_ms: int
    """After which it is worth asking again, if they do not renew their claim."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id is that of another job."""


class ClaimLost(Exception):  # noqa: N818  not an error: another worker goes on
    """Another handling of the job has taken over; this one must stop, call nobody and publish nothing."""


class Executions:
    """Claims and checkpoints of jobs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def claim(self, claim: Claim, digest: str = "") -> Claimed | Taken | Conflict:
        """Takes the job, unless somebody else has it. May be repeated with the same claim. Raises StateUnavailable.

        Args:
            claim: which.
            digest: of what the job asks; a job with the same id and another one is a conflict. Empty: any.
        """
        call = ScriptCall(_CLAIM, [claim.key], [claim.token, CLAIM_LEASE_MS, GRACE_MS, KEEP_MS, digest])
        [(verdict, detail)] = await self._redis.run([call])
        match verdict:
            case "yours":
                return Claimed(detail or None)
            case "taken":
                return Taken(int(detail))
            case _:
                return Conflict()

    async def saved_checkpoint(self, execution_id: str) -> str | None:
        """How far a job is, whoever has it; None for one that has not begun. Raises StateUnavailable."""
        async with translated():
            found = await cast(Any, self._redis.client.hget(Claim(execution_id, "").key, "checkpoint"))
        return found or None

    def checkpoint_call(self, claim: Claim, checkpoint: str, *, lease_ms: int = CLAIM_LEASE_MS) -> ScriptCall:
        """Saves how far the job is; its answer is 1, or 0 when the claim is lost. An empty text renews the lease."""
        return ScriptCall(_CHECKPOINT, [claim.key], [claim.token, lease_ms, KEEP_MS, checkpoint])

    async def checkpoint(self, claim: Claim, checkpoint: str) -> bool:
        """Saves how far the job is. False when the claim is lost. Raises StateUnavailable."""
        [kept] = await self._kept([self.checkpoint_call(claim, checkpoint)])
        return kept

    async def say(self, claim: Claim, text: str, messages: int) -> bool:
        """Saves more of the answer that is out, and in how many messages. False when the claim is lost.

        Raises StateUnavailable.
        """
        [kept] = await self._kept([ScriptCall(_SAY, [claim.key], [claim.token, text, messages, KEEP_MS])])
        return kept

    async def said(self, claim: Claim) -> tuple[str, int]:
        """What was saved so. Raises StateUnavailable."""
        [(text, messages)] = await self._redis.run([ScriptCall(_SAID, [claim.key], [])])
        return text or "", int(messages or 0)

    async def renew(self, claims: Iterable[Claim]) -> list[bool]:
        """Renews the leases of claims in one round trip; False for one that is lost. Raises StateUnavailable."""
        return await self._kept([self.checkpoint_call(claim, "") for claim in claims])

    async def release(self, claim: Claim) -> None:
        """Gives a job up before its end: whoever asks next has it, with its checkpoint. Raises StateUnavailable."""
        await self._kept([self.checkpoint_call(claim, "", lease_ms=0)])

    async def finish(self, claim: Claim) -> None:
        """Lets go of a job whose record stands; a moment later it is forgotten. Raises StateUnavailable."""
        await self._redis.run([ScriptCall(_FINISH, [claim.key], [claim.token, LINGER_MS])])

    async def _kept(self, calls: Sequence[ScriptCall]) -> list[bool]:
        return [bool(kept) for kept in await self._redis.run(calls)] if calls else []
