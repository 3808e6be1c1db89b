"""What one supervised process is, and how it is started."""

import asyncio
import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from breakwater.embedded.environment import for_program
from breakwater.embedded.probes import Probe

_CHILD = Path(__file__).with_name("child.py")
_LOG_LIMIT = 10 * 1024 * 1024
_TAIL_BYTES = 16 * 1024
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a process that ended is started again.

    Attributes:
        first_s: Wait after the first end, in seconds; doubled after every further one.
        cap_s: The longest wait, in seconds.
        reset_after_s: A process that was ready for this long counts as healthy, and the wait starts again at `first_s`.
    """

    first_s: float = 0.2
    cap_s: float = 30.0
    reset_after_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Give the wait after so many ends in a row (1 or more), in seconds."""
        return min(self.first_s * 2 ** min(failures - 1, 32), self.cap_s)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the stack.

    Attributes:
        name: Unique in the stack; several processes of one role are several specs (`worker-1`, `worker-2`).
        argv: Program and arguments. Anyone on the machine can read them: no secret belongs here.
        log_file: Where stdout and stderr go.
        ready: Answers whether the process does its work now. Called repeatedly; must not raise for "not yet".
        env: Added to what every program gets (see environment.py).
        cwd: Working directory; the supervisor's own when None.
        stop_signal: Asks the process to end.
        stop_timeout_s: How long it may take over that before its group is killed.
        ready_timeout_s: How long a start may take before it counts as failed.
        restart: None for a process whose end is the end of the stack.
        service: The service that `argv` runs, which can be forked instead of run; None for any other program.
    """

    name: str
    argv: tuple[str, ...]
    log_file: Path
    ready: Probe = field(repr=False)
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 5.0
    ready_timeout_s: float = 30.0
    restart: RestartPolicy | None = RestartPolicy()
    service: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """All of its environment."""
        return {**for_program(os.environ), **self.env}


class Process(Protocol):
    """A process that runs, or has ended: what of `subprocess.Popen` is needed here."""

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. Raises subprocess.TimeoutExpired."""
        ...


class ForkServerError(OSError):
    """The fork server did not start a service."""


class ForkedProcess:
    """A process that the fork server has started; used as a `subprocess.Popen` is.

    Attributes:
        pid: Its process id, which is also that of its group.
        returncode: As of `Popen`; None until it was polled after its end. -9 if the fork server is gone, with
            which its processes end.
    """

    def __init__(self, service: str, reports: io.FileIO) -> None:
        """Waits until the fork server has reported the pid on a pipe.

        Raises:
            ForkServerError: it has ended, or could not fork.
        """
        self.returncode: int | None = None
        self._service = service
        self._reports = reports
        pid = b""
        while not pid.endswith(b"\n"):
            if not (byte := reports.read(1)):
                raise ForkServerError(f"the fork server could not start {service}")
            pid += byte
        self.pid = int(pid)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._service} pid {self.pid} returncode {self.returncode}>"

    def fileno(self) -> int:
        """A descriptor that is readable when the process has ended."""
        return self._reports.fileno()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None and select.select([self], [], [], 0)[0]:
            self.returncode = int(self._reports.readall() or -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs still, after so many seconds.
        """
        if self.returncode is None and not select.select([self], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._service, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the process, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def spawn(spec: ProcessSpec, *, inherit: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process in its own session, with its output in its log file, tied to the life of this process.

    Args:
        spec: What to start.
        inherit: File descriptors the process keeps open, such as the lock of the data directory.

    Raises:
        RuntimeError: Called outside the main thread. The kernel kills the child when the thread that forked it ends.
        OSError: The log file or the working directory cannot be used.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"{spec.name} must be started from the main thread: a child started from another thread "
            "is killed by the kernel as soon as that thread ends"
        )
    with open_log(spec.log_file) as log:
        return subprocess.Popen(  # noqa: S603 - the command comes from the specs of the stack
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), *spec.argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=spec.cwd,
            env=spec.environment,
            start_new_session=True,
            pass_fds=tuple(inherit),
        )


@contextlib.contextmanager
def open_log(path: Path) -> Generator[int]:
    """Open a log file for appending, readable by its owner alone; one of over 10 MB is moved to `.1` first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_LIMIT:
            path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def log_size(path: Path) -> int:
    """Give the size of a log file in bytes: where the output of the next run begins."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def log_tail(path: Path, *, since: int = 0, lines: int = 20) -> str:
    """Give the last lines of a log file, of those written after the byte offset `since`; empty if there are none."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(since if since <= end else 0, end - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def signal_group(process: Process, sig: signal.Signals) -> None:
    """Send a signal to a process and everything it has started in its group; one that is gone needs none."""
    if isinstance(process, ForkedProcess) and process.poll() is not None:
        return  # so is its group, and their number may be another's
    try:
        os.killpg(process.pid, sig)
    except PermissionError:
        return  # macOS says so of a group of zombies
    except ProcessLookupError:
        if isinstance(process, ForkedProcess):
            process.send_signal(sig)  # it has only just been forked, and leads no group yet


def has_ended(process: Process) -> bool:
    """Whether a process has ended, without reaping it where the system can do that (Linux)."""
    if isinstance(process, ForkedProcess) or not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def until_ended(process: Process) -> None:
    """Wait until a process has ended, without reaping it where the system can do that (Linux)."""
    if isinstance(process, ForkedProcess):
        await until_readable(process.fileno())
        return
    if not hasattr(os, "pidfd_open"):
        while not has_ended(process):  # noqa: ASYNC110 - there is no notification on these systems
            await asyncio.sleep(_POLL_S)
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        await until_readable(descriptor)
    finally:
        os.close(descriptor)


async def until_readable(descriptor: int) -> None:
    """Wait until a descriptor can be read without blocking."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
