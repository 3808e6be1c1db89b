"""Limits that one process changes, and the calls of others that know older ones."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.js.api import StreamConfig

from breakwater.config import LiveConfig, parse_config
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import LIMIT_SETTINGS, Stream
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.contract import LimitSettings
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.limit_changes import Author, set_limit
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED, Budgets, LimitsChanged, OverRate, Reserved
from tests.server_sources import RunningServer
from tests.tables import each_row

ZONE = ZoneInfo("UTC")
NAMES = CallNames("writer", key="bot")
CONFIG = "providers: {sim: {base_url: http://127.0.0.1:1}}\nagents: {writer: {model: sim/m}}"


class Worker:
    """The limits of a worker, which hears no notices and reads on only when it must."""

    def __init__(self, client: Client, redis: Redis) -> None:
        self.live = LiveConfig(parse_config(CONFIG))
        self.log = LimitLog(lambda: client, Publisher(lambda: client, "test"))
        self.log.feed(self.live.change_limits)
        self.budgets = Budgets(redis, ZONE)
        self.counters = BudgetCounters(redis, ZONE)
        self.redis = redis
        self.read_on = 0

    async def set(self, limit_id: str, requests: int) -> None:
        """Sets a limit, as the API does."""
        settings = LimitSettings(scope="key:bot", requests=requests, per="minute")
        author = Author(limit_id, "tests", None, datetime.now(UTC))
        await self.log.change(lambda: set_limit(limit_id, settings, self.log.states.get(limit_id), author), limit_id)
        await self.counters.note_limits(self.log.version)

    async def ask(self, attempt_id: str) -> Reserved | OverRate:
        """Asks for a call, and again under newer limits."""
        while True:
            table, at = self.live.limits(), datetime.now(UTC)
            counters, rates = table.counters(NAMES), table.rate_limits(NAMES)
            command = self.budgets.reserve_command(
                attempt_id, NAMES, 0, counters, now=at, lease_ms=60_000, rates=rates, version=table.version
            )
            [raw] = await self.redis.run([command])
            answer = self.budgets.read_reservation(raw, counters, 0, now=at, rates=rates)
            if not isinstance(answer, LimitsChanged):
                assert isinstance(answer, Reserved | OverRate)
                return answer
            self.read_on += 1
            await self.log.read_on(table.version, answer.version, self.counters)


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    client = await nats.connect(own_nats_server.url)
    await client.jetstream().add_stream(_stream())
    yield client
    await client.close()


def _stream() -> StreamConfig:
    return StreamConfig(
        Stream.LIMITS.value, subjects=[LIMIT_SETTINGS], max_msgs_per_subject=1, allow_direct=True, allow_msg_ttl=True
    )


async def workers(client: Client, redis: Redis) -> tuple[Worker, Worker, Worker]:
    await redis.client.flushall()
    every = Worker(client, redis), Worker(client, redis), Worker(client, redis)
    for worker in every:
        await worker.log.catch_up()
    return every


async def test_once_a_limit_is_set_no_worker_admits_a_call_under_an_older_one(client: Client, redis: Redis) -> None:
    api, first, second = await workers(client, redis)
    assert isinstance(await first.ask("before"), Reserved)
    await api.set("bot", 2)
    asked = [await worker.ask(f"j{number}") for number, worker in enumerate((first, second, first))]
    assert [isinstance(answer, Reserved) for answer in asked] == [True, True, False]
    assert (first.read_on, second.read_on) == (2, 1), "the first call found that nothing was noted yet"
    await api.set("bot", 3)
    assert isinstance(await second.ask("j3"), Reserved)
    assert isinstance(await first.ask("j4"), OverRate)


def record_of(settings: dict[str, Any]) -> dict[str, Any]:
    """A limit of a later version, which this one can't read."""
    limit = LimitSettings(scope="key:bot", requests=1, per="minute")
    record = set_limit("bot", limit, None, Author("later", "tests", None, datetime.now(UTC)))
    document = json.loads(record.json_bytes())
    return document | {"limit": document["limit"] | settings}


ALL = CallNames("writer"), CallNames("writer", key="bot"), CallNames("writer", key="bot", user="ann")
"""The names of three calls."""


@each_row(
    ("later", "kept_waiting"),
    [
        pytest.param(record_of({"burst": 2}), (False, True, True), id="its scope is readable"),
        pytest.param(
            record_of({"scope": "user:* within key:bot", "burst": 2}), (False, False, True), id="of each name"
        ),
        pytest.param(record_of({"scope": "region:eu"}), (True, True, True), id="a scope that this version lacks"),
        pytest.param(record_of({"scope": 7}), (True, True, True), id="no scope"),
        pytest.param(b"{", (True, True, True), id="no JSON"),
        pytest.param([1], (True, True, True), id="no record"),
        pytest.param({"limit": None, "raises": 7}, (False, False, False), id="a raise of a limit of the config"),
    ],
)
async def test_a_limit_that_is_not_readable_keeps_the_calls_waiting_that_it_may_hold_for(
    client: Client, redis: Redis, later: Any, kept_waiting: tuple[bool, ...]
) -> None:
    await client.jetstream().purge_stream(Stream.LIMITS.value)
    api, worker, _ = await workers(client, redis)
    await api.set("other", 1)
    await client.jetstream().publish(
        "bw.limit-settings.later", later if isinstance(later, bytes) else json.dumps(later).encode()
    )
    await worker.log.catch_up()
    table = worker.live.limits()
    assert tuple(table.unreadable_limit(names) == "later" for names in ALL) == kept_waiting
    assert set(table.plane_limits.limits) == {"other"}, "the others count"
    await client.jetstream().publish("bw.limit-settings.later", json.dumps(record_of({})).encode())
    await worker.log.catch_up()
    assert not any(map(worker.live.limits().unreadable_limit, ALL))


async def test_a_limit_that_is_readable_no_more_keeps_its_scope(client: Client, redis: Redis) -> None:
    api, worker, _ = await workers(client, redis)
    await api.set("bot", 1)
    await worker.log.catch_up()
    for document in (b"{", b"7"):
        await client.jetstream().publish("bw.limit-settings.bot", document)
        await worker.log.catch_up()
        assert [worker.live.limits().unreadable_limit(names) for names in ALL] == [None, "bot", "bot"]
        assert not worker.live.limits().plane_limits.limits


async def test_a_redis_that_was_emptied_learns_the_version_from_the_stream(client: Client, redis: Redis) -> None:
    api, first, second = await workers(client, redis)
    await api.set("bot", 1)
    await redis.client.flushall()
    assert isinstance(await first.ask("a"), Reserved)
    assert await redis.client.hget(FILLED, "limits") == api.log.version  # type: ignore[misc]
    assert isinstance(await second.ask("b"), OverRate)


async def test_a_stream_that_was_made_anew_or_restored_is_right(client: Client, redis: Redis) -> None:
    api, first, second = await workers(client, redis)
    for requests in (1, 2, 1):
        await api.set("bot", requests)
    assert isinstance(await first.ask("a"), Reserved)
    assert isinstance(await first.ask("b"), OverRate)
    await client.jetstream().delete_stream(Stream.LIMITS.value)
    await client.jetstream().add_stream(_stream())
    assert isinstance(await second.ask("c"), Reserved)
    assert isinstance(await first.ask("d"), Reserved)
    await api.set("other", 1)
    assert isinstance(await first.ask("e"), OverRate)
