"""What the doctor says of the version of Redis or Valkey."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from breakwater.cli.doctor import Finding, all_findings
from breakwater.cli.doctor_checks import redis_findings, sentinel_finding
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.redis.sentinel import SentinelFacts
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port
from breakwater.local.servers import redis_spec
from tests.helpers import until
from tests.server_sources import ProcessRunner
from tests.servers import RunningServer

_VERSION = re.compile(rb"valkey_version:\d+\.\d\.\d")


@contextlib.asynccontextmanager
async def says_version(server: RunningServer, version: bytes) -> AsyncGenerator[str]:
    """Stands before a server and changes the version that it says; as long as the true one, as the reply has a size."""
    behind = urlsplit(server.url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(_VERSION.sub(b"valkey_version:" + version, data))

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(copy(reader, to_server[1]), copy(to_server[0], writer))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as proxy:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/0"


async def versions_found(url: str, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setenv("BREAKWATER_REDIS_URL", url)
    return [found async for found in redis_findings(PlaneLocation(None)) if "vulnerabilit" in found.text]


async def test_a_server_that_can_not_write_to_its_disk_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    (folder := tmp_path / "redis").mkdir()
    spec = redis_spec(folder, port, None)
    snapshots = ("--appendonly", "no", "--save", "3600 1", "--dir", str(folder))
    runner = ProcessRunner(replace(spec, argv=(*spec.argv, *snapshots)))
    runner.start()
    redis = Redis(url := f"redis://127.0.0.1:{port}/0")
    monkeypatch.setenv("BREAKWATER_REDIS_URL", url)
    try:
        await until(spec.ready, "the server")
        client: Any = redis.client
        await client.set("key", "value")
        shutil.rmtree(folder)
        await client.bgsave()

        async def has_failed() -> bool:
            return (await client.info("persistence"))["rdb_last_bgsave_status"] == "err"

        await until(has_failed, "the snapshot that fails")
        findings = [finding for finding in await all_findings(PlaneLocation(None), None) if finding.area == "redis"]
    finally:
        await redis.close()
        runner.stop()
    [finding] = findings
    assert (finding.verdict, finding.text.split(" ")[:5]) == ("fail", ["Redis", "does", "not", "serve:", "MISCONF"])
    assert "free disk space on its server" in finding.remedy


async def test_the_server_of_the_local_stack_has_no_known_holes(
    redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = await versions_found(redis_server.url, monkeypatch)
    assert found.verdict == "ok"
    assert re.match(r"Valkey \d+\.\d+\.\d+ ", found.text)


async def test_an_old_server_is_named_with_its_holes(
    redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with says_version(redis_server, b"8.1.0") as url:
        (found,) = await versions_found(url, monkeypatch)
    assert found.verdict == "warn"
    assert found.text == "Valkey 8.1.0 has known vulnerabilities: CVE-2025-21605, CVE-2025-49844"
    assert "Upgrade" in found.remedy


@pytest.mark.parametrize(
    ("replicas", "sentinels", "problem", "verdict", "why"),
    [
        (1, 3, None, "ok", "3 of 3 Sentinels answer"),
        (0, 3, None, "warn", "no replica could take its place"),
        (1, 2, "NOQUORUM 2 usable Sentinels", "warn", "NOQUORUM"),
        (1, 1, None, "warn", "1 of 3 Sentinels answer"),
    ],
)
def test_a_primary_that_no_replica_would_replace_is_a_warning(
    replicas: int, sentinels: int, problem: str | None, verdict: str, why: str
) -> None:
    found = sentinel_finding(SentinelFacts("10.0.0.1:6379", replicas, sentinels, 3, problem))
    assert (found.verdict, why in found.text) == (verdict, True)
