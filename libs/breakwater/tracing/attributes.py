"""What is said on spans: OpenTelemetry's conventions for GenAI where they have a name for it, `breakwater.*` else."""

from __future__ import annotations

from breakwater.contracts.execution import Attempt, Cause, Execution
from breakwater.contracts.types import NANO_PER_USD
from breakwater.tracing.spans import Attribute

_Attributes = dict[str, Attribute]


def genai_attributes(
    *,
    agent: str,
    operation: str = "chat",
    provider: str | None = None,
    request_model: str | None = None,
    response_model: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> _Attributes:
    """Attributes of the GenAI semantic conventions. What is None is left out: unknown is not 0.

    Args:
        agent: its configured name.
        operation: `chat` for a call, `invoke_agent` for a job.
        provider: its name in the config.
        request_model: the model that was asked for.
        response_model: the model that answered.
        input_tokens: those of the request, cached ones among them.
        output_tokens: those of the answer, reasoning among them.
        cached_tokens: input tokens that were read from the provider's cache.
        reasoning_tokens: output tokens that were spent on reasoning.
    """
    return _known(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.agent.name": agent,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": request_model,
            "gen_ai.response.model": response_model,
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": reasoning_tokens,
        }
    )


def attempt_attributes(
    *, agent: str, provider: str, model: str, execution_id: str, number: int, cause: Cause
) -> _Attributes:
    """What is known of an attempt when it begins."""
    return {
        **genai_attributes(agent=agent, provider=provider, request_model=model),
        "breakwater.execution_id": execution_id,
        "breakwater.attempt": number,
        "breakwater.cause": cause,
    }


def outcome_attributes(attempt: Attempt) -> _Attributes:
    """What is known of an attempt when it has ended, beside what was known before."""
    return _known(
        {
            "gen_ai.usage.input_tokens": attempt.input_tokens,
            "gen_ai.usage.output_tokens": attempt.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": attempt.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": attempt.reasoning_tokens,
            "http.response.status_code": None if attempt.error is None else attempt.error.status_code,
            "breakwater.outcome": attempt.outcome,
            "breakwater.error_kind": None if attempt.error is None else attempt.error.kind,
            "breakwater.cost_usd": _usd(attempt.cost),
            "breakwater.cost_basis": attempt.cost_basis,
        }
    )


def execution_attributes(*, agent: str, execution_id: str) -> _Attributes:
    """What is known of a job when its run begins."""
    return {
        **genai_attributes(agent=agent, operation="invoke_agent"),
        "breakwater.execution_id": execution_id,
    }


def result_attributes(record: Execution) -> _Attributes:
    """What is known of a job when it is decided, beside what was known before."""
    return _known(
        {
            "gen_ai.request.model": record.requested_model,
            "gen_ai.response.model": record.chosen_model,
            "gen_ai.usage.input_tokens": record.input_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
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


def _known(attributes: dict[str, Attribute | None]) -> _Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _usd(nano: int | None) -> float | None:
    # A number, as text can't be summed where traces are looked at; exact sums, to the nano-dollar, are elsewhere.
    return None if nano is None else nano / NANO_PER_USD
