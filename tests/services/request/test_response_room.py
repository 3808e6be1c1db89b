"""RESPONSES near its limit: one caller's flood is its own, and what is under way is not what falls out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats.subjects import Stream
from tests.flow.kit import PLANE_KEY, model
from tests.helpers import until
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import running, settings_for
from tests.services.worker.harness import running_worker

ANSWER = "".join(f"{number:03d} " for number in range(40))
MIB = 1024**2
LIMIT = 4 * MIB
MODELS = {
    "sim/m": model(answer=ANSWER),
    "sim/stalled": model({"stream": "stall", "after_chunks": 10, "stall_s": 60}, answer=ANSWER),
}
AGENTS: dict[str, Any] = {
    "writer": {"model": "sim/m"},
    "stalled": {"model": "sim/stalled", "stream_idle_timeout_s": 60},
}


async def test_a_flood_of_one_caller_costs_no_other_a_response(
    own_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path
) -> None:
    started = running_worker(
        tmp_path,
        nats_url=own_nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        limits={"responses_max_bytes": LIMIT},
    )
    async with started as worker:
        settings = settings_for(own_nats_server.url, redis_server.url, tmp_path)
        settings = settings.model_copy(update={"plane_key": SecretStr(PLANE_KEY)})
        key = create_key(settings.api_keys_file, "tests")
        async with running(settings, load_config(tmp_path / "breakwater.yaml"), key) as api:

            def sdk(name: str) -> Any:
                own = create_key(settings.api_keys_file, name, ("submit",))
                return openai_client(f"{api.url}/v1", own, max_retries=0)

            victim, flooder = sdk("victim"), sdk("flooder")
            created = await victim.responses.create(model="stalled", input="Count.", background=True)

            async def begun() -> bool:
                return (await victim.responses.retrieve(created.id)).status == "in_progress"

            await until(begun, "the call")
            large = "x" * (MIB // 4)
            for _ in range(3):
                await flooder.responses.create(model="writer", input=large, background=True)
            with pytest.raises(openai.RateLimitError, match=r"its share of 1048576 bytes.*limits\.responses_max_bytes"):
                await flooder.responses.create(model="writer", input=large, background=True)
            # Without a stored answer there is always room; one that is to be stored is answered, and not found later.
            for _ in range(20):
                answered = await flooder.responses.create(model="writer", input=large)
                assert answered.output_text == ANSWER
            with pytest.raises(openai.NotFoundError):
                await flooder.responses.retrieve(answered.id)
            # Many callers together are refused, too, before anything that is under way falls out.
            for number in range(2):
                await worker.worker.room.take(f"k{number}", MIB - 1, LIMIT)
            with pytest.raises(openai.InternalServerError, match="background responses are under way"):
                await sdk("another").responses.create(model="writer", input=large, background=True)
            info = await worker.jetstream.stream_info(Stream.RESPONSES.value)
            assert info.state.first_seq == 1
            assert (await victim.responses.retrieve(created.id)).status == "in_progress"
            assert (await victim.responses.cancel(created.id)).status == "cancelled"
            # The first one has ended, and so does what it kept from being dropped.
            await sdk("another").responses.create(model="writer", input=large, background=True)
            calls = [call for call in worker.sim.ledger.calls if call.model == "stalled"]
            assert len(calls) <= 1
