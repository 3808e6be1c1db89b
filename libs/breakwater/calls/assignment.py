"""A job as a worker handles it: the assignment, its checkpoint, and the outcomes of a run.

The checkpoint holds all that another worker needs to continue after a crash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, cast

from pydantic import JsonValue

from breakwater.breakers.settings import BreakerRules
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.output import OutputGuard
from breakwater.calls.rules.parameters import TRANSLATED, own_params, without_fields
from breakwater.calls.rules.repairs import Repairs
from breakwater.calls.rules.retry import cause_after, has_tried
from breakwater.calls.targets import Target, is_within
from breakwater.config import Agent
from breakwater.dialects.rules.embeddings import native_body
from breakwater.dialects.rules.native_requests import DIALECTS, chat_form, conversation_of, for_chat, params_of
from breakwater.dialects.rules.tool_schemas import portable_params
from breakwater.identity.rules.callers import Attribution
from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.contract.execution import Attempt, CallerLimits, Cancellation, Cause, ErrorInfo, Reason
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.jobs.held_claims import ClaimLease
from breakwater.jobs.rules.ids import JobIds
from breakwater.jobs.rules.turns import CallerTurn
from breakwater.jobs.store.executions import Claim
from breakwater.kernel.immutable import computed_once, immutable
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.subjects import Header, decode_token
from breakwater.kernel.types import Count, Event, Timestamp
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import (
    OUTPUT_LIMITS,
    InputSize,
    max_output_of,
    max_tokens_of,
    size_of_messages,
    size_of_params,
    with_each_byte,
)

_BEGINNING = 2_000
"""The characters of a message that make its conversation known."""


class InFlight(Event):
    """An attempt whose call may be under way."""

    number: int
    model: str
    provider: str
    deployment: str | None = None
    """The deployment's id, if the model lists several."""
    provider_key: str | None = None
    """The name of its key."""
    cause: Cause
    started_at: Timestamp
    backoff_ms: Count
    reserved: int | None
    """Worst-case cost in nano-dollars; None where the model has no price."""
    reserved_tokens: Count = 0
    """The most tokens that the call can use, input and output."""
    input_tokens: Count | None = None
    """A high estimate; None for a program, which has no tokens."""
    max_tokens: Count | None = None
    """The output limit of the call, if budgets reserve less than the job's own limit."""
    reserved_at: Timestamp | None = None
    """The time by Redis' clock; still unknown when the checkpoint is saved."""
    task_asked_at: Timestamp | None = None
    """The time by Redis' clock at which the job's task was asked last; None for a job that is alone in its task."""
    dropped_messages: Count = 0
    left_out: tuple[str, ...] = ()
    """Parameters that the model refuses: the call goes without them, or has an output limit under its other name."""
    breaker_version: Count | None = None
    first_token_ms: Count | None = None
    """The latency of the first published part of the answer; None if nothing was published."""
    chunks: Count | None = None

    @property
    def dropped_params(self) -> tuple[str, ...]:
        """The parameters that the call goes without."""
        return self.left_out and tuple(name for name in self.left_out if name not in TRANSLATED)


class Checkpoint(Event):
    """The progress of a job, saved before each call and each long wait. Immutable: changes return a copy."""

    dispatched_at: Timestamp
    deadline: Timestamp
    config_version: str | None = None
    """The version of the config that the job began with, and keeps to its end."""
    attempts: tuple[Attempt, ...] = ()
    model_index: int = 0
    """The index of the current model in the chain."""
    model: str | None = None
    """The current model while it is called or waited for, as a changed config may change the chain."""
    cause: Cause | None = None
    """The cause of the next attempt, if that is a recovery."""
    repairs: Repairs | None = None
    """None before the first repair."""
    backoff_ms: int = 0
    """The wait before the next attempt."""
    resume_at: Timestamp | None = None
    """The end of a long wait."""
    in_flight: InFlight | None = None
    partial: str = ""
    """The published part of an interrupted answer that the next attempt continues."""
    may_have_called: bool = False
    """Redis has lost an earlier checkpoint, so the next call may have been made already."""

    def text(self) -> str:
        """Serializes the checkpoint: JSON without default values."""
        return self.model_dump_json(exclude_defaults=True)

    def tried(self, model: str, deployment: str | None = None) -> bool:
        """Returns True if the current call of the job has an attempt on this model, including a refused one.

        With a deployment, only attempts there count.
        """
        return self.cause != "batch" and has_tried(self.attempts, model, deployment)

    def on_chain(self, chain: Sequence[str]) -> Checkpoint:
        """Returns the checkpoint at the place of its model in a chain, which another config may have made shorter."""
        index = chain.index(self.model) if self.model in chain else min(self.model_index, len(chain) - 1)
        return self if index == self.model_index else self.model_copy(update={"model_index": index})

    def is_last_of(self, chain: Sequence[str]) -> bool:
        """Returns True if the chain has no further model."""
        return self.model_index + 1 >= len(chain)

    def cause_of_next(self, model: str, deployment: str | None) -> Cause:
        """Returns the cause of the next attempt, on a deployment if the model lists some."""
        return self.cause or cause_after(self.attempts, model, deployment)

    def after(self, attempt: Attempt) -> Checkpoint:
        """Returns the checkpoint after a recorded attempt."""
        update = {"attempts": (*self.attempts, attempt), "in_flight": None, "cause": None}
        return self.model_copy(update=update | {"backoff_ms": 0, "resume_at": None})

    def at_model(self, index: int) -> Checkpoint:
        """Returns the checkpoint at another model of the chain."""
        update = {"model_index": index, "model": None, "repairs": self.repairs and self.repairs.for_next_model()}
        return self.model_copy(update=update)

    def repaired(self, cause: Cause, repairs: Repairs) -> Checkpoint:
        """Returns the checkpoint before a repaired attempt on the same model."""
        return self.model_copy(update={"cause": cause, "repairs": repairs})

    def waiting(self, model: str, delay_s: float, until: datetime) -> Checkpoint:
        """Returns the checkpoint during a wait for the next attempt on a model."""
        waited_ms = self.backoff_ms + round(delay_s * 1000)
        return self.model_copy(update={"backoff_ms": waited_ms, "resume_at": until, "model": model})

    def extended(self, waited: timedelta) -> Checkpoint:
        """Returns the checkpoint with its deadline extended by an outage of the plane."""
        return self.model_copy(update={"deadline": self.deadline + waited})


@immutable()
class Parameters:
    """The parameters of a call, without its model and messages."""

    values: Mapping[str, JsonValue]
    max_output_tokens: int
    """The most output tokens of a call, over all its choices."""
    size: InputSize
    """The input size of the parameters, including an output schema that is sent with them."""

    @classmethod
    def of_embeddings(cls, agent: Agent, request: NativeRequest) -> Parameters:
        """Returns those of a request for embeddings: no output, and a size that is its own."""
        body = native_body(request.body, params=agent.params)
        return cls({name: value for name, value in body.items() if name != "input"}, 0, InputSize())

    @classmethod
    def of(cls, agent: Agent, job_params: Mapping[str, JsonValue], guard: OutputGuard | None) -> Parameters:
        """Merges a job's parameters over those of its agent."""
        values: dict[str, JsonValue] = {**agent.params, **job_params}
        if "max_tokens" not in values and "max_completion_tokens" not in values:
            # Without an output limit the worst case would be unbounded, and no budget could hold.
            values["max_tokens"] = agent.max_tokens
        schema = guard.schema if guard is not None and guard.rules.native else None
        return cls(values, max_output_of(values, agent.max_tokens), size_of_params(values, schema=schema))


@immutable(slots=False, kw_only=True)
class Assignment:
    """A job that was delivered to this worker, as all steps of its handling see it."""

    delivery: Delivery
    job: Job
    """If there is a `problem`, only the agent and what could be read of the id and the reply subject."""
    problem: str = ""
    """The reason why the job must not run; empty for a valid job."""
    ids: JobIds
    scope: str | None
    """The scope of its ids."""
    digest: str
    """The digest of its content."""
    run_id: str
    """The run of its execution."""
    owner: str | None
    """The API key, or the NATS user of the program, that owns the job."""
    submitted_by: str | None
    """The API key, or the NATS user of the program, that sent the job."""
    attribution: Attribution
    """The user and the team whose call it is."""
    sender_regions: Sequence[str]
    """The regions that its sender's calls must not leave."""
    turn: CallerTurn
    """The turn that it waits for: by its key, its tenant and its priority."""
    agent_name: str
    agent: Agent
    """The agent, with the job's own guard and retry rules."""
    breaker: BreakerRules | None
    """The rules of its task's breaker, if the job sets them."""
    parameters: Parameters
    output_guard: OutputGuard | None
    """Checks the agent's answers against its output schema."""
    cost_tags: Mapping[str, str]
    """The job's cost tags, redacted."""
    claim: Claim
    """The claim that this handling makes on the execution."""
    lease: ClaimLease
    """The lease of the claim once Redis has granted it, with the requests to cancel the job."""
    now: Callable[[], datetime]
    """The clock of the run and its deadline. It is monotonic: setting the system time does not move it."""
    traceparent: str | None
    """The trace context of the job's span, or the one that came with the job."""
    trace_id: str | None
    """The id of the job's trace, if that is sampled."""

    @property
    def execution_id(self) -> str:
        """The id of its execution."""
        return self.ids.execution_id

    @property
    def probed(self) -> str | None:
        """The unit that a probe tries, as its breaker is named; None for another job."""
        token = self.delivery.headers.get(Header.PROBE)
        return None if token is None else decode_token(token)

    @property
    def is_probe(self) -> bool:
        """Returns True if the job only tries whether a model answers again. Its answer is of no use to anybody."""
        return Header.PROBE in self.delivery.headers

    @computed_once
    def chain(self) -> tuple[str, ...]:
        """The models to try, in order."""
        return self.agent.chain_for(self.job)

    @computed_once
    def caller(self) -> str | None:
        """The key or the program whose share of a budget the job uses.

        All operator keys and the NATS user `client` count as one caller.
        """
        return self.owner or (self.submitted_by if self.job.tenant else None)

    @computed_once
    def names(self) -> dict[str, Any]:
        """The fields that name the job in its record and in the steps of its progress."""
        return {
            "execution_id": self.execution_id,
            "job_id": self.ids.job_id,
            "agent": self.agent_name,
            "tenant": self.job.tenant,
            "task_id": self.ids.task_id,
            "task_key": self.ids.task_key,
            "parent_execution_id": self.ids.parent,
            "parent_job_id": self.job.parent_execution_id,
            "plan_id": self.job.plan_id,
            "plan_key": self.ids.plan_key,
            "run_id": self.run_id,
        }

    @computed_once
    def session(self) -> str:
        """The name of the session that its calls belong to: its caller's, its task, or else its conversation."""
        if self.ids.session_key is not None:
            return f"session {self.ids.session_key}"
        if self.ids.task_key is not None:
            return f"task {self.ids.task_key}"
        digest = blake2b(f"{self.agent_name}\n{self.caller}\n{self.job.tenant}".encode(), digest_size=16)
        # A prompt cache knows a conversation by its beginning.
        for message in self.messages[:2]:
            digest.update(_beginning(message.get("content")).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @computed_once
    def residency(self) -> Sequence[str]:
        """The regions that its calls must not leave: its agent's, and those of its sender."""
        of_agent = self.agent.residency
        return self.sender_regions if of_agent is None else (of_agent, *self.sender_regions)

    def may_use(self, targets: Sequence[Target]) -> Sequence[Target]:
        """Returns those deployments that its calls may use: in its region, and for a probe the probed one."""
        for region in self.residency:
            targets = [target for target in targets if is_within(target.region, region)]
        if (probed := self.probed) is not None:
            targets = [target for target in targets if target.unit == probed] or targets
        return targets

    def attempt_id(self, number: int) -> str:
        """Returns the id of an attempt by its number, from 1."""
        return f"{self.execution_id}:{number}"

    @computed_once
    def own_params(self) -> frozenset[str]:
        """The parameters that the job sets, in the words of a chat and of its own API."""
        request = self.job.api_request
        return own_params(params_of(self.job), () if request is None else request.body)

    @computed_once
    def added_params(self) -> frozenset[str]:
        """The parameters of its calls that the job does not set: those of its agent and of the plane.

        Those whose meaning holds without them are among them, and so is an effort of Messages, a mere wish.
        """
        of_plane = {"stream_options", "response_format"}
        wishes = {"reasoning_effort"} if self.job.api == "messages" else frozenset[str]()
        return frozenset({*self.agent.params, *of_plane} - self.own_params).union(TRANSLATED, wishes)

    def droppable(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the parameters that calls of the job may go without."""
        own_params = self.own_params if self.agent.on_unsupported_param == "drop" else frozenset[str]()
        return tuple(sorted({*names} & (self.added_params | own_params)))

    def params_without(self, left_out: Collection[str]) -> Mapping[str, JsonValue]:
        """The parameters of a call, without those that its model refuses.

        An output limit is left out only if the model knows neither of its names.
        """
        if not left_out:
            return self.parameters.values
        renamed = () if {*OUTPUT_LIMITS} <= {*left_out} else OUTPUT_LIMITS
        return {
            name: value for name, value in self.parameters.values.items() if name not in left_out or name in renamed
        }

    @computed_once
    def messages(self) -> list[dict[str, JsonValue]]:
        """The conversation, with the agent's system prompt if the job has none."""
        messages = conversation_of(self.job)
        prompt = self.agent.system_prompt
        has_own = any(message.get("role") in {"system", "developer"} for message in messages)
        if prompt is None or not messages or has_own:
            return messages
        return [{"role": "system", "content": prompt}, *messages]

    @property
    def losses(self) -> Sequence[FieldError]:
        """The fields of the job's request that a provider of another API can't be sent."""
        return () if self.job.api_request is None else chat_form(self.job.api_request).losses

    def native_body(
        self, params: Mapping[str, JsonValue], left_out: Collection[str] = ()
    ) -> Mapping[str, JsonValue] | None:
        """Returns the body for a provider that speaks the API of the job's request; None without such a request.

        Args:
            params: of the call, with the output limit of its reservation.
            left_out: parameters that its model refuses.
        """
        if self.job.api_request is None:
            return None
        if params is self.parameters.values and not left_out:
            return self._whole_native_body
        return self._native_body(params, left_out)

    def _native_body(
        self, params: Mapping[str, JsonValue], left_out: Collection[str] = ()
    ) -> Mapping[str, JsonValue] | None:
        request = self.job.api_request
        if request is None:
            return None
        max_tokens = max_tokens_of(params, self.agent.max_tokens)
        dialect = DIALECTS[request.api]
        prompt = self.agent.system_prompt
        agent_params = {name: value for name, value in self.agent.params.items() if name not in left_out}
        body = dialect.native_body(request.body, params=agent_params, max_tokens=max_tokens, system_prompt=prompt)
        if not left_out:
            return body
        # Anthropic requires a limit, and the form of vectors says how an answer is translated.
        kept_fields = {"messages": OUTPUT_LIMITS, "embeddings": TRANSLATED}.get(request.api, ())
        dropped = [name for name in left_out if name not in kept_fields]
        names = chat_form(request).names
        return cast(Mapping[str, JsonValue], without_fields(body, (names.get(name, name) for name in dropped)))

    @computed_once
    def _whole_native_body(self) -> Mapping[str, JsonValue] | None:
        return self._native_body(self.parameters.values)

    def chat_request(
        self, messages: Sequence[Mapping[str, JsonValue]], params: Mapping[str, JsonValue]
    ) -> tuple[Sequence[Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
        """Returns conversation and params for a provider of chats, which may not speak the API of the job's request."""
        if messages is self.messages and params is self.parameters.values:
            return self._whole_chat
        return for_chat(self.job, messages, params)

    @computed_once
    def _whole_chat(self) -> tuple[Sequence[Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
        return for_chat(self.job, self.messages, self.parameters.values)

    def input_size(self, *, as_written: bool = True) -> InputSize:
        """Returns the size of all that a call sends before any repair.

        Args:
            as_written: the provider gets the job's request or chat as it is. Tools of a translation may be longer.
        """
        return self._size_as_written if as_written else self._size_as_translated

    @computed_once
    def _size_as_written(self) -> InputSize:
        request = self.job.api_request
        if request is not None and (body := self._whole_native_body) is not None:
            size = DIALECTS[request.api].size_of(body) + size_of_params({}, schema=self._sent_schema)
            return self._with_each_byte(size, body)
        size = size_of_messages(self.messages) + self.parameters.size
        if self.job.input is not None:
            return size + size_of_params({}, input=self.job.input)
        return self._with_each_byte(size, {**self.parameters.values, "messages": self.messages})

    @computed_once
    def _size_as_translated(self) -> InputSize:
        messages, params = self._whole_chat
        params = portable_params(params)
        size = size_of_messages(messages) + size_of_params(params, schema=self._sent_schema)
        return self._with_each_byte(size, {**params, "messages": messages})

    def _with_each_byte(self, size: InputSize, body: Mapping[str, Any]) -> InputSize:
        more: dict[str, Any] = {}
        if self.job.stream:
            more["stream_options"] = {"include_usage": True, "stream": True}
        if (schema := self._sent_schema) is not None:
            described = {"name": "answer", "schema": schema, "strict": True}
            more["response_format"] = {"type": "json_schema", "json_schema": described}
        return with_each_byte(size, [body, more] if more else body)

    @property
    def _sent_schema(self) -> Mapping[str, Any] | None:
        guard = self.output_guard
        return guard.schema if guard is not None and guard.rules.native else None


@immutable()
class JobEnd:
    """The end of a job, as its attempts decide it. `reason` is None if it succeeded."""

    checkpoint: Checkpoint
    answer: Answer | None
    """The answer, the published part of one, the result of a failed program, or the plan of a dry run."""
    reason: Reason | None = None
    error: ErrorInfo | None = None
    chosen_model: str | None = None
    cancellation: Cancellation | None = None
    cached_from: str | None = None
    """The execution whose answer was reused."""
    dry_run: bool = False
    limits: CallerLimits | None = None
    """The rate limits of the job's caller, as of its last call or refusal."""

    @property
    def output(self) -> JsonValue:
        """The output of the answer; None without one."""
        return None if self.answer is None else self.answer.output

    @property
    def response(self) -> dict[str, JsonValue] | None:
        """The response of the answer, if the job wants it."""
        return None if self.answer is None else self.answer.response


@dataclass(frozen=True, slots=True)
class Deferred:
    """A wait that is too long to keep a slot for: the job is parked until `due`."""

    due: datetime
    over: Callable[[], Awaitable[bool]] | None = None
    """Returns True if the event that wakes the job came just before it was parked."""
    wait: JobWait | None = None
    """The wait, for those who look at the job; None if it was noted before."""


def _beginning(content: JsonValue) -> str:
    """Returns the beginning of a message's text."""
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = next((text for text in texts if isinstance(text, str)), "")
    return content[:_BEGINNING] if isinstance(content, str) else ""
