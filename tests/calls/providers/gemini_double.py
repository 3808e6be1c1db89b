"""Gemini's API as a double: checks requests and its own answers by the types of Google's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from google.genai import types
from pydantic import TypeAdapter, ValidationError

from tests.calls.providers.cloud_doubles import serving

KEY = "sk-planted-0123456789"
_PARTS: dict[str, Any] = {
    "contents": TypeAdapter(list[types.Content]),
    "systemInstruction": TypeAdapter(types.Content),
    "tools": TypeAdapter(list[types.Tool]),
    "toolConfig": TypeAdapter(types.ToolConfig),
    "generationConfig": TypeAdapter(types.GenerationConfig),
    "safetySettings": TypeAdapter(list[types.SafetySetting]),
    "cachedContent": TypeAdapter(str),
    "labels": TypeAdapter(dict[str, str]),
}


def _objection(body: dict[str, Any]) -> str | None:
    """Why Gemini refuses a body; None if it does not. The types of its SDK refuse fields that the API lacks."""
    for name, value in body.items():
        if name not in _PARTS:
            return f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.'
        try:
            _PARTS[name].validate_python(value)
        except ValidationError as error:
            return f"Invalid value at '{name}': {error.errors(include_url=False)[0]}"
    contents = body.get("contents") or []
    if not contents:
        return "contents is not specified"
    for content in contents:
        if not content["parts"] or content["role"] not in ("user", "model"):
            return "contents.parts must not be empty, and the role user or model"
        for part in content["parts"]:
            if len(part.keys() - {"thought", "thoughtSignature"}) != 1:
                return f"a part must have one initialized field: {sorted(part)}"
    calls = [part["functionCall"] for turn in contents for part in turn["parts"] if "functionCall" in part]
    results = [part["functionResponse"] for turn in contents for part in turn["parts"] if "functionResponse" in part]
    if [call["name"] for call in calls] != [result["name"] for result in results]:
        return (
            "Please ensure that the number of function response parts is equal to the number of function call parts "
            "of the function call turn."
        )
    return None


def part(**fields: Any) -> dict[str, Any]:
    return fields


def response(
    *parts: dict[str, Any], finish: str | None = "STOP", usage: dict[str, Any] | None = None, **more: Any
) -> Any:
    """A response of Gemini's with one candidate."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0, **more}
    if finish is not None:
        candidate["finishReason"] = finish
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": "gemini-3-x", "responseId": "resp-1"}
    return body if usage is None else {**body, "usageMetadata": usage}


@asynccontextmanager
async def gemini(
    *answers: Sequence[Any] | tuple[int, Any] | Callable[[dict[str, Any]], Sequence[Any]],
    seen: list[dict[str, Any]] | None = None,
) -> AsyncGenerator[str]:
    """Gemini with these answers in turn, each a list of responses, or a status and a body; gives its base URL.

    An answer may be a function that is given the request.

    A stream gets the responses as they are, any other call gets one of all their parts. The last answer is repeated.
    """
    given = list(answers)
    bodies = seen if seen is not None else []

    async def generate(request: web.Request) -> web.StreamResponse:
        if request.headers.get("x-goog-api-key") != KEY:
            error = {
                "code": 400,
                "message": "API key not valid. Please pass a valid API key.",
                "status": "INVALID_ARGUMENT",
            }
            return web.json_response({"error": error}, status=400)
        body = await request.json()
        bodies.append(body)
        if (text := _objection(body)) is not None:
            return web.json_response(
                {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}, status=400
            )
        answer: Any = given.pop(0) if len(given) > 1 else given[0]
        if callable(answer):
            answer = answer(body)
        if isinstance(answer, tuple):
            return web.json_response(answer[1], status=answer[0])
        for one in answer:
            types.GenerateContentResponse.model_validate(one)
        if request.match_info["operation"] == "generateContent":
            return web.json_response(_joined(answer))
        assert request.query["alt"] == "sse"
        streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await streamed.prepare(request)
        for one in answer:
            await streamed.write(f"data: {json.dumps(one)}\r\n\r\n".encode())
        return streamed

    async with serving({"POST /v1beta/models/{model}:{operation}": generate}) as origin:
        yield f"{origin}/v1beta"


def _joined(answer: Sequence[Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    parts: list[Any] = []
    for one in answer:
        for candidate in one.get("candidates", ()):
            parts += candidate.get("content", {}).get("parts", [])
        joined |= one
    if joined.get("candidates"):
        candidate = joined["candidates"][0]
        joined["candidates"] = [{**candidate, "content": {"role": "model", "parts": parts}}]
    return joined
