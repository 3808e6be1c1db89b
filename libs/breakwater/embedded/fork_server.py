"""Starts services by forking, on Linux: `python -m breakwater.embedded.fork_server DESCRIPTOR`, and its client.

Importing a service takes 0.7 s of CPU and 75 MB. The server imports all of them once; each service is then a fork of
it, which does the same as `python -m services NAME`, is ready in a fraction of that time, and shares the memory of the
imported modules. On other systems services are started as any program is.

DESCRIPTOR is a Unix stream socket. A request is one byte with three descriptors: a log for the service's stdout and
stderr, a pipe, and a file of JSON, `{"service", "environment", "directory"}`. The fork itself reads that file: one
service's environment is never in the server's memory, and so in no other service's. The pid is written to the pipe as
text, and on another line the exit code when the service has ended (negative: the signal that killed it). The end of the
socket's stream, or of the server, is the end of every service.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from breakwater.embedded.process import ProcessSpec, spawn, until_readable
from breakwater.errors import BreakwaterError
from breakwater.runtime import prctl

SUPPORTED = sys.platform == "linux"
_STOP_S = 2.0


class ForkServerError(BreakwaterError, OSError):
    """The fork server did not start a service."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that the fork server has started, of which it reports the pid and the exit code on a pipe.

    Making one waits until the server has imported all services. The exit code is -9 if the fork server is gone, with
    which its processes end.

    Raises:
        ForkServerError: the fork server has ended, or could not fork.
    """

    def __init__(self, service: str, reports: BinaryIO) -> None:
        self.args, self.returncode, self._reports = service, None, reports  # what Popen starts is not started
        if not (pid := reports.readline()):
            raise ForkServerError(f"the fork server could not start {service}")
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._reports.read() or -signal.SIGKILL)
        return self.returncode


class ForkServer:
    """Client of a fork server, which is started with the first service, or by `start`, and again if it has died.

    Args:
        log_file: of the server itself.
        inherit: descriptors that the services keep open, as of `spawn`.
    """

    def __init__(self, log_file: Path, *, inherit: Sequence[int] = ()) -> None:
        self._log_file = log_file
        self._inherit = tuple(inherit)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(self) -> None:
        """Starts the server, which then imports the services. From the main thread, as `spawn`. Raises OSError."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, its = socket.socketpair()
        with its:
            argv = (sys.executable, "-m", __name__, str(its.fileno()))
            spec = ProcessSpec("fork-server", argv, self._log_file, _unasked)
            self._process = spawn(spec, inherit=(*self._inherit, its.fileno()))
        self._requests = ours

    def request(self, service: str, log: int, environment: Mapping[str, str]) -> BinaryIO:
        """Requests a service in its own session, and returns the pipe on which the server reports.

        Args:
            service: its name.
            log: an open descriptor for stdout and stderr, which the caller still has to close.
            environment: all variables of the service.

        Raises:
            OSError: the server does not work.
        """
        self.start()
        assert self._requests is not None
        wanted = {"service": service, "environment": dict(environment), "directory": str(Path.cwd())}
        ours, its = os.pipe()
        reports = os.fdopen(ours, "rb")  # closed with the object, whatever comes of the request
        with io.FileIO(its, "w"), io.FileIO(os.memfd_create("request"), "r+") as file:
            file.write(json.dumps(wanted).encode())
            file.seek(0)
            socket.send_fds(self._requests, [b"+"], [log, its, file.fileno()])
        return reports

    async def fork(self, service: str, log: int, environment: Mapping[str, str], timeout_s: float) -> ForkedProcess:
        """Starts a service as `request` does, and waits for it; ends a server that takes longer than `timeout_s`."""
        reports = self.request(service, log, environment)
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


async def _unasked() -> bool:
    return True


def serve(requests: socket.socket) -> None:
    """Imports the services, and forks them as asked over a socket until its other end is closed."""
    # By name: of the rooms, only the command line may know the services.
    services = importlib.import_module("services.__main__")
    for name in services.NAMES:
        importlib.import_module(f"services.{name}.app")
    # Imported modules are not garbage: a collection would copy their pages into each service.
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}
    """By the pidfd of each service, which is readable when it has ended: its pid, and the pipe for reports."""
    while True:
        readable, _, _ = select.select([requests, *running], [], [])
        for ended in running.keys() & readable:
            pid, pipe = running.pop(ended)
            # No process of its group outlives a service. Before it is reaped, no other process has its number.
            _kill_group(pid)
            _report(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(pipe)
            os.close(ended)
        if requests not in readable:
            continue
        asked, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
        if not asked:
            break
        log, pipe, file = descriptors
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            os.close(pipe)  # with no pid on it, which says that there is no process
        else:
            if pid == 0:
                requests.close()
                for descriptor in (pipe, *running, *(pipe for _, pipe in running.values())):
                    os.close(descriptor)
                _become(log, file, server, services.run_service)
            running[os.pidfd_open(pid)] = pid, pipe
            if not _report(pipe, pid):
                os.kill(pid, signal.SIGKILL)  # the process that asked for it is gone
        os.close(log)
        os.close(file)
    for pid, _ in running.values():
        _kill_group(pid)


def _become(log: int, file: int, server: int, run: Callable[[str], int]) -> NoReturn:
    """Makes a fork a process of its own, tied to the server's life, and runs the service in it."""
    code = 1
    try:
        os.setsid()
        prctl.end_with_parent()
        if os.getppid() != server:
            sys.exit("the fork server ended while it started this")
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        with open(file, "rb") as opened:
            request = json.load(opened)
        environment: dict[str, str] = request["environment"]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["directory"])
        sys.path[0] = request["directory"]
        known = set(sys.path)
        sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in known]
        code = run(request["service"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  as at the end of any program: it is printed, and the exit code says so
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the stack below is the server's.
        os._exit(code)


def _report(pipe: int, number: int) -> bool:
    """Writes a number; False where the reader is gone."""
    try:
        os.write(pipe, b"%d\n" % number)
    except BrokenPipeError:
        return False
    return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    prctl.hide_memory()
    with socket.socket(fileno=int(sys.argv[1])) as requested:
        serve(requested)
