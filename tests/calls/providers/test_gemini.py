"""Gemini by its own API: what goes out and comes back, streamed and not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.calls.providers.base import Answer, Call, CallError, Streaming
from breakwater.calls.providers.gemini import dropped_params, request_body
from breakwater.calls.providers.registry import GeminiSettings
from breakwater.calls.rules.classify import EmptyAnswer, NotSent, classify
from breakwater.config import parse_config
from breakwater.config.pricing import pricing_of
from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import call, perform

pytest.importorskip("google.genai", reason="`make install` brings it")

from tests.calls.providers.gemini_double import gemini, response

USAGE = {
    "promptTokenCount": 1000,
    "cachedContentTokenCount": 600,
    "candidatesTokenCount": 30,
    "thoughtsTokenCount": 70,
    "totalTokenCount": 1100,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1000}],
}
CALLED = {"functionCall": {"name": "find_ship", "args": {"name": "ferry"}}, "thoughtSignature": "c2lnbmVk"}
THINKS_AND_CALLS = [
    response({"text": "A ship; ", "thought": True}, finish=None),
    response({"text": "look it up.", "thought": True}, finish=None),
    response({"text": "I look."}, CALLED, usage=USAGE),
]
TOOL = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "description": "Finds it.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": ["string", "null"]}},
            "additionalProperties": False,
        },
    },
}


def settings(base_url: str) -> GeminiSettings:
    return GeminiSettings(kind="gemini", base_url=base_url, api_key=SecretRef(env="PLANTED_KEY"))


async def stream(base_url: str, asked: Call) -> tuple[Answer, list[Chunk]]:
    chunks: list[Chunk] = []

    async def take(taken: Any) -> None:
        chunks.extend(taken)

    fields = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    answer = await perform(settings(base_url), Call(**{**fields, "streaming": Streaming(take, 5.0, 10.0)}))
    return answer, chunks


async def test_a_text_comes_whole_and_streamed_with_its_usage() -> None:
    parts = [response({"text": "Good "}, finish=None), response({"text": "day."}, usage=USAGE)]
    async with gemini(parts) as base_url:
        whole = await perform(settings(base_url), call(model="gemini-3-x"))
        answer, chunks = await stream(base_url, call(model="gemini-3-x"))
    for got in (whole, answer):
        assert got.output == "Good day."
        assert got.usage == Usage(1000, 100, 600, reasoning_tokens=70, model="gemini-3-x")
        assert got.finish_reason == "stop"
        assert got.response is not None
        assert got.response["object"] == "chat.completion"
    assert [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]] == [
        "Good ",
        "day.",
        None,
    ]


async def test_thinking_and_calls_come_back_and_go_out_again_with_their_signatures() -> None:
    seen: list[dict[str, Any]] = []
    async with gemini(THINKS_AND_CALLS, [response({"text": "At sea."})], seen=seen) as base_url:
        first = call(model="gemini-3-x", params={"tools": [TOOL], "reasoning_effort": "low"})
        whole = await perform(settings(base_url), first)
        message: Any = whole.output
        assert message["reasoning_content"] == "A ship; look it up."
        assert message["content"] == "I look."
        (made,) = message["tool_calls"]
        assert made["extra_content"] == {"google": {"thought_signature": "c2lnbmVk"}}
        assert whole.finish_reason == "tool_calls"
        made["id"] = "call_1"  # clients get one from us, as Gemini gives none
        result = {"role": "tool", "tool_call_id": made["id"], "content": '{"place": "at sea"}'}
        second = call(model="gemini-3-x", messages=[*first.messages, message, result], params=dict(first.params))
        assert (await perform(settings(base_url), second)).output == "At sea."
    assert seen[0]["generationConfig"]["thinkingConfig"] == {"thinkingLevel": "LOW", "includeThoughts": True}
    assert seen[0]["tools"] == [
        {
            "functionDeclarations": [
                {
                    "name": "find_ship",
                    "description": "Finds it.",
                    "parametersJsonSchema": TOOL["function"]["parameters"],
                }
            ]
        }
    ]
    assert seen[1]["contents"] == [
        {"role": "user", "parts": [{"text": "hello"}]},
        {
            "role": "model",
            "parts": [
                {"text": "I look."},
                {
                    "functionCall": {"id": made["id"], "name": "find_ship", "args": {"name": "ferry"}},
                    "thoughtSignature": "c2lnbmVk",
                },
            ],
        },
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": made["id"], "name": "find_ship", "response": {"place": "at sea"}}}],
        },
    ]


async def test_a_stream_has_thinking_text_and_calls_in_their_order() -> None:
    async with gemini(THINKS_AND_CALLS) as base_url:
        answer, chunks = await stream(base_url, call(model="gemini-3-x", params={"tools": [TOOL]}))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert [next(iter(delta.keys() - {"role"}), None) for delta in deltas] == [
        "reasoning_content",
        "reasoning_content",
        "content",
        "tool_calls",
        None,
    ]
    assert answer.finish_reason == "tool_calls"
    assert answer.usage.cached_tokens == 600
    message: Any = answer.output
    assert message["tool_calls"][0]["function"] == {"name": "find_ship", "arguments": '{"name":"ferry"}'}


async def test_two_calls_at_once_have_two_places() -> None:
    calls = [{"functionCall": {"name": "find_ship", "args": {"name": name}}} for name in ("a", "b")]
    async with gemini([response(calls[0], finish=None), response(calls[1])]) as base_url:
        for answer in (
            await perform(settings(base_url), call(params={"tools": [TOOL]})),
            (await stream(base_url, call(params={"tools": [TOOL]})))[0],
        ):
            message: Any = answer.output
            assert [made["function"]["arguments"] for made in message["tool_calls"]] == ['{"name":"a"}', '{"name":"b"}']


RATINGS = [
    {"category": "HARM_CATEGORY_DANGEROUS_CONTENT", "probability": "HIGH", "blocked": True},
    {"category": "HARM_CATEGORY_HARASSMENT", "probability": "NEGLIGIBLE"},
]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (response(finish="SAFETY", safetyRatings=RATINGS), "SAFETY; dangerous content (high)"),
        (response(finish="RECITATION", finishMessage="It quotes a song."), "RECITATION; It quotes a song."),
        (response(finish="PROHIBITED_CONTENT"), "PROHIBITED_CONTENT"),
        ({"promptFeedback": {"blockReason": "SAFETY", "safetyRatings": RATINGS}}, "SAFETY; dangerous content (high)"),
        ({"promptFeedback": {"blockReason": "BLOCKLIST"}}, "BLOCKLIST"),
    ],
)
async def test_a_block_is_a_failure_with_gemini_s_words(answer: Any, said: str) -> None:
    async with gemini([answer]) as base_url:
        errors: list[CallError] = []
        with pytest.raises(CallError) as caught:
            await perform(settings(base_url), call())
        errors.append(caught.value)
        with pytest.raises(CallError) as caught:
            await stream(base_url, call())
        errors.append(caught.value)
    for error in errors:
        assert isinstance(error.failure, EmptyAnswer)
        assert said in error.failure.message
        verdict = classify(error.failure, datetime.now(UTC))
        assert (verdict.class_name, verdict.retryable) == ("ContentFilteredError", False)


async def test_a_call_that_gemini_could_not_write_is_tried_again() -> None:
    async with gemini([response(finish="MALFORMED_FUNCTION_CALL", finishMessage="print(find_ship)")]) as base_url:
        with pytest.raises(CallError) as caught:
            await perform(settings(base_url), call(params={"tools": [TOOL]}))
    assert classify(caught.value.failure, datetime.now(UTC)).retryable


def _error(code: int, status: str, message: str, *details: dict[str, Any]) -> tuple[int, Any]:
    return code, {"error": {"code": code, "message": message, "status": status, "details": list(details)}}


RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "12s"}
PER_DAY = {
    "@type": "type.googleapis.com/google.rpc.QuotaFailure",
    "violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier", "quotaValue": "50"}],
}


@pytest.mark.parametrize(
    ("error", "kind", "class_name", "wait_s"),
    [
        (_error(429, "RESOURCE_EXHAUSTED", "Resource exhausted.", RETRY), "rate_limit", "RateLimitError", 12.0),
        (
            _error(429, "RESOURCE_EXHAUSTED", "You exceeded your quota.", PER_DAY, RETRY),
            "quota",
            "QuotaExceededError",
            None,
        ),
        (_error(503, "UNAVAILABLE", "The model is overloaded."), "server", "ServiceUnavailableError", None),
        (_error(504, "DEADLINE_EXCEEDED", "Deadline expired."), "server", "GatewayTimeoutError", None),
        (_error(500, "INTERNAL", "An internal error has occurred."), "server", "ServerError", None),
        (_error(400, "FAILED_PRECONDITION", "User location is not supported."), "client", "BadRequestError", None),
        (_error(403, "PERMISSION_DENIED", "Your API key was reported as leaked."), "client", "ForbiddenError", None),
        (_error(404, "NOT_FOUND", "models/x is not found for API version v1beta"), "client", "NotFoundError", None),
        (
            _error(
                400, "INVALID_ARGUMENT", "The input token count (1200000) exceeds the maximum number of tokens allowed"
            ),
            "context_overflow",
            "ContextOverflowError",
            None,
        ),
    ],
)
async def test_an_error_is_what_it_means(
    error: tuple[int, Any], kind: str, class_name: str, wait_s: float | None
) -> None:
    async with gemini(error) as base_url:
        with pytest.raises(CallError) as caught:
            await perform(settings(base_url), call())
        with pytest.raises(CallError) as of_stream:
            await stream(base_url, call())
    for failed in (caught.value, of_stream.value):
        verdict = classify(failed.failure, datetime.now(UTC))
        assert (verdict.kind, verdict.class_name, verdict.retry_after_s) == (kind, class_name, wait_s)


async def test_a_refused_key_is_refused() -> None:
    async with gemini([response({"text": "hi"})]) as base_url:
        chosen = GeminiSettings(kind="gemini", base_url=base_url)
        with pytest.raises(CallError) as caught:
            await perform(chosen, call())
    assert classify(caught.value.failure, datetime.now(UTC)).class_name == "UnauthorizedError"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("params", "model", "expected"),
    [
        (
            {"max_tokens": 100, "max_completion_tokens": 90, "temperature": 0.5, "top_p": 1, "top_k": 3, "seed": 7},
            "gemini-3-x",
            {"maxOutputTokens": 90, "temperature": 0.5, "topP": 1, "topK": 3, "seed": 7},
        ),
        ({"stop": "a"}, "m", {"stopSequences": ["a"]}),
        ({"stop": ["a", "b"], "n": 2}, "m", {"stopSequences": ["a", "b"], "candidateCount": 2}),
        ({"logprobs": True, "top_logprobs": 3}, "m", {"responseLogprobs": True, "logprobs": 3}),
        ({"presence_penalty": 0.1, "frequency_penalty": 0.2}, "m", {"presencePenalty": 0.1, "frequencyPenalty": 0.2}),
        ({"response_format": {"type": "json_object"}}, "m", {"responseMimeType": "application/json"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "m",
            {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA},
        ),
        ({"response_format": {"type": "text"}, "user": "u", "store": False}, "m", None),
        (
            {"reasoning_effort": "high"},
            "gemini-3-pro",
            {"thinkingConfig": {"thinkingLevel": "HIGH", "includeThoughts": True}},
        ),
        (
            {"reasoning_effort": "low"},
            "gemini-2.5-pro",
            {"thinkingConfig": {"thinkingBudget": 1024, "includeThoughts": True}},
        ),
        (
            {"reasoning_effort": "none"},
            "gemini-2.5-flash",
            {"thinkingConfig": {"thinkingBudget": 0, "includeThoughts": False}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "m",
            {"thinkingConfig": {"thinkingBudget": 2000, "includeThoughts": True}},
        ),
        *(
            (
                {"thinking": {"type": "enabled", "budget_tokens": 60_000}},
                model,
                {"thinkingConfig": {"thinkingBudget": most, "includeThoughts": True}},
            )
            for model, most in (("gemini-2.5-flash", 24_576), ("gemini-2.5-pro", 32_768))
        ),
        ({"thinking": {"type": "disabled"}}, "gemini-2.5-flash", {"thinkingConfig": {"thinkingBudget": 0}}),
        ({"thinking": {"type": "disabled"}}, "gemini-2.5-pro", None),
        ({"thinking": {"type": "disabled"}}, "gemini-3-pro", None),
        (
            {"reasoning_effort": "low", "thinking_config": {"include_thoughts": False}},
            "gemini-3-pro",
            {"thinkingConfig": {"thinkingLevel": "LOW", "includeThoughts": False}},
        ),
        ({"thinking_config": {"thinkingBudget": -1}}, "m", {"thinkingConfig": {"thinkingBudget": -1}}),
    ],
)
async def test_params_become_gemini_s(params: dict[str, Any], model: str, expected: Any) -> None:
    seen: list[dict[str, Any]] = []
    async with gemini([response({"text": "hi"})], seen=seen) as base_url:
        await perform(settings(base_url), call(model=model, params=params))
    assert seen[0].get("generationConfig") == expected


async def test_the_schema_of_an_agent_s_answers_goes_out() -> None:
    seen: list[dict[str, Any]] = []
    async with gemini([response({"text": '{"a": 1}'})], seen=seen) as base_url:
        await perform(settings(base_url), call(params={}, output_schema=SCHEMA))
    assert seen[0]["generationConfig"] == {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}


async def test_cached_content_and_safety_settings_are_gemini_s_own() -> None:
    seen: list[dict[str, Any]] = []
    safety = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_ONLY_HIGH"}]
    params = {"cached_content": "cachedContents/abc", "safety_settings": safety}
    async with gemini([response({"text": "hi"}, usage=USAGE)], seen=seen) as base_url:
        answer = await perform(settings(base_url), call(params=params))
    assert (seen[0]["cachedContent"], seen[0]["safetySettings"]) == ("cachedContents/abc", safety)
    assert answer.usage.cached_tokens == 600


def test_reads_from_the_cache_are_priced_as_such() -> None:
    config = parse_config("providers: {g: {kind: gemini}}\nagents: {a: {model: g/gemini-2.5-pro}}")
    pricing = pricing_of(config, "g", "g/gemini-2.5-pro") or pricing_of(config, "g", "gemini-2.5-pro")
    assert pricing is not None
    plain, cached = pricing.cost(Usage(1000, 100)), pricing.cost(Usage(1000, 100, 600))
    assert plain is not None
    assert cached is not None
    assert cached.nano < plain.nano


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}],
            [{"inlineData": {"mimeType": "image/png", "data": "QQ=="}}],
        ),
        (
            [{"type": "image_url", "image_url": "https://x/a.webp"}],
            [{"fileData": {"fileUri": "https://x/a.webp", "mimeType": "image/webp"}}],
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}}],
            [{"inlineData": {"mimeType": "audio/wav", "data": "QQ=="}}],
        ),
        (
            [{"type": "file", "file": {"file_data": "data:application/pdf;base64,QQ=="}}],
            [{"inlineData": {"mimeType": "application/pdf", "data": "QQ=="}}],
        ),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], [{"text": "a"}]),
    ],
)
async def test_files_of_a_message_become_parts(content: Any, parts: Any) -> None:
    seen: list[dict[str, Any]] = []
    async with gemini([response({"text": "hi"})], seen=seen) as base_url:
        await perform(settings(base_url), call(messages=[{"role": "user", "content": content}]))
    assert seen[0]["contents"] == [{"role": "user", "parts": parts}]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"params": {"audio": {"voice": "x"}}}, "audio"),
        ({"params": {"logit_bias": {"1": 2}}}, "logit_bias"),
        ({"params": {"tools": [{"type": "custom", "custom": {}}]}}, "tools"),
        ({"params": {"tools": [TOOL], "tool_choice": {"type": "odd"}}}, "tool_choice"),
        ({"params": {"response_format": {"type": "grammar"}}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png,xx"}]}]},
            "messages",
        ),
    ],
)
def test_what_gemini_lacks_is_refused_before_anything_is_sent(more: dict[str, Any], param: str) -> None:
    with pytest.raises(CallError) as caught:
        request_body(call(**more))
    assert isinstance(caught.value.failure, NotSent)
    assert caught.value.failure.param == param


@pytest.mark.parametrize(
    ("choice", "config"),
    [
        ("auto", {"mode": "AUTO"}),
        ("none", {"mode": "NONE"}),
        ("required", {"mode": "ANY"}),
        (
            {"type": "function", "function": {"name": "find_ship"}},
            {"mode": "ANY", "allowedFunctionNames": ["find_ship"]},
        ),
    ],
)
async def test_a_choice_of_tools_is_gemini_s(choice: Any, config: Any) -> None:
    seen: list[dict[str, Any]] = []
    async with gemini([response({"text": "hi"})], seen=seen) as base_url:
        await perform(settings(base_url), call(params={"tools": [TOOL], "tool_choice": choice}))
    assert seen[0]["toolConfig"] == {"functionCallingConfig": config}


def test_results_of_tools_are_objects_and_odd_arguments_none() -> None:
    call_fields = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call_fields]},
        {"role": "tool", "tool_call_id": "c1", "content": "it failed", "is_error": True},
        {"role": "tool", "tool_call_id": "c2", "content": "[1, 2]"},
    ]
    body = request_body(call(messages=messages, params={}))
    assert body == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "f", "args": {}}}]},
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "c1", "name": "f", "response": {"error": "it failed"}}},
                    {"functionResponse": {"id": "c2", "name": "c2", "response": {"result": [1, 2]}}},
                ],
            },
        ],
    }
    assert request_body(call(messages=messages[:1], params={})) == {
        "contents": [{"role": "user", "parts": [{"text": "Be brief."}]}]
    }


def test_params_without_a_counterpart_are_named() -> None:
    assert dropped_params({"user": "u", "store": None, "parallel_tool_calls": False, "seed": 1}) == [
        "parallel_tool_calls",
        "user",
    ]


async def test_a_stream_that_breaks_off_is_no_answer() -> None:
    async with gemini([response({"text": "Good "}, finish=None)]) as base_url:
        with pytest.raises(CallError, match="the stream ended early"):
            await stream(base_url, call())
