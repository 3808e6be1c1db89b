"""Outcomes of calls, recorded in Redis for the next admission: a failure before its job continues, others after.

The event of an attempt remains the source of truth. The budget and the breaker service later read that event, and find
their work done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import structlog

from breakwater.breakers.gate import breaker_of_agent, breaker_of_task
from breakwater.breakers.rules.breaker import BreakerKey, Observation, caller_of, short_hash
from breakwater.breakers.rules.observations import is_cut_off, observation_of
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import Breakers
from breakwater.breakers.transitions import AS_OF_NOW, ObservedOutcome, decide
from breakwater.calls.assignment import Assignment
from breakwater.calls.rules.classify import follows_request
from breakwater.calls.targets import Target
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.process.outage import Outages, StoppedWaitingError
from breakwater.kernel.redis.connection import Redis, ScriptCommand, StateUnavailableError
from breakwater.prices.rules.price import MAX_OBSERVED

RECORD_TIMEOUT_S = 1.0
"""The longest time that a job waits until Redis has its outcome. An outage of Redis must not delay the answer."""


def _as_task_counts(observation: Observation, attempt: Attempt) -> Observation:
    """Returns an outcome as the breaker of its task counts it, whose requests are the task's own.

    A failure that follows from the request counts there, unless the job repairs it.
    """
    error = attempt.error if attempt.outcome == "error" else None
    if observation.failed is None and error is not None and follows_request(error) and not attempt.tried_again:
        observation = replace(observation, failed=True, job=short_hash(attempt.execution_id))
    # The attempt's version is that of its agent's breaker, and a task has only one caller.
    return replace(observation, version=None, caller="", task="")


class Outcomes:
    """Records the outcomes of this worker's calls."""

    def __init__(self, redis: Redis, breakers: Breakers, outages: Outages, jitter: Callable[[], float]) -> None:
        self._redis = redis
        self._breakers = breakers
        self._outages = outages
        self._jitter = jitter
        self._recording: set[asyncio.Task[None]] = set()
        self._outputs: dict[tuple[str, str], deque[int]] = {}
        self.answered: dict[str, datetime] = {}
        """The time of each deployment's latest answer to this worker."""
        self._pending: dict[BreakerKey, list[ObservedOutcome]] = {}
        self._updating = asyncio.Lock()

    def outputs(self, agent: str, model: str) -> Sequence[int]:
        """Returns the output tokens of an agent's latest calls, if it reserves by observation."""
        return self._outputs.get((agent, model), ())

    def settle(self, settlements: Sequence[tuple[bool, ScriptCommand]]) -> asyncio.Task[None] | None:
        """Starts to settle the grants of the gates for a call that has ended.

        Grants that a service also settles from the log need no round trip of their own: they join the next one.

        Args:
            settlements: the commands, each with True if no service settles the grant.

        Returns:
            The task to wait for, if any grant must be settled here.
        """
        commands = [command for _, command in settlements]
        if not any(must_settle for must_settle, _ in settlements):
            if commands:
                self._redis.run_with_next(commands)
            return None
        return self._begin(partial(self._outages.retry_while_unavailable, partial(self._redis.run, commands)))

    async def record(
        self,
        settling: asyncio.Task[None] | None,
        job: Assignment,
        target: Target,
        attempt: Attempt,
        sequence: int,
        *,
        has_failed: bool,
    ) -> None:
        """Applies a recorded attempt to its breaker. Waits for that and for `settling`, up to `RECORD_TIMEOUT_S`.

        Args:
            settling: the task that `settle` returned.
            job: the job of the attempt.
            target: the deployment that was called.
            attempt: the recorded attempt.
            sequence: the sequence of its event.
            has_failed: True if the job has failed on the model before, and was to try again.
        """
        # Estimates do not count: a model may have produced hidden reasoning tokens.
        if job.agent.reserve == "observed" and attempt.output_tokens is not None and attempt.cost_basis == "billed":
            self._outputs.setdefault((job.agent_name, attempt.model), deque(maxlen=MAX_OBSERVED)).append(
                attempt.output_tokens
            )
        if attempt.outcome == "success":
            self.answered[target.deployment] = attempt.completed_at
        recording = set[asyncio.Task[None]]() if settling is None else {settling}
        key = breaker_of_agent(job, target)
        rules = job.agent.breaker
        rules_by_breaker: dict[BreakerKey, BreakerRules] = {}
        gave_up = has_failed and (attempt.short_circuited or is_cut_off(attempt))
        if key is not None and rules is not None and (gave_up or not attempt.short_circuited):
            if gave_up or attempt.counts_for_breaker or attempt.cause == "probe" or rules.failure_rate is not None:
                rules_by_breaker[key] = rules
            elif attempt.outcome == "success" and attempt.breaker_version is not None:
                # The breaker service applies the rest of a success.
                caller = caller_of(job.caller, attempt.tenant)
                success = self._breakers.succeeded_command(key, attempt.breaker_version, sequence, caller)
                self._redis.run_with_next([success])
        task_breaker = breaker_of_task(job, target)
        if task_breaker is not None and job.breaker is not None and (gave_up or not attempt.short_circuited):
            rules_by_breaker[task_breaker] = job.breaker
        if rules_by_breaker:
            observation = observation_of(sequence, AS_OF_NOW, attempt)
            for breaker_key, breaker_rules in rules_by_breaker.items():
                observed = observation if breaker_key.task is None else _as_task_counts(observation, attempt)
                self._pending.setdefault(breaker_key, []).append(ObservedOutcome(observed, breaker_rules))
            recording.add(self._begin(self._update_breakers))
        if recording:
            await asyncio.wait(recording, timeout=RECORD_TIMEOUT_S)

    async def _update_breakers(self) -> None:
        """Applies all pending outcomes to their breakers, those of all jobs together."""
        async with self._updating:
            pending: dict[BreakerKey, list[ObservedOutcome]] = dict(self._pending)
            self._pending.clear()
            while pending:
                log, breakers = await self._breakers.load_with_log(list(pending))
                # If Redis lost the breakers, the breaker service rebuilds them from the log, these outcomes included.
                decided = [
                    decide(key, loaded, pending[key], self._jitter())
                    for key, loaded in zip(pending, breakers, strict=True)
                    if log is not None or key.task is not None
                ]
                changed = [change for change in decided if change.after != change.before.breaker]
                saved = await self._breakers.save(changed)
                # If another writer saved first, decide again on the state that it saved.
                unsaved_keys = {change.key for change, is_saved in zip(changed, saved, strict=True) if not is_saved}
                pending = {key: observations for key, observations in pending.items() if key in unsaved_keys}

    def _begin(self, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._logged(work))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        return task

    async def _logged(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Runs work and logs its failure, which must not fail the job: the log of events has the outcome."""
        try:
            await work()
        except (StoppedWaitingError, StateUnavailableError):
            return  # the code that waits for an outage to end logs it
        except Exception:  # noqa: BLE001  the services that read the log apply the outcome, too
            structlog.get_logger().exception("outcome_not_noted")
