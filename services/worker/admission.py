"""Admission before a call: one round trip asks all gates; after a refusal, another one releases the grants.

A new limit is a new file with a `Gate`, and one line in `gates_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from breakwater.breakers.gate import BreakerGate, BreakerWatch, TaskBreakerGate
from breakwater.calls.claim_gate import ClaimGate
from breakwater.calls.gate import Admission, AskAgain, Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.calls.rules.waits import LEASE_MARGIN_S
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.redis.connection import ScriptCommand
from breakwater.limits.gate.budget import BudgetGate, LiveReservations
from breakwater.limits.gate.deployment import DeploymentGate
from breakwater.limits.gate.task import TaskGate
from breakwater.limits.task_guards import bound_tasks
from breakwater.services.worker.context import WorkerContext

Gates = Sequence[Callable[..., Gate]]
"""Makes the gates of one admission, each with what it needs of the worker."""


def gates_of(worker: WorkerContext) -> Gates:
    """Returns the gates of a worker, in the order in which their refusals take precedence."""
    now = worker.now
    jitter = worker.jitter
    breaker = partial(
        BreakerGate,
        breakers=worker.breakers,
        publisher=worker.publisher,
        outages=worker.outages,
        now=now,
        jitter=jitter,
    )
    return (
        partial(ClaimGate, executions=worker.executions),
        partial(TaskGate, guards=worker.guards, jitter=jitter),
        breaker,
        partial(
            BudgetGate,
            budgets=worker.budgets,
            limits=worker.limits,
            live=worker.live_reservations,
            is_local=worker.config.is_local,
            now=now,
            jitter=jitter,
            read_limits=worker.read_limits,
            hear=worker.balancer.hear_own,
        ),
        partial(
            DeploymentGate,
            deployments=worker.deployments,
            policies=worker.retry_policies,
            jitter=jitter,
            refills_in_s=worker.balancer.refills_in_s,
        ),
        partial(TaskBreakerGate, bound=worker.guards.tasks.note_begun, **breaker.keywords),
    )


def watches_of(worker: WorkerContext) -> Sequence[Coroutine[Any, Any, None]]:
    """Returns the background work of the gates under a config."""
    tasks = bound_tasks(worker.guards.tasks)
    reservations = LiveReservations(
        worker.live_reservations, worker.redis, worker.budgets, worker.limits, worker.now
    ).run()
    if all(agent.breaker is None for agent in worker.config.agents.values()):
        return (tasks, reservations)
    return (tasks, reservations, BreakerWatch(worker.breakers, worker.metrics).run())


async def admit(
    worker: WorkerContext, admission: Admission, gates: Gates
) -> Refused | WaitForCapacity | AskAgain | None:
    """Asks the gates to admit the call of an attempt; None if they do: then `admission` has their grants.

    The first refusal counts, in the order of the gates; without a refusal, the longest wait counts.

    Raises:
        ClaimLostError: this worker no longer holds the job.
        JobCancelledError: the job was cancelled.
        StateUnavailableError: ask again.
    """
    began = worker.clock()
    asked_gates, verdict = await _ask(worker, admission, gates)
    if asked_gates and verdict is not None and not isinstance(verdict, ClaimLostError):
        # Not after a lost claim: the job's new holder may hold the same grants, for the same attempt.
        commands = [gate.release() for gate in asked_gates]
        if isinstance(verdict, Refused) or (admission.has_alternatives and _is_of_deployment(verdict)):
            commands += [gate.withdraw() for gate in asked_gates]
        await worker.redis.run([command for command in commands if command is not None])
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
        return await admit(worker, admission, gates)
    fields = {name: value for gate in asked_gates for name, value in gate.flight_fields.items()}
    admission.flight = admission.flight.model_copy(update=fields)
    admission.gates = asked_gates
    return None


def _is_of_deployment(verdict: GateVerdict) -> bool:
    """Returns True if the call goes on to another deployment, and so does not wait for this one."""
    return isinstance(verdict, WaitForCapacity) and verdict.refused.of_deployment


async def check(worker: WorkerContext, admission: Admission, gates: Gates) -> Refused | WaitForCapacity | None:
    """Returns the verdict of `admit` on a dry run, without grants; None if the call would be admitted.

    Raises:
        StateUnavailableError: ask again.
    """
    asked_gates, verdict = await _ask(worker, admission, gates)
    if isinstance(verdict, AskAgain):
        for gate in asked_gates:
            if gate.announces:
                await gate.announce(verdict)
        _, verdict = await _ask(worker, admission, gates)
    return verdict if isinstance(verdict, Refused | WaitForCapacity) else None


_FINAL = Refused | ClaimLostError | JobCancelledError


async def _ask(worker: WorkerContext, admission: Admission, gates: Gates) -> tuple[list[Gate], GateVerdict | None]:
    """Asks all gates in one round trip, or none if one refuses locally. Returns the asked gates and the verdict."""
    asked_gates: list[Gate] = []
    commands: list[ScriptCommand] = []
    for make in gates:
        gate = make(admission=admission)
        match gate.ask():
            case Refused() as refused:
                return [gate], refused
            case ScriptCommand() as command:
                asked_gates.append(gate)
                commands.append(command)
            case None:
                pass
    answers = await worker.redis.run(commands) if commands else []
    verdicts = [
        verdict for gate, answer in zip(asked_gates, answers, strict=True) if (verdict := gate.read(answer)) is not None
    ]
    if not verdicts:
        return asked_gates, None
    waits = [verdict for verdict in verdicts if isinstance(verdict, WaitForCapacity)]
    undecided = max(waits, key=lambda wait: wait.delay_s, default=verdicts[0])
    return asked_gates, next((verdict for verdict in verdicts if isinstance(verdict, _FINAL)), undecided)
