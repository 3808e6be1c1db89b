"""What we override or read of other packages without a promise of theirs: an upgrade that moves it fails here first."""

from __future__ import annotations

import asyncio
import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio as aioredis
import uvicorn
from aiohttp import TCPConnector
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.http_writer import _serialize_headers
from clickhouse_connect.driver._backend import httpcommon, orchestration
from clickhouse_connect.driver.asyncclient import AsyncClient
from faststream import FastStream
from faststream.nats import NatsBroker, TestNatsBroker
from faststream.nats.subscriber.specification import NatsSubscriberSpecification
from faststream.nats.subscriber.usecases.basic import DefaultSubscriber
from multidict import CIMultiDict
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from breakwater.kernel.clickhouse.client import SETTINGS_IN_USE, Driver
from breakwater.kernel.nats.broker import Batches, Broker, ServiceApp, make_broker
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.subscriber import ChannelSpecification, PullSubscriber
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.contract import GuardEvent
from breakwater.records.channels import GUARDS
from tests.server_sources import RunningServer
from tests.tables import each_row

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


@each_row("package", ["aiohttp", "chdb", "clickhouse-connect", "faststream", "nats-py", "redis", "uvicorn"])
def test_a_package_whose_internals_are_used_is_not_taken_in_a_version_that_nobody_has_tried(package: str) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    required: list[str] = [*project["dependencies"], *project["optional-dependencies"]["embedded"]]
    [ranges] = [one for one in required if re.match(rf"{package}\b", one)]
    bound = re.search(r"<(\d+)\.(\d+)$", ranges)
    assert bound is not None, f"{ranges} has no upper bound"
    major, minor = map(int, version(package).split(".")[:2])
    assert (major, minor + 1) == tuple(map(int, bound.groups())), "one minor version at a time"


def overridden(ours: type, theirs: type) -> set[str]:
    """The methods of ours that replace one of the package."""
    return {name for name in vars(ours) if callable(getattr(theirs, name, None)) and not name.startswith("__")}


def test_aiohttp_connects_and_reads_by_what_is_called() -> None:
    assert {"headers", "loop", "proxy", "proxy_headers", "ssl"} <= inspect.signature(ClientRequest).parameters.keys()
    assert list(inspect.signature(TCPConnector.connect).parameters) == ["self", "req", "traces", "timeout"]
    assert inspect.iscoroutinefunction(ResponseHandler.read)
    assert "read_until_eof" in inspect.signature(ResponseHandler.set_response_params).parameters
    head = _serialize_headers("POST / HTTP/1.1", CIMultiDict({"Host": "h"}))
    assert bytes(head) == b"POST / HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_uvicorn_has_what_is_read() -> None:
    config = uvicorn.Config(lambda: None, lifespan="off", ws="none", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {})
    for name in ("cycle", "scope", "timeout_keep_alive_task", "transport"):
        assert hasattr(protocol, name), name
    assert {"on_message_begin", "connection_lost"} <= vars(HttpToolsProtocol).keys()
    assert {"main_loop", "on_tick", "handle_exit"} <= vars(uvicorn.Server).keys()
    assert "connections" in vars(ServerState())
    server: Any = uvicorn.Server(config)
    assert {"server_state", "should_exit"} <= vars(server).keys()


def as_given(*words: object) -> object:
    return words


async def test_redis_packs_commands_by_what_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Redis("redis://127.0.0.1:1").client.connection_pool
    connection: Any = pool.connection_class(**pool.connection_kwargs)
    sent: list[object] = []

    async def keep(command: object, **_: object) -> None:
        sent.append(command)

    monkeypatch.setattr(connection, "send_packed_command", keep)
    monkeypatch.setattr(connection, "pack_command", as_given)
    await connection.send_command("SCRIPT LOAD", "text")
    assert sent == [("SCRIPT LOAD", "text")]
    assert callable(aioredis.Connection.read_response)
    assert callable(aioredis.Connection.pack_commands)


def test_nats_says_of_a_server_what_presence_reads() -> None:
    assert Client()._server_info == {}  # pyright: ignore[reportPrivateUsage]
    assert Client().stats["reconnects"] == 0


def test_nats_sends_and_receives_by_what_is_called_and_replaced() -> None:
    private = {"_send_command", "_flush_pending", "_flusher", "_remove_sub", "_parse_header_lines", "_process_headers"}
    assert private <= vars(Client).keys()
    assert "await self._ps.parse(" in inspect.getsource(Client._read_loop)  # pyright: ignore[reportPrivateUsage]
    assert {"buf", "state", "nc"} <= vars(Parser()).keys()
    assert [*Msg.__dataclass_fields__][:5] == ["_client", "subject", "reply", "data", "headers"]
    fields = {"_flush_queue", "_max_payload", "_max_pending_size", "_pending", "_pending_data_size", "_ps", "_sid"}
    assert fields | {"_status", "_subs", "_transport", "stats"} <= vars(Client()).keys()
    assert {"_io_reader", "_io_writer"} <= vars(TcpTransport()).keys()
    assert "await self._flush_queue.get()" in inspect.getsource(Client._flusher)  # pyright: ignore[reportPrivateUsage]
    waits = re.findall(r"await (.*)", inspect.getsource(Client._process_headers))  # pyright: ignore[reportPrivateUsage]
    assert waits == ["self._error_cb(e)"]
    assert "reader.feed_data(data)" in inspect.getsource(asyncio.StreamReaderProtocol.data_received)
    assert isinstance(Subscription(Client())._pending_queue, asyncio.Queue)  # pyright: ignore[reportPrivateUsage]


def test_faststream_calls_what_is_overridden() -> None:
    hooks = {"on_startup", "after_startup", "on_shutdown", "after_shutdown"}
    assert overridden(ServiceApp, FastStream) == {"start", "run", "exit", *hooks}
    assert overridden(Broker, NatsBroker) == {"subscriber", "start", "stop"}
    assert overridden(ChannelSpecification, NatsSubscriberSpecification) == {"get_schema"}
    replaced = {"start", "stop", "consume", "get_one", "_create_subscription"}
    assert overridden(PullSubscriber, DefaultSubscriber) == replaced


async def test_faststream_runs_a_handler_by_what_the_subscriber_sets() -> None:
    broker = make_broker("nats://127.0.0.1:1", "sink")
    read = broker.subscriber(GUARDS, durable="guards", pull_sub=Batches(10, linger_s=0))
    came: list[Any] = []

    @read
    async def handle(batch: list[Delivery[GuardEvent]]) -> None:
        came.extend(batch)

    assert broker.pull_subscribers == [read], "FastStream starts and stops it"
    # What `TestNatsBroker` looks at.
    assert (read.pull_sub.batch, read.stream.name, read.filter_subjects) == (True, "EVENTS", ["bw.guards.*"])
    async with TestNatsBroker(broker):
        message = Msg(Client(), "bw.guards.a", "$JS.ACK.EVENTS.guards.1.2.3.4.0", b"{}", {})
        await read.process_message([message])
    assert [one.sequence for one in came] == [2]


async def test_the_driver_of_clickhouse_reads_the_settings_that_it_looks_at(clickhouse_server: RunningServer) -> None:
    assert overridden(Driver, AsyncClient) == {"_execute_operation"}
    sources = "".join(map(inspect.getsource, (httpcommon, orchestration)))
    assert {*re.findall(r'setting_status\((?:server_settings, )?"(\w+)"', sources)} < {*SETTINGS_IN_USE}
    server = urlsplit(clickhouse_server.url)
    driver = Driver("http", str(server.hostname), server.port or 0, server.username, server.password)
    async with driver:
        assert driver.server_settings.keys() == {*SETTINGS_IN_USE} - {"wait_end_of_query"}  # which HTTP alone has
