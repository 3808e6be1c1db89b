"""The processes of one local stack: started in order, kept alive, stopped in reverse."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from breakwater.embedded.events import ProcessEvent
from breakwater.embedded.fork_server import SUPPORTED, ForkServer
from breakwater.embedded.keeper import Keeper
from breakwater.embedded.process import Process, ProcessSpec, open_log, spawn

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEAST_GRACE_S = 1.0
_CANCEL_S = 1.0


class Supervisor:
    """Runs the processes of a stack; a context manager that leaves no process behind.

    It must be used from the main thread, whose end is the end of every child (see child.py).

    Attributes:
        keepers: Of all processes, by their names, in the order of their start.

    Args:
        on_event: Called with everything that happens to a process, in order.
        inherit: File descriptors that every process keeps open: the lock of the data directory.
        stop_s: How long a whole stop may take, in seconds. Whatever else takes, every process gets at least one second.
        fork_log: Where the fork server logs that starts the services (see fork_server.py). Without it, and on systems
            other than Linux, each service is run with a Python of its own.
    """

    def __init__(
        self,
        *,
        on_event: Callable[[ProcessEvent], None] = lambda _: None,
        inherit: Sequence[int] = (),
        fork_log: Path | None = None,
        stop_s: float = 10.0,
    ) -> None:
        self._on_event = on_event
        self._inherit = tuple(inherit)
        self._fork_server: ForkServer | None = None
        if fork_log is not None and SUPPORTED:
            self._fork_server = ForkServer(fork_log, inherit=inherit)
        self._stop_s = stop_s
        # Steps of the start: the processes of one step stop at the same time, the steps in reverse order.
        self._steps: list[list[Keeper]] = []
        self.keepers: dict[str, Keeper] = {}
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._stopping = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, specs: Sequence[ProcessSpec], *, together: bool = False) -> None:
        """Start processes and wait until they are ready. May be called again for more.

        Args:
            specs: What to start.
            together: Start, and later stop, all of them at the same time; otherwise each waits for the one before it.

        Raises:
            ProcessFailedError: One of them did not come up. Those that did still run, until `stop`.
            ValueError: A name is taken.
        """
        if self._fork_server is not None:
            self._fork_server.start()  # it imports the services while the servers come up
        for step in [list(specs)] if together else [[spec] for spec in specs]:
            keepers: list[Keeper] = []
            self._steps.append(keepers)
            for spec in step:
                keepers.append(self._launch(spec))
            waits = [asyncio.create_task(keeper.until_ready()) for keeper in keepers]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()

    async def stop(self) -> None:
        """End all processes, the last started first, by their stop signal, then by SIGKILL of their groups."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self._stop_s
        while self._steps:
            step = self._steps[-1]
            left_s = max(end - loop.time(), _LEAST_GRACE_S)
            await asyncio.gather(*(keeper.stop(min(keeper.spec.stop_timeout_s, left_s)) for keeper in step))
            self._steps.pop()
        if self._fork_server is not None:
            self._fork_server.stop()

    def kill_all(self) -> None:
        """End all processes and everything they have started, at once."""
        self._stopping = True
        for keeper in self.keepers.values():
            keeper.kill_group()

    async def run_until_signal(self, bring_up: Callable[[], Awaitable[None]]) -> int:
        """Bring a stack up, keep it until a signal or a failure ends it, and stop it.

        Args:
            bring_up: Starts the processes, and does whatever else belongs to the start.

        Returns:
            The exit code of a program ended by that signal: 130 for SIGINT, 143 for SIGTERM.

        Raises:
            ProcessFailedError: A process did not come up, or could not go on; the stack is stopped by then.
            Exception: Whatever else `bring_up` raised; the stack is stopped by then, too.
        """

        async def for_ever() -> None:
            await bring_up()
            await asyncio.Event().wait()

        ended = await self.run(for_ever)
        assert isinstance(ended, signal.Signals)
        return 128 + ended

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | signal.Signals:
        """Do some work with a stack, and stop the stack when the work, a signal or a failure has ended it.

        The first SIGINT, SIGTERM or SIGHUP cancels the work and stops the stack in order; a second one kills
        everything at once.

        Args:
            work: Starts the processes, and does what they are needed for.

        Returns:
            What the work returned, or the signal that came first.

        Raises:
            ProcessFailedError: A process did not come up, or could not go on; the stack is stopped by then.
            Exception: Whatever else `work` raised; the stack is stopped by then, too.
        """
        loop = asyncio.get_running_loop()
        received: asyncio.Future[signal.Signals] = loop.create_future()

        def on_signal(sig: signal.Signals) -> None:
            if received.done():
                self.kill_all()
            else:
                received.set_result(sig)

        # `nohup` means that the end of the terminal is not to end the stack.
        handled = [sig for sig in _SIGNALS if sig is not signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN]
        for sig in handled:
            loop.add_signal_handler(sig, on_signal, sig)
        life = asyncio.create_task(self._live(work))
        life.add_done_callback(_retrieve)
        try:
            await asyncio.wait({life, received}, return_when=asyncio.FIRST_COMPLETED)
            ended = life.done()
            life.cancel()
            await asyncio.wait({life}, timeout=_CANCEL_S)
            await self.stop()
        finally:
            life.cancel()
            for sig in handled:
                loop.remove_signal_handler(sig)
        return life.result() if ended else received.result()

    def _launch(self, spec: ProcessSpec) -> Keeper:
        if spec.name in self.keepers:
            raise ValueError(f"two processes of one stack are called {spec.name!r}: every name is used once")
        if self._stopping:
            raise RuntimeError(f"{spec.name} cannot be started: the stack is being stopped")
        keeper = self.keepers[spec.name] = Keeper(spec, self._on_event, self._start)
        keeper.launch(self._on_end)
        return keeper

    async def _start(self, spec: ProcessSpec) -> Process:
        if spec.service is None or self._fork_server is None:
            return spawn(spec, inherit=self._inherit)
        with open_log(spec.log_file) as log:
            return await self._fork_server.fork_soon(
                spec.service, log, spec.environment, spec.cwd, spec.ready_timeout_s
            )

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and self._failure is None:
            self._failure = error
            self._failed.set()

    async def _live(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work, unless a process fails in the meantime: that ends it, also in the middle of a start."""
        failed = asyncio.create_task(self._failed.wait())
        working = asyncio.ensure_future(work())
        working.add_done_callback(_retrieve)
        try:
            await asyncio.wait({failed, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            assert self._failure is not None
            raise self._failure
        finally:
            working.cancel()
            failed.cancel()
            await asyncio.wait({working})


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Takes the error of a task that nobody waits for any more: asyncio would log it with its traceback.

    Work that is cancelled while its server is being stopped often ends with an error of the connection instead.
    """
    if not task.cancelled():
        task.exception()
