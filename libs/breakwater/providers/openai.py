"""Any OpenAI-compatible HTTP endpoint, over aiohttp: one request for each attempt, no retries of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal, cast

import aiohttp
import orjson
from pydantic import Field, JsonValue

from breakwater.policy.classify import BrokenAnswer, HttpFailure, TransportFailure
from breakwater.policy.price import Usage
from breakwater.providers.base import URL, Answer, Call, CallFailed, HttpSettings, Provider

MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ERROR_TEXT = 16_000
"""Cut only after redaction could see the whole; records cut it further."""


class OpenAISettings(HttpSettings):
    """Any OpenAI-compatible endpoint: OpenAI, Gemini's compatible one, vLLM, Ollama, OpenRouter and others."""

    kind: Literal["openai"] = "openai"
    base_url: str = Field(pattern=URL, description="Up to and including /v1.")

    def open(self) -> Provider:
        """Makes the provider. Raises ConfigError."""
        key = self.api_key.read() if self.api_key is not None else None
        return OpenAICompatible(self.base_url, api_key=key, headers=self.headers)


class OpenAICompatible:
    """Calls `<base_url>/chat/completions`.

    Args:
        base_url: up to and including `/v1`.
        api_key: sent as a bearer token; never logged, and in no error.
        headers: sent with every call.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"OpenAICompatible({self._url!r})"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # How many calls run at once is bounded by the agents' concurrency; a second limit here would hide it.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    async def perform(self, call: Call) -> Answer:
        """Makes the call once. Raises CallFailed."""
        body = _encode({**call.params, "model": call.model, "messages": call.messages})
        headers = {"X-Client-Request-Id": call.attempt_id}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        try:
            async with (
                asyncio.timeout(call.timeout_s),
                self._open().post(self._url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                status, reply_headers = response.status, response.headers
                payload = await response.content.read(MAX_ANSWER_BYTES + 1)
                while not response.content.at_eof() and len(payload) <= MAX_ANSWER_BYTES:
                    payload += await response.content.read(MAX_ANSWER_BYTES + 1 - len(payload))
        except TimeoutError as error:
            text = f"no answer within {call.timeout_s:g} s"
            raise CallFailed(TransportFailure("timeout", "TimeoutError", text), maybe_billed=True) from error
        except aiohttp.ClientConnectorError as error:
            # No connection, so no request left this process.
            raise CallFailed(_network(error), maybe_billed=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(_network(error), maybe_billed=True) from error
        if status != 200:
            raise CallFailed(_http_failure(status, payload, reply_headers), maybe_billed=False)
        return _answer(payload)

    async def refresh_credential(self, used: int | None) -> bool:  # noqa: ARG002
        """The key is read once."""
        return False

    async def close(self) -> None:
        """Closes idle connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()  # numbers beyond 64 bits are JSON, too


def _network(error: Exception) -> TransportFailure:
    name = type(error).__name__
    return TransportFailure("network", name if name.endswith("Error") else f"{name}Error", str(error) or name)


def _http_failure(status: int, payload: bytes, headers: Mapping[str, str]) -> HttpFailure:
    lowered = {name.lower(): value for name, value in headers.items()}
    message, code, kind = _error_of(payload) or (payload[:MAX_ERROR_TEXT].decode(errors="replace").strip(), None, None)
    return HttpFailure(status, message or f"HTTP {status} without a text", code, kind, lowered)


def _error_of(payload: bytes) -> tuple[str, str | None, str | None] | None:
    """Message, code and type of an error body in OpenAI's shape; None where it is none."""
    try:
        body: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    error: Any = cast(dict[str, Any], body).get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return error[:MAX_ERROR_TEXT], None, None
    if not isinstance(error, dict):
        return None
    fields = cast(dict[str, Any], error)
    message, code, kind = fields.get("message"), fields.get("code"), fields.get("type")
    return (
        str(message or code or kind or "an error without a text")[:MAX_ERROR_TEXT],
        None if code is None else str(code),
        None if kind is None else str(kind),
    )


def _answer(payload: bytes) -> Answer:
    if not payload.strip():
        raise _broken("the answer's body is empty")
    if len(payload) > MAX_ANSWER_BYTES:
        raise _broken(f"the answer is over {MAX_ANSWER_BYTES} bytes")
    try:
        body: Any = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise _broken(f"the answer is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _broken("the answer is not a JSON object")
    fields = cast(dict[str, Any], body)
    if fields.get("error"):
        found = _error_of(payload)
        raise _broken(f"a 200 that carries an error: {found[0] if found else 'of unknown shape'}")
    choices = fields.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _broken("the answer has no choices")
    first = cast(list[Any], choices)[0]
    message = cast(dict[str, Any], first).get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict):
        raise _broken("the answer's first choice has no message")
    return Answer(_output(cast(dict[str, JsonValue], message)), _usage(fields.get("usage")))


def _output(message: dict[str, JsonValue]) -> JsonValue:
    content = message.get("content")
    return content if isinstance(content, str) and not message.get("tool_calls") else message


def _usage(reported: Any) -> Usage:
    if not isinstance(reported, dict):
        return Usage(None, None)
    fields = cast(dict[str, Any], reported)
    details = fields.get("prompt_tokens_details")
    cached = cast(dict[str, Any], details).get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(fields.get("prompt_tokens")), _count(fields.get("completion_tokens")), _count(cached))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _broken(text: str) -> CallFailed:
    # A model ran and gave something: its provider may well bill for it.
    return CallFailed(BrokenAnswer(text), maybe_billed=True)
