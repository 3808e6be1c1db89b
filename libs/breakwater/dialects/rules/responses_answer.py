"""Results of jobs as OpenAI's Response objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from typing import Any, Literal, cast

from breakwater.dialects.rules.chat_completions import OVERFLOW, completion_of, error_of, first_choice
from breakwater.dialects.rules.provider_state import AUTHOR, state_of_calls, token_of
from breakwater.jobs.rules.chat_messages import ORDER, THOUGHT, arguments_text, call_id, fields, finish_reason, objects
from breakwater.prices.rules.usage import ESTIMATED, MAX_USAGE, figure, is_estimated, of_completion

Item = dict[str, Any]
Turn = tuple[str, int]
"""A field of a message, and the place in it where this turn begins: a character, or the number of a call."""
ResponseStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

OBJECT = "response"
_PREFIX = "resp_"
OWN_ITEM = "bw"
"""The beginning of the id, after the kind, of an item that the plane has made."""

_DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "user": None,
}
"""Settings that a response repeats, each with OpenAI's default."""

_FUNCTION_DEFAULTS: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedRequest:
    """The request of a response, as far as its Response objects repeat it.

    Attributes:
        job_id: the id of the job as its owner knows it.
        created_at: the time when the job was accepted, in seconds since the epoch.
        model: the requested model: an agent, or an agent's model.
        body: the body as the client wrote it.
        background: the response outlives its connection.
        store: the response can be read later.
        previous_response_id: the response whose conversation it continues.
    """

    job_id: str
    created_at: int
    model: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None

    @property
    def id(self) -> str:
        """The id of the response."""
        return f"{_PREFIX}{self.job_id}"


def job_id_of(response_id: str) -> str | None:
    """Returns the id of a response's job as its owner knows it; None for an id that the plane gives no response."""
    return response_id.removeprefix(_PREFIX) if response_id.startswith(_PREFIX) else None


def item_id(job_id: str, kind: str, number: int) -> str:
    """Returns the id of an output item that the plane makes. OpenAI's ids have at most 64 characters.

    Args:
        job_id: the id of the response's job.
        kind: the prefix: `msg`, `rs`, `fc` or `ctc`.
        number: the number of the item in the response.
    """
    return f"{kind}_{OWN_ITEM}{blake2b(f'{job_id}:{number}'.encode(), digest_size=12).hexdigest()}"


def pending_response(request: EchoedRequest, status: ResponseStatus = "in_progress") -> dict[str, Any]:
    """Returns the Response object of a job that has not ended."""
    return _response(request, status, [])


def response_of(
    request: EchoedRequest, result: Mapping[str, Any], output: Sequence[Item] | None = None
) -> dict[str, Any]:
    """Returns the Response object of a job that has ended.

    Args:
        request: the request of the response.
        result: a `Result`, as JSON.
        output: the items as they were streamed; by default those of the result.
    """
    status = result["status"]
    if status != "succeeded":
        ended_status: ResponseStatus = "cancelled" if status == "cancelled" else "failed"
        error = None if ended_status == "cancelled" else _error(result)
        partial = [{**item, "status": "incomplete"} if "status" in item else item for item in output or ()]
        return {**_response(request, ended_status, partial), "error": error, "usage": _usage(result)}
    items = output_of(request.job_id, result) if output is None else list(output)
    completed_at = int(datetime.fromisoformat(result["completed_at"]).timestamp())
    if (native := native_response(result)) is not None:
        request_fields = _of_plane(request) | ({} if native.get("created_at") else {"created_at": request.created_at})
        ended_status = "incomplete" if native.get("status") == "incomplete" else "completed"
        usage = _details(fields(native.get("usage"))) or _usage(result)
        defaults = _response(request, ended_status, items)
        plane_fields = {
            "object": OBJECT,
            "status": ended_status,
            "completed_at": completed_at,
            "output": items,
            "usage": usage,
        }
        readable = {
            name: value for name, value in _without_nulls(native).items() if _has_type_of(defaults.get(name), value)
        }
        return {
            **defaults,
            **readable,
            **request_fields,
            **plane_fields,
            "tools": objects(native.get("tools") or defaults["tools"]),
        }
    completion = completion_of(result)
    choice = first_choice(completion)
    incomplete_reason = _INCOMPLETE.get(finish_reason(choice.get("finish_reason")) or "")
    tier_field = {"service_tier": tier} if isinstance(tier := completion.get("service_tier"), str) else {}
    return {
        **_response(request, "completed" if incomplete_reason is None else "incomplete", items),
        **tier_field,
        "completed_at": completed_at,
        "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
        "model": completion.get("model") or request.model,
        "usage": _usage(result),
    }


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def native_response(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the Response object of a provider; None for an answer in another dialect."""
    response = fields(result.get("response"))
    # An answer that a second call has continued has choices, as it was assembled from a chat's chunks.
    is_native = response.get("object") == OBJECT and isinstance(response.get("output"), list)
    return response if is_native and "choices" not in response else None


def output_of(job_id: str, result: Mapping[str, Any]) -> list[Item]:
    """Returns the output items of a job that succeeded, in the order in which the model wrote them."""
    if (native := native_response(result)) is not None:
        return normalized_items(objects(native["output"]), job_id)
    choice = first_choice(completion_of(result))
    response = fields(result.get("response"))
    return items_of(choice, job_id, order_of_turns(choice, response), response.get(AUTHOR))


def order_of_turns(choice: Mapping[str, Any], response: Mapping[str, Any]) -> list[Turn]:
    """Returns the order in which a model wrote the parts of a chat's message.

    Args:
        choice: a choice of a chat completion, with its message.
        response: the provider's response, as Anthropic's blocks have an order, too.
    """
    if isinstance(order := choice.get(ORDER), list):
        return cast(list[Turn], order)
    message = fields(choice.get("message"))
    blocks = objects(response.get("content") or [])
    if not blocks:
        thought = THOUGHT if message.get(THOUGHT) else "reasoning"
        return [(name, 0) for name in (thought, "content", "refusal", "tool_calls")]
    order = list[Turn]()
    lengths = dict.fromkeys(_OF_BLOCKS.values(), 0)
    for block in blocks:
        kind = str(block.get("type"))
        if (name := _OF_BLOCKS.get(kind)) is not None:
            order.append((name, lengths[name]))
            lengths[name] += 1 if name == "tool_calls" else len(str(block.get(kind) or ""))
    return order


_OF_BLOCKS = {"thinking": THOUGHT, "text": "content", "tool_use": "tool_calls"}
"""The fields of a chat's message that Anthropic's blocks become, by their type."""


def state_item(token: str, job_id: str, number: int) -> Item:
    """Returns an item that precedes tool calls and has the state that their author needs back with them."""
    return {**reasoning_item(item_id(job_id, "rs", number), ""), "encrypted_content": token}


def items_of(choice: Mapping[str, Any], job_id: str, order: Sequence[Turn], author: Any = None) -> list[Item]:
    """Returns the output items of the message of a chat's choice. `author` is None if it is unknown."""
    message = fields(choice.get("message"))
    items = list[Item]()
    latest = ""
    notes = [
        note for reported in objects(message.get("annotations") or []) if (note := annotation(reported)) is not None
    ]
    logprobs = log_probabilities(choice.get("logprobs"))
    for number, (name, start) in enumerate(order):
        value = message.get(name)
        end = next((later_start for later_name, later_start in order[number + 1 :] if later_name == name), None)
        if name == "tool_calls":
            if not start and (token := state_of_calls(author, message)) is not None:
                items.append(state_item(token, job_id, len(items)))
            for call in objects(value or [])[start:end]:
                items.append(call_item(call, job_id, len(items)))
                latest = name
            continue
        text = value[start:end] if isinstance(value, str) else ""
        if not text:
            continue
        if name in THOUGHTS:
            items.append(sealed_thought(reasoning_item(item_id(job_id, "rs", len(items)), text), name, author))
        else:
            if latest not in _SPOKEN:
                items.append(message_item(item_id(job_id, "msg", len(items)), []))
            part = {"type": name, name: text} if name == "refusal" else text_part(text, notes, logprobs)
            items[-1]["content"].append(part)
            if name == "content":
                notes = []
                logprobs = []
        latest = name
    return items


THOUGHTS = (THOUGHT, "reasoning")
_SPOKEN = ("content", "refusal")


def message_item(message_id: str, parts: Sequence[Item], status: str = "completed") -> Item:
    """Returns a message of the assistant."""
    return {"id": message_id, "type": "message", "status": status, "role": "assistant", "content": list(parts)}


def text_part(text: str, annotations: Sequence[Item] = (), logprobs: Sequence[Item] = ()) -> Item:
    """Returns a text part of a message of the assistant."""
    return {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": list(logprobs)}


def reasoning_item(reasoning_id: str, text: str, status: str = "completed") -> Item:
    """Returns a reasoning item with its whole text."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": reasoning_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def sealed_thought(item: Item, name: str, author: Any) -> Item:
    """Returns a reasoning item of a chat's message with the token by which its author gets it back.

    Args:
        item: the item, with its text.
        name: the field of the message that the reasoning comes from.
        author: the author; None if it is unknown.
    """
    text = "".join(part["text"] for part in item.get("content") or ())
    return {**item, "encrypted_content": token_of(author, {name: text})} if isinstance(author, str) and text else item


def call_item(call: Mapping[str, Any], job_id: str, number: int, status: str = "completed") -> Item:
    """Returns a tool call of a chat's message as an item."""
    tool_call_id = call_id(call.get("id")) or item_id(job_id, "call", number)
    if call.get("custom") is not None:
        custom = fields(call["custom"])
        item = {
            "id": item_id(job_id, "ctc", number),
            "type": "custom_tool_call",
            "call_id": tool_call_id,
            "status": status,
        }
        return {**item, "name": str(custom.get("name") or ""), "input": arguments_text(custom.get("input"))}
    function = fields(call.get("function"))
    item = {"id": item_id(job_id, "fc", number), "type": "function_call", "call_id": tool_call_id, "status": status}
    # Clients expect JSON, unless the arguments are to come.
    arguments = arguments_text(function.get("arguments")) or ("" if status == "in_progress" else "{}")
    return {**item, "name": str(function.get("name") or ""), "arguments": arguments}


def annotation(reported: Mapping[str, Any]) -> Item | None:
    """Returns a chat's annotation as an annotation of a text part; None if it is invalid."""
    kind = reported.get("type")
    details = fields(reported.get(str(kind)))
    return {"type": kind, **details} if isinstance(kind, str) and details else None


def log_probabilities(logprobs: Any) -> list[Item]:
    """Returns the log probabilities of a chat's text as a text part has them."""
    return [{"bytes": [], "top_logprobs": [], **token} for token in objects(fields(logprobs).get("content") or [])]


def normalized_items(items: Sequence[Mapping[str, Any]], job_id: str) -> list[Item]:
    """Returns a provider's output items as clients can read them, with all ids, texts and statuses."""
    named = [item for item in items if isinstance(item.get("type"), str)]
    return [normalized_item(item, job_id, number) for number, item in enumerate(named)]


_KNOWN_PARTS = frozenset({"output_text", "reasoning_text", "refusal", "summary_text"})
_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def normalized_item(item: Mapping[str, Any], job_id: str, number: int) -> Item:
    """Returns one output item as clients can read it.

    Args:
        item: the provider's item.
        job_id: the id of the response's job.
        number: the number of the item in the response.
    """
    kind = item.get("type")
    usable_id = item.get("id")
    status = item.get("status")
    if not isinstance(usable_id, str) or not usable_id:
        usable_id = item_id(job_id, _KINDS.get(str(kind), "item"), number)
    normalized: Item = {**item, "id": usable_id}
    if kind in ("message", "function_call") and status not in ("in_progress", "completed", "incomplete"):
        normalized["status"] = "completed"
    match kind:
        case "message":
            content = item.get("content")
            parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else objects(content or [])
            normalized |= {"role": "assistant", "content": _parts(parts, ("output_text", "refusal"))}
        case "function_call" | "custom_tool_call":
            name = item.get("name")
            tool_call_id = call_id(item.get("call_id")) or item_id(job_id, "call", number)
            normalized |= {"call_id": tool_call_id, "name": name if isinstance(name, str) else ""}
            if kind == "function_call":
                normalized["arguments"] = arguments_text(item.get("arguments")) or "{}"
            else:
                normalized["input"] = arguments_text(item.get("input"))
        case "reasoning":
            normalized["summary"] = _parts(objects(item.get("summary") or []), ("summary_text",))
            if "content" in item:
                normalized["content"] = _parts(objects(item["content"] or []), ("reasoning_text",))
        case _:
            pass
    return normalized


def _parts(reported_parts: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[Item]:
    """Returns the parts of some types with their texts as strings, and parts of unknown types unchanged."""
    parts = list[Item]()
    for part in reported_parts:
        kind = part.get("type")
        name = "refusal" if kind == "refusal" else "text"
        text = part.get(name)
        if kind in kinds:
            lists = {
                field_name: objects(part.get(field_name) or [])
                for field_name in ("annotations", "logprobs")
                if kind == "output_text"
            }
            parts.append({**part, name: text if isinstance(text, str) else "", **lists})
        elif isinstance(kind, str) and kind not in _KNOWN_PARTS:
            parts.append(dict(part))  # of a type that a newer version of the API has
    return parts


def _response(request: EchoedRequest, status: ResponseStatus, output: Sequence[Item]) -> dict[str, Any]:
    body = request.body
    text = fields(request.body.get("text"))
    settings = {name: default if (value := body.get(name)) is None else value for name, default in _DEFAULTS.items()}
    if settings["service_tier"] == "auto":
        settings["service_tier"] = "default"
    return {
        **_of_plane(request),
        "object": OBJECT,
        "created_at": request.created_at,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": list(output),
        "usage": None,
        **settings,
        "reasoning": {"effort": None, "summary": None, **fields(body.get("reasoning"))},
        "text": {"format": {"type": "text"}, **_without_nulls(text)},
        "tools": [
            {**_FUNCTION_DEFAULTS, **tool} if tool.get("type") == "function" else tool
            for tool in objects(body.get("tools") or [])
        ],
    }


def _of_plane(request: EchoedRequest) -> dict[str, Any]:
    """Returns the fields that the plane sets itself, even in a provider's own response."""
    return {
        "id": request.id,
        "background": request.background,
        "store": request.store,
        "previous_response_id": request.previous_response_id,
    }


def _error(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the error of a failed job, with one of the codes that OpenAI's clients know."""
    error = error_of(result)
    is_rate_limited = error.status == 429
    is_refused = error.status < 500
    code = "rate_limit_exceeded" if is_rate_limited else "invalid_prompt" if is_refused else "server_error"
    return {"code": OVERFLOW if error.code == OVERFLOW else code, "message": error.message}


def _usage(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tokens of the call that gave the answer; None if they are unknown."""
    successes = [attempt for attempt in result.get("attempts", ()) if attempt["outcome"] == "success"]
    if successes and successes[-1].get("input_tokens") is not None and successes[-1].get("output_tokens") is not None:
        last = successes[-1]
        mark = {ESTIMATED: True} if is_estimated(fields(result.get("response"))) else {}
        return {**_counts(*(last.get(name) for name in _COUNTS)), **mark}
    usage = None if successes else of_completion(fields(result.get("response")))  # of a cached answer
    if usage is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    return _counts(*(getattr(usage, name) for name in _COUNTS))


_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")


def _counts(
    input_tokens: int, output_tokens: int, cached_tokens: int | None, reasoning_tokens: int | None
) -> dict[str, Any]:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _details(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a provider's usage with the details that clients expect; None if it has no figures."""
    input_tokens = figure(usage.get("input_tokens"))
    output_tokens = figure(usage.get("output_tokens"))
    if input_tokens is None or output_tokens is None or max(input_tokens, output_tokens) > MAX_USAGE:
        return None
    counts = _counts(input_tokens, output_tokens, None, None)
    reported = _without_nulls(usage)
    for name, default in counts.items():
        if isinstance(default, dict):
            reported_details = fields(reported.get(name))
            counts[name] = {
                **reported_details,
                **{part: figure(reported_details.get(part)) or 0 for part in cast(dict[str, int], default)},
            }
    return {**reported, **counts, "total_tokens": figure(usage.get("total_tokens")) or input_tokens + output_tokens}


def _has_type_of(default: Any, value: Any) -> bool:
    """Returns True if a provider's setting has the type that clients know."""
    numbers = isinstance(default, float) and type(value) in (int, float)
    return default is None or default == "auto" or numbers or type(value) is type(default)


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
