"""Many requests at once on one subscription: each has its own reply, or its own error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import nats
import nats.errors
import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.nats.publisher import Replies
from tests.servers import RunningServer


async def test_each_has_its_own_reply_and_who_gets_none_waits_for_its_own_time(own_nats_server: RunningServer) -> None:
    client, replies = await nats.connect(own_nats_server.url), Replies()
    received: list[Msg] = []

    async def answer_all_but_the_third(message: Msg) -> None:
        received.append(message)
        if len(received) == 5:  # the last first
            for one in reversed(received):
                if one.data != b"2":
                    await one.respond(one.data)

    await client.subscribe("echo", cb=answer_all_but_the_third)
    loop = asyncio.get_running_loop()
    began = loop.time()
    asked = [replies.ask(client, "echo", b"%d" % number, 0.3 if number == 2 else 30.0) for number in range(5)]
    nobody = replies.ask(client, "nobody", b"", 30.0)
    *found, unheard = await asyncio.gather(*asked, nobody, return_exceptions=True)
    assert [one.data if isinstance(one, Msg) else type(one) for one in found] == [b"0", b"1", TimeoutError, b"3", b"4"]
    assert isinstance(unheard, nats.errors.NoRespondersError)
    assert 0.3 <= loop.time() - began < 20
    await client.close()


async def test_who_asks_later_for_less_time_is_not_kept_waiting(own_nats_server: RunningServer) -> None:
    client, replies = await nats.connect(own_nats_server.url), Replies()
    await client.subscribe("silence")
    patient = asyncio.create_task(replies.ask(client, "silence", b"", 60.0))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await replies.ask(client, "silence", b"", 0.05)
    assert not patient.done()
    patient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patient
    await client.close()


class _DeafServer:
    """A client of NATS whose server replies to nothing."""

    is_connected = is_closed = is_draining = False
    _status = Client.DISCONNECTED

    def __init__(self) -> None:
        self._sid = self._pending_data_size = 0
        self._subs: dict[int, Any] = {}
        self._pending: list[bytes] = []
        self._ps = SimpleNamespace()

    def new_inbox(self) -> str:
        return "inbox"

    async def publish(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_that_are_due_at_once_time_out_on_each_event_loop(loop_factory: Any) -> None:
    async def ask_all() -> list[Any]:
        client, replies = _DeafServer(), Replies()
        timeouts_s = [-1.0, 0.0, 0.0001, 0.0004, 0.0006, 0.002, 0.0, -1.0, 0.03, 0.0301, 0.0302, 0.0303]
        asked = [replies.ask(client, "nobody", b"", timeout_s) for timeout_s in timeouts_s]  # type: ignore[arg-type]
        return await asyncio.gather(*asked, return_exceptions=True)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        found = runner.run(asyncio.wait_for(ask_all(), 10))
    assert {type(answer) for answer in found} == {TimeoutError}
