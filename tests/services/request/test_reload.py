"""The HTTP API goes over to another config while it answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.provision import provision
from breakwater.services.request.app import build
from tests.helpers import until
from tests.servers import RunningServer
from tests.services.request.conftest import CONFIG, calling, settings_for, until_ready

ADDED = CONFIG.replace("reader: {}", "reader: {}, later: {max_tokens: 7}")
TOKENS = "identity: {jwt: {issuer: us, audience: plane, jwks_url: 'http://127.0.0.1:9/'}}\n"
TOKEN = {"Authorization": "Bearer eyJhbGciOiJFUzI1NiJ9.e30.x"}
LINKS = "alerts: {links: {base_url: 'http://127.0.0.1:9', secret: {env: NOT_SET_ANYWHERE}}}\n"


async def test_a_request_that_waits_ends_and_the_next_one_knows_the_new_agents(
    own_nats_server: RunningServer, own_redis_server: RunningServer, tmp_path: Path
) -> None:
    config = parse_config(CONFIG + TOKENS)
    await provision(own_nats_server.url, bus_plan(config))
    settings = settings_for(own_nats_server.url, own_redis_server.url, tmp_path)
    key = create_key(settings.api_keys_file, "tests")
    service = build(settings, config)
    serving = asyncio.create_task(service.run())

    async def stop() -> None:
        service.stop()
        await serving

    try:
        async with calling(settings, key, stop) as api:
            await until_ready(api)
            waiting = asyncio.create_task(api.act("jobs?wait_s=1", agent="writer", prompt="x"))
            await until(lambda: _queued(api.queued), "the job to be queued")
            assert (await api.act("jobs", agent="later", prompt="x")).status == 404
            assert (await api.ask("GET", "/api/v1/key", headers=TOKEN)).code == "identity_unavailable"

            with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
                await service.reload(parse_config(ADDED + LINKS))
            assert (await api.act("jobs", agent="later", prompt="x")).status == 404

            added = parse_config(ADDED)
            await provision(own_nats_server.url, bus_plan(added))
            await service.reload(added)
            assert (await api.act("jobs", agent="later", prompt="x")).status == 202
            assert (await waiting).status == 202
            refused = await api.ask("GET", "/api/v1/key", headers=TOKEN)
            assert (refused.status, "are not accepted here" in refused.message) == (401, True)
            assert b'"later"' in (await api.ask("GET", "/api/v1/agents")).body
    finally:
        await stop()


async def _queued(count: object) -> bool:
    return bool(await count())  # type: ignore[operator]
