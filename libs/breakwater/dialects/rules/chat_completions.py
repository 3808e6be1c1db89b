"""OpenAI's chat completions as jobs, and results of jobs as OpenAI's objects and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, cast

from breakwater.dialects.contract.openai import CallOptions, ChatCompletionRequest
from breakwater.dialects.rules.context_overflow import overflow_message
from breakwater.jobs.contract.job import CallApi, Job
from breakwater.jobs.rules.chat_messages import THOUGHT, known_reason, normalize, objects, thoughts_in
from breakwater.kernel.formats import join_figures


@dataclass(frozen=True, slots=True)
class ChatError:
    """An error in place of a chat completion.

    Attributes:
        status: the HTTP status.
        code: the code, if possible one that OpenAI's clients know.
        message: the message, for people.
        param: the field of the request at fault; None if there is none.
        retry_after_s: the seconds from the end of the job until a call may succeed; None if unknown, or never.
        may_retry: True if the client may repeat the request once that time is over, as the job has made no call.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    may_retry: bool = False


OVERFLOW = "context_length_exceeded"
"""The code of a request that is too long for its model. Programs that know it shorten their conversation."""
_ERRORS: Mapping[str, tuple[int, str]] = {
    "budget_exceeded": (429, "insufficient_quota"),
    "rate_limited": (429, "rate_limit_exceeded"),
    "rate_limit": (429, "rate_limit_exceeded"),
    "quota": (429, "insufficient_quota"),
    "breaker_open": (503, "breaker_open"),
    "retry_budget": (503, "retry_budget_exceeded"),
    "guard_tripped": (403, "guard_tripped"),
    "context_overflow": (400, OVERFLOW),
    "orphan_tool_calls": (400, "invalid_request"),
    "invalid": (400, "invalid_request"),
    "timeout": (504, "timeout"),
    "network": (502, "provider_unreachable"),
    "server": (502, "provider_error"),
    "transient": (502, "provider_error"),
    "logic": (502, "invalid_output"),
    "worker_lost": (502, "worker_lost"),
    "dependency_failed": (409, "dependency_failed"),
    "cancelled": (409, "cancelled"),
}
"""Statuses and codes by the reason why a job ended; if that is `error`, by the kind of the error."""

_OF_THE_PLANE = frozenset({401, 402, 403, 407})
"""Statuses about the plane's own key at the provider: the client's key is not at fault."""
_OVERLOADED = frozenset({503, 529})

_OF_REFUSALS: Mapping[str, tuple[int, str]] = {
    "BudgetHeldError": (429, "rate_limit_exceeded"),
    "BudgetsRebuildingError": (503, "unavailable"),
    "LimitUnreadableError": (503, "unavailable"),
}
"""Statuses and codes of refusals by a budget that is not used up, by the error's class."""

_OF_ANSWERS: Mapping[str, tuple[int, str]] = {
    "ContentFilteredError": (400, "content_filter"),
    "OutputLimitError": (400, "max_tokens_reached"),
}
"""Statuses and codes of unusable answers for which OpenAI has codes of its own, by the error's class."""

_FINISH_REASONS = frozenset({"stop", "length", "content_filter"})
"""Finish reasons that OpenAI's clients know, apart from `tool_calls`, which follows from the message."""


def job_of(request: ChatCompletionRequest, options: CallOptions, agent: str, model: str | None) -> Job:
    """Returns the job of a request.

    All further fields of the request are params, except nulls and a `service_tier` of `auto`, which mean the same as
    leaving the field out.

    Args:
        request: the request.
        options: the call's options, which become fields of the job.
        agent: the agent that `model` names.
        model: the requested model; None for the agent's own.

    Raises:
        ValidationError: the fields do not make a valid job.
    """
    params = {name: value for name, value in (request.model_extra or {}).items() if value is not None}
    if params.get("service_tier") == "auto":
        del params["service_tier"]
    named = {} if model is None else {"model": model}
    more = options.model_dump(exclude_unset=True)
    if request.stream:
        more["stream"] = True
    return Job(agent=agent, messages=request.messages, params=params, include_response=True, **named, **more)


def error_of(result: Mapping[str, Any]) -> ChatError:
    """Returns the error of a job that ended without an answer.

    A provider's error about a request keeps its status, unless it is about the plane's own key.

    Args:
        result: a `Result`, as JSON.
    """
    error = cast(Mapping[str, Any], result.get("error") or {})
    reason = str(result.get("reason") or result["status"])
    kind = str(error.get("kind"))
    message = join_figures(str(error.get("message") or f"the job ended {reason}"), error.get("figures"))
    wait_s = cast(float | None, error.get("retry_after_s"))
    status_code = error.get("status_code")
    if reason == "timeout" and (kind == "rate_limit" or wait_s is not None):
        # There was no time to wait for a retry, so the job has ended with this failure rather than a timeout.
        reason = "error"
    if reason != "error" or kind != "client":
        status, code = _ERRORS.get(kind if reason == "error" else reason, (502, "provider_error"))
        if code == "provider_error" and status_code in _OVERLOADED:
            status = 503
        if (status_and_code := _OF_REFUSALS.get(str(error.get("class")))) is not None:
            status, code = status_and_code
        api: CallApi = result.get("api") or "chat"
        place = "input" if api in {"responses", "embeddings"} else "messages"
        if code == OVERFLOW:
            # Programs read the beginning of Anthropic's message, so no field must be named before it.
            param = None if api == "messages" else place
            return ChatError(status, code, overflow_message(message, api), param)
        of_conversation = kind == "orphan_tool_calls" and status == 400
        # Breakwater has repeated the calls that it made as often as it may, and each would cost money again.
        may_retry = wait_s is not None and all(attempt["short_circuited"] for attempt in result.get("attempts", ()))
        return ChatError(status, code, message, place if of_conversation else None, wait_s, may_retry)
    if (answer_error := _OF_ANSWERS.get(str(error.get("class")))) is not None:
        return ChatError(*answer_error, message)
    if isinstance(status_code, int) and 500 <= status_code <= 599:
        status_code = 400  # llama.cpp refuses requests under the status of its own failures
    if not isinstance(status_code, int) or not 400 <= status_code < 500 or status_code in _OF_THE_PLANE:
        return ChatError(502, "provider_error", message)
    code = "model_not_found" if status_code == 404 else "invalid_request"
    return ChatError(status_code, code, message, error.get("param"))


def is_overflow(result: Mapping[str, Any]) -> bool:
    """Returns True if a job failed because its request is too long for its model."""
    return result["status"] == "dead_lettered" and error_of(result).code == OVERFLOW


def completion_of(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the chat completion of a job that succeeded: the provider's own object, or one made from the result.

    OpenAI's clients can read its messages, whatever the provider has sent.

    Args:
        result: a `Result`, as JSON.
    """
    response = cast(dict[str, Any], result.get("response") or {})
    choice_of = partial(_complete, str(result["job_id"]))
    # A message of Anthropic's has `content`; if it has `choices`, too, they mean nothing here.
    if isinstance(response.get("choices"), list) and "content" not in response:
        if not is_usage(response.get("usage")):
            response = {name: value for name, value in response.items() if name != "usage"}
        return {
            **response,
            "object": "chat.completion",
            "choices": [choice_of(number, choice) for number, choice in enumerate(objects(response["choices"]))],
        }
    choices = cast(list[Mapping[str, Any]], result.get("choices") or [{"index": 0, **result}])
    usage = _usage(result)
    thought = thoughts_in(response.get("content"))
    return {
        "id": f"chatcmpl-{result['job_id']}",
        "object": "chat.completion",
        "created": int(datetime.fromisoformat(result["completed_at"]).timestamp()),
        "model": result.get("chosen_model") or result.get("requested_model") or result["agent"],
        "choices": [choice_of(choice["index"], _choice(choice, thought)) for choice in choices],
        **({} if usage is None else {"usage": usage}),
    }


def with_error_as_answer(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a failed job whose agent has `on_error: message` as if it was answered with that message.

    Other results are returned as they are, as are those of embeddings, whose vectors can't contain a message.

    Args:
        result: a `Result`, as JSON.
    """
    message = (result.get("error") or {}).get("user_message")
    is_message = result["status"] == "dead_lettered" and message is not None and result["output"] == message
    if not is_message or result.get("api") == "embeddings":
        return result
    return {**result, "status": "succeeded", "finish_reason": "stop", "choices": [], "response": None}


def first_choice(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the choice for APIs that have only one answer; an empty one if there is none."""
    choices = objects(completion.get("choices") or [])
    return next((choice for choice in choices if not choice.get("index")), choices[0] if choices else {})


def is_usage(usage: Any) -> bool:
    """Returns True for a usage that has figures."""
    return isinstance(usage, dict) and any(value is not None for value in cast(dict[str, Any], usage).values())


def _complete(job_id: str, number: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    reported_index = choice.get("index")
    message = choice.get("message")
    index = reported_index if isinstance(reported_index, int) else number
    message = normalize(cast(dict[str, Any], message) if isinstance(message, dict) else {}, job_id, index)
    called = bool(message.get("tool_calls"))
    reason = known_reason(choice.get("finish_reason"), called=called) or finish_reason_of(None, called=called)
    return {**choice, "index": index, "message": message, "finish_reason": reason}


def _choice(choice: Mapping[str, Any], thought: str) -> dict[str, Any]:
    message = {**({THOUGHT: thought} if thought else {}), **_message(choice.get("output"))}
    reason = finish_reason_of(choice.get("finish_reason"), called=bool(message.get("tool_calls")))
    return {"message": {"annotations": [], **message}, "finish_reason": reason, "logprobs": None}


def finish_reason_of(reason: str | None, *, called: bool) -> str:
    """Returns a `finish_reason` that OpenAI's clients know. `called` is True if the answer calls tools."""
    if called:
        return "tool_calls"
    return reason if reason in _FINISH_REASONS else "stop"


def _message(output: Any) -> dict[str, Any]:
    """Returns an output as a message of the assistant. JSON that is neither a text nor a message becomes a text."""
    message = cast(dict[str, Any], output) if isinstance(output, dict) else {}
    if message.get("role") == "assistant":
        return message
    return {"content": output if output is None or isinstance(output, str) else json.dumps(output, ensure_ascii=False)}


def _usage(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tokens of the call that gave the answer; None if they are unknown, or no call was made."""
    successes = [attempt for attempt in result.get("attempts", ()) if attempt["outcome"] == "success"]
    if not successes or successes[-1].get("input_tokens") is None or successes[-1].get("output_tokens") is None:
        return None
    last = successes[-1]
    prompt = last["input_tokens"]
    completion = last["output_tokens"]
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if last.get("cached_tokens") is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": last["cached_tokens"]}
    if last.get("reasoning_tokens") is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": last["reasoning_tokens"]}
    return usage
