"""What surrounds the sink in its tests: publishers on the one side, tables and DLQ on the other."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from nats.aio.client import Client
from nats.js import JetStreamContext
from pydantic import SecretStr

from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.process.settings import Settings
from breakwater.services.sink.app import build
from tests.helpers import FIRST, ServiceProcess, all_acknowledged, nats_client, start_service, until
from tests.server_sources import RunningServer


@dataclass(frozen=True)
class SinkProcess:
    """A sink that takes signals, and its log in JSON lines."""

    process: ServiceProcess
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    async def until_logged(self, event: str, **fields: str) -> dict[str, Any]:
        """Waits until it logs an event with some fields, beside others; gives the line."""

        def logged() -> dict[str, Any] | None:
            lines = (json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n"))
            return next((line for line in lines if line["event"] == event and fields.items() <= line.items()), None)

        return await until(logged, f"{event} in the log")

    async def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 60)

    async def kill(self) -> None:
        """SIGKILL, and it is gone."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait, 60)


CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {provider: local, model: gpt-4.1}
agents: {writer: {}}
"""


@dataclass(frozen=True)
class Plane:
    """A bus with streams and consumers, a database with tables."""

    nats_server: RunningServer
    clickhouse_server: RunningServer
    analytics: Analytics
    client: Client
    jetstream: JetStreamContext

    @classmethod
    @asynccontextmanager
    async def provisioned(
        cls, nats_server: RunningServer, clickhouse_server: RunningServer, analytics: Analytics
    ) -> AsyncGenerator["Plane"]:
        await provision(nats_server.url, bus_plan(parse_config(CONFIG)))
        async with nats_client(nats_server.url) as client:
            yield cls(nats_server, clickhouse_server, analytics, client, client.jetstream(timeout=30))

    @property
    def settings(self) -> Settings:
        database = f"{self.clickhouse_server.url.rstrip('/')}/{self.analytics.database}"
        return Settings(nats_url=SecretStr(self.nats_server.url), clickhouse_url=SecretStr(database))

    @asynccontextmanager
    async def sink(self) -> AsyncGenerator[None]:
        """The service, in this process."""
        app = build(self.settings, parse_config(CONFIG))
        await app.start()
        try:
            yield
        finally:
            await app.stop()

    def sink_process(
        self, directory: Path, *, clickhouse_url: str | None = None, metrics_port: int | None = None
    ) -> "SinkProcess":
        """The service as a process of its own."""
        config = directory / "breakwater.yaml"
        config.write_text(CONFIG)
        surroundings = {
            "BREAKWATER_CONFIG": str(config),
            "BREAKWATER_NATS_URL": self.settings.nats_url.get_secret_value(),
            "BREAKWATER_CLICKHOUSE_URL": clickhouse_url or self.settings.clickhouse_url.get_secret_value(),
            **({} if metrics_port is None else {"BREAKWATER_METRICS_PORT": str(metrics_port)}),
        }
        log = directory / f"sink-{uuid4().hex}.log"
        return SinkProcess(start_service("sink", surroundings, log), log)

    @asynccontextmanager
    async def clickhouse_away(self) -> AsyncGenerator[None]:
        """ClickHouse is killed, and back afterwards with its data."""
        self.clickhouse_server.kill()
        try:
            yield
        finally:
            await self.clickhouse_server.restart_async()

    async def publish(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Stores messages on the bus, in order."""
        waiting = [
            await self.jetstream.publish_async(subject, data, headers=FIRST if _is_record(subject) else None)
            for subject, data in messages
        ]
        await asyncio.gather(*waiting)

    async def consumer(self, name: str = "sink-events", stream: str = "EVENTS") -> Any:
        return await self.jetstream.consumer_info(stream, name)

    async def until_done(self, name: str = "sink-events", stream: str = "EVENTS") -> None:
        """Waits until everything on a stream is acknowledged."""
        await until(lambda: all_acknowledged(self.jetstream, stream, name), f"{name} is done")

    async def until_delivered(self, name: str = "sink-events", stream: str = "EVENTS") -> None:
        """Waits until the sink holds something that it has not acknowledged."""

        async def held() -> bool:
            return (await self.consumer(name, stream)).num_ack_pending > 0

        await until(held, f"{name} holds messages", brief=True)

    async def rows(self, sql: str) -> tuple[tuple[Any, ...], ...]:
        return (await self.analytics.query(sql)).rows

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Everything on DLQ."""
        subscription = await self.jetstream.pull_subscribe("bw.dlq.>", stream="DLQ")
        dead_letters: list[dict[str, Any]] = []
        there = (await subscription.consumer_info()).num_pending
        while len(dead_letters) < there:
            fetched = await subscription.fetch(min(100, there - len(dead_letters)), timeout=60)
            dead_letters += [json.loads(message.data) | {"on": message.subject} for message in fetched]
        return dead_letters


def _is_record(subject: str) -> bool:
    return subject.startswith(("bw.attempts.", "bw.executions."))


def of_attempt(attempt: Attempt) -> tuple[str, bytes]:
    return subjects.attempt(attempt.agent, attempt.execution_id, attempt.number), attempt.json_bytes()


def of_execution(record: Execution) -> tuple[str, bytes]:
    return subjects.execution(record.agent, record.execution_id), record.json_bytes()
