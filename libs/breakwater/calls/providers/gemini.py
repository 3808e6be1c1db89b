"""Gemini's own API. On our side, conversations and answers have OpenAI's format, as at Google's compatible endpoint.

The endpoint that is compatible with OpenAI's has no thinking budgets as numbers, no cached content by name and no
reason why an answer was blocked.
"""

from __future__ import annotations

import mimetypes
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

import orjson
from pydantic import JsonValue

from breakwater.calls.providers.base import Call, StreamReader, Wire, params_to_translate, refusal_of
from breakwater.calls.providers.embeddings import EmbeddingsWire
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.dialects.rules.chat_chunks import OBJECT, Assembly, Chunk
from breakwater.dialects.rules.tool_schemas import portable_function
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.jobs.rules.chat_messages import OTHERS, THOUGHT, encode_json, fields, finish_reason, objects
from breakwater.kernel.formats import words
from breakwater.kernel.surrogates import whole_escapes
from breakwater.prices.rules.price import OUTPUT_LIMITS
from breakwater.prices.rules.usage import Usage, figure, of_completion

_NO_COUNTERPART: Mapping[str, Any] = {
    **dict.fromkeys(("audio", "function_call", "functions", "prediction", "verbosity", "web_search_options"), ...),
    "logit_bias": {},
    "modalities": ["text"],
}
"""OpenAI's params that Gemini lacks, each with the value that has no effect. Any other value is refused."""
_DROPPED = words(
    """
    metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store user
    """
)
"""OpenAI's params without a counterpart that the answer does without."""
_OF_REQUEST = {
    "cached_content": "cachedContent",
    "labels": "labels",
    "safety_settings": "safetySettings",
    "tool_config": "toolConfig",
}
"""Gemini's own params beside the `generationConfig`."""
_TRANSLATED = words(
    """
    logprobs n reasoning_effort response_format stop thinking thinking_config tool_choice tools top_logprobs
    """
)
_NAMES = {"n": "candidateCount", "logprobs": "responseLogprobs", "top_logprobs": "logprobs"}

_BUDGETS = {"none": 0, "minimal": 1024, "low": 1024, "medium": 8192, "high": 24576, "xhigh": 24576, "max": 24576}
"""Tokens of thinking by the effort, as Google's compatible endpoint translates it."""
_LEVELS = {"none": "MINIMAL", "xhigh": "HIGH", "max": "HIGH"}
_WITH_BUDGET = re.compile(r"gemini-(?:2|flash-latest|flash-lite-latest|robotics)")
"""Models whose thinking is limited by tokens. Later ones have levels."""

_MOST_OF_PRO = 32_768
"""The largest budget of a model called pro. That of others is less, and Claude's, whose clients ask here, is more."""

_Part = dict[str, Any]


def request_body(call: Call) -> dict[str, Any]:
    """Translates a call.

    Messages: system and developer messages become `systemInstruction`; consecutive messages of one role become one.
    A call of a tool, and a text, go back with the signature that Gemini gave them (`extra_content.google`).

    Params: OpenAI's are translated, `dropped_params` left out. `cached_content`, `labels`, `safety_settings`,
    `thinking_config` and `tool_config` are Gemini's own; unknown ones become fields of `generationConfig`, and Gemini
    names those that it does not accept. Where the effort or the budget of thinking is set, its summary is asked for.

    Raises:
        CallError: the call needs something that only OpenAI has, and leaving it out would change the answer.
    """
    params = params_to_translate(call, "Gemini", dropped=_DROPPED, no_counterpart=_NO_COUNTERPART)
    system, contents = _conversation(call.messages)
    generation = _generation(call, params)
    return {
        "contents": contents,
        **({"systemInstruction": {"parts": system}} if system else {}),
        **_tools(params),
        **{target: params[name] for name, target in _OF_REQUEST.items() if name in params},
        **({"generationConfig": generation} if generation else {}),
    }


def dropped_params(params: Mapping[str, JsonValue]) -> list[str]:
    """Returns the params of a call that are left out."""
    return sorted(name for name in _DROPPED.intersection(params) if params[name] is not None)


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(word.capitalize() for word in more)


def _camel_keys(value: Any) -> Any:
    return {_camel(name): inner for name, inner in fields(value).items()}


def _generation(call: Call, params: Mapping[str, Any]) -> dict[str, Any]:
    skipped = _TRANSLATED | _OF_REQUEST.keys() | frozenset(OUTPUT_LIMITS)
    generation = {_camel(name): value for name, value in params.items() if name not in skipped}
    generation |= {target: params[name] for name, target in _NAMES.items() if name in params}
    limits = [params[name] for name in OUTPUT_LIMITS if name in params]
    if limits:
        generation["maxOutputTokens"] = min(limits)
    if (stop := params.get("stop")) is not None:
        generation["stopSequences"] = [stop] if isinstance(stop, str) else stop
    if thinking := _thinking(call.model, params):
        generation["thinkingConfig"] = thinking
    match params.get("response_format"):
        case None if call.output_schema is not None:
            schema: Any = call.output_schema
        case None | {"type": "text"}:
            return generation
        case {"type": "json_object"}:
            schema = None
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            pass
        case other:
            text = f"the response_format {fields(other).get('type')!r} is not supported by Gemini"
            raise refusal_of(text, "response_format")
    generation["responseMimeType"] = "application/json"
    return generation if schema is None else generation | {"responseJsonSchema": schema}


def _thinking(model: str, params: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    is_pro = "-pro" in model
    effort = params.get("reasoning_effort")
    if isinstance(effort, str):
        if _WITH_BUDGET.search(model):
            config["thinkingBudget"] = _BUDGETS.get(effort, effort)
        else:
            config["thinkingLevel"] = _LEVELS.get(effort, effort.upper())
        config["includeThoughts"] = effort != "none"
    match params.get("thinking"):  # Anthropic's
        case {"type": "enabled", "budget_tokens": budget}:
            most = _MOST_OF_PRO if is_pro else _BUDGETS["high"]
            config = {"thinkingBudget": min(budget, most) if isinstance(budget, int) else budget}
            config["includeThoughts"] = True
        case {"type": "disabled"}:
            # The others think in any case, and refuse a budget of 0.
            config = {"thinkingBudget": 0} if _WITH_BUDGET.search(model) and not is_pro else {}
        case {"type": "adaptive"}:
            config = {"includeThoughts": True, **config}
        case _:
            pass
    return config | _camel_keys(params.get("thinking_config"))


def _tools(params: Mapping[str, Any]) -> dict[str, Any]:
    functions = list[dict[str, Any]]()
    google_tools = list[dict[str, Any]]()
    for tool in objects(params.get("tools") or []):
        match tool.get("type"):
            case "function":
                function = portable_function(fields(tool.get("function")))
                named = {name: function[name] for name in ("name", "description") if function.get(name) is not None}
                functions.append({**named, "parametersJsonSchema": function["parameters"]})
            case None:
                google_tools.append(tool)
            case other:
                raise refusal_of(f"tools of type {other!r} are not supported by Gemini", "tools")
    tools = [*([{"functionDeclarations": functions}] if functions else []), *google_tools]
    if not tools:
        return {}
    choice = _tool_choice(params.get("tool_choice"))
    return {"tools": tools, **({"toolConfig": {"functionCallingConfig": choice}} if choice else {})}


def _tool_choice(choice: Any) -> dict[str, Any] | None:
    match choice:
        case None:
            return None
        case "auto" | "none":
            return {"mode": choice.upper()}
        case "required":
            return {"mode": "ANY"}
        case {"type": "function", "function": {"name": name}}:
            return {"mode": "ANY", "allowedFunctionNames": [name]}
        case _:
            raise refusal_of("this 'tool_choice' is not supported by Gemini", "tool_choice")


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[list[_Part], list[dict[str, Any]]]:
    """Returns the system instruction, and the contents. Without any content, the instruction becomes the user's."""
    system: list[_Part] = []
    contents: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        match message.get("role"):
            case "system" | "developer":
                system += _parts(message.get("content"))
                continue
            case "user":
                role = "user"
                parts = _parts(message.get("content"))
            case "assistant":
                role = "model"
                parts = _model_parts(message)
                calls = map(fields, objects(message.get("tool_calls") or []))
                names |= {str(call.get("id")): str(fields(call.get("function")).get("name")) for call in calls}
            case "tool":
                role = "user"
                parts = _result_parts(message, names)
            case unknown:
                raise refusal_of(f"messages with the role {unknown!r} are not supported by Gemini", "messages")
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        elif parts:
            contents.append({"role": role, "parts": parts})
    if not contents and system:
        return [], [{"role": "user", "parts": system}]
    return system, contents


def _parts(content: Any) -> list[_Part]:
    """Returns the parts of a content, without empty texts, which Gemini refuses."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = (_part(fields(part)) for part in (cast(list[Any], content) if isinstance(content, list) else []))
    return [part for part in parts if part and part.get("text") != ""]


def _part(part: Mapping[str, Any]) -> _Part:
    match part.get("type"):
        case "text" | "input_text" | "output_text" | None if isinstance(text := part.get("text"), str):
            return {"text": text}
        case "refusal":
            return {"text": str(part.get("refusal") or "")}
        case "thinking" | "reasoning" | "redacted_thinking":
            return {}
        case "image_url":
            image = part.get("image_url")
            return _file(str(image if isinstance(image, str) else fields(image).get("url")), "image/jpeg")
        case "input_audio":
            audio = fields(part.get("input_audio"))
            return {"inlineData": {"mimeType": f"audio/{audio.get('format')}", "data": audio.get("data")}}
        case "file":
            file = fields(part.get("file"))
            return _file(str(file.get("file_data") or file.get("file_id")), "application/pdf")
        case kind:
            raise refusal_of(f"content of type {kind!r} is not supported by Gemini", "messages")


def _file(url: str, default_type: str) -> _Part:
    if not url.startswith("data:"):
        return {"fileData": {"fileUri": url, "mimeType": mimetypes.guess_type(url)[0] or default_type}}
    header, _, data = url.removeprefix("data:").partition(",")
    media_type, *more = header.split(";")
    if "base64" not in more:
        raise refusal_of("a file in a data: URL must be base64 for Gemini", "messages")
    return {"inlineData": {"mimeType": media_type, "data": data}}


def _signature(extra: Any) -> dict[str, Any]:
    signature = fields(fields(extra).get("google")).get("thought_signature")
    return {"thoughtSignature": signature} if isinstance(signature, str) and signature else {}


def _model_parts(message: Mapping[str, Any]) -> list[_Part]:
    parts = _parts(message.get("content"))
    if signed := _signature(message.get("extra_content")):
        parts = [*parts[:-1], {**(parts[-1] if parts else {"text": ""}), **signed}]
    for call in objects(message.get("tool_calls") or []):
        function = fields(call.get("function"))
        try:
            arguments: Any = orjson.loads(whole_escapes(function.get("arguments") or "{}"))
        except orjson.JSONDecodeError:  # a model may write something that is not JSON; the tool's result shows it
            arguments = None
        called = {"id": call.get("id"), "name": function.get("name"), "args": fields(arguments)}
        parts.append({"functionCall": called, **_signature(call.get("extra_content"))})
    return parts


def _result_parts(message: Mapping[str, Any], names: Mapping[str, str]) -> list[_Part]:
    content = _parts(message.get("content"))
    text = "".join(part["text"] for part in content if "text" in part)
    key = "error" if message.get("is_error") is True else "result"
    try:
        result: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        result = text
    response = cast(dict[str, Any], result) if isinstance(result, dict) and key == "result" else {key: result}
    call_id = str(message.get("tool_call_id"))
    called = {"id": call_id, "name": names.get(call_id, call_id), "response": response}
    return [{"functionResponse": called}, *(part for part in content if "text" not in part)]


# Answers


def _blocked_choice(feedback: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the choice of a prompt that was blocked before any model read it."""
    return {"index": 0, "delta": {}, "finish_reason": "content_filter", **_reasons(feedback, "blockReason")}


def _reasons(reported: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns Gemini's word for the end, its text, and its ratings as Azure writes results of a filter."""
    severities = {"MEDIUM", "HIGH"}
    ratings = {
        str(rating.get("category")).removeprefix("HARM_CATEGORY_").lower(): {
            "filtered": rating.get("blocked") is True,
            "severity": str(rating.get("probability")).lower(),
        }
        for rating in objects(reported.get("safetyRatings") or [])
        if rating.get("blocked") is True or rating.get("probability") in severities
    }
    text = reported.get("finishMessage") or reported.get("blockReasonMessage")
    optional = {"content_filter_results": ratings, "finish_message": text}
    return {"native_finish_reason": reported.get(name), **{key: value for key, value in optional.items() if value}}


def _count(report: Mapping[str, Any], *names: str) -> int | None:
    counts = [count for name in names if (count := figure(report.get(name))) is not None]
    return sum(counts) if counts else None


def _modality(report: Mapping[str, Any], name: str, modality: str) -> int:
    details = objects(report.get(name) or [])
    return sum(figure(detail.get("tokenCount")) or 0 for detail in details if detail.get("modality") == modality)


def usage_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a usage in OpenAI's dialect, whose output includes the thinking and whose input the results of tools."""
    return {
        "prompt_tokens": _count(report, "promptTokenCount", "toolUsePromptTokenCount"),
        "completion_tokens": _count(report, "candidatesTokenCount", "thoughtsTokenCount"),
        "total_tokens": _count(report, "totalTokenCount"),
        "prompt_tokens_details": {
            "cached_tokens": _count(report, "cachedContentTokenCount") or 0,
            "audio_tokens": _modality(report, "promptTokensDetails", "AUDIO"),
        },
        "completion_tokens_details": {
            "reasoning_tokens": _count(report, "thoughtsTokenCount") or 0,
            "audio_tokens": _modality(report, "candidatesTokensDetails", "AUDIO"),
            "image_tokens": _modality(report, "candidatesTokensDetails", "IMAGE"),
        },
    }


@dataclass(slots=True)
class _Responses:
    """Reads the responses of a stream, or the one of a whole answer, which has the same form."""

    _answer: Assembly
    ended: bool = False
    _calls: dict[int, int] = field(default_factory=dict[int, int])
    """The number of tool calls so far, by the candidate."""
    _created: int = field(default_factory=lambda: int(time.time()))

    @property
    def whole(self) -> bool:
        """Returns True after the finish reasons of all candidates: the stream has no other end."""
        return self._answer.finished

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns a chunk for each part, in the order of the parts."""
        if event is None:
            self.ended = True
            return
        head = {"id": event.get("responseId"), "object": OBJECT, "created": self._created}
        head["model"] = event.get("modelVersion")
        feedback = fields(event.get("promptFeedback"))
        candidates = objects(event.get("candidates") or [])
        if feedback.get("blockReason") and not candidates:
            yield {**head, "choices": [_blocked_choice(feedback)]}
        for candidate in candidates:
            for choice in self._choices(candidate):
                yield {**head, "choices": [choice]}
        if report := fields(event.get("usageMetadata")):
            yield {**head, "choices": [], "usage": usage_of(report)}

    def _choices(self, candidate: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        index = candidate.get("index")
        number = index if isinstance(index, int) else 0
        for part in objects(fields(candidate.get("content")).get("parts") or []):
            if delta := self._delta(part, number):
                yield {"index": number, "delta": {"role": "assistant", **delta}, "finish_reason": None}
        if reason := finish_reason(candidate.get("finishReason")):
            called = reason == "stop" and number in self._calls
            reasons = {} if reason in ("stop", "length") else _reasons(candidate, "finishReason")
            grounding = {name: candidate[name] for name in _FURTHER if candidate.get(name)}
            end = "tool_calls" if called else reason
            yield {"index": number, "delta": {}, "finish_reason": end, **reasons, **grounding}

    def _delta(self, part: Mapping[str, Any], number: int) -> dict[str, Any]:
        signature = part.get("thoughtSignature")
        signed = {"extra_content": {"google": {"thought_signature": signature}}} if signature else {}
        if called := fields(part.get("functionCall")):
            place = self._calls.get(number, 0)
            self._calls[number] = place + 1
            function = {"name": called.get("name"), "arguments": encode_json(called.get("args") or {}).decode()}
            call = {"index": place, "id": called.get("id"), "type": "function", "function": function, **signed}
            return {"tool_calls": [call]}
        text = part.get("text")
        if isinstance(text, str):
            name = THOUGHT if part.get("thought") is True else "content"
            return {**({name: text} if text else {}), **signed}
        if data := fields(part.get("inlineData")):
            url = f"data:{data.get('mimeType')};base64,{data.get('data')}"
            return {"images": [{"type": "image_url", "image_url": {"url": url}}], **signed}
        return {OTHERS: [dict(part)]}

    def answer(self) -> dict[str, Any]:
        """Returns a `chat.completion`."""
        return self._answer.completion()


_FURTHER = ("citationMetadata", "groundingMetadata", "logprobsResult", "urlContextMetadata")
"""Fields of a candidate about its answer, which clients get with the choice."""


@dataclass(frozen=True, slots=True)
class GenerateContent:
    """`<base_url>/models/<model>:generateContent`. `request_body` says what is translated, and what is refused."""

    base_url: str

    def url(self, model: str, *, streamed: bool = False) -> str:
        """Returns the URL of the model's operation, of another one for a stream."""
        name = quote(model.removeprefix("models/"), safe="/")
        path = name if name.startswith("tunedModels/") else f"models/{name}"
        operation = "streamGenerateContent?alt=sse" if streamed else "generateContent"
        return f"{self.base_url.rstrip('/')}/{path}:{operation}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the key in its header."""
        return {} if key is None else {"x-goog-api-key": key}

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the translated call. Raises CallError."""
        return request_body(call)

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Returns a reader of the responses of a stream."""
        return _Responses(answer)

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:  # noqa: ARG002  it has its form
        """Returns a whole answer as a `chat.completion`."""
        if "choices" in answer:
            return answer  # a stream that nobody asked for
        assembly = Assembly()
        reader = _Responses(assembly)
        for chunk in reader.read(answer):
            assembly.add(chunk)
        return reader.answer()

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens of a response, or of the completion that it becomes."""
        report = fields(answer.get("usageMetadata"))
        if not report:
            return of_completion(answer)
        return of_completion({"usage": usage_of(report), "model": answer.get("modelVersion")})

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns all choices of a completion. Raises UnusableAnswerError."""
        return ChatCompletions(self.base_url).choices(answer)


def gemini_wires(base_url: str) -> dict[CallApi, Wire]:
    """Returns the APIs of Gemini: chats are translated to its own, and embeddings go to the compatible endpoint."""
    compatible = ChatCompletions(f"{base_url.rstrip('/')}/openai")
    return {"chat": GenerateContent(base_url), "embeddings": EmbeddingsWire(compatible)}
