"""The processes of one local stack: started in order, kept alive, stopped in reverse."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import structlog

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.background import run_together
from breakwater.local import fork_server
from breakwater.local.process import (
    ProcessSpec,
    RunningProcess,
    kill_group,
    log_size,
    log_tail,
    open_log,
    spawn,
    until_ended,
)

T = TypeVar("T")

ProcessEventKind = Literal["started", "ready", "exited", "restarting_in", "stopping", "stopped", "gave_up"]

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
HEALTHY_S = 30.0
"""A process that was ready for this long is started again after the first delay, however often it ended before."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CANCEL_S = 1.0
_PROBE_EVERY_S = 0.03
_REAP_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """An event in the life of a process.

    Attributes:
        kind: `stopping` is reported when a process is asked to end, `stopped` when it has. An unexpected end is
            `exited`; `gave_up` means that it never came up, and the stack stops.
        name: of the process in the stack.
        pid: None between two runs.
        returncode: as of subprocess, for `exited`, `restarting_in`, `gave_up` and `stopped`.
        delay_s: until the next start, for `restarting_in`.
        restarts: number of restarts so far.
        failures: for `exited` and `restarting_in`: number of ends in a row, without being healthy in between.
        message: for `restarting_in`: the reason of the end. For `gave_up`: the same, with the end of the log.
    """

    kind: ProcessEventKind
    name: str
    pid: int | None = None
    returncode: int | None = None
    delay_s: float | None = None
    restarts: int = 0
    failures: int = 0
    message: str | None = None

    @property
    def code(self) -> int | None:
        """The exit code; None if a signal ended it."""
        return None if self.signal else self.returncode

    @property
    def signal(self) -> Signals | None:
        """The signal that ended it."""
        return Signals(-self.returncode) if self.returncode is not None and self.returncode < 0 else None


def restart_delay_s(failures: int) -> float:
    """Returns the wait before the next start, which doubles with each failure in a row."""
    return min(FIRST_DELAY_S * 2 ** min(failures - 1, 32), LONGEST_DELAY_S)


class ProcessFailedError(BreakwaterError, RuntimeError):
    """A process did not come up.

    Attributes:
        exit_code: negative for a signal, None if the process could not be started.
    """

    command_code = "not_started"

    def __init__(self, name: str, reason: str, exit_code: int | None, log_file: Path, log_tail: str) -> None:
        self.exit_code = exit_code
        output = f"the last lines of its log:\n{log_tail}" if log_tail else "it wrote nothing to its log"
        super().__init__(f"{name} {reason} (log: {log_file}); {output}")


class Keeper:
    """Keeps the process of one spec alive until it is stopped.

    Attributes:
        ready: set while the process does its work.
        restarts: number of restarts so far.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        on_event: Callable[[ProcessEvent], None],
        start: Callable[[ProcessSpec], Awaitable[RunningProcess]],
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready = asyncio.Event()
        self._on_event = on_event
        self._start = start
        self._process: RunningProcess | None = None
        self._stopping = False
        self.task = asyncio.create_task(self._keep(), name=f"keep {spec.name}")

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    async def until_ready(self) -> None:
        """Waits until the process is ready, or is being stopped.

        Raises:
            ProcessFailedError: it ended, or did not get ready in time.
        """
        ready = asyncio.create_task(self.ready.wait())
        try:
            await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self.task.done() and not self.task.cancelled():
            self.task.result()

    def signal(self, sig: Signals) -> None:
        """Sends a signal to the process itself, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # a fork that has just ended
                os.kill(self._process.pid, sig)
            if sig is signal.SIGKILL:  # it must not be taken for ready until the kernel has reported its end
                self.ready.clear()

    def kill(self) -> None:
        """Kills the process and everything that it has started, and does not start it again."""
        self._stopping = True
        if self._process is None:
            self.task.cancel()
        else:
            kill_group(self._process)

    async def stop(self) -> None:
        """Asks the process to end, and kills it when its time is over."""
        if self.task.done():
            return
        if not self._stopping:
            self._stopping = True
            self._report("stopping")
            if self._process is None:  # it is being started, or waits for its next start
                self.task.cancel()
                self._report("stopped")
            self.signal(signal.SIGTERM)
        _, late = await asyncio.wait({self.task}, timeout=self.spec.stop_timeout_s)
        if late:
            self.kill()
            _, late = await asyncio.wait({self.task}, timeout=_REAP_S)
        if late:  # stuck in the kernel, as on a disk that no longer answers: nothing can end it
            structlog.get_logger().error("process_cannot_be_killed", process=self.spec.name, pid=self.pid)

    async def _keep(self) -> None:
        failures = 0
        while True:
            log_start = log_size(self.spec.log_file)
            reason, healthy_s, run = await self._run()
            if self._stopping:
                self._report("stopped", **run)
                return
            failures = 1 if healthy_s is not None and healthy_s >= HEALTHY_S else failures + 1
            self._report("exited", failures=failures, **run)
            if self.restarts == 0 and healthy_s is None:
                tail = log_tail(self.spec.log_file, since=log_start)
                failed = ProcessFailedError(self.spec.name, reason, run.get("returncode"), self.spec.log_file, tail)
                self._report("gave_up", message=str(failed), **run)
                raise failed
            # The other processes work without it, and its problem, such as a port in use or a wrong file, may be over
            # at the next start.
            delay_s = restart_delay_s(failures)
            self._report("restarting_in", failures=failures, delay_s=delay_s, message=reason, **run)
            await asyncio.sleep(delay_s)
            self.restarts += 1

    async def _run(self) -> tuple[str, float | None, dict[str, int]]:
        """Runs the process once.

        Returns:
            The reason of its end, the time for which it was ready (None: it never was), and details for events.
        """
        try:
            process = self._process = await self._start(self.spec)
        except OSError as error:
            return f"could not be started: {error}", None, {}
        try:
            self._report("started")
            problem, healthy_s = await self._watch(process)
        finally:
            # No process of the group outlives its leader, also when this task is cancelled or a probe raises.
            self.ready.clear()
            kill_group(process)
            returncode = process.wait()
            self._process = None
            assert returncode is not None
        ended = f"was killed by {Signals(-returncode).name}" if returncode < 0 else f"exited with code {returncode}"
        return problem or ended, healthy_s, {"pid": process.pid, "returncode": returncode}

    async def _watch(self, process: RunningProcess) -> tuple[str | None, float | None]:
        """Follows a run to its end; returns its problem, None if it just ended, and the time for which it was ready."""
        loop = asyncio.get_running_loop()
        limit_s = self.spec.ready_timeout_s
        ended = asyncio.create_task(until_ended(process))
        try:
            async with asyncio.timeout(limit_s):
                while not await self.spec.ready() and process.poll() is None:
                    await asyncio.wait({ended}, timeout=_PROBE_EVERY_S)
            if process.poll() is not None:  # an answer came from another program on its port
                return None, None
            ready_at = loop.time()
            self.ready.set()
            self._report("ready")
            await ended
            return None, loop.time() - ready_at
        except TimeoutError:
            return f"was not ready within {limit_s:g} s and was killed", None
        finally:
            ended.cancel()

    def _report(self, kind: ProcessEventKind, **details: Any) -> None:
        details = {"pid": self.pid, "restarts": self.restarts, **details}
        self._on_event(ProcessEvent(kind, self.spec.name, **details))


class Supervisor:
    """Runs the processes of a stack; a context manager that leaves no process behind.

    It must be used from the main thread, whose end is the end of every child (see child.py).

    Attributes:
        keepers: of all processes, by their names, in the order of their start.

    Args:
        on_event: called with every event, in order.
        inherit: file descriptors that every process keeps open: the lock of the data directory.
        fork: has the services forked (see fork_server.py). Otherwise, and on systems other than Linux, each service is
            run with a Python of its own.
        on_hangup: called at SIGHUP, which otherwise stops the stack.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[ProcessEvent], None] = lambda _: None,
        inherit: Sequence[int] = (),
        fork: bool = False,
        on_hangup: Callable[[], None] | None = None,
    ) -> None:
        self._on_event = on_event
        self._inherit = tuple(inherit)
        self._fork = fork and fork_server.SUPPORTED
        self._fork_server_started = False
        self._on_hangup = on_hangup
        # Processes that were started together stop together, in reverse order.
        self._steps: list[list[Keeper]] = []
        self.keepers: dict[str, Keeper] = {}
        # The end of the stack: a signal, or the error of a process that failed.
        self._ended: asyncio.Future[Signals] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_retrieve)
        self._stopping = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Starts processes together and waits until they are ready. May be called again for more.

        Raises:
            ProcessFailedError: one of them did not come up. Those that did still run, until `stop`.
            ValueError: a name is taken.
        """
        if self._fork:
            fork_server.start()  # it imports the services while the servers come up
            self._fork_server_started = True
        keepers: list[Keeper] = []
        self._steps.append(keepers)
        for spec in specs:
            keepers.append(self._launch(spec))
        await run_together(*(keeper.until_ready() for keeper in keepers))

    async def stop(self) -> None:
        """Ends all processes, the last started first, by SIGTERM, then by SIGKILL of their groups."""
        self._stopping = True
        while self._steps:
            await asyncio.gather(*(keeper.stop() for keeper in self._steps[-1]))
            self._steps.pop()
        if self._fork_server_started:
            fork_server.stop()

    def kill_all(self) -> None:
        """Kills all processes and everything that they have started."""
        self._stopping = True
        for keeper in self.keepers.values():
            keeper.kill()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | Signals:
        """Runs work with a stack, and stops the stack at the end of the work, at a signal or at a failure.

        The first SIGINT, SIGTERM or SIGHUP cancels the work and stops the stack in order; a second one kills all.

        Args:
            work: starts the processes and uses them.

        Returns:
            The result of the work, or the signal that came first.

        Raises:
            ProcessFailedError: a process did not come up; the stack is stopped by then.
            Exception: any other error of `work`; the stack is stopped by then, too.
        """
        loop = asyncio.get_running_loop()
        # `nohup` means that the end of the terminal is not to end the stack.
        handled = [sig for sig in _SIGNALS if sig is not signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN]
        for sig in handled:
            loop.add_signal_handler(sig, self._on_signal, sig)
        working = asyncio.ensure_future(work())
        working.add_done_callback(_retrieve)
        try:
            await asyncio.wait({working, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            ended = working if working.done() else self._ended
            working.cancel()
            await asyncio.wait({working}, timeout=_CANCEL_S)
            await self.stop()
            return ended.result()
        finally:
            working.cancel()  # the handlers stay: what follows takes a moment, and need not be interrupted

    def _on_signal(self, sig: Signals) -> None:
        if sig is signal.SIGHUP and self._on_hangup is not None:
            self._on_hangup()
        elif self._ended.done():
            self.kill_all()
        else:
            self._ended.set_result(sig)

    def _launch(self, spec: ProcessSpec) -> Keeper:
        if spec.name in self.keepers:
            raise ValueError(f"two processes of the stack have the name {spec.name!r}; names must be unique")
        if self._stopping:
            raise RuntimeError(f"{spec.name} cannot be started: the stack is being stopped")
        keeper = self.keepers[spec.name] = Keeper(spec, self._on_event, self._start)

        def on_end(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._ended.done():
                self._ended.set_exception(error)

        keeper.task.add_done_callback(on_end)
        return keeper

    async def _start(self, spec: ProcessSpec) -> RunningProcess:
        if spec.service is None or not self._fork:
            return spawn(spec, inherit=self._inherit)
        with open_log(spec.log_file) as log:
            return await fork_server.fork_within(
                spec.ready_timeout_s, spec.service, log, spec.environment, inherit=self._inherit
            )


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Takes the error of a task that is no longer awaited: asyncio would log it with its traceback.

    Work that is cancelled while its server is being stopped often ends with an error of the connection instead.
    """
    if not task.cancelled():
        task.exception()
