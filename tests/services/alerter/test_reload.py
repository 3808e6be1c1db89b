"""The alerter goes over to other channels while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from breakwater.config import Config
from breakwater.config.servers import bus_plan
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.process.settings import Settings
from breakwater.services.alerter.app import build
from tests.helpers import until
from tests.servers import RunningServer
from tests.services.alerter.kit import Receiver, bus_of, config_of, opened


def to(receiver: Receiver, channel: str = "ops", secret: str = "HOOK_SECRET") -> Config:
    hook: dict[str, Any] = {"url": receiver.url, "secret": {"env": secret}}
    return config_of(allow_networks=["127.0.0.0/8"], channels={channel: {"webhook": hook}})


async def test_alerts_go_where_the_config_says_from_then_on(own_nats_server: RunningServer, receiver: Receiver) -> None:
    await receiver.start()
    other = await Receiver().start()
    try:
        async with bus_of(own_nats_server.url, to(receiver)) as bus:
            app = build(Settings(nats_url=SecretStr(bus.url)), to(receiver))
            await app.start()
            try:
                await bus.publish(opened())
                await until(lambda: receiver.seen, "the first receiver to be notified")

                with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
                    await app.reload(to(other, secret="NOT_SET_ANYWHERE"))
                await provision(bus.url, bus_plan(to(other, "others")))
                await app.reload(to(other, "others"))
                await bus.publish(opened(model="gpt-5", transition_id="writer/gpt-5#7.1"))
                await until(lambda: other.seen, "the other receiver to be notified")
                assert other.seen[0].verified()["data"]["model"] == "gpt-5"
                assert len(receiver.seen) == 1
            finally:
                await app.stop()
    finally:
        await other.stop()
