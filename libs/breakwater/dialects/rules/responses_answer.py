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
"""A field of a message, and where in it what was said then begins: a character, or the number of a call."""
ResponseStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

OBJECT = "response"
_PREFIX = "resp_"
OWN_ITEM = "bw"
"""Beginning of an item's id, after its kind, where the plane has made it."""

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
class Asked:
    """The request of a response, as far as its Response objects repeat it.

    Attributes:
        job_id: of the job, as its owner calls it.
        created_at: seconds since the epoch at which the job was accepted.
        model: that was asked for: an agent, or an agent's model.
        body: as the client wrote it.
        background: the response outlives its connection.
        store: it can be read later.
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
    """The job of a response, as its owner calls it; None for an id that no response of the plane has."""
    return response_id.removeprefix(_PREFIX) if response_id.startswith(_PREFIX) else None


def item_id(job_id: str, kind: str, number: int) -> str:
    """The id of an output item that the plane makes: OpenAI's are at most 64 characters long.

    Args:
        job_id: of the response's job.
        kind: its prefix: `msg`, `rs`, `fc` or `ctc`.
        number: of the item in the response.
    """
    return f"{kind}_{OWN_ITEM}{blake2b(f'{job_id}:{number}'.encode(), digest_size=12).hexdigest()}"


def pending_response(asked: Asked, status: ResponseStatus = "in_progress") -> dict[str, Any]:
    """The Response object of a job that has not ended."""
    return _response(asked, status, [])


def response_of(asked: Asked, result: Mapping[str, Any], output: Sequence[Item] | None = None) -> dict[str, Any]:
    """The Response object of a job that has ended.

    Args:
        asked: its request.
        result: a `Result`, as JSON.
        output: the items as they were streamed; by default those of the result.
    """
    status = result["status"]
    if status != "succeeded":
        ended: ResponseStatus = "cancelled" if status == "cancelled" else "failed"
        error = None if ended == "cancelled" else _error(result)
        partial = [{**item, "status": "incomplete"} if "status" in item else item for item in output or ()]
        return {**_response(asked, ended, partial), "error": error, "usage": _usage(result)}
    items = output_of(asked.job_id, result) if output is None else list(output)
    completed_at = int(datetime.fromisoformat(result["completed_at"]).timestamp())
    if (native := native_response(result)) is not None:
        ours = _of_plane(asked) | ({} if native.get("created_at") else {"created_at": asked.created_at})
        ended = "incomplete" if native.get("status") == "incomplete" else "completed"
        usage = _details(fields(native.get("usage"))) or _usage(result)
        made = _response(asked, ended, items)
        named = {"object": OBJECT, "status": ended, "completed_at": completed_at, "output": items, "usage": usage}
        readable = {name: value for name, value in _known(native).items() if _fits(made.get(name), value)}
        return {**made, **readable, **ours, **named, "tools": objects(native.get("tools") or made["tools"])}
    completion = completion_of(result)
    choice = first_choice(completion)
    why = _INCOMPLETE.get(finish_reason(choice.get("finish_reason")) or "")
    served = {"service_tier": tier} if isinstance(tier := completion.get("service_tier"), str) else {}
    return {
        **_response(asked, "completed" if why is None else "incomplete", items),
        **served,
        "completed_at": completed_at,
        "incomplete_details": None if why is None else {"reason": why},
        "model": completion.get("model") or asked.model,
        "usage": _usage(result),
    }


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def native_response(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The Response object that a provider gave; None for an answer in another dialect."""
    response = fields(result.get("response"))
    # A continued answer has the chunks of a chat.
    is_native = response.get("object") == OBJECT and isinstance(response.get("output"), list)
    return response if is_native and "choices" not in response else None


def output_of(job_id: str, result: Mapping[str, Any]) -> list[Item]:
    """The output items of a job that succeeded, in the order in which they were said."""
    if (native := native_response(result)) is not None:
        return normalized_items(objects(native["output"]), job_id)
    choice = first_choice(completion_of(result))
    response = fields(result.get("response"))
    return items_of(choice, job_id, said_in_order(choice, response), response.get(AUTHOR))


def said_in_order(choice: Mapping[str, Any], response: Mapping[str, Any]) -> list[Turn]:
    """The order in which the parts of a chat's message were said, each with its beginning.

    Args:
        choice: of a chat completion, with a message.
        response: of the provider: blocks of Anthropic have an order, too.
    """
    if isinstance(order := choice.get(ORDER), list):
        return cast(list[Turn], order)
    message = fields(choice.get("message"))
    blocks = objects(response.get("content") or [])
    if not blocks or message.get(THOUGHT):
        thought = THOUGHT if message.get(THOUGHT) else "reasoning"
        return [(name, 0) for name in (thought, "content", "refusal", "tool_calls")]
    order = list[Turn]()
    said = 0
    calls = 0
    for block in blocks:
        if block.get("type") == "tool_use":
            order = [*order, ("tool_calls", calls)]
            calls += 1
        elif block.get("type") == "text":
            order = [*order, ("content", said)]
            said += len(str(block.get("text") or ""))
    return order


def state_item(token: str, job_id: str, number: int) -> Item:
    """An item before calls, with what their author wants back with them."""
    return {**reasoning_item(item_id(job_id, "rs", number), ""), "encrypted_content": token}


def items_of(choice: Mapping[str, Any], job_id: str, order: Sequence[Turn], author: Any = None) -> list[Item]:
    """The output items that the message of a chat's choice comes to. `author`: None where it is not known."""
    message = fields(choice.get("message"))
    items = list[Item]()
    latest = ""
    notes = [note for one in objects(message.get("annotations") or []) if (note := annotation(one)) is not None]
    logprobs = log_probabilities(choice.get("logprobs"))
    for number, (name, start) in enumerate(order):
        said = message.get(name)
        end = next((begins for other, begins in order[number + 1 :] if other == name), None)
        if name == "tool_calls":
            if not start and (token := state_of_calls(author, message)) is not None:
                items.append(state_item(token, job_id, len(items)))
            for call in objects(said or [])[start:end]:
                items.append(call_item(call, job_id, len(items)))
                latest = name
            continue
        text = said[start:end] if isinstance(said, str) else ""
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


def message_item(own: str, parts: Sequence[Item], status: str = "completed") -> Item:
    """A message of the assistant."""
    return {"id": own, "type": "message", "status": status, "role": "assistant", "content": list(parts)}


def text_part(text: str, annotations: Sequence[Item] = (), logprobs: Sequence[Item] = ()) -> Item:
    """A text in such a message."""
    return {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": list(logprobs)}


def reasoning_item(own: str, text: str, status: str = "completed") -> Item:
    """Reasoning, with its whole text."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": own, "type": "reasoning", "summary": [], "content": content, "status": status}


def sealed_thought(item: Item, name: str, author: Any) -> Item:
    """Reasoning of a chat's message, with the token by which its author gets it back.

    Args:
        item: with its text.
        name: the field of the message that it is of.
        author: None where it is not known.
    """
    text = "".join(part["text"] for part in item.get("content") or ())
    return {**item, "encrypted_content": token_of(author, {name: text})} if isinstance(author, str) and text else item


def call_item(call: Mapping[str, Any], job_id: str, number: int, status: str = "completed") -> Item:
    """A tool call of a chat's message as an item."""
    own = call_id(call.get("id")) or item_id(job_id, "call", number)
    if call.get("custom") is not None:
        custom = fields(call["custom"])
        known = {"id": item_id(job_id, "ctc", number), "type": "custom_tool_call", "call_id": own, "status": status}
        return {**known, "name": str(custom.get("name") or ""), "input": arguments_text(custom.get("input"))}
    function = fields(call.get("function"))
    known = {"id": item_id(job_id, "fc", number), "type": "function_call", "call_id": own, "status": status}
    arguments = arguments_text(function.get("arguments"))
    return {**known, "name": str(function.get("name") or ""), "arguments": arguments}


def annotation(given: Mapping[str, Any]) -> Item | None:
    """A chat's annotation as one of a text's; None for one that is none."""
    kind = given.get("type")
    said = fields(given.get(str(kind)))
    return {"type": kind, **said} if isinstance(kind, str) and said else None


def log_probabilities(given: Any) -> list[Item]:
    """The log probabilities of a chat's text, as a text part has them."""
    return [{"bytes": [], "top_logprobs": [], **one} for one in objects(fields(given).get("content") or [])]


def normalized_items(items: Sequence[Mapping[str, Any]], job_id: str) -> list[Item]:
    """The output items of a provider as a client can read them: ids, texts and statuses are there."""
    named = [item for item in items if isinstance(item.get("type"), str)]
    return [normalized_item(item, job_id, number) for number, item in enumerate(named)]


_KNOWN_PARTS = frozenset({"output_text", "reasoning_text", "refusal", "summary_text"})
_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def normalized_item(item: Mapping[str, Any], job_id: str, number: int) -> Item:
    """One of them."""
    kind = item.get("type")
    own = item.get("id")
    status = item.get("status")
    if not isinstance(own, str) or not own:
        own = item_id(job_id, _KINDS.get(str(kind), "item"), number)
    shown: Item = {**item, "id": own}
    if kind in ("message", "function_call") and status not in ("in_progress", "completed", "incomplete"):
        shown["status"] = "completed"
    match kind:
        case "message":
            content = item.get("content")
            given = [{"type": "output_text", "text": content}] if isinstance(content, str) else objects(content or [])
            shown |= {"role": "assistant", "content": _parts(given, ("output_text", "refusal"))}
        case "function_call" | "custom_tool_call":
            said = "arguments" if kind == "function_call" else "input"
            name = item.get("name")
            called = call_id(item.get("call_id")) or item_id(job_id, "call", number)
            shown |= {
                said: arguments_text(item.get(said)),
                "call_id": called,
                "name": name if isinstance(name, str) else "",
            }
        case "reasoning":
            shown["summary"] = _parts(objects(item.get("summary") or []), ("summary_text",))
            if "content" in item:
                shown["content"] = _parts(objects(item["content"] or []), ("reasoning_text",))
        case _:
            pass
    return shown


def _parts(given: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[Item]:
    """The parts of those types, with their texts as texts, and parts of unknown types as they are."""
    parts = list[Item]()
    for part in given:
        kind = part.get("type")
        name = "refusal" if kind == "refusal" else "text"
        text = part.get(name)
        if kind in kinds:
            lists = {one: objects(part.get(one) or []) for one in ("annotations", "logprobs") if kind == "output_text"}
            parts.append({**part, name: text if isinstance(text, str) else "", **lists})
        elif isinstance(kind, str) and kind not in _KNOWN_PARTS:
            parts.append(dict(part))  # of a newer version of the API
    return parts


def _response(asked: Asked, status: ResponseStatus, output: Sequence[Item]) -> dict[str, Any]:
    body = asked.body
    text = fields(asked.body.get("text"))
    settings = {name: default if (given := body.get(name)) is None else given for name, default in _DEFAULTS.items()}
    if settings["service_tier"] == "auto":
        settings["service_tier"] = "default"
    return {
        **_of_plane(asked),
        "object": OBJECT,
        "created_at": asked.created_at,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": asked.model,
        "output": list(output),
        "usage": None,
        **settings,
        "reasoning": {"effort": None, "summary": None, **fields(body.get("reasoning"))},
        "text": {"format": {"type": "text"}, **_known(text)},
        "tools": [
            {**_FUNCTION_DEFAULTS, **tool} if tool.get("type") == "function" else tool
            for tool in objects(body.get("tools") or [])
        ],
    }


def _of_plane(asked: Asked) -> dict[str, Any]:
    """Fields that the plane answers for, also where a provider has given the response."""
    return {
        "id": asked.id,
        "background": asked.background,
        "store": asked.store,
        "previous_response_id": asked.previous_response_id,
    }


def _error(result: Mapping[str, Any]) -> dict[str, Any]:
    """The error of a job that failed, with one of the codes that OpenAI's clients know."""
    error = error_of(result)
    limited = error.status == 429
    refused = error.status < 500
    code = "rate_limit_exceeded" if limited else "invalid_prompt" if refused else "server_error"
    return {"code": OVERFLOW if error.code == OVERFLOW else code, "message": error.message}


def _usage(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tokens of the call that gave the answer; None where they are not known."""
    called = [one for one in result.get("attempts", ()) if one["outcome"] == "success"]
    if called and called[-1].get("input_tokens") is not None and called[-1].get("output_tokens") is not None:
        last = called[-1]
        mark = {ESTIMATED: True} if is_estimated(fields(result.get("response"))) else {}
        return {**_counts(*(last.get(name) for name in _COUNTS)), **mark}
    usage = None if called else of_completion(fields(result.get("response")))  # of a cached answer
    if usage is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    return _counts(*(getattr(usage, name) for name in _COUNTS))


_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")


def _counts(tokens: int, said: int, cached: int | None, reasoned: int | None) -> dict[str, Any]:
    return {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": reasoned or 0},
        "total_tokens": tokens + said,
    }


def _details(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    """A provider's usage with the details that clients expect; None where it says nothing."""
    tokens = figure(usage.get("input_tokens"))
    said = figure(usage.get("output_tokens"))
    if tokens is None or said is None or max(tokens, said) > MAX_USAGE:
        return None
    counts = _counts(tokens, said, None, None)
    given = _known(usage)
    for name, most in counts.items():
        if isinstance(most, dict):
            more = fields(given.get(name))
            counts[name] = {**more, **{part: figure(more.get(part)) or 0 for part in cast(dict[str, int], most)}}
    return {**given, **counts, "total_tokens": figure(usage.get("total_tokens")) or tokens + said}


def _fits(default: Any, given: Any) -> bool:
    """True if a provider's setting is of the type that clients know."""
    numbers = isinstance(default, float) and type(given) in (int, float)
    return default is None or default == "auto" or numbers or type(given) is type(default)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
