"""What the tests of providers share: calls, settings, and servers that answer as no good one would."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Answer, Call, CallError
from breakwater.calls.providers.registry import AnthropicSettings, AzureSettings, OpenAISettings
from breakwater.calls.providers.settings import HttpSettings
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

KEY = "sk-planted-0123456789"
KINDS = ("openai", "azure", "anthropic")


def call(**more: Any) -> Call:
    fields: dict[str, Any] = {
        "attempt_id": "j:1",
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "params": {"max_tokens": 100},
        "timeout_s": 60.0,
    }
    return Call(**(fields | more))


def settings(kind: str, origin: str, **more: Any) -> HttpSettings:
    """Settings of one kind for a server at `origin`, with the planted key from the environment."""
    fields: dict[str, Any] = {"api_key": SecretRef(env="PLANTED_KEY"), **more}
    match kind:
        case "openai":
            return OpenAISettings(base_url=f"{origin}/v1", **fields)
        case "azure":
            return AzureSettings(kind="azure", base_url=origin, **fields)
        case _:
            return AnthropicSettings(kind="anthropic", base_url=f"{origin}/v1", **fields)


async def perform(
    chosen: HttpSettings, asked: Call | None = None, redaction: RedactionRules = DEFAULT_REDACTION
) -> Answer:
    """One call, and nothing left open."""
    provider = chosen.open(redaction)
    try:
        return await provider.perform(asked or call())
    finally:
        await provider.close()


async def failure(chosen: HttpSettings, asked: Call | None = None) -> CallError:
    """The failure of a call; the planted key stands nowhere in it."""
    with pytest.raises(CallError) as caught:
        await perform(chosen, asked)
    reported = "".join((*traceback.format_exception(caught.value), repr(caught.value), repr(caught.value.failure)))
    assert KEY not in reported
    return caught.value


@asynccontextmanager
async def answering(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncGenerator[str]:
    """A server that answers every request so; gives its origin."""
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def saying(body: Any, status: int = 200, **headers: str) -> AsyncGenerator[str]:
    """A server that gives one answer, JSON or bytes; gives its origin."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    async with answering(answer) as origin:
        yield origin


@asynccontextmanager
async def silent() -> AsyncGenerator[int]:
    """A server that takes connections and never says anything; gives its port."""
    done = asyncio.Event()

    async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        done.set()
        server.close()
        await server.wait_closed()


def local_call(**more: Any) -> Call:
    """A call of a program or a callable."""
    fields: dict[str, Any] = {
        "attempt_id": "j:1",
        "model": "m",
        "messages": [],
        "params": {},
        "timeout_s": 20.0,
        "execution_id": "j",
        "job_id": "j",
        "input": {"question": "why"},
    }
    return Call(**(fields | more))
