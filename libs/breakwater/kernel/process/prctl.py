"""Process attributes set through prctl(2). Linux only; elsewhere each function does nothing."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15  # linux/prctl.h


def hide_memory() -> None:
    """Keeps other processes of the same user from reading this one's environment and memory, and debugging it.

    Root, and processes with CAP_SYS_PTRACE, still can. The kernel then writes no core dump. Forks inherit the
    attribute; an executed program starts without it.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def end_with_parent() -> None:
    """Has this process killed when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """Names the process in `ps -e` and `top`, which show at most 15 bytes. Forks would all be named `python`."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
