"""Admission before a call: one round trip asks all gates; after a refusal, another one releases the grants.

A new limit is a new file with a `Gate`, and one line in `GATES`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from breakwater.breakers.gate import BreakerGate, TaskBreakerGate
from breakwater.calls.assignment import InFlight
from breakwater.calls.claim_gate import ClaimGate
from breakwater.calls.gate import LEASE_MARGIN_S, AdmissionRequest, Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.config import Agent
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.redis.connection import ScriptCall
from breakwater.limits.gate.budget import BudgetGate
from breakwater.limits.gate.deployment import DeploymentGate
from breakwater.limits.gate.rate_limit import RateLimitGate
from breakwater.limits.gate.task import TaskGate
from services.worker.context import WorkerContext
from services.worker.leases import JobCancelledError

Gates = Sequence[type[Gate]]

GATES: Gates = (
    ClaimGate,
    TaskGate,
    BreakerGate,
    BudgetGate,
    RateLimitGate,
    DeploymentGate,
)
"""The gates, in the order in which their refusals take precedence."""

ALL_GATES: Gates = (*GATES, TaskBreakerGate)
"""The gates for jobs that set rules themselves, including rules that their agents lack."""


def gates_of(worker: WorkerContext, agent: Agent) -> Gates:
    """Returns the gates that can refuse a call of an agent."""
    return tuple(gate for gate in GATES if gate.applies(worker, agent))


@dataclass(frozen=True, slots=True)
class Admitted:
    """The call may be made, and the gates hold grants for it."""

    flight: InFlight
    """The attempt, with the fields that the gates have set."""
    gates: Sequence[Gate]
    """The gates that were asked in Redis."""

    @contextmanager
    def under_way(self) -> Generator[None]:
        """Enters the context of each gate for the duration of the call."""
        with ExitStack() as stack:
            for gate in self.gates:
                if gate.lease is not None:
                    stack.enter_context(gate.lease)
            yield


async def admit(
    worker: WorkerContext, request: AdmissionRequest, gates: Gates = GATES
) -> Admitted | Refused | WaitForCapacity:
    """Asks the gates to admit the call of an attempt.

    The first refusal counts, in the order of the gates; without a refusal, the longest wait counts.

    Raises:
        ClaimLostError: this worker no longer holds the job.
        JobCancelledError: the job was cancelled.
        StateUnavailableError: ask again.
    """
    began = worker.clock()
    asked_gates, verdict = await _ask(worker, request, gates)
    if asked_gates and isinstance(verdict, Refused | WaitForCapacity | JobCancelledError):
        # Not after a lost claim: the job's new holder may hold the same grants, for the same attempt.
        await worker.redis.run([call for gate in asked_gates if (call := gate.release()) is not None])
    # In reverse, so that the breaker announces before the task. Only the admission that made it half-open announces
    # that; no repetition does.
    for gate in reversed(asked_gates):
        if gate.announces:
            await gate.announce(verdict)
    if isinstance(verdict, ClaimLostError | JobCancelledError):
        raise verdict
    if verdict is not None:
        return verdict
    if worker.clock() - began > LEASE_MARGIN_S / 2:
        # The grant may have expired during the announcement, and another call may be the probe now.
        return await admit(worker, request, gates)
    flight_fields = {name: value for gate in asked_gates for name, value in gate.flight_fields.items()}
    return Admitted(request.flight.model_copy(update=flight_fields), asked_gates)


async def check(
    worker: WorkerContext, request: AdmissionRequest, gates: Gates = GATES
) -> Refused | WaitForCapacity | None:
    """Returns the verdict of `admit` on a dry run, without grants; None if the call would be admitted.

    Raises:
        StateUnavailableError: ask again.
    """
    _, verdict = await _ask(worker, request, gates)
    if isinstance(verdict, WaitForCapacity) and not verdict.delay_s:
        _, verdict = await _ask(worker, request, gates)
    return None if isinstance(verdict, ClaimLostError | JobCancelledError) else verdict


_FINAL = Refused | ClaimLostError | JobCancelledError


async def _ask(worker: WorkerContext, request: AdmissionRequest, gates: Gates) -> tuple[list[Gate], GateVerdict | None]:
    """Asks all gates in one round trip, or none if one refuses locally. Returns the asked gates and the verdict."""
    asked_gates: list[Gate] = []
    calls: list[ScriptCall] = []
    for make in gates:
        gate = make(worker, request)
        match gate.ask():
            case Refused() as refused:
                return [gate], refused
            case ScriptCall() as call:
                asked_gates.append(gate)
                calls.append(call)
            case None:
                pass
    answers = await worker.redis.run(calls) if calls else []
    verdicts = [
        verdict for gate, answer in zip(asked_gates, answers, strict=True) if (verdict := gate.read(answer)) is not None
    ]
    if not verdicts:
        return asked_gates, None
    waits = [verdict for verdict in verdicts if isinstance(verdict, WaitForCapacity)]
    longest = max(waits, key=lambda wait: wait.delay_s, default=None)
    return asked_gates, next((verdict for verdict in verdicts if isinstance(verdict, _FINAL)), longest)
