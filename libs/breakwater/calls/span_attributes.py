"""Attributes of the spans of jobs and attempts.

Their names are those of OpenTelemetry's semantic conventions for GenAI, 0.1.0, and for HTTP, if they define one. Other
names begin with `breakwater.`, and one is Langfuse's. Unknown values are left out, and are not 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import JsonValue

from breakwater.jobs.contract.execution import Attempt, Cause, Execution
from breakwater.kernel.telemetry.tracing import Attribute, SpanAttributes
from breakwater.kernel.types import NANO_PER_USD

MAX_ID = 256
"""The most characters of a provider's names for its response and its model."""

_BY_KIND = {
    "anthropic": "anthropic",
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "vertex": "gcp.vertex_ai",
}
"""The provider's name in the conventions, by its kind."""

_HOSTS = (
    (".api.openai.com", "openai"),
    (".openai.azure.com", "azure.ai.openai"),
    (".services.ai.azure.com", "azure.ai.inference"),
    (".generativelanguage.googleapis.com", "gcp.gemini"),
    (".aiplatform.googleapis.com", "gcp.vertex_ai"),
    ("-aiplatform.googleapis.com", "gcp.vertex_ai"),
    (".amazonaws.com", "aws.bedrock"),
    (".ml.cloud.ibm.com", "ibm.watsonx.ai"),
    (".groq.com", "groq"),
    (".mistral.ai", "mistral_ai"),
    (".deepseek.com", "deepseek"),
    (".x.ai", "x_ai"),
    (".perplexity.ai", "perplexity"),
    (".cohere.com", "cohere"),
    (".cohere.ai", "cohere"),
    (".moonshot.ai", "moonshot_ai"),
    (".moonshot.cn", "moonshot_ai"),
)
"""The provider's name in the conventions, by the end of its host name."""


def provider_attributes(kind: str, base_url: str | None, name: str) -> SpanAttributes:
    """Returns the attributes of the provider that serves a call.

    Args:
        kind: the provider's kind in the config.
        base_url: the provider's base URL; None for a program or a callable.
        name: the provider's name in the config, which is used if the conventions have no value for it.
    """
    host, port = _server(base_url)
    semantic_name = _BY_KIND.get(kind) or next((value for end, value in _HOSTS if f".{host}".endswith(end)), None)
    return _without_unknown(
        {
            "gen_ai.provider.name": semantic_name or name or "unknown",
            "server.address": host,
            "server.port": port,
            "breakwater.provider": name or None,
        }
    )


def request_attributes(
    params: Mapping[str, JsonValue], stop_sequences: JsonValue, *, json_schema: bool
) -> SpanAttributes:
    """Returns the attributes of a job's request, without its conversation.

    Args:
        params: the params as they go to the provider, in OpenAI's or Anthropic's form.
        stop_sequences: their stop sequences; None to leave them out.
        json_schema: True if the provider enforces a schema of the answer, which is not in the params.
    """
    choices = _integer(params.get("n"))
    max_tokens = params.get("max_completion_tokens")
    stops = [stop_sequences] if isinstance(stop_sequences, str) else stop_sequences
    return _without_unknown(
        {
            "gen_ai.request.temperature": _number(params.get("temperature")),
            "gen_ai.request.top_p": _number(params.get("top_p")),
            "gen_ai.request.frequency_penalty": _number(params.get("frequency_penalty")),
            "gen_ai.request.presence_penalty": _number(params.get("presence_penalty")),
            "gen_ai.request.max_tokens": _integer(params.get("max_tokens") if max_tokens is None else max_tokens),
            "gen_ai.request.seed": _integer(params.get("seed")),
            "gen_ai.request.choice.count": None if choices == 1 else choices,
            "gen_ai.request.stop_sequences": tuple(stop for stop in stops if isinstance(stop, str))
            if isinstance(stops, list) and stops
            else None,
            "gen_ai.output.type": "json" if json_schema else _output_type(params.get("response_format")),
        }
    )


def attempt_attributes(
    params: Mapping[str, JsonValue],
    *,
    agent: str,
    model: str,
    name: str,
    execution_id: str,
    task_id: str | None,
    number: int,
    cause: Cause,
    streaming: bool,
    operation: str = "chat",
) -> SpanAttributes:
    """Returns the attributes of an attempt at its start, without those of `request_attributes`.

    Args:
        params: the params as they go to the provider.
        agent: the calling agent.
        model: the model's id in the config.
        name: the provider's name of the model.
        execution_id: the job's execution.
        task_id: the job's task.
        number: the attempt's number, from 1.
        cause: the attempt's cause.
        streaming: True if the answer is streamed.
        operation: `chat` or `embeddings`.
    """
    return _without_unknown(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": name,
            "gen_ai.request.top_k": _integer(params.get("top_k")),
            "gen_ai.request.reasoning.level": _short(params, "reasoning_effort"),
            "gen_ai.request.stream": True if streaming else None,
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": task_id,
            "breakwater.execution_id": execution_id,
            "breakwater.model": model,
            "breakwater.attempt": number,
            "breakwater.cause": cause,
        }
    )


def outcome_attributes(
    attempt: Attempt, response: Mapping[str, Any] | None = None, finish_reasons: tuple[str, ...] = ()
) -> SpanAttributes:
    """Returns the attributes of an attempt that are known at its end.

    Args:
        attempt: the recorded attempt.
        response: the provider's response, if it sent one.
        finish_reasons: the finish reason of each choice, if there are several.
    """
    reasons = finish_reasons or (() if attempt.finish_reason is None else (attempt.finish_reason,))
    if not reasons and attempt.error is not None and attempt.first_token_ms is not None:
        reasons = ("error",)  # it broke off
    usd = _usd(attempt.cost)
    return _without_unknown(
        {
            "gen_ai.response.id": _short(response, "id"),
            "gen_ai.response.model": _short(response, "model"),
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.response.time_to_first_chunk": None
            if attempt.first_token_ms is None
            else attempt.first_token_ms / 1000,
            "gen_ai.usage.input_tokens": attempt.input_tokens,
            "gen_ai.usage.output_tokens": attempt.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": attempt.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": attempt.reasoning_tokens,
            "http.response.status_code": None if attempt.error is None else attempt.error.status_code,
            "breakwater.outcome": attempt.outcome,
            "breakwater.error_kind": None if attempt.error is None else attempt.error.kind,
            "breakwater.cost_usd": usd,
            "breakwater.cost_basis": attempt.cost_basis,
            # The conventions have no cost. Without this, Langfuse would work one out from a price list of its own.
            "langfuse.observation.cost_details": None if usd is None else json.dumps({"total": usd}),
        }
    )


def execution_attributes(*, agent: str, execution_id: str, task_id: str | None) -> SpanAttributes:
    """Returns the attributes of a job at its start."""
    return _without_unknown(
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent,
            "gen_ai.conversation.id": task_id,
            "breakwater.execution_id": execution_id,
        }
    )


def result_attributes(record: Execution) -> SpanAttributes:
    """Returns the attributes of a job that are known at its end.

    Its sums have our own names: a sum of `gen_ai.usage.*` over a trace would count each call twice.
    """
    return _without_unknown(
        {
            "gen_ai.response.finish_reasons": None if record.finish_reason is None else (record.finish_reason,),
            "breakwater.requested_model": record.requested_model,
            "breakwater.chosen_model": record.chosen_model,
            "breakwater.input_tokens": record.input_tokens,
            "breakwater.output_tokens": record.output_tokens,
            "breakwater.status": record.status,
            "breakwater.reason": record.reason,
            "breakwater.attempts": record.attempts_count,
            "breakwater.cost_usd": _usd(record.total_cost),
            "breakwater.wasted_cost_usd": _usd(record.wasted_cost),
            "breakwater.cost_basis": record.cost_basis,
            "breakwater.cache_hit": record.cache_hit,
            "breakwater.parent_execution_id": record.parent_execution_id,
        }
    )


def _without_unknown(attributes: dict[str, Attribute | None]) -> SpanAttributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _usd(nano: int | None) -> float | None:
    # A number, because tracing tools can't sum text; exact sums, to the nano-dollar, are elsewhere.
    return None if nano is None else nano / NANO_PER_USD


def _number(value: JsonValue) -> float | None:
    if isinstance(value, float):
        return value
    integer = _integer(value)
    return None if integer is None else float(integer)


def _integer(value: JsonValue) -> int | None:
    # OTLP's integers have 64 bits.
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _output_type(response_format: JsonValue) -> str | None:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    return {"json_object": "json", "json_schema": "json", "text": "text"}.get(kind) if isinstance(kind, str) else None


def _short(response: Mapping[str, Any] | None, name: str) -> str | None:
    value = None if response is None else response.get(name)
    return value[:MAX_ID] if isinstance(value, str) and value else None


def _server(base_url: str | None) -> tuple[str | None, int | None]:
    try:
        url = urlsplit(base_url or "")
        port = url.port
    except ValueError:
        return None, None
    if url.hostname is None:
        return None, None
    return url.hostname, port or (443 if url.scheme == "https" else 80)
