"""A Redis primary with replicas, and the Sentinels that replace it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio as aioredis

from breakwater.local.ports import free_port, redis_ready
from breakwater.local.process import ProcessSpec
from breakwater.local.servers import ServerNotFoundError, find_valkey, redis_spec
from tests.helpers import until
from tests.server_sources import ProcessRunner, RunningServer, missing_backend

NAME = "mymaster"
PASSWORD = "only-for-tests"
SENTINEL_PASSWORD = "of-sentinels"


@dataclass(frozen=True, slots=True)
class Watched:
    """Servers, by their ports, and the Sentinels that watch them."""

    servers: dict[int, RunningServer]
    sentinels: dict[int, RunningServer]

    @property
    def url(self) -> str:
        """The setting BREAKWATER_REDIS_URL."""
        addresses = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{addresses}/{NAME}/0?sentinel_password={SENTINEL_PASSWORD}"

    async def primary(self) -> int:
        """The port of the primary, as the first of the Sentinels that run says."""
        return (await self.primaries())[0]

    async def primaries(self) -> list[int]:
        """The port of the primary, as each Sentinel that runs says: they learn of a failover from each other."""
        named: list[int] = []
        for port, sentinel in self.sentinels.items():
            if sentinel.runs:
                async with aioredis.Redis(port=port, password=SENTINEL_PASSWORD, decode_responses=True) as client:
                    named.append(int((await client.sentinel_get_master_addr_by_name(NAME))[1]))
        return named

    async def fail_over(self) -> None:
        """Has a Sentinel promote the replica now, without the others' votes, which may be split."""
        port = next(iter(self.sentinels))
        async with aioredis.Redis(port=port, password=SENTINEL_PASSWORD) as client:
            await client.execute_command("SENTINEL", "FAILOVER", NAME)

    async def are_replicated(self, primary: int) -> bool:
        """Returns True if a server has all others as its replicas."""
        async with aioredis.Redis(port=primary, password=PASSWORD) as client:
            facts = await client.info("replication")
        replicas = [value for name, value in facts.items() if name.startswith("slave") and isinstance(value, dict)]
        return sum(replica.get("state") == "online" for replica in replicas) == len(self.servers) - 1

    async def replicated(self) -> None:
        """Waits until the primary has all its replicas, and the Sentinels know them and each other."""

        async def all_are_known() -> bool:
            if not await self.are_replicated(await self.primary()):
                return False
            for port in self.sentinels:
                async with aioredis.Redis(port=port, password=SENTINEL_PASSWORD, decode_responses=True) as client:
                    state = (await client.sentinel_masters())[NAME]
                    replicas = await client.sentinel_slaves(NAME)
                usable = [one for one in replicas if not one["is_sdown"] and one["master-link-status"] == "ok"]
                if state["num-other-sentinels"] != len(self.sentinels) - 1 or len(usable) != len(self.servers) - 1:
                    return False
            return True

        await until(all_are_known, "replicas and Sentinels", timeout_s=60)


@asynccontextmanager
async def watched_servers(
    directory: Path, *, sentinels: int = 3, down_after_ms: int = 1_000
) -> AsyncGenerator[Watched]:
    """Starts a primary, a replica and Sentinels."""
    ports = [free_port(), free_port()]
    running: list[RunningServer] = []
    try:
        for port in ports:
            folder = directory / f"redis-{port}"
            folder.mkdir(parents=True)
            spec = _of_pair(redis_spec(folder, port, PASSWORD), None if port == ports[0] else ports[0])
            running.append(_started(spec, f"redis://:{PASSWORD}@127.0.0.1:{port}/0"))
        servers = dict(zip(ports, running, strict=True))
        watched = Watched(servers, {})
        for server in running:
            await asyncio.to_thread(server.wait_until_ready)
        # A Sentinel that finds no replica looks again after 10 s.
        await until(lambda: watched.are_replicated(ports[0]), "the replica", timeout_s=60)
        for port in [free_port() for _ in range(sentinels)]:
            sentinel = start_sentinel(
                *(directory / f"sentinel-{port}", port, f"127.0.0.1 {ports[0]}"),
                more=[
                    f"sentinel auth-pass {NAME} {PASSWORD}",
                    f"sentinel down-after-milliseconds {NAME} {down_after_ms}",
                    f"sentinel failover-timeout {NAME} {max(5_000, down_after_ms)}",
                ],
                quorum=sentinels // 2 + 1,
            )
            watched.sentinels[port] = sentinel
            running.append(sentinel)
        for sentinel in watched.sentinels.values():
            await asyncio.to_thread(sentinel.wait_until_ready)
        await watched.replicated()
        yield watched
    finally:
        for server in running:
            server.stop()


def start_sentinel(folder: Path, port: int, primary: str, more: Sequence[str], *, quorum: int = 1) -> RunningServer:
    """Starts a Sentinel that watches a host and a port, with further lines of its config."""
    folder.mkdir()
    config = folder / "sentinel.conf"
    own = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", f"requirepass {SENTINEL_PASSWORD}"]
    own += [f"sentinel sentinel-pass {SENTINEL_PASSWORD}", "sentinel resolve-hostnames yes"]
    config.write_text("\n".join([*own, f"sentinel monitor {NAME} {primary} {quorum}", *more, ""]))
    ready = redis_ready("127.0.0.1", port, SENTINEL_PASSWORD)
    argv = (_valkey(), str(config), "--sentinel")
    return _started(ProcessSpec("sentinel", argv, folder / "log", ready), f"redis://127.0.0.1:{port}")


def _of_pair(spec: ProcessSpec, primary: int | None) -> ProcessSpec:
    """Adds to the config of a server what a pair needs; the port of its primary if it begins as the replica."""
    config = Path(spec.argv[1])
    more = [f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0", "hz 10"]
    more += [] if primary is None else [f"replicaof 127.0.0.1 {primary}"]
    config.write_text("\n".join([config.read_text(), *more, ""]))
    return spec


def _started(spec: ProcessSpec, url: str) -> RunningServer:
    runner = ProcessRunner(spec)
    runner.start()
    return RunningServer(url, runner, spec.ready)


def _valkey() -> str:
    try:
        return str(find_valkey())
    except ServerNotFoundError as error:
        missing_backend(str(error))
        raise
