"""Answers whoever wants to see a channel work: sends it a test message, and says what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from uuid import uuid4

from breakwater.bus.errors import BusError
from breakwater.contracts.alerts import Alert, ChannelTest
from breakwater.contracts.subjects import decode_token
from services.alerter.channel import Channel, SendError
from services.alerter.channels import TEST
from services.alerter.notes import Gone

PATIENCE_S = 15.0
"""Whoever asks waits for 20 s."""


class Trial:
    """Test messages to channels. They are sent at once, whatever waits, and by whichever alerter is asked."""

    def __init__(self, channels: Mapping[str, Channel], gone: Mapping[str, Gone], now: Callable[[], datetime]) -> None:
        self._channels, self._gone, self._now = channels, gone, now

    async def answer(self, subject: str) -> bytes:
        """Sends the test message that a subject asks for, and answers with a ChannelTest."""
        name = decode_token(subject.rpartition(".")[2])
        channel = self._channels.get(name)
        if channel is None:
            error = "the alerter's config has no such channel; it may have to be restarted"
            return ChannelTest(channel=name, delivered=False, error=error).json_bytes()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await channel.send(test_alert(name, self._now()))
            # A receiver that was gone is back.
            if await self._gone[name].now():
                await self._gone[name].note(False)
        except TimeoutError:
            error = f"no answer within {PATIENCE_S:g} s; perhaps it arrives all the same"
            return ChannelTest(channel=name, delivered=False, error=error).json_bytes()
        except (SendError, BusError) as error:
            return ChannelTest(channel=name, delivered=False, error=str(error)).json_bytes()
        return ChannelTest(channel=name, delivered=True).json_bytes()


def test_alert(channel: str, at: datetime) -> Alert:
    """What a test looks like: an alert that says that nothing is wrong."""
    identity = f"{TEST}{uuid4().hex}"
    return Alert(
        alert_id=identity,
        incident_id=identity,
        key=f"agent_anomaly/{identity}",
        change="opened",
        status="firing",
        event="agent_anomaly",
        severity="info",
        title=f"Test of channel {channel}",
        text="Somebody wants to know whether alerts arrive here. They do. Nothing is wrong, and nothing to do.",
        payload={"test": True},
        count=1,
        version=1,
        opened_at=at,
        last_at=at,
        source_id=identity,
        at=at,
    )
