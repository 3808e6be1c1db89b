"""Vertex AI, against a double that checks tokens, paths and bodies before the simulated provider answers."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from breakwater.calls.providers.base import Call, CallError, Streaming
from breakwater.calls.providers.registry import GoogleAuth, VertexSettings
from breakwater.config import parse_config
from breakwater.config.load import missing_parts
from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.local.provider import SimulatedProvider
from tests.calls.providers.cloud_doubles import ServiceAccount, TokenIssuer, metadata_server, serving, vertex
from tests.calls.providers.kit import call, failure
from tests.flow.kit import model

pytest.importorskip("google.auth", reason="`make install` brings it")

# Google warns of credential files from strangers; ours come from the config.
pytestmark = pytest.mark.filterwarnings("ignore:The load_credentials_from_dict:DeprecationWarning")

THINKS: dict[str, Any] = {
    "turns": [
        [
            {"type": "thinking", "text": "A ship; look it up."},
            {"type": "tool_call", "name": "find_ship", "arguments": {"name": "ferry"}},
        ],
        [{"type": "thinking", "text": "It is known now."}, {"type": "text", "text": "The ferry is at sea."}],
    ]
}
TOOLS = [{"type": "function", "function": {"name": "find_ship", "parameters": {"type": "object", "properties": {}}}}]
MODELS = {
    "gemini-x": model(answer="hi from Gemini"),
    "claude-x@20260101": model(answer="hi from Claude"),
    "claude-thinks": {"price": model()["price"], "latency_ms": 1, **THINKS},
    "gemini-calls": model(tool_calls=[{"name": "find_ship", "arguments": {"name": "ferry"}}]),
}


@dataclass
class World:
    origin: str
    issuer: TokenIssuer
    sim: SimulatedProvider
    refused: list[str]

    def settings(self, **more: Any) -> VertexSettings:
        fields: dict[str, Any] = {"kind": "vertex", "project": "my-project", "location": "europe-west4"}
        return VertexSettings(base_url=self.origin, **fields, **more)


@asynccontextmanager
async def world(monkeypatch: pytest.MonkeyPatch, *, lifetime_s: float = 3600) -> AsyncGenerator[World]:
    """Vertex with a service account, whose key is in the environment."""
    issuer = TokenIssuer(lifetime_s)
    refused: list[str] = []
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(SimulatedProvider({"models": MODELS}))
        origin = await stack.enter_async_context(vertex(issuer, sim.url, refused))
        key = await stack.enter_async_context(ServiceAccount(issuer).serve())
        monkeypatch.setenv("GOOGLE_KEY", json.dumps(key))
        yield World(origin, issuer, sim, refused)


KEY = GoogleAuth(credentials=SecretRef(env="GOOGLE_KEY"))


async def stream(settings: VertexSettings, asked: Call) -> tuple[Any, list[Chunk]]:
    chunks: list[Chunk] = []

    async def take(taken: Any) -> None:
        chunks.extend(taken)

    provider = settings.open()
    fields = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    answer = await provider.perform(Call(**{**fields, "streaming": Streaming(take, 5.0, 10.0)}))
    await provider.close()
    return answer, chunks


async def test_each_publisher_is_called_by_its_own_api(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as here:
        provider = here.settings(auth=KEY).open()
        for name, text in (
            ("gemini-x", "hi from Gemini"),
            ("google/gemini-x", "hi from Gemini"),
            ("claude-x@20260101", "hi from Claude"),
            ("anthropic/claude-x@20260101", "hi from Claude"),
        ):
            assert (await provider.perform(call(model=name))).output == text
        await provider.close()
        assert not here.refused
        assert len(here.issuer.requests) == 1
        assert here.issuer.requests[0]["scope"] == "https://www.googleapis.com/auth/cloud-platform"
        for name in ("gemini-x", "claude-x@20260101"):
            answer, chunks = await stream(here.settings(auth=KEY), call(model=name))
            assert answer.output.startswith("hi from")
            assert answer.usage.input_tokens == 120
            assert len(chunks) > 1
        assert not here.refused


async def test_a_native_message_passes_as_it_is_and_thinking_and_tools_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Where is the ferry?"}],
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "find_ship", "input_schema": {"type": "object"}}],
    }
    native = {"model": "claude-thinks", "api": "messages", "native": body, "headers": {"anthropic-beta": "b-1"}}
    async with world(monkeypatch) as here:
        whole = await stream(here.settings(auth=KEY), call(**native))
        provider = here.settings(auth=KEY).open()
        answer = await provider.perform(call(**native))
        await provider.close()
        assert not here.refused
    assert answer.response is not None
    for blocks in (answer.response["content"], whole[0].response["content"]):
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
        assert blocks[0]["signature"]
    assert any("event" in chunk for chunk in whole[1])


async def test_a_chat_calls_tools_of_either_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as here:
        provider = here.settings(auth=KEY).open()
        for name in ("gemini-calls", "claude-thinks"):
            answer = await provider.perform(call(model=name, params={"max_tokens": 2000, "tools": TOOLS}))
            assert answer.output["tool_calls"][0]["function"]["name"] == "find_ship"
        await provider.close()
        assert not here.refused


async def test_an_effort_that_gemini_lacks_there_becomes_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as here:
        provider = here.settings(auth=KEY).open()
        for effort in ("none", "minimal", "high", "xhigh", "max"):
            await provider.perform(call(model="gemini-x", params={"reasoning_effort": effort}))
        await provider.close()
        assert not here.refused


async def test_a_token_that_was_revoked_is_fetched_again_and_one_that_ends_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch) as here:
        provider = here.settings(auth=KEY).open()
        await provider.perform(call(model="gemini-x"))
        here.issuer.revoke()
        with pytest.raises(CallError) as caught:
            await provider.perform(call(model="gemini-x"))
        assert caught.value.failure.status == 401  # pyright: ignore[reportAttributeAccessIssue]
        assert await provider.refresh_credential(caught.value.credential) is True
        assert (await provider.perform(call(model="gemini-x"))).output == "hi from Gemini"
        await provider.close()


async def test_the_metadata_server_of_a_machine_gives_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    async with world(monkeypatch) as here, metadata_server(here.issuer, monkeypatch):
        provider = here.settings().open()
        assert (await provider.perform(call(model="gemini-x"))).output == "hi from Gemini"
        await provider.close()


async def test_the_key_of_a_deployment_is_a_credential_file(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as here:
        one_key = here.settings().model_copy(update={"api_key": SecretRef(env="GOOGLE_KEY"), "auth": None})
        provider = one_key.open()
        for name in ("gemini-x", "claude-x@20260101"):
            await provider.perform(call(model=name))
        await provider.close()
        assert not here.refused


async def test_where_there_is_no_credential_the_failure_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    error = await failure(VertexSettings(kind="vertex", project="p", base_url="http://127.0.0.1:1"))
    assert "GOOGLE_APPLICATION_CREDENTIALS" in str(error)
    assert "metadata server" in str(error)
    assert not error.maybe_billed


async def test_a_credential_file_that_google_refuses_is_a_failure_without_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = ServiceAccount(TokenIssuer())
    other = ServiceAccount(TokenIssuer())
    async with account.serve() as key:
        monkeypatch.setenv("GOOGLE_KEY", json.dumps({**key, "private_key": other.pem}))
        chosen = VertexSettings(kind="vertex", project="p", base_url="http://127.0.0.1:1", auth=KEY)
        error = await failure(chosen)
        assert "invalid_grant" in str(error)
        assert "PRIVATE KEY" not in str(error)
        monkeypatch.setenv("GOOGLE_KEY", "not JSON")
        error = await failure(chosen)
        assert "the credential is not JSON" in str(error)


@pytest.mark.parametrize(
    ("location", "host"),
    [
        ("global", "https://aiplatform.googleapis.com"),
        ("europe-west4", "https://europe-west4-aiplatform.googleapis.com"),
        ("eu", "https://aiplatform.eu.rep.googleapis.com"),
    ],
)
def test_the_location_gives_the_endpoint(location: str, host: str) -> None:
    chosen = VertexSettings(kind="vertex", project="p", location=location)  # pyright: ignore[reportCallIssue]
    assert chosen.base_url == host
    assert VertexSettings.model_validate(chosen.model_dump()).base_url == host


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("", "p.project: is missing"),
        ("project: p, api_key: {env: A}", "p: Vertex takes no api_key"),
        ("project: p, location: Europe/West", "p.location: "),
        ("project: p, auth: {creds: x}", "p.auth.creds: is not a known setting"),
    ],
)
def test_a_mistake_is_named_by_its_place(fields: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"agents: {{a: {{model: p/m}}}}\nproviders:\n  p: {{kind: vertex, {fields}}}")
    assert f"providers.{problem}" in str(caught.value)


def test_apis_and_params_are_those_of_the_publisher() -> None:
    chosen = VertexSettings(kind="vertex", project="p")  # pyright: ignore[reportCallIssue]
    assert [chosen.apis_of(name) for name in ("claude-x", "gemini-x")] == [("chat", "messages"), ("chat",)]
    assert [chosen.api_kind(name) for name in ("anthropic/claude-x", "gemini-x")] == ["anthropic", "openai"]


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(ConfigError, match=r"install it with: pip install 'breakwater-plane\[gcp\]'"):
        VertexSettings(kind="vertex", project="p").open()  # pyright: ignore[reportCallIssue]
    config = parse_config("providers: {v: {kind: vertex, project: p}}\nagents: {a: {model: v/gemini-2.5-flash}}")
    assert "providers.v: the package google.auth is not installed" in str(missing_parts(config))


async def test_a_spent_quota_waits_as_long_as_google_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    from aiohttp import web

    from breakwater.calls.rules.classify import classify

    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "17s"}]
    body = {
        "error": {"code": 429, "message": "Resource exhausted.", "status": "RESOURCE_EXHAUSTED", "details": details}
    }

    async def busy(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=429)

    async with world(monkeypatch) as here, serving({"POST /{path:.*}": busy}) as origin:
        chosen = VertexSettings(kind="vertex", project="p", base_url=origin, auth=KEY)
        error = await failure(chosen, call(model="gemini-x"))
        assert here.issuer.requests
    verdict = classify(error.failure, datetime.now(UTC))
    assert (verdict.kind, verdict.retry_after_s) == ("rate_limit", 17.0)
