"""Handling of Ctrl-C: the first ends a command in order, the second immediately; neither prints a traceback.

While Python starts, imports and ends, the kernel's default applies, because Python would print an exception there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

from breakwater.kernel.commands.errors import ExitCode

T = TypeVar("T")


def begin() -> None:
    """Lets the next SIGINT raise KeyboardInterrupt, unless the process already has a handler of its own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def ignore_interrupts() -> Generator[None]:
    """Ignores SIGINT in the block, which must be short."""
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs the asynchronous part of a command. SIGINT cancels it.

    Raises:
        KeyboardInterrupt: if SIGINT cancelled it.
    """
    import asyncio  # a tenth of the time that `breakwater --help` may take

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)  # only the main thread receives signals
    previous_handler = signal.getsignal(signal.SIGINT)
    interrupted = False

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                _exit_immediately()
            interrupted = True
            # Silences the errors of connections that break while they are closed.
            loop.set_exception_handler(lambda _loop, _context: None)
            assert task is not None
            task.cancel()

        if previous_handler is not signal.SIG_IGN:  # a script's background job ignores SIGINT
            loop.add_signal_handler(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return await work
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _exit_immediately if previous_handler is _interrupt else previous_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # SIGINT is blocked while asyncio sets up and closes the loop, because it would print an error that is raised there.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return asyncio.run(main())
    except BaseException:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        ends_immediately = interrupted and previous_handler is _interrupt
        signal.signal(signal.SIGINT, _exit_immediately if ends_immediately else previous_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # The import system would print the exception and continue, so try again in a moment.
            signal.signal(signal.SIGALRM, _raise_sigint)
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        frame = frame.f_back
    signal.signal(signal.SIGINT, _exit_immediately)
    raise KeyboardInterrupt


def _raise_sigint(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def _exit_immediately(*_: object) -> NoReturn:
    """Ends the process without any cleanup, except that it shows the cursor, which a progress line hides."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h")
    os._exit(ExitCode.INTERRUPTED)
