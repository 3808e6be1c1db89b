"""One process kept alive: start it, wait until it is ready, start it again when it dies."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from breakwater.embedded.events import EventKind, ProcessEvent, ProcessFailedError, describe_exit
from breakwater.embedded.process import Process, ProcessSpec, has_ended, log_size, log_tail, signal_group, until_ended

_PROBE_EVERY_S = 0.03
_REAP_S = 2.0


@dataclass(frozen=True, slots=True)
class _Run:
    """How one run of the process went: why it ended, and how long it had been ready, None if it never was."""

    reason: str
    pid: int | None
    returncode: int | None
    healthy_s: float | None


class Keeper:
    """Keeps the process of one spec alive until it is stopped."""

    def __init__(
        self,
        spec: ProcessSpec,
        on_event: Callable[[ProcessEvent], None],
        start: Callable[[ProcessSpec], Awaitable[Process]],
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready = asyncio.Event()
        self._on_event = on_event
        self._start = start
        self._process: Process | None = None
        self._log_start = 0
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return None if self._process is None else self._process.pid

    def launch(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Begin; `on_end` gets the finished task, whose exception says why the stack cannot go on."""
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")
        self._task.add_done_callback(on_end)

    async def until_ready(self) -> None:
        """Wait until the process is ready, or is being stopped.

        Raises:
            ProcessFailedError: It ended, or did not get ready in time.
        """
        assert self._task is not None, "launch() comes first"
        ready = asyncio.create_task(self.ready.wait())
        try:
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to the process itself, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # a fork that has just ended
                os.kill(self._process.pid, sig)
            if sig is signal.SIGKILL:  # it must not be taken for ready until the kernel has reported its end
                self.ready.clear()

    def kill_group(self) -> None:
        """End the process and all that it has started, at once and for good."""
        self._stopping.set()
        if self._process is not None:
            signal_group(self._process, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, and end it by force when the time is over."""
        if self._task is None or self._task.done():
            return
        if not self._stopping.is_set():
            self._stopping.set()
            self._report("stopping")
            self.signal(self.spec.stop_signal)
        _, late = await asyncio.wait({self._task}, timeout=timeout_s)
        if late:
            self.kill_group()
            _, late = await asyncio.wait({self._task}, timeout=_REAP_S)
        if late:  # stuck in the kernel, as on a disk that no longer answers: nothing can end it
            structlog.get_logger().error("process_cannot_be_killed", process=self.spec.name, pid=self.pid)

    async def _keep(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            run = await self._run_once()
            if self._stopping.is_set():
                self._report("stopped", run)
                return
            policy = self.spec.restart
            if policy is not None and run.healthy_s is not None and run.healthy_s >= policy.reset_after_s:
                failures = 0
            failures += 1
            self._report("exited", run, failures=failures)
            came_up = self.restarts > 0 or run.healthy_s is not None
            if policy is None or not came_up:
                raise self._give_up(run)
            # Whatever ended it, a port that was taken or a file that was wrong: the others do their work without it,
            # and what ended it may have passed at the next try.
            delay_s = policy.delay_s(failures)
            self._report("restarting_in", run, failures=failures, delay_s=delay_s, message=run.reason)
            if await self._stopped_within(delay_s):
                self._report("stopped")
                return
            self.restarts += 1

    async def _run_once(self) -> _Run:
        self._log_start = log_size(self.spec.log_file)
        try:
            process = self._process = await self._start_unless_stopped()
        except OSError as error:
            return _Run(f"could not be started: {error}", None, None, None)
        try:
            self._report("started")
            problem, healthy_s = await self._watch(process)
        finally:
            # Nothing of the group outlives its leader, also when this task is cancelled or a probe raises. The leader
            # is reaped after that, not before: until then the number of the group cannot be another one's.
            self.ready.clear()
            signal_group(process, signal.SIGKILL)
            returncode = process.wait()
            self._process = None
        return _Run(problem or describe_exit(returncode), process.pid, returncode, healthy_s)

    async def _start_unless_stopped(self) -> Process:
        """Start it; a stop that comes meanwhile does not wait for that, and nobody will own what is started."""
        starting = asyncio.ensure_future(self._start(self.spec))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise OSError("it was stopped before")
            return starting.result()
        finally:
            starting.cancel()
            stopping.cancel()

    async def _watch(self, process: Process) -> tuple[str | None, float | None]:
        """Follow a run to its end: give what was wrong with it, if not its end, and for how long it was ready."""
        loop = asyncio.get_running_loop()
        ended, answers = asyncio.create_task(until_ended(process)), asyncio.create_task(self._answer())
        try:
            limit_s = self.spec.ready_timeout_s
            await asyncio.wait({ended, answers}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if has_ended(process):  # so an answer came from something else on its port
                return None, None
            if not (answers.done() and answers.result()):
                return f"was not ready within {limit_s:g} s and was killed", None
            ready_at = loop.time()
            self.ready.set()
            self._report("ready")
            await ended
            return None, loop.time() - ready_at
        finally:
            ended.cancel()
            answers.cancel()

    async def _answer(self) -> bool:
        while not await self.spec.ready():  # noqa: ASYNC110 - another program's state has no event to wait for
            await asyncio.sleep(_PROBE_EVERY_S)
        return True

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return False
        return True

    def _give_up(self, run: _Run) -> ProcessFailedError:
        tail = log_tail(self.spec.log_file, since=self._log_start)
        error = ProcessFailedError(self.spec.name, run.reason, run.returncode, self.spec.log_file, tail)
        self._report("gave_up", run, message=str(error))
        return error

    def _report(
        self,
        kind: EventKind,
        run: _Run | None = None,
        *,
        failures: int = 0,
        delay_s: float | None = None,
        message: str | None = None,
    ) -> None:
        code = None if run is None else run.returncode
        event = ProcessEvent(
            kind=kind,
            name=self.spec.name,
            pid=self.pid if run is None else run.pid,
            code=code if code is not None and code >= 0 else None,
            signal=signal.Signals(-code) if code is not None and code < 0 else None,
            delay_s=delay_s,
            restarts=self.restarts,
            failures=failures,
            message=message,
        )
        self._on_event(event)
