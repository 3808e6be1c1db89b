"""A delivered job, the job as this worker runs it, what is sent to its models, and how its run can end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from pydantic import JsonValue

from breakwater.bus.delivery import Delivery
from breakwater.config import Agent
from breakwater.contracts.execution import Cancellation, Choice, ErrorInfo, Reason
from breakwater.contracts.job import Job
from breakwater.policy.breaker import ALL, BreakerKey, BreakerRules
from breakwater.policy.output import OutputGuard
from breakwater.policy.price import InputSize, max_output_of, size_of_messages, size_of_params
from breakwater.state.executions import Claim
from breakwater.state.tasks import TaskKey
from services.worker.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class JobDelivery:
    """A delivered job as far as it could be read: who asked for it, and where the answer goes."""

    delivery: Delivery
    agent: Agent
    job: Job | None
    reply_to: str | None
    owner: str | None
    """The name of the API key, or the NATS user of the named program, that it belongs to."""
    submitted_by: str | None
    """The same, that it was sent with."""
    digest: str
    """Of what it asks."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What goes to the provider beside model and messages."""

    values: Mapping[str, JsonValue]
    max_output_tokens: int
    """The most tokens that a call may give, over all its choices."""
    size: InputSize
    """What they add to a call, with the schema where it is sent too."""

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
    """What the agent's answers must satisfy."""
    owner: str | None = None
    """The name of the API key or the program that it belongs to."""
    submitted_by: str | None = None
    """The name of the API key that it was sent with."""
    caller: str | None = None
    """Whose share of a budget it takes: that key, or the program that it belongs to."""
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
        """Whether a parameter of `ADDED` is the plane's, or has a name that the plane may change; not the job's own."""
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
        """What a call sends before any repair."""
        return self.size_of_call(self.messages)

    def size_of_call(self, messages: Iterable[Mapping[str, JsonValue]]) -> InputSize:
        """What a call sends: the conversation, the input, and the parameters."""
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
    """Whether it need not wait any more: of one that is woken, too, perhaps a moment before it slept."""
