"""Ctrl-C: the first one ends a command in order, a second one immediately; neither prints anything of Python's.

While Python starts, imports and ends, the kernel's own handling applies: nothing is to be put in order there, and an
exception in an import or a finalizer would be printed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from breakwater.cli.errors import ExitCode

T = TypeVar("T")

_SHOW_CURSOR = b"\x1b[?25h"


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

    async def main() -> T | None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                _exit()
            interrupted = True
            # Connections that are cut off while they are closed raise errors of their own.
            loop.set_exception_handler(_unheard)
            assert task is not None
            task.cancel()

        if before is not signal.SIG_IGN:  # as for a background job of a script
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await work
        except BaseException:
            if not interrupted:
                raise
        return None

    try:
        result = asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, _again if interrupted and before is _first else before)
    if interrupted:
        raise KeyboardInterrupt
    return result  # pyright: ignore[reportReturnType]  # None is the result of interrupted work alone


def _unheard(loop: object, context: object) -> None:
    """Takes the errors of tasks that are no longer awaited."""


def _first(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    signal.signal(signal.SIGINT, _again)
    raise KeyboardInterrupt


def _again(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    _exit()


def _exit() -> NoReturn:
    """Ends the process as it is, but for the cursor, which a progress line has hidden."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(ExitCode.INTERRUPTED)
