"""Ctrl-C: the first one ends a command in order, a second one immediately; neither prints anything of Python's.

While Python starts, imports and ends, the kernel's own handling applies: an exception there would be printed.
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

from breakwater.cli.errors import ExitCode

T = TypeVar("T")


def begin() -> None:
    """From now on SIGINT raises KeyboardInterrupt, once. Leaves a process alone that is not the command's own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _first)


@contextmanager
def ignored() -> Generator[None]:
    """Ignores SIGINT in the block, which takes a moment."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs the asynchronous part of a command. SIGINT cancels it.

    Raises:
        KeyboardInterrupt: it was cancelled by one.
    """
    import asyncio  # a tenth of the time that `breakwater --help` may take

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)  # signals arrive in the main thread alone
    before, interrupted = signal.getsignal(signal.SIGINT), False

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                _exit()
            interrupted = True
            # Connections that are cut off while they are closed raise errors.
            loop.set_exception_handler(lambda _loop, _context: None)
            assert task is not None
            task.cancel()

        if before is not signal.SIG_IGN:  # as for a background job of a script
            loop.add_signal_handler(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return await work
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, _exit if before is _first else before)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # An error in a loop that is half set up, or half closed, would be printed: SIGINT waits meanwhile, or ends it all.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return asyncio.run(main())
    except BaseException:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, _exit if interrupted and before is _first else before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _first(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # The import system prints an exception that its callbacks raise, and goes on: try again in a moment.
            signal.signal(signal.SIGALRM, _again)
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            return
        frame = frame.f_back
    signal.signal(signal.SIGINT, _exit)
    raise KeyboardInterrupt


def _again(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def _exit(*_: object) -> NoReturn:
    """Ends the process as it is, but for the cursor, which a progress line has hidden."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h")
    os._exit(ExitCode.INTERRUPTED)
