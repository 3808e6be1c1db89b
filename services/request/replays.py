"""Running the jobs of dead letters again, each once.

A replay's id is a function of its dead letter, so JOBS takes it once in ten minutes, and the worker runs it once as
long as its record is kept. What outlasts both is the note beside the dead letter. It is written once the job is queued:
after a crash in between, a second replay is the same job again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from breakwater.bus.errors import AlreadyDecided, BusError
from breakwater.bus.lookup import Connection
from breakwater.bus.publisher import Publisher
from breakwater.bus.scan import last_on
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.api import ReplayedDeadLetter, ReplayStatus, SkippedDeadLetter
from breakwater.contracts.events import ReplayNote
from breakwater.contracts.execution import Status
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import Event, Identifier
from breakwater.policy.redact import Redactor
from breakwater.state.accepted import Accepted
from services.request.by_hand import not_done
from services.request.letters import Kept, job_of, replay_of
from services.request.problems import Problem, unavailable
from services.request.queue import Queue

SUCCEEDED = "its job succeeded after all, by another worker: there is nothing to replay"


@dataclass(frozen=True, slots=True)
class By:
    """Who replays, when and why."""

    name: str
    why: str
    at: datetime


@dataclass(slots=True)
class Outcome:
    """What came of replaying dead letters, as far as it has come."""

    replayed: list[ReplayedDeadLetter] = field(default_factory=list[ReplayedDeadLetter])
    already: int = 0
    skipped: list[SkippedDeadLetter] = field(default_factory=list[SkippedDeadLetter])

    def skip(self, dead_letter_id: int, why: str) -> None:
        """Leaves a dead letter alone."""
        self.skipped.append(SkippedDeadLetter(dead_letter_id=dead_letter_id, why=why))


class _Ended(Event):
    """What is read of a result or a record."""

    execution_id: Identifier
    status: Status


class Replays:
    """The replays that there are, and new ones."""

    def __init__(
        self,
        config: Config,
        connection: Connection,
        queue: Queue,
        publisher: Publisher,
        accepted: Accepted,
        redactor: Redactor,
    ) -> None:
        self._config = config
        self._connection = connection
        self._queue = queue
        self._publisher = publisher
        self._accepted = accepted
        self._redactor = redactor
        self._remembered = timedelta(hours=config.limits.events_max_age_h)

    def why_not(self, kept: Kept) -> str | None:
        """Why the dead letter holds nothing that can run as the config is now; redacted. None where it does."""
        job = job_of(self._config, kept)
        return self._redactor.text(job) if isinstance(job, str) else None

    async def notes(self, dead_letters: Sequence[int]) -> dict[int, ReplayNote]:
        """The replays of some dead letters. Raises BusError."""
        found: dict[int, ReplayNote] = {}
        async with aclosing(
            last_on(
                self._connection, Stream.DLQ, [subjects.replayed(dead_letter_id) for dead_letter_id in dead_letters]
            )
        ) as stored:
            async for one in stored:
                if (note := one.read(ReplayNote)) is not None:
                    found[note.dead_letter_id] = note
        return found

    async def ended(self, agents: Mapping[str, str]) -> dict[str, Status]:
        """How executions ended, of those that have and are remembered. `agents`: of each. Raises BusError."""
        records = [subjects.execution(agent, execution_id) for execution_id, agent in agents.items()]
        found = await self._ended(Stream.EVENTS, records)
        # The result comes before the record.
        rest = [subjects.result(execution_id) for execution_id in agents if execution_id not in found]
        return found | await self._ended(Stream.RESULTS, rest)

    def status(self, note: ReplayNote, ended: Mapping[str, Status], now: datetime) -> ReplayStatus | None:
        """How a replay stands; None where that is forgotten."""
        forgotten = now - note.at > self._remembered
        return ended.get(note.execution_id, None if forgotten else "accepted")

    async def replay(self, dead_letters: Sequence[Kept], by: By, outcome: Outcome) -> None:
        """Replays dead letters at the same time, and adds what came of it to `outcome`.

        Raises:
            BusError: whether they were replayed before is not known; none was replayed.
            Problem: 503, not all were accepted; `outcome` tells which were.
        """
        notes = await self.notes([kept.number for kept in dead_letters])
        runnable: list[tuple[Kept, Job]] = []
        for kept in dead_letters:
            if kept.number in notes:
                outcome.already += 1
            elif isinstance(job := job_of(self._config, kept), str):
                outcome.skip(kept.number, self._redactor.text(job))
            else:
                runnable.append((kept, job))
        ended = await self.ended(
            {kept.dead_letter.execution_id: job.agent for kept, job in runnable if kept.dead_letter.execution_id}
        )
        # Two workers can have been at a job at once: one gave it up, and the other one answered it.
        wanted: list[tuple[Kept, Job]] = []
        for kept, job in runnable:
            if ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                outcome.skip(kept.number, SUCCEEDED)
            else:
                wanted.append((kept, job))
        done = await asyncio.gather(*(self._put(kept, job, by) for kept, job in wanted), return_exceptions=True)
        for (kept, _), came in zip(wanted, done, strict=True):
            if came == "replayed":
                outcome.replayed.append(ReplayedDeadLetter(dead_letter_id=kept.number, execution_id=kept.replay_id))
            elif came == "already":
                outcome.already += 1
        for came in done:
            if isinstance(came, BaseException):
                raise came

    async def _put(self, kept: Kept, job: Job, by: By) -> Literal["replayed", "already"]:
        again = replay_of(kept, job)
        duplicate = await self._queue.put(again, None)
        self._accepted.mark(again.job_id, job.agent)
        if not duplicate:
            await self._queue.tell_queued(again)
        note = ReplayNote(
            dead_letter_id=kept.number,
            execution_id=kept.replay_id,
            agent=job.agent,
            by=by.name,
            why=by.why or None,
            at=by.at,
        )
        # Whoever replays it at the same moment may be the first to note it.
        with suppress(AlreadyDecided):
            await self._publisher.event(subjects.replayed(kept.number), note, id=kept.replay_id, at=by.at, once=True)
        return "already" if duplicate else "replayed"

    async def _ended(self, stream: Stream, of: Sequence[str]) -> dict[str, Status]:
        found: dict[str, Status] = {}
        async with aclosing(last_on(self._connection, stream, of)) as stored:
            async for one in stored:
                if (ended := one.read(_Ended)) is not None:
                    found[ended.execution_id] = ended.status
        return found


def not_all(error: BusError | Problem, outcome: Outcome) -> Problem:
    """503: what was asked for is not done, or not all of it."""
    problem = error if isinstance(error, Problem) else not_done(error)
    if not outcome.replayed:
        return problem
    done = f"{len(outcome.replayed):,} were replayed before this happened, and asking again replays none of them twice"
    return unavailable(problem.code, f"{problem.message}; {done}")
