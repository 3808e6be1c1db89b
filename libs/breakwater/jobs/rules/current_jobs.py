"""Decides the state of a job that has not ended, by its message and its claim."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self, get_args

from breakwater.jobs.contract.current_jobs import JobState, JobWait
from breakwater.jobs.rules.checkpoints import SavedCheckpoint
from breakwater.kernel.nats.subjects import decode_token, encode_token
from breakwater.kernel.types import is_identifier

Phase = Literal["held", "parked", "queued"]
"""The parts of the list, in its order: delivered messages on JOBS, those on PARKED, and the others on JOBS."""

PHASES: tuple[Phase, ...] = get_args(Phase)

STATES_IN: dict[Phase, frozenset[JobState]] = {
    "held": frozenset({"running", "waiting"}),
    "parked": frozenset({"parked"}),
    "queued": frozenset({"queued"}),
}
"""The states of the jobs in each part."""


@dataclass(frozen=True, slots=True)
class ClaimState:
    """The claim of a job, and what else Redis knows of it.

    Attributes:
        exists: False if it knows nothing.
        claimed: True if a worker has claimed the job.
        ended: True if the job has ended; its message may still be there for a moment.
        lease_until: the end of the claim, unless it is renewed.
        worker_silent_s: the seconds since the last heartbeat of its worker; None without a heartbeat.
        checkpoint: the job's progress; None before its first call.
        wait: what it waits for, or has waited for.
        woken: the sequence of its message on PARKED after which it was put back into its queue; 0 for none.
        cancelling: True if someone wants it cancelled.
    """

    exists: bool = False
    claimed: bool = False
    ended: bool = False
    lease_until: datetime | None = None
    worker_silent_s: float | None = None
    checkpoint: SavedCheckpoint | None = None
    wait: JobWait | None = None
    woken: int = 0
    cancelling: bool = False


WAITS_FOR_TURN = JobWait(
    kind="concurrency", message="its key or its tenant has its share of the agent's slots; it waits for its turn"
)
UNCLAIMED = JobWait(kind="worker", message="its worker gave it back, and none has it yet")


def held_state(claim: ClaimState, now: datetime, silent_after_s: float) -> tuple[JobState, JobWait | None]:
    """Returns the state of a job whose message was delivered to a worker, and what it waits for.

    Args:
        claim: what Redis knows of it.
        now: the time.
        silent_after_s: the silence after which a worker may be dead.
    """
    if not claim.claimed:
        return "waiting", UNCLAIMED
    silent_s = claim.worker_silent_s
    is_over = claim.lease_until is not None and claim.lease_until <= now
    if is_over or (silent_s is not None and silent_s > silent_after_s):
        since = "" if silent_s is None else f" has been silent for {silent_s:.0f} s"
        message = f"its worker{since or ' does not renew its claim'}; another one takes it when the claim has ended"
        return "waiting", JobWait(kind="claim", message=message, until=claim.lease_until)
    wait = claim.wait
    if wait is None or wait.until is None or wait.until <= now:
        return "running", None
    call = None if claim.checkpoint is None else claim.checkpoint.in_flight
    # Its note outlives a wait that ends early; the call that begins then shows that it is over.
    if call is not None and wait.since is not None and call.started_at > wait.since:
        return "running", None
    return "waiting", wait


def waits_for_turn(claim: ClaimState, now: datetime, silent_after_s: float) -> bool:
    """Returns True if a job makes no call because it waits for a worker, for room in a limit, or for other jobs.

    The pause before a retry is none of these, nor is a call. The arguments are as in `held_state`.
    """
    if claim.claimed:
        state, wait = held_state(claim, now, silent_after_s)
        return state == "waiting" and wait is not None and wait.kind != "back_off"
    return not claim.ended and (claim.wait is None or claim.wait.kind != "back_off")


def is_parked(claim: ClaimState, sequence: int) -> bool:
    """Returns True if a message on PARKED is that of a job that still waits there, if Redis knows the job."""
    return not claim.claimed and claim.woken < sequence


@dataclass(frozen=True, slots=True)
class ListPlace:
    """A place in the list of jobs: the next page begins there."""

    phase: Phase
    agent: str
    """Empty for parked jobs of all agents."""
    sequence: int

    @property
    def text(self) -> str:
        """The place as a page cursor, yet to be quoted."""
        return f"{self.phase}.{self.agent and encode_token(self.agent)}.{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a page cursor. Raises ValueError with a message for the user."""
        phase, _, agent_and_number = text.partition(".")
        token, _, number = agent_and_number.partition(".")
        message = "is not the `next` of a page of jobs"
        if phase not in PHASES or not (number.isascii() and number.isdigit() and len(number) < 20):
            raise ValueError(message)
        try:
            agent = decode_token(token)
        except UnicodeDecodeError:
            raise ValueError(message) from None
        if agent and not is_identifier(agent):
            raise ValueError(message)
        return cls(phase, agent, int(number))  # pyright: ignore[reportArgumentType]  # one of PHASES, as checked above
