"""A gate: one condition that a call must meet before it is made."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from breakwater.calls.assignment import Assignment, Checkpoint, InFlight
from breakwater.calls.targets import Target
from breakwater.jobs.contract.execution import Attempt, CallerLimits, ErrorInfo, FailureStatistics, Reason
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.redis.connection import ScriptCommand


@dataclass(slots=True, eq=False)
class Admission:
    """The admission of a call, or the question of a dry run about one."""

    job: Assignment
    target: Target
    """The model to call."""
    checkpoint: Checkpoint
    """The job's checkpoint before the call."""
    flight: InFlight
    """The attempt: its number, model, provider and worst case. Once admitted, with the fields that gates set."""
    timeout_s: float
    attempt_id: str
    """The holder of the grants."""
    lease_ms: int | None
    """The lease of the grants. None for a dry run, which may take, count or save nothing."""
    has_alternatives: bool = False
    """True if it seems that another deployment may be called if this one does not admit the call now."""
    waited: Mapping[Reason, float] = field(default_factory=dict[Reason, float])
    """The seconds that the job has waited for capacity, by the reason of the refusal it would get."""
    limits: CallerLimits | None = None
    """The rate limits of the job's caller, once a gate has read them."""
    gates: Sequence[Gate] = ()
    """The gates that hold grants for the admitted call."""

    @contextmanager
    def under_way(self) -> Generator[None]:
        """Tells the gates that the call begins, and that it has ended."""
        for gate in self.gates:
            gate.begin_call()
        try:
            yield
        finally:
            for gate in self.gates:
                gate.end_call()
        self.gates = ()  # they refer to the admission: without them, it needs no garbage collector


@dataclass(frozen=True, slots=True)
class Refused:
    """The verdict that the call must not be made."""

    reason: Reason
    """The reason for the end of the job, unless another model answers."""
    error: ErrorInfo
    """Built by `calls.rules.refusals`."""
    refused_by: str | None = None
    """The name of the budget or the limit that has no room."""
    refused_cap: int | None = None
    """The exhausted hard limit, in nano-dollars."""
    ends_chain: bool = False
    """True if no other model may be tried."""
    of_deployment: bool = False
    """True if another deployment of the model may be admitted."""
    statistics: FailureStatistics | None = None
    """The statistics of the guard or the breaker that refused."""


@dataclass(frozen=True, slots=True)
class WaitForCapacity:
    """The verdict that there is no capacity for the call now; the gates are asked again after `delay_s`."""

    delay_s: float
    refused: Refused
    """The refusal if the job has no time to wait."""
    ahead: int | None = None
    """The number of calls that wait before it; None if they have no places in a queue."""
    frees: str | None = None
    """The event that makes room, in words; None if the refusal says it."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    """The verdict that facts have changed: all gates release their grants and are asked again."""


GateVerdict = Refused | WaitForCapacity | AskAgain | ClaimLostError | JobCancelledError
"""The verdict of a gate that does not admit a call."""


@dataclass(slots=True, kw_only=True)
class Gate:
    """A gate for one admission. A subclass adds the stores and clocks it needs, and overrides the methods that apply.

    `ask` comes first. Its script joins the one round trip of all gates, and `read` gets the answer. If any gate
    refuses, all that asked release their grants. `announce` comes last.
    """

    admission: Admission
    flight_fields: dict[str, object] = field(default_factory=dict[str, object], init=False)
    """Fields of `InFlight` that `read` sets for the record of the attempt."""
    announces: bool = field(default=False, init=False)
    """True if `announce` has something to publish or to read; set by `read`."""

    settles: ClassVar[bool] = False
    """True if the gate overrides `settle`; the method of other gates is not called."""
    must_settle: ClassVar[bool] = False
    """True if no service settles the grant from the log, so that the worker retries until Redis answers."""

    def __init_subclass__(cls) -> None:
        cls.settles = cls.settle is not Gate.settle

    def ask(self) -> ScriptCommand | Refused | None:
        """Returns the script that asks Redis, a refusal that needs no question, or None if the gate does not apply.

        The script must take nothing if `admission.lease_ms` is None.
        """
        raise NotImplementedError

    def read(self, answer: Any) -> GateVerdict | None:
        """Reads the answer of the script into a verdict; None admits the call."""
        raise NotImplementedError

    def release(self) -> ScriptCommand | None:
        """Returns the script that releases the grants of a call that is not made; None without grants."""
        return None

    def withdraw(self) -> ScriptCommand | None:
        """Returns the script that gives up the place of a call that some gate refused; None without a place."""
        return None

    async def announce(self, verdict: GateVerdict | None) -> None:
        """Publishes changes that the admission made, or reads what it lacked; called if `read` has set `announces`.

        It waits while NATS is unavailable, so a refused call has already released its grants.

        Args:
            verdict: the verdict of all gates; None admits the call.
        """

    def begin_call(self) -> None:
        """Notes that the admitted call begins."""

    def end_call(self) -> None:
        """Notes that the call has ended and is in the log, or that its worker stops."""

    def settle(self, attempt: Attempt) -> ScriptCommand | None:
        """Returns the script that ends the grants of a finished call. After a crash, a new gate settles it."""
        del attempt
        return None
