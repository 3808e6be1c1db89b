"""OpenAI's Responses: native requests go out as their clients wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from breakwater.calls.providers.base import Call, StreamReader, UnusableAnswerError
from breakwater.calls.providers.embeddings import ProviderEndpoint
from breakwater.dialects.rules.chat_chunks import OBJECT, Assembly, Chunk
from breakwater.dialects.rules.responses import chat_form, input_of, text_format
from breakwater.dialects.rules.responses_answer import OBJECT as RESPONSE
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.rules.chat_messages import OTHERS, THOUGHT, arguments_text, fields, objects
from breakwater.prices.rules.usage import Usage, of_completion, of_response

_FINISHED = {"max_output_tokens": "length", "content_filter": "content_filter"}
_ENDS = frozenset({"response.completed", "response.incomplete"})
_TEXTS = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": THOUGHT,
    "response.reasoning.delta": THOUGHT,
    "response.reasoning_summary_text.delta": THOUGHT,
}
"""Fields of a chat's delta, by the events that have a piece of them."""
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_GROWS = {
    "response.function_call_arguments.delta": "function_call",
    "response.custom_tool_call_input.delta": "custom_tool_call",
}


@dataclass(frozen=True, slots=True)
class ResponsesWire:
    """OpenAI's Responses, at the endpoint of its chat completions."""

    endpoint: ProviderEndpoint

    def url(self, model: str, *, streamed: bool = False) -> str:  # noqa: ARG002  the body says it
        """Returns the URL next to that of the chat completions."""
        return self.endpoint.address("responses", model)

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the headers of the chat completions."""
        return self.endpoint.headers(key)

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the client's request, with the repaired conversation, and the schema if it sets no format itself."""
        assert call.native is not None
        body: dict[str, Any] = {**call.native, "model": call.model}
        if call.repaired:
            body |= _conversation(call.native, call.messages)
        if call.output_schema is not None and "format" not in fields(body.get("text")):
            schema = {"name": "answer", "schema": call.output_schema, "strict": call.strict_output}
            format_ = text_format({"type": "json_schema", "json_schema": schema})
            body["text"] = {**fields(body.get("text")), "format": format_}
        return body | {"stream": True} if call.streaming is not None else body

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Returns a reader of the events of a response."""
        return _ResponseReader(answer)

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:  # noqa: ARG002  it stays as it is
        """Returns the answer as it is."""
        return answer

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens of a response."""
        return of_response(answer)

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns one choice: its text, or the assistant's message if that has more. Raises UnusableAnswerError."""
        if not isinstance(answer.get("output"), list):
            raise UnusableAnswerError("the answer has no output")
        if answer.get("status") in ("failed", "cancelled"):
            raise UnusableAnswerError(f"the response is {answer['status']}")
        texts = list[str]()
        refusals = list[str]()
        calls = list[dict[str, Any]]()
        other_items = list[dict[str, Any]]()
        thoughts = list[dict[str, Any]]()
        for item in objects(answer["output"]):
            kind = str(item.get("type"))
            if kind == "message":
                content = item.get("content")
                for part in [{"text": content}] if isinstance(content, str) else objects(content or []):
                    texts.append(text if isinstance(text := part.get("text"), str) else "")
                    refusals.append(text if isinstance(text := part.get("refusal"), str) else "")
            elif kind in _CALLS:
                name, text_field = _CALLS[kind]
                call_fields = {"name": item.get("name"), text_field: arguments_text(item.get(text_field))}
                calls.append({"id": item.get("call_id"), "type": name, name: call_fields})
            else:
                (thoughts if kind == "reasoning" else other_items).append(item)
        text = "".join(texts)
        refusal = "".join(refusals)
        if answer.get("status") == "incomplete":
            other_items += thoughts  # an incomplete response may have nothing else
        output: Any = text or None
        if calls or refusal or (other_items and not text):
            optional_fields = {"refusal": refusal or None, "tool_calls": calls, OTHERS: [] if text else other_items}
            output = {
                "role": "assistant",
                "content": text or None,
                **{name: value for name, value in optional_fields.items() if value},
            }
        limit_reason = _FINISHED.get(str(fields(answer.get("incomplete_details")).get("reason")))
        return [Choice(index=0, output=output, finish_reason=limit_reason or ("tool_calls" if calls else "stop"))]


def _conversation(native: Mapping[str, JsonValue], messages: Sequence[Mapping[str, JsonValue]]) -> dict[str, Any]:
    """Returns the repaired conversation. If messages were only added, they follow the client's own items."""
    before = chat_form(native).messages
    added = len(messages) - len(before)
    for skipped in (0, 1):  # the agent's system prompt may come first, which the body has as instructions
        if list(messages[skipped : skipped + len(before)]) == before and added >= skipped:
            original_input = native.get("input")
            items = [{"role": "user", "content": original_input}] if isinstance(original_input, str) else original_input
            return {"input": [*objects(items or []), *input_of(messages[skipped + len(before) :])]}
    return {"instructions": None, "input": input_of(messages)}


@dataclass(slots=True)
class _ResponseReader:
    _answer: Assembly
    ended: bool = False
    _response: dict[str, Any] = field(default_factory=dict[str, Any])
    _items: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    _calls: dict[int, int] = field(default_factory=dict[int, int])
    """The numbers of calls by the indexes of their items."""
    _begun_calls: set[int] = field(default_factory=set[int])
    """The indexes of calls whose text has begun."""

    @property
    def whole(self) -> bool:
        """Returns True if the last event has arrived, as only that ends a response."""
        return self.ended

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunk of an event, with the event itself, unless it is about the response as a whole."""
        event = event or {}
        kind = str(event.get("type"))
        index = _index(event)
        if kind == "response.created":
            self._response = {**fields(event.get("response"))}
            return (self._chunk({"role": "assistant", "content": ""}),)
        if kind in _ENDS:
            return self._end(dict(fields(event.get("response"))))
        if not kind.startswith("response.") or "response" in event:
            return ()
        if kind in ("response.output_item.added", "response.output_item.done"):
            return (self._item(index, fields(event.get("item")), event),)
        if (name := _TEXTS.get(kind)) is not None:
            return (self._chunk({name: _text(event)}, event),)
        if (grows := _GROWS.get(kind)) is not None:
            self._begun_calls.add(index)
            return (self._call(index, grows, {_CALLS[grows][1]: _text(event)}, event),)
        return ({**self._head(), "choices": [], "event": event},)

    def _item(self, index: int, item: Mapping[str, Any], event: Mapping[str, Any]) -> Chunk:
        is_new = index not in self._items
        kind = str(item.get("type"))
        self._items[index] = dict(item)
        if kind not in _CALLS or not (is_new or (index not in self._begun_calls and event["type"].endswith(".done"))):
            return {**self._head(), "choices": [], "event": event}
        _, text_field = _CALLS[kind]
        text = arguments_text(item.get(text_field))
        if text:
            self._begun_calls.add(index)
        call_head = {"id": item.get("call_id"), "name": item.get("name")} if is_new else {}
        return self._call(index, kind, {**call_head, text_field: text}, event)

    def _call(self, index: int, kind: str, call_fields: dict[str, Any], event: Mapping[str, Any]) -> Chunk:
        name, _ = _CALLS[kind]
        number = self._calls.setdefault(index, len(self._calls))
        call_head = {"id": call_fields.pop("id"), "type": name} if "id" in call_fields else {}
        return self._chunk({"tool_calls": [{"index": number, **call_head, name: call_fields}]}, event)

    def _end(self, response: dict[str, Any]) -> Iterable[Chunk]:
        self.ended = True
        if not response.get("output"):
            response["output"] = [item for _, item in sorted(self._items.items())]
        # Whatever a provider writes there: its stream and its stored answer are read in the same way.
        self._response |= {**response, "object": RESPONSE}
        limit_reason = _FINISHED.get(str(fields(response.get("incomplete_details")).get("reason")))
        yield self._chunk({}, finish_reason=limit_reason or ("tool_calls" if self._calls else "stop"))
        usage = of_completion(response)
        if usage is not None and usage.input_tokens is not None and usage.output_tokens is not None:
            counts = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens}
            details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0}}
            if usage.reasoning_tokens is not None:
                details["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
            total = usage.input_tokens + usage.output_tokens
            yield {**self._head(), "choices": [], "usage": {**counts, "total_tokens": total, **details}}

    def answer(self) -> dict[str, Any]:
        """Returns the response; if it broke off, the part of it that has arrived."""
        if self.ended:
            return self._response
        message = self._answer.messages().get(0, {})
        partial_message = {
            "type": "message",
            "content": [{"type": "output_text", "text": message.get("content") or ""}],
        }
        return {**self._response, "output": [partial_message]}

    def _chunk(
        self, delta: dict[str, Any], event: Mapping[str, Any] | None = None, finish_reason: str | None = None
    ) -> Chunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head(), "choices": [choice], **({} if event is None else {"event": event})}

    def _head(self) -> dict[str, Any]:
        response = self._response
        return {
            "id": response.get("id"),
            "object": OBJECT,
            "created": response.get("created_at"),
            "model": response.get("model"),
        }


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("output_index")
    return index if isinstance(index, int) else 0


def _text(event: Mapping[str, Any]) -> str:
    return text if isinstance(text := event.get("delta"), str) else ""
