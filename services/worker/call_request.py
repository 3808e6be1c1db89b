"""The request of a call: what a provider is sent of a job, with the repairs that its models need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, InFlight
from breakwater.calls.providers.base import Call, Streaming
from breakwater.calls.rules.repairs import JsonMessage, Repairs
from breakwater.calls.targets import Target
from breakwater.dialects.rules.native_requests import repaired_body
from breakwater.dialects.rules.provider_state import StateRepair, author_of, for_author
from breakwater.prices.rules.price import with_output_limit
from breakwater.services.worker.context import WorkerContext


def author_of_answer(job: Assignment, target: Target) -> str | None:
    """Returns the signature of a translated answer (`dialects.rules.provider_state`).

    None if the provider speaks the client's API, or the job has no request of an API.
    """
    translated = job.job.api_request is not None and job.job.api not in target.apis
    return author_of(f"{target.provider}/{target.name}") if translated else None


def call_request(
    worker: WorkerContext,
    job: Assignment,
    flight: InFlight,
    messages: Sequence[JsonMessage],
    timeout_s: float,
    repairs: Repairs,
    *,
    target: Target,
    author: str | None,
    traceparent: str | None,
    streaming: Streaming | None,
) -> Call:
    """Builds the request of an attempt. `repairs` change its parameters and messages.

    `author` is that of the answer; see `author_of_answer`.
    """
    guard = job.output_guard
    state_repairs = {*repairs.state, *worker.state_repairs.get(target.unit, ())}
    left_out = (*flight.left_out, "thinking") if "thinking" in state_repairs else flight.left_out
    params = _params(job, left_out, flight.max_tokens, repairs.output_limit)
    is_repaired = messages is not job.messages and messages != job.messages
    is_native = job.job.api in target.apis
    body = _native_body(job, params, left_out, state_repairs) if is_native else None
    sent_messages = messages
    sent_params = params
    if not is_native:
        sent_messages, sent_params = job.chat_request(messages, params)
        if "thinking" in params and worker.config.providers[target.provider].takes_thinking:
            sent_params = {**sent_params, "thinking": params["thinking"]}
    if author is not None or state_repairs or (is_repaired and body is not None):
        sent_messages = for_author(sent_messages, author or "", state_repairs)
    native_schema = guard is not None and guard.rules.native and "response_format" not in left_out
    return Call(
        job.attempt_id(flight.number),
        target.name,
        sent_messages,
        sent_params,
        timeout_s,
        traceparent,
        agent=job.agent_name,
        execution_id=job.execution_id,
        tenant=job.job.tenant,
        task_id=job.ids.task_id,
        job_id=job.ids.job_id,
        input=job.job.input,
        output_schema=guard.schema if guard is not None and native_schema else None,
        strict_output=guard is not None and guard.rules.strict and guard.fits_strict_mode,
        streaming=streaming,
        left_out=left_out,
        api=job.job.api if is_native else "chat",
        native=body,
        headers=dict(job.job.api_request.headers) if job.job.api_request else {},
        repaired=is_repaired,
        on_headers=partial(worker.balancer.hear, target.deployment) if target.has_others else None,
    )


def _params(
    job: Assignment, left_out: Collection[str], max_tokens: int | None, repaired_limit: int | None
) -> Mapping[str, JsonValue]:
    """Returns the parameters of a call, with the lowest output limit of its reservation and its repairs."""
    limits = [limit for limit in (max_tokens, repaired_limit) if limit is not None]
    params = job.params_without(left_out)
    return with_output_limit(params, min(limits)) if limits else params


def _native_body(
    job: Assignment, params: Mapping[str, JsonValue], left_out: Collection[str], state_repairs: Collection[StateRepair]
) -> Mapping[str, JsonValue] | None:
    body = job.native_body(params, left_out)
    return repaired_body(job.job.api, body, state_repairs) if state_repairs and body is not None else body
