"""The client of `python -m services fork-server`, which starts the services of the local stack.

A service that is forked from a process that has imported everything is ready in a fraction of the time that a new
Python takes, and shares its memory with the others. Linux only: elsewhere services are started as any program is.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from breakwater.embedded.process import ForkedProcess, ProcessSpec, spawn

SUPPORTED = sys.platform == "linux"


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
        """Starts a service in its own session. The first time, blocks until the server has imported everything.

        Args:
            service: Its name.
            log: Where stdout and stderr go: an open descriptor, which stays the caller's.
            environment: All of it.
            directory: Working directory; this process' own when None.

        Raises:
            OSError: The server does not work.
        """
        self.start()
        assert self._requests is not None
        request = {"service": service, "environment": dict(environment), "directory": str(directory or Path.cwd())}
        ours, its = os.pipe()
        try:
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(self._requests, [line], [log, its])
            self._requests.sendall(line[sent:])
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        return ForkedProcess(service, ours, self._log_file)

    def stop(self) -> None:
        """Ends the server, and with it every service that still runs."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
