"""One supervised process: its description, its environment, its start and its log."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from breakwater.kernel.process.programs import for_program
from breakwater.local.ports import Probe

_CHILD = Path(__file__).with_name("child.py")
_LOG_LIMIT = 10 * 1024 * 1024
_TAIL_BYTES = 16 * 1024
_POLL_S = 0.05

_OF_SERVICES = frozenset({"BREAKWATER_LOG_LEVEL", "BREAKWATER_LOG_JSON", "BREAKWATER_METRICS_TOKEN"})


def for_service(environment: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """Returns a service's variables: those that its part of the config names, and those of its logs and metrics."""
    names = _OF_SERVICES.union(named)
    prefixes = ("BREAKWATER_TLS_", "OTEL_", "PROMETHEUS_")
    variables = {name: value for name, value in environment.items() if name in names or name.startswith(prefixes)}
    return variables | for_program(environment)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the stack, which is asked to end with SIGTERM.

    Attributes:
        name: unique in the stack; several processes of one kind are several specs (`worker-1`, `worker-2`).
        argv: program and arguments. Anyone on the machine can read them: no secret belongs here.
        log_file: receives stdout and stderr.
        ready: returns True if the process does its work now. Called repeatedly; must not raise for "not yet".
        env: added to the variables of every program.
        cwd: working directory of a program; the supervisor's own when None, as for services.
        stop_timeout_s: time to end, after which its group is killed.
        ready_timeout_s: time to start, after which the start has failed.
        service: the service that `argv` runs, which can be forked instead of run; None for any other program.
        timer_slack_us: by how many microseconds the kernel may wake a program late; 0 for the kernel's default.
    """

    name: str
    argv: tuple[str, ...]
    log_file: Path
    ready: Probe = field(repr=False)
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: Path | None = None
    stop_timeout_s: float = 5.0
    ready_timeout_s: float = 30.0
    service: str | None = None
    timer_slack_us: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """All variables of the process."""
        return {**for_program(os.environ), **self.env}


class RunningProcess(Protocol):
    """A child process, started as a program (`subprocess.Popen`) or forked by the fork server."""

    pid: int

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        ...

    def wait(self) -> int | None:
        """Waits for the exit code."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL, if the process runs."""
        ...


def spawn(spec: ProcessSpec, *, inherit: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a process in its own session, with its output in its log file, tied to the life of this process.

    Args:
        spec: of the process.
        inherit: file descriptors that the process keeps open, such as the lock of the data directory.

    Raises:
        RuntimeError: called outside the main thread. The kernel kills the child when the thread that forked it ends.
        OSError: the log file or the working directory cannot be used.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{spec.name} must be started from the main thread: a child started from another thread "
            "is killed by the kernel as soon as that thread ends"
        )
    with open_log(spec.log_file) as log:
        return subprocess.Popen(  # noqa: S603 - the command comes from the specs of the stack
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), str(spec.timer_slack_us), *spec.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=spec.cwd,
            env=spec.environment,
            start_new_session=True,
            pass_fds=tuple(inherit),
        )


def kill_group(process: RunningProcess) -> None:
    """Ends a process and its group, also where the process itself has ended already."""
    # The number of a group is not reused for another process. macOS refuses to signal a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # one that has only just been forked leads no group yet


async def until_ended(process: RunningProcess) -> None:
    """Waits until a process has ended."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):  # it was reaped
            descriptor = os.pidfd_open(process.pid)
            try:
                await until_readable(descriptor)
            finally:
                os.close(descriptor)
    while process.poll() is None:  # noqa: ASYNC110 - there is no notification on other systems
        await asyncio.sleep(_POLL_S)


async def until_readable(descriptor: int) -> None:
    """Waits until a descriptor can be read without blocking."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def open_log(path: Path) -> Generator[int]:
    """Opens a log file for appending, readable by its owner alone; one of over 10 MB is moved to `.1` first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if log_size(path) > _LOG_LIMIT:
        path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def log_size(path: Path) -> int:
    """Returns the size of a log file in bytes, which is the offset of the next run's output."""
    return path.stat().st_size if path.exists() else 0


def log_tail(path: Path, *, since: int = 0, lines: int = 20) -> str:
    """Returns the last lines of a log file, of those written after the byte offset `since`."""
    size = log_size(path)
    if size == 0:
        return ""
    with path.open("rb") as log:
        log.seek(max(since if since <= size else 0, size - _TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-lines:])
