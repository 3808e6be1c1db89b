"""The answers of models to calls that were never made, which are drawn from those that they gave to others."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from hashlib import blake2b
from operator import itemgetter

from breakwater.jobs.contract.execution import Attempt, ErrorInfo
from breakwater.kernel.types import ms_from_time, time_from_ms

NEAREST = 32
"""The number of calls, the nearest in time, from which an answer is drawn."""

LEAST_OWN = 4
"""The number of calls of the same agent among these that are enough to draw from them alone."""

WITHIN_MS = 3_600_000
"""The most time between a call and those from which its answer is drawn, unless another is named."""

OF_DELAY = 0.5
"""The share of a delay between a retry after it and the calls that tell its outcome: one that comes a second after a
failure may meet the same outage, one that comes ten seconds later may not."""

TIMED_OUT = ErrorInfo(
    kind="timeout", class_="TimeoutError", message="no answer within the agent's time limit", retryable=True
)

_Call = tuple[datetime, str, Attempt]
"""A call after its beginning and its id, by which calls are in order."""

_PLACE = itemgetter(0, 1)


class World:
    """The recorded calls of all models, by model and time: those of the two latest stretches of time."""

    def __init__(
        self, attempts: Iterable[Attempt] = (), *, within_ms: int = WITHIN_MS, compares_delays: bool = False
    ) -> None:
        """Takes recorded attempts, as `add`, and the most time between a call and those that it is drawn from.

        With `compares_delays`, that is `OF_DELAY` of a delay before a retry, if the delay is not that of the record.
        """
        self._within_ms = within_ms
        self._compares_delays = compares_delays
        self._stretches: list[Mapping[str, list[_Call]]] = []
        """The calls of each model, of the two latest stretches; not in order before the model is drawn from."""
        self._ordered: dict[str, tuple[list[int], list[Attempt]]] = {}
        """The times and calls of the models that were drawn from, in order."""
        self.add(attempts)

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Adds the recorded attempts of a later stretch of time, in any order.

        Refusals, lost calls and cancelled ones say nothing of a model.
        """
        by_model: dict[str, list[_Call]] = defaultdict(list)
        for attempt in attempts:
            if attempt.outcome in {"success", "error"} and not attempt.short_circuited:
                by_model[attempt.model].append((attempt.started_at, attempt.attempt_id, attempt))
        self._stretches = [*self._stretches[-1:], by_model]
        self._ordered.clear()

    def _of_model(self, model: str) -> tuple[list[int], list[Attempt]]:
        """Returns the calls of a model in order, and their times, in milliseconds since the epoch."""
        ordered = self._ordered.get(model)
        if ordered is None:
            of_model: list[_Call] = []
            for calls in self._stretches:
                if model in calls:
                    calls[model].sort(key=_PLACE)  # once for both stretches that it is needed in
                    of_model += calls[model]
            of_model.sort(key=_PLACE)
            times = [ms_from_time(started_at) for started_at, _, _ in of_model]
            ordered = self._ordered[model] = times, [attempt for _, _, attempt in of_model]
        return ordered

    def within_ms(self, waited_ms: int | None) -> int:
        """Returns the most time between a call and those that tell its outcome; `waited_ms` as for `draw`."""
        if waited_ms is not None and self._compares_delays:
            return round(OF_DELAY * waited_ms)
        return self._within_ms

    def draw(self, model: str, agent: str, at_ms: int, seed: str, waited_ms: int | None = None) -> Attempt | None:
        """Returns the call whose outcome a call of a model takes; None if the record has none near it.

        It is of the same agent, whose prompts cost and take alike, if some of the nearest are.

        Args:
            model: the model.
            agent: the agent.
            at_ms: the time of the call, in milliseconds since the epoch.
            seed: what the draw depends on: the same text draws the same call.
            waited_ms: the delay before it in milliseconds, unless that is the delay of the record.
        """
        within_ms = self.within_ms(waited_ms)
        times, all_calls = self._of_model(model)
        if not times:
            return None
        place = bisect_left(times, at_ms)
        first, last = max(0, place - NEAREST // 2), min(len(times), place + NEAREST // 2)
        while first < last and at_ms - times[first] > within_ms:
            first += 1
        while first < last and times[last - 1] - at_ms > within_ms:
            last -= 1
        if first == last:
            return None
        nearest = all_calls[first:last]
        of_agent = [call for call in nearest if call.agent == agent]
        calls = of_agent if len(of_agent) >= LEAST_OWN else nearest
        digest = blake2b(seed.encode(), digest_size=8).digest()
        return calls[int.from_bytes(digest) % len(calls)]


def as_call_of(drawn: Attempt, of_job: Attempt, at_ms: int, **fields: object) -> Attempt:
    """Returns a drawn call as a job's own.

    Args:
        drawn: the call whose model, outcome, duration and cost it takes.
        of_job: any attempt of the job, which names its caller and its task.
        at_ms: the time at which it begins, in milliseconds since the epoch.
        fields: its other fields.
    """
    started_at = time_from_ms(at_ms)
    of_caller = {name: getattr(of_job, name) for name in _OF_JOB}
    times = {
        "started_at": started_at,
        "completed_at": started_at + timedelta(milliseconds=drawn.duration_ms),
        "reserved_at": started_at,
        "task_asked_at": None,
    }
    return drawn.model_copy(update={**of_caller, **times, **fields})


_OF_JOB = (
    "execution_id",
    "job_id",
    "agent",
    "tenant",
    "task_id",
    "task_key",
    "submitted_by",
    "user",
    "team",
    "caller",
    "cost_tags",
)


def cut_off_after(attempt: Attempt, timeout_s: float, remaining_s: float) -> Attempt:
    """Returns a call as shorter time limits would have ended it; an answer that was streamed had begun before.

    Args:
        attempt: the call.
        timeout_s: the time limit of an attempt. A call that exceeds it counts for the breaker.
        remaining_s: what is left of the job's time. A call that exceeds that alone says nothing about the model.
    """
    limit_ms = round(min(timeout_s, remaining_s) * 1000)
    if attempt.duration_ms <= limit_ms or attempt.first_token_ms is not None:
        return attempt
    return attempt.model_copy(
        update={
            "outcome": "error",
            "error": TIMED_OUT,
            "duration_ms": limit_ms,
            "completed_at": attempt.started_at + timedelta(milliseconds=limit_ms),
            "counts_for_breaker": remaining_s >= timeout_s,
            "cost": attempt.reserved,
            "cost_basis": "unknown" if attempt.reserved is None else "estimated",
            "finish_reason": None,
        }
    )
