"""Starts services by forking: `python -m services fork-server DESCRIPTOR`, Linux only.

Importing a service takes 0.7 s of CPU and 75 MB. This process imports all of them once; each service is then a fork of
it, ready in a fraction of that and sharing the memory of what was imported. The client is
`breakwater.embedded.fork_server`.

DESCRIPTOR is a Unix stream socket. A request is one byte with three descriptors: where the service's stdout and stderr
go, a pipe, and a file of JSON, `{"service", "environment", "directory"}`. The fork itself reads that file: what one
service's environment holds is never in this process' memory, and so in no other service's. The pid is written to the
pipe as text, and on another line the exit code when the service has ended (negative: the signal that killed it). The
end of the socket's stream, or of this process, is the end of every service.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from breakwater import prctl

_DESCRIPTORS = 3


class ServiceForker:
    """Forks services for the process at the other end of a socket."""

    def __init__(self, requests: socket.socket, run: Callable[[str], int]) -> None:
        """Takes what a fork does with the name of its service; its exit code is what that returns."""
        self._requests = requests
        self._run = run
        self._pipes: dict[int, int] = {}
        """By the pid of each service that runs, where its end is reported."""
        self._ended, self._child_signal = os.pipe()
        self._pid = os.getpid()

    def serve(self) -> None:
        """Serves until the other end is closed, and kills what then still runs."""
        for descriptor in (self._ended, self._child_signal):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._child_signal, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        # What was imported is not garbage: a collection would copy its pages into each service.
        gc.collect()
        gc.freeze()
        while True:
            readable, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in readable:
                with suppress(BlockingIOError):
                    os.read(self._ended, 4096)
                self._reap()
            if self._requests in readable:
                data, descriptors, _, _ = socket.recv_fds(self._requests, 1, _DESCRIPTORS)
                if not data:
                    break
                self._fork(*descriptors)
        for pid in self._pipes:
            _kill_group(pid)

    def _fork(self, log: int, pipe: int, request: int) -> None:
        try:
            pid = os.fork()
        except OSError:
            traceback.print_exc()
            os.close(pipe)  # with no pid on it, which says that there is no process
        else:
            if pid == 0:
                self._become(log, pipe, request)
            self._pipes[pid] = pipe
            if not _write(pipe, pid):
                os.kill(pid, signal.SIGKILL)  # the process that asked for it is gone
        os.close(log)
        os.close(request)

    def _reap(self) -> None:
        while self._pipes and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            # Nothing of its group outlives a service. Before it is reaped: until then the number is its own.
            _kill_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            pipe = self._pipes.pop(ended.si_pid)
            _write(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)

    def _become(self, log: int, pipe: int, file: int) -> NoReturn:
        code = 1
        try:
            self._leave_server(log, pipe)
            with open(file, "rb") as opened:
                request = json.load(opened)
            environment: dict[str, str] = request["environment"]
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(request["directory"])
            sys.path[0] = request["directory"]
            known = set(sys.path)
            sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in known]
            code = self._run(request["service"])
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:  # noqa: BLE001  as at the end of any program: it is printed, and the exit code says so
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the stack below is the server's.
            os._exit(code)

    def _leave_server(self, log: int, pipe: int) -> None:
        """Makes a fork a process of its own, tied to the server's life."""
        os.setsid()
        prctl.end_with_parent()
        if os.getppid() != self._pid:
            sys.exit("the fork server ended while it started this")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._ended, self._child_signal, *self._pipes.values(), pipe):
            os.close(descriptor)
        self._requests.close()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)


def serve(descriptor: int, names: tuple[str, ...], run: Callable[[str], int]) -> None:
    """Imports the services of these names, and forks them as asked over a socket, until its other end is closed."""
    for name in names:
        importlib.import_module(f"services.{name}.app")
    with socket.socket(fileno=descriptor) as requests:
        ServiceForker(requests, run).serve()


def _wake_up(_number: int, _frame: object) -> None:
    """Does nothing: a signal with a handler is written to the wake-up descriptor."""


def _write(pipe: int, number: int) -> bool:
    """Reports a number; False where the reader is gone."""
    try:
        os.write(pipe, b"%d\n" % number)
    except BrokenPipeError:
        return False
    return True


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
