"""Executions of jobs: the claim of each, with a fencing token and a lease, and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any, Literal, cast

from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.contract.execution import PendingCancel
from breakwater.jobs.rules.workers import LIVENESS, Liveness
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.immutable import immutable
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, ScriptCommand, scripts_of
from breakwater.kernel.security.encryption import OFF, Cipher

LINGER_MS = 60_000
"""A finished job stays taken: for longer than a message can be on its way to a worker that is still connected."""

KEEP_MS = 72 * 3_600_000

MAYBE_HELD_MS = 60_000
"""Time after Redis was emptied in which a job that it knows nothing of may be held by a worker that stands still. NATS
delivers the message of such a job to another worker after 20 s."""

_BATCH = 1_000

SPAN_S = 4 * 3600
"""Notes of the jobs that are accepted in four hours share a hash (`jobs.store.accepted`)."""

MAX_UNSEEN = 10_000
"""Cancel requests of one NATS user for jobs of which nothing is known: they take 5 MB of Redis' memory at most."""

_LUA = scripts_of(__file__)

MAX_UNKNOWN = 1_000
"""Unknown jobs of one owner that others wait for: they take 0.3 MB of Redis' memory at most."""

MAX_WAITING = 200
"""The most jobs that wait for one job to end: its holder reads their ids whenever it renews its claim."""


def accepted_key(epoch_s: float) -> str:
    """The key of the notes of jobs that are accepted at a time."""
    return f"bw:accepted-jobs:{int(epoch_s) // SPAN_S * SPAN_S}"


@immutable()
class Claim:
    """The right to run a job, held by one handling of one delivery."""

    execution_id: str
    token: str
    """The fencing token, which distinguishes this handling from all others."""
    keys: tuple[str, str] = field(init=False, compare=False, repr=False)
    """In Redis: the execution's, and that of the notices for its holder: cancel requests, the jobs that wait for
    it, and a mark if it has children. All may come before the job has begun."""

    def __post_init__(self) -> None:
        keys = (f"bw:execution:{self.execution_id}", f"bw:cancel:{self.execution_id}")
        object.__setattr__(self, "keys", keys)

    @classmethod
    def new(cls, execution_id: str, worker: str = "") -> Claim:
        """Makes a claim for a worker, by the worker's id."""
        return cls(execution_id, f"{worker}/{getrandbits(128):032x}")

    @property
    def key(self) -> str:
        """The execution's key in Redis."""
        return self.keys[0]


@immutable()
class Claimed:
    """This worker holds the job now. `checkpoint` was saved under an earlier claim."""

    checkpoint: str | None
    cancels: tuple[PendingCancel, ...] = ()
    """The requests to cancel the job."""
    has_children: bool = False
    """True if children came before it began; they belong to its task, if it names no other."""
    incomplete: bool = False
    """True if Redis may have lost a checkpoint: an earlier handling may have made an unrecorded call."""


@immutable()
class ClaimKept:
    """This worker still holds the claim."""

    cancels: tuple[PendingCancel, ...] = ()
    """The requests to cancel the job."""
    has_children: bool = False
    """True if it has children, which belong to its task, as it names none."""
    incomplete: bool = False
    """True if Redis has lost the saved execution, which `Executions.restore` writes again."""


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """The saved progress of a job, as the holder of its claim knows it."""

    checkpoint: str | None
    partial: str = ""
    """The part of its answer that was sent."""
    messages: int = 0
    """The number of messages in which this part was sent."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Another handling works on the job, or has just ended it."""

    for_ms: int
    """The time after which the claim may be free, unless it is renewed."""


@dataclass(frozen=True, slots=True)
class MaybeHeld:
    """Redis knows nothing of the job, as it may have lost the claim of a worker that holds another message of it."""

    kept_since_ms: int
    """The time since which Redis has its data."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id is that of another job."""


@immutable()
class ClaimEnded:
    """The claim is released, as the job has ended."""

    waiting: tuple[str, ...] = ()
    """The jobs that wait for it, which are returned only once."""
    tenant: str | None = None
    """The tenant of the job; None if it has none or is unknown."""
    task_key: str | None = None
    """The task that it belongs to: its own where it was given none and has children; None where it has none either."""


class ClaimLostError(BreakwaterError):
    """Another handling has taken the job over. This one must stop without a further call or message."""


class Executions:
    """Claims and checkpoints of jobs."""

    def __init__(self, redis: Redis, cipher: Cipher = OFF, liveness: Liveness = LIVENESS) -> None:
        self._redis = redis
        self._cipher = cipher
        self.liveness = liveness
        self._lease_ms = liveness.claim_lease_ms
        self._grace_ms = liveness.grace_ms

    async def claim(
        self,
        claim: Claim,
        digest: str = "",
        *,
        tenant: str | None = None,
        task_key: str | None = None,
        task_id: str | None = None,
        owner: str | None = None,
        run_id: str | None = None,
        accepted_s: float = 0.0,
        redelivered: bool = False,
        delivered_before: bool = False,
        checked_since_ms: int | None = None,
    ) -> Claimed | Taken | Conflict | MaybeHeld:
        """Claims the job, unless another worker has. Idempotent for the same claim. Raises StateUnavailableError.

        Args:
            claim: which.
            digest: of the job's content; a job with the same id and another one is a conflict. Empty: any.
            tenant: of the job, for its children.
            task_key: the task that they belong to; None: that of the job, whose key is the execution's id.
            task_id: the same as its caller named it; None where that is its key.
            owner: the key or the program that the job belongs to.
            run_id: the run of the job, for its children.
            accepted_s: when it was accepted, since the epoch; its note (`jobs.store.accepted`) goes to the claim.
            redelivered: another handling may have begun it, of which Redis knows nothing if it was emptied.
            delivered_before: this very message was delivered to another handling, which may have been calling.
            checked_since_ms: the beginning of Redis' data for which the caller has seen that no worker holds an earlier
                message of the job; 0 where it has not looked, None where this is the job's only message.

        Raises DecryptionError, too: it is ours, and its checkpoint can't be read.
        """
        arguments = [
            claim.token,
            self._lease_ms,
            self._grace_ms,
            KEEP_MS,
            digest,
            tenant or "",
            task_key or "",
            owner or "",
        ]
        arguments += [claim.execution_id, run_id or "", int(redelivered)]
        arguments += [round(accepted_s * 1000) if delivered_before else "", task_id or ""]
        arguments += ["" if checked_since_ms is None else checked_since_ms, MAYBE_HELD_MS]
        command = ScriptCommand(_LUA["claim"], [*claim.keys, accepted_key(accepted_s), KEPT_SINCE], arguments)
        [(verdict, detail, *cancels)] = await self._redis.run([command])
        match verdict:
            case "yours":
                checkpoint = self._cipher.decrypt_document(detail.encode()).decode() if detail else None
                if not cancels:
                    return Claimed(checkpoint)
                return Claimed(checkpoint, _cancels(cancels), "" in cancels, _INCOMPLETE in cancels)
            case "taken":
                return Taken(int(detail))
            case "held?":
                return MaybeHeld(int(detail))
            case _:
                return Conflict()

    async def saved_checkpoint(self, execution_id: str) -> str | None:
        """The checkpoint of a job, under any claim; None for one that has not begun. Raises StateUnavailableError.

        As Redis has it: without the texts where they are encrypted.
        """
        checkpoint = await cast(Any, self._redis.client.hget(Claim(execution_id, "").key, "checkpoint"))
        return checkpoint or None

    def checkpoint_command(
        self, claim: Claim, checkpoint: str, *, release: bool = False, wait: JobWait | None = None
    ) -> ScriptCommand:
        """Saves a checkpoint unless it is empty, and renews or ends the lease; `read_claim_answer` reads the answer.

        `wait` is what the job waits for from now on, for those who look at it.
        """
        if self._cipher.on and checkpoint:
            checkpoint = self._cipher.encrypt_document(checkpoint.encode()).decode()
        arguments = [claim.token, 0 if release else self._lease_ms, KEEP_MS, checkpoint]
        if wait is not None:
            arguments.append(wait.model_dump_json())
        return ScriptCommand(_LUA["checkpoint"], [*claim.keys, KEPT_SINCE], arguments)

    @staticmethod
    def read_claim_answer(answer: Any) -> ClaimKept | None:
        """Reads the answer to `checkpoint_command`; None means that the claim is lost."""
        if not answer:
            return None
        if not isinstance(answer, list):
            return _KEPT
        texts = cast(list[str], answer)
        return ClaimKept(_cancels(texts), "" in texts, _INCOMPLETE in texts)

    async def checkpoint(self, claim: Claim, checkpoint: str, wait: JobWait | None = None) -> ClaimKept | None:
        """Saves a checkpoint, as `checkpoint_command`. None when the claim is lost. Raises StateUnavailableError."""
        [answer] = await self._redis.run([self.checkpoint_command(claim, checkpoint, wait=wait)])
        return self.read_claim_answer(answer)

    async def append_partial(self, claim: Claim, text: str, messages: int) -> ClaimKept | None:
        """Saves more of the answer that is out, and in how many messages. None when the claim is lost.

        An `incomplete` execution is not appended to. Raises StateUnavailableError.
        """
        line = self._cipher.encrypt_line(text)
        arguments = [claim.token, line, messages, KEEP_MS]
        [answer] = await self._redis.run([ScriptCommand(_LUA["append_partial"], [claim.key, KEPT_SINCE], arguments)])
        return self.read_claim_answer(answer)

    async def restore(
        self,
        claim: Claim,
        progress: SavedProgress,
        digest: str = "",
        *,
        tenant: str | None = None,
        task_key: str | None = None,
        task_id: str | None = None,
        owner: str | None = None,
        run_id: str | None = None,
        release: bool = False,
    ) -> bool:
        """Writes an execution again that Redis has lost. False when another handling has the job.

        The arguments are those of `claim`. `release` ends its lease at once. Raises StateUnavailableError.
        """
        checkpoint = progress.checkpoint or ""
        if self._cipher.on and checkpoint:
            checkpoint = self._cipher.encrypt_document(checkpoint.encode()).decode()
        line = self._cipher.encrypt_line(progress.partial)
        lease_ms = 0 if release else self._lease_ms
        arguments = [claim.token, lease_ms, KEEP_MS, checkpoint, line, progress.messages, digest]
        arguments += [tenant or "", task_key or "", owner or "", run_id or "", task_id or ""]
        [restored] = await self._redis.run([ScriptCommand(_LUA["restore"], [claim.key, KEPT_SINCE], arguments)])
        return bool(restored)

    async def partial_output(self, claim: Claim) -> tuple[str, int]:
        """Reads what `append_partial` has saved. Raises StateUnavailableError, DecryptionError."""
        [(text, messages)] = await self._redis.run([ScriptCommand(_LUA["partial"], [claim.key], [])])
        return self._cipher.decrypt_lines(text or ""), int(messages or 0)

    async def renew(self, claims: Iterable[Claim]) -> list[ClaimKept | None]:
        """Renews the leases of claims in one round trip; None for one that is lost. Raises StateUnavailableError."""
        answers = await self._redis.run([self.checkpoint_command(claim, "") for claim in claims])
        return [self.read_claim_answer(answer) for answer in answers]

    async def release(self, claim: Claim, wait: JobWait | None = None) -> ClaimKept | None:
        """Releases a job before its end: the next claim has it, with its checkpoint. Raises StateUnavailableError."""
        [answer] = await self._redis.run([self.checkpoint_command(claim, "", release=True, wait=wait)])
        return self.read_claim_answer(answer)

    async def finish(self, claim: Claim) -> ClaimEnded:
        """Releases a job whose record is stored; Redis deletes it after `LINGER_MS`. Raises StateUnavailableError.

        Args:
            claim: which; one without a token means that of any holder.
        """
        [answer] = await self._redis.run(
            [ScriptCommand(_LUA["finish"], claim.keys, [claim.token, LINGER_MS, claim.execution_id])]
        )
        if not isinstance(answer, list):
            return ClaimEnded()
        tenant, task_key, *notices = cast(list[str], answer)
        return ClaimEnded(_waiting(notices), tenant or None, task_key or None)

    async def count_crash(self, message: str, by: int = 1) -> int:
        """Counts the crashes of a message's handling, over all workers. Raises StateUnavailableError."""
        key = f"bw:crashes:{message}"
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.incrby(key, by)
            pipe.pexpire(key, KEEP_MS)
            count, _ = await pipe.execute()
        return int(count)

    async def parent(
        self, execution_id: str, tenant: str | None, *, dry_run: bool, owner: str | None = None, others: str = ""
    ) -> tuple[str, str, str, str]:
        """The key of a job's task, its checkpoint, its run, and its task as the caller named it where that differs.

        For a child of the same tenant; each empty for none. The checkpoint is as Redis has it: without the texts where
        they are encrypted.

        Args:
            execution_id: the parent.
            tenant: of the child.
            dry_run: a parent that has no task but its own need not learn that it has children there.
            owner: of the child; None: it may be of any.
            others: the task where the parent is of another owner.

        Raises:
            StateUnavailableError: ask again.
        """
        command = ScriptCommand(
            _LUA["parent"], Claim(execution_id, "").keys, [tenant or "", int(dry_run), KEEP_MS, owner or "", others]
        )
        [(task_key, checkpoint, run_id, task_id)] = await self._redis.run([command])
        return task_key, checkpoint, run_id, task_id

    async def free(self, worker: str, execution_ids: Sequence[str]) -> list[Literal["freed", "unclaimed", "held"]]:
        """Ends the claims that a dead worker holds on some jobs, and returns the state of each job.

        The holder of an `unclaimed` one writes its claim again, if Redis has lost it. Raises StateUnavailableError.
        """
        commands = [
            ScriptCommand(_LUA["free"], [Claim(execution_id, "").key], [f"{worker}/"]) for execution_id in execution_ids
        ]
        return await self._redis.run(commands)

    async def wait_for(
        self, execution_ids: Iterable[str], waiting: str, *, unknown: Mapping[str, int], owner: str
    ) -> None:
        """Notes with executions that a job waits for each of them to end. Raises StateUnavailableError.

        Args:
            execution_ids: of those that are known.
            waiting: the job. Where it finds no room, it has to look again by itself.
            unknown: those of which nothing is known, and for how many milliseconds the job waits for them.
            owner: whose jobs share the room for unknown ones.
        """
        commands = [
            ScriptCommand(_LUA["wait"], Claim(execution_id, "").keys[1:], [waiting, KEEP_MS, MAX_WAITING])
            for execution_id in execution_ids
        ]
        for unknown_id, keep_ms in unknown.items():
            keys = [*Claim(unknown_id, "").keys[1:], f"bw:unknown-dependencies:{owner}"]
            commands.append(ScriptCommand(_LUA["wait"], keys, [waiting, keep_ms, MAX_WAITING, unknown_id, MAX_UNKNOWN]))
        await self._redis.run(commands)

    async def waiting_for(self, execution_ids: Iterable[str]) -> set[str]:
        """The jobs that wait for one of the executions. Raises StateUnavailableError."""
        keys = (Claim(execution_id, "").keys[1:] for execution_id in execution_ids)
        notices: list[list[str]] = await self._redis.run([ScriptCommand(_LUA["notices"], key, []) for key in keys])
        return {job_id for texts in notices for job_id in _waiting(texts)}

    async def note_woken(self, parked: Mapping[str, int]) -> None:
        """Notes that parked jobs were returned to their queues before they were due. Raises StateUnavailableError.

        Args:
            parked: the sequence of each job's message on PARKED, which stays there.
        """
        await self._redis.run(
            [
                ScriptCommand(_LUA["woken"], [Claim(execution_id, "").key], [sequence])
                for execution_id, sequence in parked.items()
            ]
        )

    async def cancel(self, request: PendingCancel) -> PendingCancel:
        """Leaves a request to cancel a job, for the worker that has it or takes it.

        Returns:
            The request that counts: the first of the same sender for the same agents.

        Raises:
            StateUnavailableError: it may be left all the same; ask again.
        """
        by = request.cancellation
        sender = f"{by.by}/{by.key_id or by.name or ''}/{','.join(sorted(request.agents))}"
        keys = Claim(request.execution_id, "").keys[1:]
        [counts] = await self._redis.run(
            [ScriptCommand(_LUA["cancel"], keys, [sender, request.model_dump_json(), KEEP_MS])]
        )
        return PendingCancel.model_validate_json(counts)

    async def cancels_of(self, execution_id: str) -> tuple[PendingCancel, ...]:
        """Returns the requests to cancel a job, under any claim or none. Raises StateUnavailableError."""
        return _cancels(await cast(Any, self._redis.client.hvals(Claim(execution_id, "").keys[1])))

    async def count_unseen(self, user: str, execution_id: str) -> bool:
        """Counts a cancel request of a NATS user for an unknown job; False where there are too many of them.

        Those whose job has ended, or whose time is over, count no more. Raises StateUnavailableError.
        """
        key = f"bw:unseen-cancels:{user}"
        command = ScriptCommand(_LUA["unseen"], [key], [execution_id, MAX_UNSEEN, KEEP_MS])
        [counted] = await self._redis.run([command])
        if counted:
            return True
        for begin in range(0, MAX_UNSEEN, _BATCH):
            async with self._redis.client.pipeline(transaction=False) as pipe:
                unseen_ids = cast(list[str], await cast(Any, self._redis.client.zrange(key, begin, begin + _BATCH - 1)))
                for unseen_id in unseen_ids:
                    pipe.exists(*Claim(unseen_id, "").keys[1:])
                over = [
                    unseen_id
                    for unseen_id, key_count in zip(unseen_ids, await pipe.execute(), strict=True)
                    if not key_count
                ]
                if over:
                    await cast(Any, self._redis.client.zrem(key, *over))
                    break
        return bool((await self._redis.run([command]))[0])


_KEPT = ClaimKept()

_INCOMPLETE = "?"


def _cancels(texts: Iterable[str]) -> tuple[PendingCancel, ...]:
    return tuple(PendingCancel.model_validate_json(text) for text in texts if text.startswith("{"))


def _waiting(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text[1:] for text in texts if text.startswith("~"))
