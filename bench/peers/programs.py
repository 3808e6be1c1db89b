"""The programs of one system: how they are started and ended, what CPU they take, and how they are asked."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.plane import role_of

START_S = 180
END_S = 30
ANSWER_S = 120


class BrokenSystemError(Exception):
    """A system did not start, has ended, or gave another answer than the provider's."""


@dataclass(frozen=True, slots=True)
class Load:
    """The outcome of a number of requests. Times are in seconds."""

    took_s: list[float]
    wall_s: float


class Programs(ExitStack):
    """Programs that run in a directory. They are ended, the last one first, when the context is left."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._log = directory / "output.log"
        self._counted: list[subprocess.Popen[str]] = []
        self._asking: subprocess.Popen[str] | None = None

    def start(
        self,
        *command: object,
        env: Mapping[str, str] | None = None,
        ready: Callable[[], bool] | None = None,
        counted: bool = True,
        user: int | None = None,
        asks: bool = False,
    ) -> subprocess.Popen[str]:
        """Starts a program.

        Args:
            command: its path and its arguments.
            env: variables beside those of this process.
            ready: whether it has started.
            counted: whether its CPU, and that of the processes it starts, is the system's.
            user: the number of the user and of the group that run it; by default those of this process.
            asks: whether it is the program that asks the system, which uses `asking.answer_lines`.

        Raises:
            BrokenSystemError: it has ended, or is not ready after three minutes.
        """
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.directory,
                env={**os.environ, **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if asks else log,
                stderr=log,
                text=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        self.callback(_end, process)
        if counted:
            self._counted.append(process)
        if ready is not None:
            self._wait_for(ready, process)
        if asks:
            self._asking = process
            if self._line() != "ready":
                raise BrokenSystemError(f"{command} is not ready:\n{self._output()}")
        return process

    def ask(self, requests: int, in_flight: int, seconds: float) -> Load:
        """Has the system asked so often, or for so long if that is over first. Raises BrokenSystemError."""
        assert self._asking is not None
        assert self._asking.stdin is not None
        print(requests, in_flight, seconds, file=self._asking.stdin, flush=True)
        line = self._line()
        if not line.startswith("{"):
            raise BrokenSystemError(f"no answer to {requests} requests:\n{line}\n{self._output()}")
        return Load(**json.loads(line))

    def cpu_ms(self) -> Counter[str]:
        """The CPU time that the system has taken so far, user's and kernel's, by what its processes do."""
        used_s: Counter[str] = Counter()
        for program in self._counted:
            parent = psutil.Process(program.pid)
            for process in (parent, *parent.children(recursive=True)):
                # The clock of another process (clock_getcpuclockid), in nanoseconds, as /proc tells hundredths of a
                # second. That of a child which has ended is its parent's.
                with suppress(psutil.NoSuchProcess, OSError):  # it has ended since it was listed
                    times = process.cpu_times()
                    own_s = time.clock_gettime(~process.pid << 3 | 2)
                    used_s[role_of(process)] += own_s + times.children_user + times.children_system
        return Counter({role: seconds * 1000 for role, seconds in used_s.items()})

    def _wait_for(self, ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise BrokenSystemError(f"{process.args} does not start:\n{self._output()}")
            time.sleep(0.1)

    def _line(self) -> str:
        assert self._asking is not None
        assert self._asking.stdout is not None
        answered, _, _ = select.select([self._asking.stdout], [], [], ANSWER_S)
        return self._asking.stdout.readline().strip() if answered else ""

    def _output(self) -> str:
        return self._log.read_text(errors="replace")[-1000:]


def takes_connections(port: int) -> Callable[[], bool]:
    """Whether anyone listens at a port of this machine."""

    def ready() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        return False

    return ready


def answers(url: str) -> Callable[[], bool]:
    """Whether a URL answers with a success."""

    def ready() -> bool:
        with suppress(http.client.HTTPException, OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return True
        return False

    return ready


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended before it read the last line
        process.stdin.close()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
