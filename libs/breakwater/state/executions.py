"""Who works on a job, and how far it is: a claim with a fencing token and a lease, and the checkpoint it carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from uuid import uuid4

from breakwater.contracts.execution import PendingCancel
from breakwater.encryption import OFF, Cipher
from breakwater.state.connection import Redis, Script, ScriptCall, translated

CLAIM_LEASE_MS = 12_000
"""A worker renews its claims every three seconds."""

GRACE_MS = 4_000
"""How long a holder whose lease has ended may still renew it, from when somebody else first asks for the job."""

LINGER_MS = 60_000
"""How long a finished job stays taken: longer than a message can be on its way to a worker that is still connected."""

KEEP_MS = 72 * 3_600_000

MAX_UNSEEN = 10_000
"""Orders of one NATS user to cancel jobs of which nothing is known: they take 5 MB of Redis' memory at most."""

_CLAIM = Script.named("claim")
_CHECKPOINT = Script.named("checkpoint")
_FINISH = Script.named("finish")
_FREE = Script.named("claim_free")
_APPEND_PARTIAL = Script.named("append_partial")
_CANCEL = Script.named("cancel")
_PARENT = Script.named("parent")
_UNSEEN = Script.named("unseen_cancel")
_WAIT = Script.of("""
if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[3]) then -- who leaves no word looks again by itself
  redis.call('HSET', KEYS[1], 'waits/' .. ARGV[1], '~' .. ARGV[1])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
_NOTICES = Script.of("return redis.call('HVALS', KEYS[1])")
_PARTIAL = Script.of("return redis.call('HMGET', KEYS[1], 'partial', 'messages')")


MAX_WAITING = 200
"""Jobs that are woken when one ends: its holder reads who they are each time that it renews its claim."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run a job, held by one handling of one delivery."""

    execution_id: str
    token: str
    """Fences the handling off from any other, of whichever worker and delivery."""
    keys: tuple[str, str] = field(init=False, compare=False, repr=False)
    """In Redis: the execution's, and that of the notices for its worker: cancel requests for it, which jobs wait for
    it, and whether it has children. All may come before anybody has begun it."""

    def __post_init__(self) -> None:
        keys = (f"bw:execution:{{{self.execution_id}}}", f"bw:cancel:{{{self.execution_id}}}")
        object.__setattr__(self, "keys", keys)

    @classmethod
    def new(cls, execution_id: str, worker: str = "") -> Claim:
        """One that nobody has had before. `worker`: the id of the one that is to hold it."""
        return cls(execution_id, f"{worker}/{uuid4().hex}")

    @property
    def key(self) -> str:
        """The execution's key in Redis."""
        return self.keys[0]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The job is ours. `checkpoint` is what an earlier claim saved."""

    checkpoint: str | None
    cancels: tuple[PendingCancel, ...] = ()
    """To cancel it."""
    has_children: bool = False
    """Which came before it was begun, and belong to its task, as far as it was given none."""


@dataclass(frozen=True, slots=True)
class ClaimKept:
    """The claim is still ours."""

    cancels: tuple[PendingCancel, ...] = ()
    """To cancel the job."""
    has_children: bool = False
    """Which belong to its task, as it was given none."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Somebody else works on the job, or has just ended it."""

    for_ms: int
    """After which it is worth asking again, if they do not renew their claim."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id is that of another job."""


@dataclass(frozen=True, slots=True)
class ClaimEnded:
    """The claim is let go of."""

    waiting: tuple[str, ...] = ()
    """The jobs that wait for it; they are returned once."""
    tenant: str | None = None
    """Of the job, as far as it is known."""
    task_id: str | None = None
    """The task that it belongs to: its own where it was given none and has children; None where it has none either."""


class ClaimLost(Exception):  # noqa: N818  not an error: another worker goes on
    """Another handling of the job has taken over; this one must stop, call nobody and publish nothing."""


class Executions:
    """Claims and checkpoints of jobs."""

    def __init__(self, redis: Redis, cipher: Cipher = OFF) -> None:
        self._redis = redis
        self._cipher = cipher

    async def claim(
        self,
        claim: Claim,
        digest: str = "",
        *,
        tenant: str | None = None,
        task_id: str | None = None,
        owner: str | None = None,
    ) -> Claimed | Taken | Conflict:
        """Takes the job, unless somebody else has it. May be repeated with the same claim. Raises StateUnavailable.

        Args:
            claim: which.
            digest: of what the job asks; a job with the same id and another one is a conflict. Empty: any.
            tenant: of the job, for its children.
            task_id: the task that they belong to; None: that of the job, whose id is the execution's.
            owner: the key or the program that the job belongs to.

        Raises Undecryptable, too: it is ours, and what an earlier claim saved can't be read.
        """
        arguments = [claim.token, CLAIM_LEASE_MS, GRACE_MS, KEEP_MS, digest, tenant or "", task_id or "", owner or ""]
        call = ScriptCall(_CLAIM, claim.keys, arguments)
        [(verdict, detail, *cancels)] = await self._redis.run([call])
        match verdict:
            case "yours":
                checkpoint = self._cipher.decrypt_document(detail.encode()).decode() if detail else None
                return Claimed(checkpoint, _cancels(cancels), "" in cancels) if cancels else Claimed(checkpoint)
            case "taken":
                return Taken(int(detail))
            case _:
                return Conflict()

    async def saved_checkpoint(self, execution_id: str) -> str | None:
        """How far a job is, whoever has it; None for one that has not begun. Raises StateUnavailable.

        As it stands in Redis: without the texts where they are encrypted.
        """
        async with translated():
            found = await cast(Any, self._redis.client.hget(Claim(execution_id, "").key, "checkpoint"))
        return found or None

    def checkpoint_call(self, claim: Claim, checkpoint: str, *, lease_ms: int = CLAIM_LEASE_MS) -> ScriptCall:
        """Saves how far the job is; for its answer see `kept`. An empty text renews the lease."""
        if self._cipher.on and checkpoint:
            checkpoint = self._cipher.encrypt_document(checkpoint.encode()).decode()
        return ScriptCall(_CHECKPOINT, claim.keys, [claim.token, lease_ms, KEEP_MS, checkpoint])

    @staticmethod
    def kept(answer: Any) -> ClaimKept | None:
        """What `checkpoint_call` answers; None: the claim is lost."""
        if not answer:
            return None
        if not isinstance(answer, list):
            return _KEPT
        texts = cast(list[str], answer)
        return ClaimKept(_cancels(texts), "" in texts)

    async def checkpoint(self, claim: Claim, checkpoint: str) -> ClaimKept | None:
        """Saves how far the job is. None when the claim is lost. Raises StateUnavailable."""
        [answer] = await self._redis.run([self.checkpoint_call(claim, checkpoint)])
        return self.kept(answer)

    async def append_partial(self, claim: Claim, text: str, messages: int) -> bool:
        """Saves more of the answer that is out, and in how many messages. False when the claim is lost.

        Raises StateUnavailable.
        """
        line = self._cipher.encrypt_line(text)
        [kept] = await self._redis.run(
            [ScriptCall(_APPEND_PARTIAL, [claim.key], [claim.token, line, messages, KEEP_MS])]
        )
        return bool(kept)

    async def partial_output(self, claim: Claim) -> tuple[str, int]:
        """What was saved so. Raises StateUnavailable, Undecryptable."""
        [(text, messages)] = await self._redis.run([ScriptCall(_PARTIAL, [claim.key], [])])
        return self._cipher.decrypt_lines(text or ""), int(messages or 0)

    async def renew(self, claims: Iterable[Claim]) -> list[ClaimKept | None]:
        """Renews the leases of claims in one round trip; None for one that is lost. Raises StateUnavailable."""
        answers = await self._redis.run([self.checkpoint_call(claim, "") for claim in claims])
        return [self.kept(answer) for answer in answers]

    async def release(self, claim: Claim) -> ClaimKept | None:
        """Gives a job up before its end: whoever asks next has it, with its checkpoint. Raises StateUnavailable."""
        [answer] = await self._redis.run([self.checkpoint_call(claim, "", lease_ms=0)])
        return self.kept(answer)

    async def finish(self, claim: Claim) -> ClaimEnded:
        """Lets go of a job whose record stands; a moment later it is forgotten. Raises StateUnavailable.

        Args:
            claim: which; one without a token stands for that of whoever has the job.
        """
        [answer] = await self._redis.run(
            [ScriptCall(_FINISH, claim.keys, [claim.token, LINGER_MS, claim.execution_id])]
        )
        if not isinstance(answer, list):
            return ClaimEnded()
        tenant, task_id, *notices = cast(list[str], answer)
        return ClaimEnded(_waiting(notices), tenant or None, task_id or None)

    async def crashed(self, message: str, by: int = 1) -> int:
        """Counts how often the handling of a message crashed, in whichever worker. Raises StateUnavailable."""
        key = f"bw:crashes:{{{message}}}"
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.incrby(key, by)
            pipe.pexpire(key, KEEP_MS)
            count, _ = await pipe.execute()
        return int(count)

    async def parent(
        self, execution_id: str, tenant: str | None, *, dry_run: bool, owner: str | None = None, others: str = ""
    ) -> tuple[str, str]:
        """The task and the checkpoint of a job, for a child of the same tenant; each empty for none.

        The checkpoint is as it stands in Redis: without the texts where they are encrypted.

        Args:
            execution_id: the parent.
            tenant: of the child.
            dry_run: a parent that has no task but its own need not learn that it has children there.
            owner: of the child; None: it may be of any.
            others: the task where the parent is of another owner.

        Raises:
            StateUnavailable: ask again.
        """
        call = ScriptCall(
            _PARENT, Claim(execution_id, "").keys, [tenant or "", int(dry_run), KEEP_MS, owner or "", others]
        )
        [(task_id, checkpoint)] = await self._redis.run([call])
        return task_id, checkpoint

    async def free(self, worker: str, execution_ids: Sequence[str]) -> list[Literal["freed", "unclaimed", "held"]]:
        """Ends the claims that a dead worker holds on some jobs, and returns what became of each job.

        Who holds an `unclaimed` one writes its claim again, if Redis has lost it. Raises StateUnavailable.
        """
        calls = [ScriptCall(_FREE, [Claim(one, "").key], [f"{worker}/"]) for one in execution_ids]
        return await self._redis.run(calls)

    async def wait_for(self, execution_ids: Iterable[str], waiting: str) -> None:
        """Leaves word for whoever ends one of the executions that a job waits for it. Raises StateUnavailable."""
        keys = (Claim(one, "").keys[1:] for one in execution_ids)
        await self._redis.run([ScriptCall(_WAIT, key, [waiting, KEEP_MS, MAX_WAITING]) for key in keys])

    async def waiting_for(self, execution_ids: Iterable[str]) -> set[str]:
        """The jobs that wait for one of the executions. Raises StateUnavailable."""
        keys = (Claim(one, "").keys[1:] for one in execution_ids)
        notices: list[list[str]] = await self._redis.run([ScriptCall(_NOTICES, key, []) for key in keys])
        return {job_id for texts in notices for job_id in _waiting(texts)}

    async def cancel(self, request: PendingCancel) -> PendingCancel:
        """Leaves a request to cancel a job, for whoever has it or takes it.

        Returns:
            The request that holds: the first that the same one has left for the same agents.

        Raises:
            StateUnavailable: it may be left all the same; ask again.
        """
        by = request.cancellation
        who = f"{by.by}/{by.key_id or by.name or ''}/{','.join(sorted(request.agents))}"
        keys = Claim(request.execution_id, "").keys[1:]
        [stands] = await self._redis.run([ScriptCall(_CANCEL, keys, [who, request.model_dump_json(), KEEP_MS])])
        return PendingCancel.model_validate_json(stands)

    async def count_unseen(self, user: str, execution_id: str) -> bool:
        """Counts a cancel request of a NATS user for an unknown job; False where there are too many of them.

        Those whose job has ended, or whose time is over, count no more. Raises StateUnavailable.
        """
        call = ScriptCall(_UNSEEN, [f"bw:unseen-cancels:{{{user}}}"], [execution_id, MAX_UNSEEN, KEEP_MS])
        [counted] = await self._redis.run([call])
        if counted:
            return True
        key = call.keys[0]
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            known = cast(list[str], await cast(Any, self._redis.client.zrange(key, 0, -1)))
            for one in known:
                pipe.exists(*Claim(one, "").keys[1:])
            over = [one for one, kept in zip(known, await pipe.execute(), strict=True) if not kept]
            if not over:
                return False
            await cast(Any, self._redis.client.zrem(key, *over))
        return bool((await self._redis.run([call]))[0])


_KEPT = ClaimKept()


def _cancels(texts: Iterable[str]) -> tuple[PendingCancel, ...]:
    return tuple(PendingCancel.model_validate_json(text) for text in texts if text and not text.startswith("~"))


def _waiting(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text[1:] for text in texts if text.startswith("~"))
