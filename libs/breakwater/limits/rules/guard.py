"""Stops tasks that loop, burn money, fail over and over, or grow unsure of themselves.

A task is the run of an agent that calls many times: jobs with one `task_id`, or a job with its children. Each is one
iteration. A job that belongs to no other is a task of its own. What a task used and how it fared is counted elsewhere
(`limits.store.tasks`) and judged here: its caps before each call, its failures and its answers after each job. Every
reason names figures and limits. It is for the people who look after the plane, and never for the model or the end user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal, Self, TypedDict

from pydantic import Field, JsonValue, field_validator, model_validator

from breakwater.breakers.rules import Preset, take_preset
from breakwater.jobs.contract.events import GuardRule
from breakwater.jobs.contract.execution import Execution, Reason
from breakwater.kernel.formats import beyond, counted, money, moneys
from breakwater.kernel.json_values import NoJsonError, find_json
from breakwater.kernel.types import Message, Off, UsdAmount
from breakwater.limits.rules.budget import fits
from breakwater.limits.rules.rate_limit import RateLimit


class ConfidenceRules(Message):
    """Confidence that answers report about themselves, as `agent_decision` does."""

    field: str = Field(
        default="confidence", min_length=1, description="The field of the answer, a JSON object, that contains it."
    )
    answers: int = Field(default=3, ge=2, le=100, description="How many in a row.")
    floor: float | None = Field(default=None, ge=0, le=1, description="Trip when all of them are below this.")
    falling: bool = Field(default=True, description="Trip when each of them is below the one before.")

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if self.floor is None and not self.falling:
            raise ValueError("set floor, or falling: true, or `confidence: off`")
        return self


class GuardRules(Message):
    """Limits of one task. Each rule can be `off`."""

    preset: Literal[Preset, "agent-run"] | None = Field(
        default=None,
        description="A named set of rules; settings next to it override it. `agent-run`, for agents that call their "
        "model in a loop, allows 100 iterations; the others set consecutive_failures and same_error.",
    )
    max_iterations: Annotated[int | None, Off] = Field(default=10, ge=1, le=1_000_000, description="Jobs of one task.")
    max_tokens: Annotated[int | None, Off] = Field(
        default=200_000, ge=1, le=10_000_000_000, description="Input and output, over all its calls."
    )
    max_cost_usd: Annotated[UsdAmount | None, Off] = Field(
        default=10_000_000_000,
        description="Over all its calls, including the worst case of the next; $10 by default.",
        json_schema_extra={"default": "10"},
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=1000, description="Failed jobs in a row."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5, ge=1, le=1000, description="Jobs that failed with the same error, even with successes in between."
    )
    confidence: Annotated[ConfidenceRules | None, Off] = None
    rate_limit: Annotated[RateLimit | None, Off] = Field(
        default=None, description="Limits on the rate of the task's calls, over all its jobs; it never stops the task."
    )

    _take_preset = model_validator(mode="before")(take_preset)

    def for_embeddings(self) -> Self:
        """The rules for a job that embeds: it is no step of a loop, and its tokens are not those of a conversation."""
        return self.model_copy(update=dict.fromkeys(("max_iterations", "max_tokens", "confidence")))

    @field_validator("rate_limit")
    @classmethod
    def _within_the_life_of_a_task(cls, limit: RateLimit | None) -> RateLimit | None:
        # Each task has counters of its own, which would fill Redis for a day.
        if limit is not None and limit.per == "day":
            raise ValueError("must be per minute or per hour, as each task is counted by itself")
        return limit

    @field_validator("max_cost_usd")
    @classmethod
    def _something(cls, cap: int | None) -> int | None:
        if cap == 0:
            raise ValueError("must be more than 0, as nothing would be left for the first call; `off` means no cap")
        return cap


SOFT_PERCENT = 80
"""Share of a cap at which people are notified, once for each task."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A rule that stops the task, and why, in words with figures: `3 consecutive failures (threshold: 3)`."""

    rule: GuardRule
    reason: str


@dataclass(frozen=True, slots=True)
class TaskBudgetHeld:
    """The cost cap has room for a call, but not while other jobs of the task hold what they do.

    Attributes:
        held: by the others: what they have spent, and the worst case of their calls under way; in nano-dollars.
    """

    held: int


class TaskCounts(TypedDict):
    """The counts of a task in a `GuardEvent`; `cost` in nano-dollars."""

    iterations: int
    tokens: int
    cost: int
    consecutive_failures: int
    total_failures: int
    unique_errors: int


@dataclass(frozen=True, slots=True)
class Task:
    """The known state of a task.

    Attributes:
        iterations: jobs that were let in, those under way included.
        tokens: input and output of its concluded jobs.
        cost: of its concluded jobs, in nano-dollars.
        consecutive_failures: failed jobs since the last one that succeeded.
        total_failures: failed jobs, ever.
        errors: how many jobs failed with each error, by its identity of 8 hex digits; a success clears none of them.
        confidences: how sure its answers said they are, 0..1, newest last.
    """

    iterations: int = 0
    tokens: int = 0
    cost: int = 0
    consecutive_failures: int = 0
    total_failures: int = 0
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    confidences: tuple[float, ...] = ()

    @property
    def counts(self) -> TaskCounts:
        """Figures for an event of its guard."""
        return {
            "iterations": self.iterations,
            "tokens": self.tokens,
            "cost": self.cost,
            "consecutive_failures": self.consecutive_failures,
            "total_failures": self.total_failures,
            "unique_errors": len(self.errors),
        }


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Usage of a concluded job, over all its attempts, and its end.

    Attributes:
        tokens: input and output.
        cost: in nano-dollars.
        failed: true if it counts as a failure, false as a success; None where it was refused without a call.
        called: whether any call was made. A job that was refused without one is no iteration.
        error_hash: the identity of its error, 8 hex digits; counted where it failed.
        confidence: how sure its answer says it is, 0..1; None where it does not say.
        is_step: whether it is an iteration of its task.
    """

    tokens: int
    cost: int
    failed: bool | None
    called: bool
    error_hash: str | None
    confidence: float | None
    is_step: bool = True


_FAILURES: frozenset[Reason] = frozenset({"error", "timeout", "worker_lost"})
_REFUSALS: frozenset[Reason] = frozenset({"breaker_open", "budget_exceeded", "rate_limited"})
"""Reasons that say nothing of the task before any call: an outage must not stop it until people come."""


def outcome_of(record: Execution, rules: GuardRules) -> JobOutcome:
    """The outcome that a concluded job adds to its task.

    Of one for embeddings, cost and failures count. It is no iteration, its tokens count for nothing, and its success
    says nothing of the failures before it.

    Args:
        record: of the job, or its result.
        rules: of the job's agent.
    """
    embeds = record.api == "embeddings"
    called = [attempt for attempt in record.attempts if not attempt.short_circuited]
    failed_before = bool(called) and record.reason in _REFUSALS
    error = called[-1].error if failed_before else record.error
    succeeded = False if record.reason is None and not embeds else None
    return JobOutcome(
        tokens=0 if embeds else record.total_tokens,
        cost=record.total_cost or 0,
        failed=True if failed_before or record.reason in _FAILURES else succeeded,
        called=bool(called),
        error_hash=error.hash if error is not None else None,
        confidence=None if embeds else confidence_of(record.output, rules),
        is_step=not embeds,
    )


def before_call(
    task: Task, number: int, rules: GuardRules, *, tokens: int, cost: int, worst_case: int | None = None, held: int = 0
) -> Trip | TaskBudgetHeld | None:
    """A trip if a job of the task must not call any more, as a cap is reached or the call might pass it.

    Args:
        task: with its concluded jobs.
        number: which iteration of the task the job is, from 1.
        rules: of the job's agent.
        tokens: what the job itself has used so far, by its earlier attempts.
        cost: what those cost, in nano-dollars.
        worst_case: the most that the call can cost, in nano-dollars. None, where its model has no price, counts as
            nothing: a cap that was not set must not refuse such models.
        held: for the other jobs of the task that are under way, in nano-dollars.
    """
    used = task.tokens + tokens
    spent = task.cost + cost
    limit = rules.max_cost_usd
    if rules.max_iterations is not None and number > rules.max_iterations:
        return Trip("max_iterations", f"{counted(number - 1, 'iteration')} (limit: {rules.max_iterations:,})")
    if rules.max_tokens is not None and used >= rules.max_tokens:
        return Trip("max_tokens", f"{counted(used, 'token')} used (limit: {rules.max_tokens:,})")
    if limit is None:
        return None
    if spent >= limit:
        return Trip("max_cost", f"{money(spent)} spent (limit: {money(limit)})")
    most = worst_case or 0
    if not fits(most, limit=limit, spent=spent):
        so_far, needed, cap = beyond(spent, most, limit)
        return Trip("max_cost", f"{so_far} spent, and the next call may cost up to {needed} (limit: {cap})")
    return None if fits(most, limit=limit, spent=spent, reserved=held) else TaskBudgetHeld(held)


def near_cap(task: Task, number: int, rules: GuardRules, *, tokens: int, cost: int) -> Trip | None:
    """A cap of which the task has used 80 % and not all, so that people may act before the guard stops it.

    The arguments are those of `before_call`.
    """
    used = task.tokens + tokens, task.cost + cost
    if _is_near(number, rules.max_iterations):
        return Trip("max_iterations", f"{counted(number, 'iteration')} (limit: {rules.max_iterations:,})")
    if _is_near(used[0], rules.max_tokens):
        return Trip("max_tokens", f"{counted(used[0], 'token')} used (limit: {rules.max_tokens:,})")
    if rules.max_cost_usd is not None and _is_near(used[1], rules.max_cost_usd):
        spent, limit = moneys(used[1], rules.max_cost_usd)
        return Trip("max_cost", f"{spent} spent (limit: {limit})")
    return None


def _is_near(used: int, limit: int | None) -> bool:
    return limit is not None and limit * SOFT_PERCENT <= used * 100 < limit * 100


def after_job(task: Task, rules: GuardRules) -> Trip | None:
    """A trip if the task must stop now that a job of it is concluded and counted.

    Caps are no matter here: a task that has just finished within them needs no operator.
    """
    in_a_row = task.consecutive_failures
    most = max(task.errors.values(), default=0)
    if rules.consecutive_failures is not None and in_a_row >= rules.consecutive_failures:
        reason = f"{counted(in_a_row, 'consecutive failure')} (threshold: {rules.consecutive_failures:,})"
        return Trip("consecutive_failures", reason)
    if rules.same_error is not None and most >= rules.same_error:
        reason = f"Same error repeated {counted(most, 'time')} (threshold: {rules.same_error:,})"
        return Trip("same_error", reason)
    return None if rules.confidence is None else _drift(task.confidences, rules.confidence)


def confidence_of(output: JsonValue, rules: GuardRules) -> float | None:
    """Confidence that an answer states, 0..1.

    Args:
        output: an object, or a text that is nothing but the JSON of one, in a fenced block or not.
        rules: which say where to look.

    Returns:
        None where it does not say, or nothing that can be meant so.
    """
    if rules.confidence is None:
        return None
    if isinstance(output, str):
        try:
            output = find_json(output, strict=True)
        except NoJsonError:
            return None
    said = output.get(rules.confidence.field) if isinstance(output, dict) else None
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said <= 1:
        return None
    return float(said)


def _drift(confidences: tuple[float, ...], rules: ConfidenceRules) -> Trip | None:
    last = confidences[-rules.answers :]
    if len(last) < rules.answers:
        return None
    if rules.floor is not None and max(last) < rules.floor:
        return Trip("confidence_drift", f"confidence below {rules.floor:g} in {len(last)} answers: {_listed(last)}")
    if rules.falling and all(later < earlier for earlier, later in pairwise(last)):
        return Trip("confidence_drift", f"confidence fell through {len(last)} answers: {_listed(last)}")
    return None


def _listed(confidences: tuple[float, ...]) -> str:
    shown = ", ".join(f"{confidence:g}" for confidence in confidences[-10:])
    return shown if len(confidences) <= 10 else f"..., {shown}"
