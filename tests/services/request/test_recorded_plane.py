"""What unmodified programs have sent, replayed against a plane: to a provider of the same API, and to one of chats."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.local.provider import SimulatedProvider
from tests.calls.providers.kit import answering
from tests.dialects.test_recorded import EXPECTED
from tests.flow.kit import model
from tests.recorded import Recorded, recorded
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import running_worker

KINDS: dict[str, dict[str, Any]] = {
    "chat": {},
    "responses": {"api": "responses"},
    "messages": {"kind": "anthropic"},
}
"""Providers, by the API that they speak; each is an agent, too, and has one model."""
OWN = ("model", "stream", "store", "stream_options")
FORWARDED = ("content-type", "anthropic-version", "anthropic-beta")
SAID = "Done"
ENDS = {"responses": b"response.completed", "messages": b"message_stop", "chat/completions": b"[DONE]"}


@dataclass(frozen=True, slots=True)
class Replays:
    api: HttpApi
    sent: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Bodies that the providers got."""

    async def send(self, one: Recorded, agent: str) -> tuple[int, bytes]:
        """Sends a recorded request for an agent's model, and returns the answer."""
        self.sent.clear()
        body = {**one.body, "model": agent}
        async with self.api.http.post(self.api.url + one.path, json=body, headers=one.headers) as answer:
            return answer.status, await answer.read()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Replays]:
    directory = tmp_path_factory.mktemp("recorded")
    script = {"models": {f"of-{name}": model(answer=SAID) for name in KINDS}}
    sent: list[dict[str, Any]] = []
    async with SimulatedProvider(script) as sim, aiohttp.ClientSession() as forward:

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            sent.append(json.loads(body))
            headers = {name: value for name, value in request.headers.items() if name.lower() in FORWARDED}
            async with forward.post(sim.url.removesuffix("/v1") + request.path, data=body, headers=headers) as given:
                return web.Response(status=given.status, body=await given.read(), content_type=given.content_type)

        async with answering(answer) as origin:
            more = {name: {"base_url": f"{origin}/v1", **kind} for name, kind in KINDS.items()}
            agents = {
                name: {"model": f"{name}/of-{name}", "retry": {"max_attempts": 1}, "breaker": "off", "guard": "off"}
                for name in KINDS
            }
            started = running_worker(
                directory,
                nats_url=module_nats_server.url,
                redis_url=redis_server.url,
                script=script,
                agents=agents,
                more_providers=more,
            )
            async with started:
                settings = settings_for(module_nats_server.url, redis_server.url, directory)
                config = load_config(directory / "breakwater.yaml")
                async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
                    yield Replays(api, sent)


def door_of(one: Recorded) -> str:
    return one.path.removeprefix("/v1/").partition("?")[0]


ALL = [one for one in recorded() if "thread" not in one.body]
TRANSLATED = [one for one in ALL if one.name in EXPECTED]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
async def test_a_recorded_request_passes_unchanged_to_a_provider_of_its_api(plane: Replays, one: Recorded) -> None:
    door = door_of(one)
    status, answer = await plane.send(one, door.partition("/")[0])
    assert status == 200, answer
    assert SAID.encode() in answer
    assert ENDS[door] in answer
    [sent] = plane.sent
    expected = {name: value for name, value in one.body.items() if name not in OWN}
    assert {name: sent.get(name) for name in expected} == expected


@pytest.mark.parametrize("one", TRANSLATED, ids=lambda one: one.name)
async def test_a_recorded_request_is_translated_or_refused_for_the_field(plane: Replays, one: Recorded) -> None:
    door, (losses, _) = door_of(one), EXPECTED[one.name]
    for kind in KINDS.keys() - {door}:
        status, answer = await plane.send(one, kind)
        if losses:
            assert (status, plane.sent) == (400, [])
            assert losses[0] in answer.decode()
        else:
            assert status == 200, answer
            assert SAID.encode() in answer
            assert ENDS[door] in answer
