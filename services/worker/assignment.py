"""A job as a worker runs it: the assignment, its progress in a checkpoint, and the ends of a run.

The checkpoint has all that another worker needs to go on after a crash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from pydantic import JsonValue

from breakwater.config import Agent
from breakwater.contracts.execution import Attempt, Cancellation, Cause, Choice, ErrorInfo, Reason
from breakwater.contracts.job import Job
from breakwater.contracts.types import Count, Event, Timestamp
from breakwater.policy.breaker import ALL, BreakerKey, BreakerRules
from breakwater.policy.output import OutputGuard
from breakwater.policy.price import InputSize, max_output_of, size_of_messages, size_of_params
from breakwater.state.executions import Claim
from breakwater.state.tasks import TaskKey
from services.worker.repairs import Repairs


class InFlight(Event):
    """An attempt whose call may be under way."""

    number: int
    model: str
    provider: str
    cause: Cause
    started_at: Timestamp
    backoff_ms: Count
    reserved: int | None
    """Worst-case cost in nano-dollars; None where the model has no price."""
    input_tokens: Count | None = None
    """A high estimate; None for a program, which is no model."""
    max_tokens: Count | None = None
    """The output limit of the call, where budgets hold less for it than the job's own limit."""
    reserved_at: Timestamp | None = None
    """By Redis' clock; not known yet when the checkpoint is saved."""
    dropped_messages: Count = 0
    breaker_version: Count | None = None
    first_token_ms: Count | None = None
    """Some of its answer may be out. None: nothing is."""
    chunks: Count | None = None


class Checkpoint(Event):
    """Saved before each call and before each long wait. It never changes: what changes it gives another one."""

    dispatched_at: Timestamp
    deadline: Timestamp
    config_version: str | None = None
    """Of the config that the job began under, and ends under."""
    attempts: tuple[Attempt, ...] = ()
    model_index: int = 0
    """Index of its present model in the chain."""
    model: str | None = None
    """The present model, while it is called or waited for: a config that changes meanwhile may change the chain."""
    cause: Cause | None = None
    """Cause of the next attempt, where it is a recovery."""
    repairs: Repairs | None = None
    """None until the first."""
    backoff_ms: int = 0
    """Wait before the next attempt."""
    resume_at: Timestamp | None = None
    """End of a long wait."""
    in_flight: InFlight | None = None
    partial: str = ""
    """Published part of an answer that broke off, and is to be continued."""

    def text(self) -> str:
        """As it is saved: JSON without what is as it was at the start."""
        return self.model_dump_json(exclude_defaults=True)

    def tried(self, model: str) -> bool:
        """True if the job has come to this model before, if only to be refused."""
        return any(attempt.model == model for attempt in self.attempts)

    def is_last_of(self, chain: Sequence[str]) -> bool:
        """True if no other model of the chain is left to be tried."""
        return self.model_index + 1 >= len(chain)

    def cause_of_next(self, model: str) -> Cause:
        """Cause of the next attempt."""
        if self.cause is not None:
            return self.cause
        if not self.attempts:
            return "first"
        return "retry" if self.tried(model) else "fallback"

    def after(self, attempt: Attempt) -> Checkpoint:
        """With an attempt that has ended and is recorded."""
        update = {"attempts": (*self.attempts, attempt), "in_flight": None, "cause": None}
        return self.model_copy(update=update | {"backoff_ms": 0, "resume_at": None})

    def at_model(self, index: int) -> Checkpoint:
        """At another model of the chain."""
        update = {"model_index": index, "model": None, "repairs": self.repairs and self.repairs.for_next_model()}
        return self.model_copy(update=update)

    def repaired(self, cause: Cause, repairs: Repairs) -> Checkpoint:
        """About to ask the same model again with what was mended."""
        return self.model_copy(update={"cause": cause, "repairs": repairs})

    def waiting(self, model: str, delay_s: float, until: datetime) -> Checkpoint:
        """Waiting before the next attempt on a model."""
        waited_ms = self.backoff_ms + round(delay_s * 1000)
        return self.model_copy(update={"backoff_ms": waited_ms, "resume_at": until, "model": model})

    def extended(self, waited: timedelta) -> Checkpoint:
        """With as much more time as an outage of the plane has cost."""
        return self.model_copy(update={"deadline": self.deadline + waited})


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a call, next to its model and messages."""

    values: Mapping[str, JsonValue]
    max_output_tokens: int
    """The most tokens that a call may give, over all its choices."""
    size: InputSize
    """Their part in the size of a call, with the schema where it is sent too."""

    @classmethod
    def of(cls, agent: Agent, own: Mapping[str, JsonValue], guard: OutputGuard | None) -> Parameters:
        """A job's own over those of its agent."""
        values: dict[str, JsonValue] = {**agent.params, **own}
        if "max_tokens" not in values and "max_completion_tokens" not in values:
            # Without a limit the worst case would have none either, and no budget could be held.
            values["max_tokens"] = agent.max_tokens
        schema = guard.schema if guard is not None and guard.rules.native else None
        return cls(values, max_output_of(values, agent.max_tokens), size_of_params(values, schema=schema))


@dataclass(frozen=True)
class Assignment:
    """A valid job that this worker has claimed."""

    execution_id: str
    agent_name: str
    agent: Agent
    job: Job
    chain: tuple[str, ...]
    claim: Claim
    traceparent: str | None
    parameters: Parameters
    now: Callable[[], datetime]
    """The time of its run, which goes on evenly where the time of day is set: its deadline is counted by it."""
    breaker: BreakerRules | None = None
    """Of its task's breaker, where the job brings one. Its guard and retry rules are those of `agent` already."""
    output_guard: OutputGuard | None = None
    """Check of the agent's answers."""
    owner: str | None = None
    """The name of the API key or the program that it belongs to."""
    submitted_by: str | None = None
    """The name of the API key that it was sent with."""
    caller: str | None = None
    """Owner of the budget share that it takes: an API key, or the program that it belongs to."""
    trace_id: str | None = None
    """Of the trace that it is a part of, where that is sampled."""
    cost_tags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Redacted."""

    def attempt_id(self, number: int) -> str:
        """The id of the job's attempt of that number, from 1."""
        return f"{self.execution_id}:{number}"

    def task_breaker(self, model: str) -> BreakerKey | None:
        """The breaker of its task for a model; None where the job brings none."""
        if self.breaker is None:
            return None
        task = TaskKey(self.job.tenant, self.job.task_id or self.execution_id)
        return BreakerKey(ALL, model, task.short_name)

    def adds(self, param: str | None) -> bool:
        """True if a parameter of `ADDED` is the plane's, or has a name that the plane may change; not the job's own."""
        guard = self.output_guard
        if param not in {"response_format", "output_config"}:
            return True
        return guard is not None and guard.rules.native and param not in self.parameters.values

    @cached_property
    def messages(self) -> list[dict[str, JsonValue]]:
        """The conversation, under the agent's system prompt where it brings none of its own."""
        messages = self.job.chat_messages()
        prompt = self.agent.system_prompt
        has_own = any(message.get("role") in {"system", "developer"} for message in messages)
        if prompt is None or not messages or has_own:
            return messages
        return [{"role": "system", "content": prompt}, *messages]

    @cached_property
    def input_size(self) -> InputSize:
        """Size of a call before any repair."""
        return self.size_of_call(self.messages)

    def size_of_call(self, messages: Iterable[Mapping[str, JsonValue]]) -> InputSize:
        """Size of a call: the conversation, the input, and the parameters."""
        size = size_of_messages(messages) + self.parameters.size
        return size if self.job.input is None else size + size_of_params({}, input=self.job.input)


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is decided. `reason` is None when it succeeded."""

    checkpoint: Checkpoint
    output: JsonValue
    chosen_model: str | None
    reason: Reason | None
    error: ErrorInfo | None
    response: dict[str, JsonValue] | None = None
    finish_reason: str | None = None
    choices: tuple[Choice, ...] = ()
    cancellation: Cancellation | None = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """The job waits for longer than it may hold a slot."""

    due: datetime
    over: Callable[[], Awaitable[bool]] | None = None
    """True if it need not wait any more, as the event that wakes it may have come a moment before it slept."""
