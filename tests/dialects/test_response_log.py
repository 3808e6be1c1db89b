"""The log of chunks: one writer at a time, and what is deleted stays deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock, patch

import orjson
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.dialects.store.response_log import DELETED, ResponseLog
from breakwater.kernel.nats.bodies import BodyReader, BodyReference
from breakwater.kernel.nats.errors import AlreadyDecidedError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.security.encryption import OFF
from tests.helpers import nats_client
from tests.servers import RunningServer

DAY = timedelta(days=1)
RESPONSE = StoredResponse(
    execution_id="j1", job_id="j1", agent="a", created_at=datetime(2026, 11, 27, tzinfo=UTC), body={"input": "Count."}
)


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, Plan(agents={"a": 1}))
    async with nats_client(own_nats_server.url) as client:
        yield client


def log_of(client: Client) -> ResponseLog:
    return ResponseLog(Publisher(lambda: client, "worker"), Lookup(lambda: client), OFF)


def message(number: int, text: str = "x") -> bytes:
    return orjson.dumps({"type": "chunks", "number": number, "chunks": [{"text": text}]})


async def test_a_writer_that_another_has_replaced_can_add_nothing(client: Client) -> None:
    old, new = log_of(client), log_of(client)
    first = await old.append("j1", message(1), 0)
    messages, last = await new.messages("j1", whole=True)
    assert (len(messages), last) == (1, first)
    second = await new.append("j1", message(2, "new"), last)
    with pytest.raises(AlreadyDecidedError):
        await old.append("j1", message(2, "old"), first)
    with pytest.raises(AlreadyDecidedError):
        await old.append("j1", message(1), 0)
    assert [one["chunks"] for one in (await new.messages("j1"))[0]] == [[{"text": "x"}], [{"text": "new"}]]
    assert await new.end("j1") == (2, second)


async def test_a_message_whose_acknowledgement_was_lost_is_added_once(client: Client) -> None:
    log = log_of(client)
    first = await log.append("j1", message(1), 0)
    assert await log.append("j1", message(1), 0) == first
    assert len((await log.messages("j1"))[0]) == 1


async def test_of_writers_that_race_one_adds_each_message(client: Client) -> None:
    logs = [log_of(client) for _ in range(10)]
    added = await asyncio.gather(
        *(log.append("j1", message(1, str(number)), 0) for number, log in enumerate(logs)), return_exceptions=True
    )
    assert sum(isinstance(one, int) for one in added) == 1
    assert all(isinstance(one, int | AlreadyDecidedError) for one in added)


async def test_messages_are_read_from_a_place_on(client: Client) -> None:
    log, last = log_of(client), 0
    assert await log.messages("j1", whole=True) == ([], 0)
    assert await log.end("j1") == (0, 0)
    middle = other = 0
    for number in (1, 2, 3):
        middle, last = last, await log.append("j1", message(number), last)
        other = await log.append("j2", message(number), other)
    assert [one["number"] for one in (await log.messages("j1", after=middle, whole=True))[0]] == [3]
    assert await log.messages("j1", after=last) == ([], last)


async def test_a_request_is_stored_once_and_found_with_others(client: Client) -> None:
    log = log_of(client)
    assert await log.find("j1") is None
    assert await log.keep(RESPONSE, private=False, lasts=DAY) == RESPONSE
    later = RESPONSE.model_copy(update={"body": {"input": "Other."}})
    assert await log.keep(later, private=False, lasts=DAY) == RESPONSE
    second = RESPONSE.model_copy(update={"execution_id": "j2"})
    await log.keep(second, private=False, lasts=DAY)
    assert await log.find("j1") == RESPONSE
    assert await log.find_all(("j1", "j2", "j3"), AsyncMock()) == {"j1": RESPONSE, "j2": second}


async def test_a_large_input_is_read_only_where_it_is_needed_and_once_there_is_room_for_it(client: Client) -> None:
    log = log_of(client)
    whole = RESPONSE.model_copy(update={"body": {"input": "x" * 5_000_000, "instructions": "Be brief."}})
    await log.keep(whole, private=False, lasts=DAY)
    steps: list[int | str] = []
    read = BodyReader.read

    async def spy(self: BodyReader, reference: BodyReference) -> bytes:
        steps.append("read")
        return await read(self, reference)

    async def take_room(size: int) -> None:
        steps.append(size)

    with patch.object(BodyReader, "read", spy):
        assert await log.find("j1") == RESPONSE.model_copy(update={"body": {"instructions": "Be brief."}})
        assert steps == []
        assert await log.find_all(("j1",), take_room) == {"j1": whole}
    assert steps == [len(whole.json_bytes()), "read"]


async def test_a_deleted_response_leaves_a_note_and_refuses_its_writer(client: Client) -> None:
    log = log_of(client)
    await log.keep(RESPONSE, private=False, lasts=DAY)
    last = await log.append("j1", message(1), 0)
    for _ in range(2):
        await log.delete(RESPONSE)
    assert await log.find("j1") is None
    assert (await log.keep(RESPONSE, private=False, lasts=DAY)).deleted
    assert [one["type"] for one in (await log.messages("j1"))[0]] == [DELETED]
    assert (await log.end("j1"))[0] == -1
    with pytest.raises(AlreadyDecidedError):
        await log.append("j1", message(2), last)
    info = await client.jetstream().stream_info("RESPONSES", subjects_filter=">")
    assert info.state.subjects == {"bw.responses.j1.request": 1, "bw.responses.j1.chunks": 1}


async def test_a_full_stream_drops_the_oldest_responses(own_nats_server: RunningServer, client: Client) -> None:
    del client
    small = Plan(agents={"a": 1}, max_bytes={"RESPONSES": 20_000})  # type: ignore[dict-item]
    await provision(own_nats_server.url, small)
    async with nats_client(own_nats_server.url) as other:
        log = log_of(other)
        for number in range(10):
            await log.append(f"j{number}", message(1, "x" * 5_000), 0)
        assert (await log.messages("j0"))[0] == []
        assert len((await log.messages("j9"))[0]) == 1


async def test_what_nats_does_not_acknowledge_may_be_added_again(
    own_nats_server: RunningServer, client: Client
) -> None:
    log = log_of(client)
    last = await log.append("j1", message(1), 0)
    own_nats_server.kill()
    with pytest.raises(BusUnavailableError):
        await log.append("j1", message(2), last)
    own_nats_server.restart()
    while True:
        try:
            await log.append("j1", message(2), last)
            break
        except BusUnavailableError:
            await asyncio.sleep(0.1)
    assert [one["number"] for one in (await log.messages("j1", whole=True))[0]] == [1, 2]
