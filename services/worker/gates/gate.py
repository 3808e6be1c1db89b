"""A gate: one condition that must admit a call before it is made."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

from breakwater.config import Agent
from breakwater.contracts.execution import Attempt, ErrorInfo, ErrorKind, FailureStatistics, Reason
from breakwater.state.connection import ScriptCall
from breakwater.state.executions import ClaimLostError
from services.worker.assignment import Assignment, Checkpoint, InFlight
from services.worker.context import WorkerContext
from services.worker.leases import JobCancelledError
from services.worker.targets import Target

LEASE_MARGIN_S = 120.0
"""A grant is held so much longer than its call: enough for a redelivery to record a lost attempt."""

POLL_S = 0.25
"""Longest wait of a call for others to end before it asks again; up to as much again is added at random."""


TOO_MANY = "This agent is receiving too many requests right now. Please try again later."
"""Text for callers where a rate limit has no room, in the config or at the provider."""


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A call that is to be made, or that a dry run only asks about."""

    job: Assignment
    target: Target
    """The model that is to be called."""
    checkpoint: Checkpoint
    """Of the job, before the call."""
    flight: InFlight
    """The attempt: its number, model, provider and worst-case cost."""
    worst_tokens: int
    """The most tokens that the call can use, input and output."""
    timeout_s: float
    attempt_id: str
    """Holder of the grants."""
    lease_ms: int | None
    """Lease of the grants. None for a dry run: nothing may be taken, counted or saved."""
    waited: Mapping[Reason, float] = field(default_factory=dict[Reason, float])
    """For how many seconds it has waited for capacity, by what it would have been refused with."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The call must not be made.

    `error` has three texts: `message` for programs, which names what refused the call and no figure; `figures` for
    operators alone; and `user_message` for models and end users.
    """

    reason: Reason
    """Reason of the job's end, unless another model answers."""
    error: ErrorInfo
    refused_by: str | None = None
    """The budget or the limit that has no room, by its name."""
    refused_cap: int | None = None
    """The hard cap that is used up, in nano-dollars."""
    ends_chain: bool = False
    """No other model is to be tried."""
    statistics: FailureStatistics | None = None
    """Of a guard or a breaker."""

    @classmethod
    def of(
        cls,
        reason: Reason,
        class_name: str,
        message: str,
        *,
        kind: ErrorKind | None = None,
        figures: str | None = None,
        retry_after_s: float | None = None,
        user_message: str | None = None,
        **more: Any,
    ) -> Self:
        """A refusal with its error, whose kind has the name of the reason; `more` are fields of the refusal."""
        error = ErrorInfo(
            kind=kind or cast(ErrorKind, reason),
            class_=class_name,
            message=message,
            figures=figures,
            retry_after_s=retry_after_s,
            user_message=user_message,
        )
        return cls(reason, error, **more)


@dataclass(frozen=True, slots=True)
class WaitForCapacity:
    """There is no room for the call just now; it may be asked for again after `delay_s`."""

    delay_s: float
    refused: Refused
    """Refusal of the call where there is no time to wait."""


GateVerdict = Refused | WaitForCapacity | ClaimLostError | JobCancelledError
"""Verdict of a gate that does not admit a call."""


@dataclass(slots=True)
class Gate:
    """One gate for one admission; a subclass overrides what it needs.

    `ask` comes first. The script that it returns joins the one round trip of all gates, and `read` is given the answer.
    If any gate refuses, each that asked releases its grants. `announce` comes after that.
    """

    worker: WorkerContext
    request: AdmissionRequest
    flight_fields: dict[str, object] = field(default_factory=dict[str, object], init=False)
    """Notes on the grant for the attempt's record: fields of `InFlight`, set by `read`."""
    lease: AbstractContextManager[None] | None = field(default=None, init=False)
    """Entered while the call is under way; set by `read`."""
    announces: bool = field(default=False, init=False)
    """`announce` has something to publish; set by `read`."""

    settles: ClassVar[bool] = False
    """The gate has a `settle` of its own; of the others it is not called."""
    must_settle: ClassVar[bool] = False
    """No service settles it where Redis does not answer: it is repeated until Redis does."""

    def __init_subclass__(cls) -> None:
        cls.settles = cls.settle is not Gate.settle

    @classmethod
    def applies(cls, worker: WorkerContext, agent: Agent) -> bool:
        """True if the gate can have a say in calls of an agent; asked once for an agent, not for each call."""
        del worker, agent
        return True

    @classmethod
    def watch(cls, worker: WorkerContext) -> Coroutine[Any, Any, None] | None:
        """Background work of the gate, for as long as the worker runs."""
        del worker
        return None

    def ask(self) -> ScriptCall | Refused | None:
        """The script that asks; or the refusal, where nothing need be asked; or None: the gate has no say.

        The script takes nothing where `request.lease_ms` is None.
        """
        raise NotImplementedError

    def read(self, answer: Any) -> GateVerdict | None:
        """The verdict on the call, by the script's answer; None where it is admitted."""
        raise NotImplementedError

    def release(self) -> ScriptCall | None:
        """Releases the grants of a call that is not made after all; None where there are none."""
        return None

    async def announce(self, verdict: GateVerdict | None) -> None:
        """Publishes changes by the admission; called where `read` has set `announces`.

        It may take as long as NATS is unavailable, so a call that is not made holds nothing by then.

        Args:
            verdict: of all gates on the call; None: it is admitted.
        """

    def settle(self, attempt: Attempt) -> ScriptCall | None:
        """Ends the grants of a call that has ended. Also called after a crash, on a gate that admitted nothing."""
        del attempt
        return None
