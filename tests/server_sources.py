"""What a test server is, and the source that needs nothing but this Python; servers.py says when it is used."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import pytest

from breakwater.local.ports import Probe, free_port
from breakwater.local.process import ProcessSpec, kill_group, log_size, log_tail, spawn
from breakwater.local.servers import ServerNotFoundError, clickhouse_spec, nats_spec, redis_spec
from tests.forked_commands import CommandProcess

USER, PASSWORD = "breakwater", "only-for-tests"
_POLL_S = 0.02
_PORT_RACES = 3


class ServerFailedError(RuntimeError):
    """A server did not come up; the message has the end of its log."""


class Runner(Protocol):
    """What keeps one server, wherever it runs."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def check(self) -> str | None: ...
    def connections(self) -> int | None: ...


@dataclass(slots=True, eq=False)
class RunningServer:
    """A server that a test talks to.

    Attributes:
        url: All that a client needs, user and password included: `nats://…`, `redis://…/0` or `http://…`.
        disturbed: Whether a test has ended or restarted it, or can have sent it signals.
    """

    url: str
    _runner: Runner = field(repr=False)
    _ready: Probe = field(repr=False)
    _patience_s: float = 60.0
    disturbed: bool = False

    @property
    def pid(self) -> int:
        """Its process, for signals that no other source of servers could send."""
        self.disturbed = True
        assert isinstance(self._runner, ProcessRunner), "a container has no process here"
        assert self._runner.pid is not None, "it does not run"
        return self._runner.pid

    @property
    def runs(self) -> bool:
        """Whether its process has not ended."""
        return self._runner.check() is None

    @property
    def connections(self) -> int | None:
        """How many connections clients have to it; None where that can't be seen."""
        return self._runner.connections()

    def start(self) -> None:
        """Start it; returns when it answers."""
        self._runner.start()
        self.wait_until_ready()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would, and wait until it is gone."""
        self.disturbed = True
        self._runner.kill()

    def restart(self) -> None:
        """Start it again after `kill()`, or stop it in order and start it; returns when it answers.

        Blocks the event loop of an async test for that long, so `restart_async` is there too.
        """
        self.disturbed = True
        self.start()

    async def restart_async(self) -> None:
        """Do what `restart` does, while the test's own tasks go on."""
        self.disturbed = True
        self._runner.start()
        deadline = time.monotonic() + self._patience_s
        while not await self._ready():
            self._complain_if_over(deadline)
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """End it for good, with its data."""
        self.disturbed = True
        self._runner.stop()

    def wait_until_ready(self) -> None:
        """Wait until it answers in its own protocol.

        Raises:
            ServerFailedError: It ended, or its time is over.
        """
        deadline = time.monotonic() + self._patience_s
        # A thread, because the test that calls this may already run an event loop in its own.
        with ThreadPoolExecutor(1) as pool:
            while not pool.submit(asyncio.run, _ask(self._ready)).result():
                self._complain_if_over(deadline)
                time.sleep(_POLL_S)

    def _complain_if_over(self, deadline: float) -> None:
        problem = self._runner.check()
        if problem is None and time.monotonic() > deadline:
            problem = f"did not answer within {self._patience_s:g} s"
        if problem is not None:
            raise ServerFailedError(problem)


class Servers(Protocol):
    """A source of servers; every call starts a new and empty one."""

    def nats(self) -> RunningServer: ...
    def redis(self) -> RunningServer: ...
    def clickhouse(self) -> RunningServer: ...
    def stop(self) -> None: ...


class EmbeddedServers:
    """Servers that are processes of this machine, from the same specs as the stack of `breakwater up`."""

    def __init__(
        self,
        new_directory: Callable[[], Path],
        redis_env: Mapping[str, str] | None = None,
        spawn: Callable[[ProcessSpec], CommandProcess] = spawn,
    ) -> None:
        self._new_directory = new_directory
        self._redis_env = redis_env or {}
        self._spawn = spawn
        self._running: list[RunningServer] = []

    def nats(self) -> RunningServer:
        def spec(data: Path, port: int) -> ProcessSpec:
            made, config = nats_spec(data, port, {}), data / "nats.conf"
            # Streams set their limits aside in full; how much disk there is must not decide how a test ends. And no
            # test cuts the power: to flush each stream each second is most of what an idle server does.
            text = config.read_text().replace("jetstream {", "jetstream {\n  max_file_store: 64GB", 1)
            config.write_text(text.replace("sync_interval: 1s", "sync_interval: 1h", 1))
            return made

        return self._run(spec, "nats://127.0.0.1:{port}")

    def redis(self) -> RunningServer:
        return self._run(
            lambda data, port: replace(redis_spec(data, port, None), env=self._redis_env), "redis://127.0.0.1:{port}/0"
        )

    def clickhouse(self) -> RunningServer:
        def spec(data: Path, port: int) -> ProcessSpec:
            password_file = data / "password"
            password_file.write_text(PASSWORD)
            return clickhouse_spec(data, port, USER, password_file)

        return self._run(spec, f"http://{USER}:{PASSWORD}@127.0.0.1:{{port}}")

    def stop(self) -> None:
        for server in self._running:
            server.stop()

    def _run(self, make_spec: Callable[[Path, int], ProcessSpec], url: str) -> RunningServer:
        # Between choosing a port and the server's bind, another test worker may take it: then a new port is tried.
        for race in range(_PORT_RACES):
            port = free_port()
            try:
                spec = make_spec(self._new_directory(), port)
                server = RunningServer(url.format(port=port), ProcessRunner(spec, self._spawn), spec.ready)
                self._running.append(server)
                server.start()
            except ServerNotFoundError as error:
                missing_backend(str(error))
            except ServerFailedError:
                if race == _PORT_RACES - 1:
                    raise
            else:
                return server
        raise AssertionError("unreachable: the last race raises")


class ProcessRunner:
    """Runs one process of a spec, which `spawn` starts."""

    def __init__(self, spec: ProcessSpec, spawn: Callable[[ProcessSpec], CommandProcess] = spawn) -> None:
        self._spec = spec
        self._spawn = spawn
        self._process: CommandProcess | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(self._spec.stop_timeout_s)
        self._log_start = log_size(self._spec.log_file)
        self._process = self._spawn(self._spec)

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        # Killed, not asked: nobody wants its data any more.
        self.kill()

    def check(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        tail = log_tail(self._spec.log_file, since=self._log_start)
        return f"{self._spec.name} ended with {self._process.returncode}; {self._spec.log_file} says:\n{tail}"

    def connections(self) -> int | None:
        # Counted by its open files, as the list of all connections of this machine takes 10 ms to read.
        files = Path(f"/proc/{self.pid}/fd")
        if not files.is_dir():
            return None
        sockets = 0
        for file in files.iterdir():
            with suppress(FileNotFoundError):  # it was closed in between
                sockets += str(file.readlink()).startswith("socket:")
        return sockets - 1  # the one that it listens on


def missing_backend(reason: str) -> None:
    """Skip the test, or fail it where skipping would hide that it never ran."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: not skipped)", pytrace=False)
    pytest.skip(reason)


async def _ask(ready: Probe) -> bool:
    return await ready()


@contextmanager
def embedded_servers() -> Generator[tuple[EmbeddedServers, Path]]:
    """A source of servers for a program without fixtures, and the temporary directory that holds their data."""
    with tempfile.TemporaryDirectory() as directory:
        servers = EmbeddedServers(lambda: Path(tempfile.mkdtemp(dir=directory)))
        try:
            yield servers, Path(directory)
        finally:
            servers.stop()
