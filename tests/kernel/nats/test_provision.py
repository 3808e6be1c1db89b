from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext

import nats
import pytest
import pytest_asyncio
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, StreamInfo
from nats.js.errors import BadRequestError, NoStreamResponseError, ServiceUnavailableError

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.provision import NO_PEERS, TRIES, provision
from breakwater.kernel.nats.topology import Plan, alert_consumer, worker_consumer
from breakwater.local.ports import free_port
from tests.servers import RunningServer

PLAN = Plan(agents={"writer": 8, "an-agent/with.odd*name": 2}, alert_channels=("slack",))


@pytest_asyncio.fixture
async def jetstream(own_nats_server: RunningServer) -> AsyncGenerator[JetStreamContext]:
    client = await nats.connect(own_nats_server.url)
    yield client.jetstream()
    await client.close()


async def test_what_is_missing_is_made_and_then_nothing_is_left_to_do(own_nats_server: RunningServer) -> None:
    done = await provision(own_nats_server.url, PLAN)
    assert "created stream JOBS" in done
    assert "created consumer worker-writer" in done
    # The first of two servers is away.
    both = own_nats_server.url.replace("nats://", f"nats://127.0.0.1:{free_port()},")
    assert await provision(both, PLAN) == ()


async def test_a_changed_plan_changes_what_differs_and_nothing_else(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    changed = Plan(agents={**PLAN.agents, "writer": 3}, alert_channels=("slack",), events_max_age_h=1)
    done = await provision(own_nats_server.url, changed)
    assert done == (
        "updated stream EVENTS (max_age, duplicate_window)",
        "updated consumer worker-writer (max_ack_pending)",
    )
    info = await jetstream.consumer_info("JOBS", worker_consumer("writer"))
    assert info.config.max_ack_pending == 3


async def test_publishing_to_an_agent_that_is_not_configured_fails_at_once(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    await jetstream.publish(subjects.job("an-agent/with.odd*name"), b"{}")
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish(subjects.job("nobody"), b"{}")


async def test_an_agent_that_is_gone_loses_its_subject_once_none_of_its_jobs_wait(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    await jetstream.publish(subjects.job("writer"), b"{}")
    without = Plan(agents={"an-agent/with.odd*name": 2}, alert_channels=("slack",))
    assert await provision(own_nats_server.url, without) == ()
    subscription = await jetstream.pull_subscribe_bind(worker_consumer("writer"), "JOBS")
    [job] = await subscription.fetch(1, timeout=60)
    await job.ack_sync()
    assert await provision(own_nats_server.url, without) == ("updated stream JOBS (subjects)",)
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish(subjects.job("writer"), b"{}")


async def test_a_new_channel_gets_a_consumer_of_its_own_whatever_its_name(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    more = Plan(agents=PLAN.agents, alert_channels=("slack", "on call"))
    assert await provision(own_nats_server.url, more) == ("created consumer alerter-channel-on%20call",)
    await jetstream.publish(subjects.alert("breaker_open"), b"kept")
    for channel in more.alert_channels:
        subscription = await jetstream.pull_subscribe_bind(alert_consumer(channel), "ALERTS")
        [alert] = await subscription.fetch(1, timeout=60)
        assert alert.data == b"kept"


async def test_the_alerters_stream_keeps_the_last_note_on_each_subject(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    for note in (b"one", b"two"):
        await jetstream.publish(subjects.disabled_channel("a-channel/with.odd*name"), note)
        await jetstream.publish(subjects.ALERTER_LEADER, note)
    assert (await jetstream.stream_info("ALERTER")).state.messages == 2
    # A test message is answered by an alerter, and not by a stream.
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish(subjects.channel_test("ops"), b"")


async def test_a_full_queue_refuses_and_drops_nothing(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    config = (await jetstream.stream_info("JOBS")).config
    assert config.retention == "workqueue"
    assert config.discard == "new"


async def test_jobs_that_sleep_are_no_reason_to_touch_their_stream(
    own_nats_server: RunningServer, jetstream: JetStreamContext
) -> None:
    await provision(own_nats_server.url, PLAN)
    await jetstream.publish(subjects.parked("writer", "e1"), b"{}")
    assert await provision(own_nats_server.url, Plan(agents={"writer": 8}, alert_channels=("slack",))) == (
        "updated stream JOBS (subjects)",
    )
    config = (await jetstream.stream_info("PARKED")).config
    assert config.subjects == ["bw.parked.*.*", "bw-filler.PARKED"]
    assert (config.retention, config.discard) == ("workqueue", "new")


@asynccontextmanager
async def losing(nats_url: str, mark: bytes, times: int) -> AsyncGenerator[str]:
    """A way to the server on which what holds `mark` is lost, so many times."""
    _, _, address = nats_url.rpartition("@" if "@" in nats_url else "//")
    host, port = address.split(":")
    left = times

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there, onward = await asyncio.open_connection(host, int(port))

        async def back() -> None:
            while chunk := await there.read(65536):
                writer.write(chunk)
            writer.close()

        answers = asyncio.create_task(back())
        while chunk := await reader.read(65536):
            if mark in chunk and left:
                left -= 1
            else:
                onward.write(chunk)
        onward.close()
        await answers

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield nats_url.replace(address, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_request_without_an_answer_is_made_again(own_nats_server: RunningServer) -> None:
    async with losing(own_nats_server.url, b"STREAM.CREATE.EVENTS", times=2) as url:
        assert "created stream EVENTS" in await provision(url, PLAN, answer_s=0.5)
    assert await provision(own_nats_server.url, PLAN) == ()


@pytest.mark.parametrize(("code", "asked"), [(NO_PEERS, 2), (10052, 1)])
async def test_nodes_that_are_not_there_yet_are_waited_for(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch, code: int, asked: int
) -> None:
    refusal = BadRequestError(code=400, err_code=code, description="peer offline")
    add_stream, streams = JetStreamContext.add_stream, list[str]()

    async def once_refused(self: JetStreamContext, config: StreamConfig) -> StreamInfo:
        streams.append(config.name or "")
        if len(streams) == 1:
            raise refusal
        return await add_stream(self, config)

    monkeypatch.setattr(JetStreamContext, "add_stream", once_refused)
    with nullcontext() if asked == 2 else pytest.raises(BusError, match="stream JOBS: refused by NATS: peer offline"):
        await provision(own_nats_server.url, Plan(agents={"writer": 1}))
    assert streams.count("JOBS") == asked


async def test_what_is_then_not_answered_is_still_asked_for_a_few_times_only(
    own_nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = BadRequestError(code=400, err_code=NO_PEERS, description="peer offline")
    outcomes = [*(refusal for _ in range(TRIES)), *(ServiceUnavailableError(code=503) for _ in range(TRIES))]

    async def failing(_: JetStreamContext, config: StreamConfig) -> StreamInfo:
        raise outcomes.pop(0)

    monkeypatch.setattr(JetStreamContext, "add_stream", failing)
    with pytest.raises(BusError, match=f"after {TRIES} requests"):
        await provision(own_nats_server.url, PLAN)
    assert outcomes == []


async def test_a_server_that_never_answers_is_named_with_what_was_asked(own_nats_server: RunningServer) -> None:
    async with losing(own_nats_server.url, b"STREAM.CREATE.EVENTS", times=100) as url:
        with pytest.raises(BusError, match=r"stream EVENTS: no response from NATS"):
            await provision(url, PLAN, answer_s=0.1)
