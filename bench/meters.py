"""Meters of a running local stack, and a simulated provider in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import psutil
import redis.asyncio as aioredis
import uvloop
from nats.js import JetStreamContext

from bench.plane import role_of, url_of_request
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.local.ports import LOOPBACK, free_port, http_ready
from breakwater.local.provider import SimulatedProvider, ledger
from tests.helpers import until

STORES = ("nats", "redis", "clickhouse", "logs")
STREAMS_WITH_LAG = ("EVENTS", "ALERTS", "DLQ")


def serve_provider(script: Mapping[str, Any], port: int) -> None:
    """Serves until it is terminated. It counts all calls, and keeps few."""
    ledger.KEPT_CALLS = 1_000

    async def serve() -> None:
        async with SimulatedProvider(script, port=port):
            await asyncio.Event().wait()

    uvloop.run(serve())


@asynccontextmanager
async def running_provider(script: Mapping[str, Any]) -> AsyncGenerator[str]:
    """Runs a provider. Yields its address."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve_provider, args=(script, port), daemon=True)
    process.start()
    try:
        await until(http_ready(LOOPBACK, port, "/_sim/health"), "the provider")
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


@asynccontextmanager
async def connected(data: Path, user: str) -> AsyncGenerator[nats.NATS]:
    """A connection of a user to the NATS of a stack."""
    address = url_of_request(data).rpartition("@")[2]
    client = await nats.connect(
        f"nats://{user}:{secret_of(data / 'secrets' / f'nats-{user}')}@{address}",
        inbox_prefix=inbox_prefix(user),
        pending_size=64 * 2**20,
    )
    try:
        yield client
    finally:
        await client.close()


def secret_of(file: Path) -> str:
    """The secret in a file."""
    return file.read_text().strip()


class Meters:
    """The meters of a stack.

    Attributes:
        redis: a connection to its Redis.
        analytics: one to its ClickHouse, of the user who may do all.
    """

    def __init__(self, endpoints: Mapping[str, Any], jetstream: JetStreamContext) -> None:
        self._data = Path(endpoints["data_dir"])
        self._plane = psutil.Process(endpoints["pid"])
        self._jetstream = jetstream
        self.redis: aioredis.Redis = aioredis.Redis.from_url(endpoints["redis_url"], decode_responses=True)
        url = urlsplit(endpoints["clickhouse_url"])
        password = secret_of(self._data / "secrets" / "clickhouse")
        self.analytics: Analytics = connect(f"http://breakwater:{password}@{url.hostname}:{url.port}{url.path}")

    async def close(self) -> None:
        """Closes its connections."""
        await self.redis.aclose()
        await self.analytics.close()

    async def read(self) -> dict[str, float]:
        """Returns all series by name; memory (PSS), disks and streams in MB."""
        return {
            **await asyncio.to_thread(self._of_processes),
            **await self._of_streams(),
            **await self._of_redis(),
            **await self._of_clickhouse(),
        }

    def _of_processes(self) -> dict[str, float]:
        series: Counter[str] = Counter()
        for process in (self._plane, *self._plane.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                role = role_of(process)
                series[f"memory.{role}"] += process.memory_full_info().pss / 1e6  # pyright: ignore[reportArgumentType]
                series[f"fds.{role}"] += process.num_fds()
        folders = [str(self._data / store) for store in STORES]
        sizes = subprocess.run(["du", "-sB1", *folders], capture_output=True, text=True, check=False).stdout
        of_stores = (line.split("\t") for line in sizes.splitlines())
        return dict(series) | {f"disk.{Path(folder).name}": int(size) / 1e6 for size, folder in of_stores}

    async def _of_streams(self) -> dict[str, float]:
        series: dict[str, float] = {"messages.all": 0.0, "bytes.all": 0.0}
        for info in await self._jetstream.streams_info():
            name, state = str(info.config.name), info.state
            series |= {f"messages.{name}": float(state.messages), f"bytes.{name}": state.bytes / 1e6}
            series["messages.all"] += state.messages
            series["bytes.all"] += state.bytes / 1e6
            for consumer in await self._jetstream.consumers_info(name) if name in STREAMS_WITH_LAG else ():
                series[f"lag.{consumer.name}"] = float((consumer.num_pending or 0) + (consumer.num_ack_pending or 0))
        return series

    async def _of_redis(self) -> dict[str, float]:
        info = await self.redis.info()
        keys, expiring = info["db0"]["keys"], info["db0"]["expires"]
        return {"redis.used": info["used_memory"] / 1e6, "redis.keys": keys, "redis.staying": keys - expiring}

    async def _of_clickhouse(self) -> dict[str, float]:
        series: dict[str, float] = {"rows.all": 0.0, "parts.mb": 0.0, "parts": 0.0}
        statement = """
            SELECT table, sum(rows) AS stored, sum(bytes_on_disk) / 1e6 AS mb, count() AS parts
            FROM system.parts WHERE active AND database = {database:String} GROUP BY table"""
        for row in (await self.analytics.query(statement, {"database": self.analytics.database})).named_rows():
            series[f"rows.{row['table']}"] = float(row["stored"])
            series["rows.all"] += row["stored"]
            series["parts.mb"] += row["mb"]
            series["parts"] += row["parts"]
        return series
