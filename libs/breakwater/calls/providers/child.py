"""One run of a child program, which gets its request on stdin. Its output is collected, and no process is left over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

STDERR_KEPT = 4 * 1024
GRACE_S = 0.2
"""Time for which processes that a program has left behind may keep its output open after its end."""
_REAP_S = 1.0
_POLL_S = 0.01
_CHUNK = 64 * 1024
_GATE = ("sh", "-c", 'read -r _ && exec "$@"', "sh")
"""A shell that waits for a line on stdin before it becomes the program. Limits are set from outside meanwhile, without
a fork of the worker's own code. A shell reads from a pipe byte by byte, so the rest is left for the program."""
_CHUNKS_IN_A_PIPE = 16  # the largest pipe that Linux gives to an ordinary user holds as many


class Child:
    """A child program in a session of its own, so that everything it starts can be killed with it.

    A process that leaves the session with `setsid`, as daemons do, is out of reach.

    Args:
        command: the program and its arguments, without a shell.
        program: the file to run.
        env: its whole environment.
        cwd: its working directory.
        max_output_bytes: the size limit of its stdout. A program that prints more is killed.
        limits: the kernel's limits for it and each process that it starts, by `resource.RLIMIT_…`. Linux only.

    Attributes:
        stdout: its output so far.
        on_stdout: takes its output as it arrives.
        stderr: the end of its error output.
        flooded: it has printed too much.

    Raises:
        OSError: it can't be started.
        ValueError: there is a NUL in its arguments or its environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        program: Path,
        env: Mapping[str, str],
        cwd: Path,
        max_output_bytes: int,
        limits: Mapping[int, int],
    ) -> None:
        self.stdout = bytearray()
        self.on_stdout: Callable[[bytes], None] | None = None
        self.stderr = bytearray()
        self.flooded = False
        self._max_output_bytes = max_output_bytes
        self._ends: list[_OutputPipe | _InputPipe] = []
        self._opens_gate = b"\n" if limits else b""
        if limits:
            command = (*_GATE, str(program), *command[1:])
            program = Path("/bin/sh")
        # Without a preexec_fn, CPython can vfork, and a start takes no longer in a large worker than in a small one.
        self._process = subprocess.Popen(  # noqa: S603  the command is the operator's own, from the config
            command,
            executable=program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        if sys.platform == "linux":
            for limit, value in limits.items():
                self._limit(limit, value)

    @property
    def pid(self) -> int:
        """The process id of the program, and the id of its group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The code as in `subprocess.Popen`; None before `end`."""
        return self._process.returncode

    async def talk(self, request: bytes) -> None:
        """Sends the request, and waits until the program has ended and its output was read.

        Raises:
            OSError: the event loop can't watch it.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None

        def take_stderr(data: bytes) -> None:
            self.stderr += data
            del self.stderr[:-STDERR_KEPT]

        outputs = (_OutputPipe(process.stdout, self._take_stdout), _OutputPipe(process.stderr, take_stderr))
        self._ends += outputs
        for output in outputs:
            output.start()
        writer = _InputPipe(process.stdin, self._opens_gate + request)
        self._ends.append(writer)
        writer.start()
        await _until_ended(process)
        await asyncio.wait({output.closed for output in outputs}, timeout=GRACE_S)
        self._kill_group()
        for output in outputs:
            output.read_rest()

    async def end(self) -> None:
        """Kills the program with everything in its session, and reaps it. May be called again."""
        for pipe_end in self._ends:
            pipe_end.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self._process.returncode is not None:
            return
        self._kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await _until_ended(self._process)
        if self._process.poll() is None:
            # It runs as another user, or waits for a disk. `subprocess` reaps it with a later start.
            import structlog  # which takes a tenth of the time in which the command line checks a config

            structlog.get_logger().warning("child_not_reaped", pid=self.pid, waited_s=_REAP_S)

    def _limit(self, limit: int, value: int) -> None:
        _, hard_limit = resource.prlimit(self.pid, limit)
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        # A process gets SIGXCPU at the soft limit of CPU time, and is killed at the hard one.
        new_hard_limit = value + 1 if limit == resource.RLIMIT_CPU and value != hard_limit else value
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which its exit code shows
            resource.prlimit(self.pid, limit, (value, new_hard_limit))

    def _kill_group(self) -> None:
        # While the program is not reaped, no other group can get its number.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
                os.killpg(self.pid, signal.SIGKILL)

    def _take_stdout(self, data: bytes) -> None:
        if len(self.stdout) + len(data) <= self._max_output_bytes and not self.flooded:
            self.stdout += data
            if self.on_stdout is not None:
                self.on_stdout(data)
        elif not self.flooded:
            self.flooded = True
            self._kill_group()


class _OutputPipe:
    """Our end of a pipe that a child writes to."""

    # asyncio's transports for pipes are not used: uvloop's close their descriptor twice, and in between another thread
    # may have got the same number.

    def __init__(self, pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
        self._pipe = pipe
        self._take = take
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        os.set_blocking(self._pipe.fileno(), False)
        self._loop.add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._take(data)
        else:
            self.close()

    def read_rest(self) -> None:
        """Reads what is in the pipe already, which a loop that was held up may not have read yet."""
        for _ in range(_CHUNKS_IN_A_PIPE):
            if self._pipe.closed:
                return
            self._read()

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
        if not self.closed.done():
            self.closed.set_result(None)


class _InputPipe:
    """Our end of a pipe that a child reads from. A child need not read its request."""

    def __init__(self, pipe: IO[bytes], data: bytes) -> None:
        self._pipe = pipe
        self._unwritten = memoryview(data)
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        os.set_blocking(self._pipe.fileno(), False)
        self._write()
        if not self._pipe.closed:
            self._loop.add_writer(self._pipe.fileno(), self._write)

    def _write(self) -> None:
        try:
            self._unwritten = self._unwritten[os.write(self._pipe.fileno(), self._unwritten) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.close()
            return
        if not self._unwritten:
            self.close()

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_writer(self._pipe.fileno())
            self._pipe.close()


async def _until_ended(process: subprocess.Popen[bytes]) -> None:
    """Waits until a process has ended. On Linux, this does not reap it."""
    try:
        await _until_readable(os.pidfd_open(process.pid))
    except (AttributeError, OSError):  # macOS lacks it; or there is no descriptor left; or the process was reaped
        while not _has_ended(process):  # noqa: ASYNC110  there is no notification
            await asyncio.sleep(_POLL_S)


async def _until_readable(descriptor: int) -> None:
    """Waits until a descriptor is readable, and closes it."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    try:
        loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
        await readable
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
