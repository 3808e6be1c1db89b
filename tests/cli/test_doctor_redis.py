"""What the doctor says of the version of Redis or Valkey."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import pytest

from breakwater.cli.doctor import Finding
from breakwater.cli.doctor_checks import redis_findings
from breakwater.local.plane import PlaneLocation
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
