"""The client of `python -m services fork-server`, which starts the services of the local stack.

A service that is forked from a process that has imported everything is ready in a fraction of the time that a new
Python takes, and shares its memory with the others. Linux only: elsewhere services are started as any program is.
"""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from breakwater.embedded.process import ForkedProcess, ForkServerError, ProcessSpec, spawn, until_readable

SUPPORTED = sys.platform == "linux"
_STOP_S = 2.0


async def _unasked() -> bool:
    return True


class ForkServer:
    """Starts services as forks. Started with the first of them, or by `start`, and again if it has died."""

    def __init__(self, log_file: Path, *, inherit: Sequence[int] = ()) -> None:
        """Starts nothing yet.

        Args:
            log_file: What the server itself has to say, which is little.
            inherit: Descriptors that the services keep open, as of `spawn`.
        """
        self._log_file = log_file
        self._inherit = tuple(inherit)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server, which then imports the services while others are busy. From the main thread, as `spawn`.

        Raises:
            OSError: it can't be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, its = socket.socketpair()
        with its:
            argv = (sys.executable, "-m", "services", "fork-server", str(its.fileno()))
            spec = ProcessSpec("fork-server", argv, self._log_file, _unasked)
            self._process = spawn(spec, inherit=(*self._inherit, its.fileno()))
        self._requests = ours

    def fork(
        self, service: str, log: int, environment: Mapping[str, str], directory: Path | None = None
    ) -> ForkedProcess:
        """Starts a service in its own session. Blocks until the server has imported everything, the first time.

        Args:
            service: Its name.
            log: Where stdout and stderr go: an open descriptor, which stays the caller's.
            environment: All of it.
            directory: Working directory; this process' own when None.

        Raises:
            OSError: The server does not work.
        """
        return ForkedProcess(service, self._ask(service, log, environment, directory))

    async def fork_soon(
        self, service: str, log: int, environment: Mapping[str, str], directory: Path | None, timeout_s: float
    ) -> ForkedProcess:
        """Does the same, and lets others work meanwhile; a server that takes too long over it is ended."""
        reports = self._ask(service, log, environment, directory)
        try:
            async with asyncio.timeout(timeout_s):
                await until_readable(reports.fileno())
        except TimeoutError as error:
            self.stop()
            raise ForkServerError(f"the fork server did not start {service} within {timeout_s:g} s") from error
        return ForkedProcess(service, reports)

    def stop(self) -> None:
        """Ends the server, and with it every service that still runs."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)  # it ends what the services have started, too
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _ask(self, service: str, log: int, environment: Mapping[str, str], directory: Path | None) -> io.FileIO:
        """Sends a request; gives the pipe on which the server reports the pid, and the exit code."""
        self.start()
        assert self._requests is not None
        request = {"service": service, "environment": dict(environment), "directory": str(directory or Path.cwd())}
        ours, its = os.pipe()
        # It is closed with the object, whatever comes of the request.
        reports = io.FileIO(ours)
        # In memory; read by the fork, and not by the server (see there).
        file = os.memfd_create("request")
        try:
            os.write(file, json.dumps(request).encode())
            os.lseek(file, 0, os.SEEK_SET)
            socket.send_fds(self._requests, [b"+"], [log, its, file])
        finally:
            os.close(its)
            os.close(file)
        return reports
