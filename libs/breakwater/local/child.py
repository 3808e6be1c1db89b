"""Runs one command that must not outlive its supervisor: `python -I -S child.py SUPERVISOR_PID SLACK_US command…`.

A step between fork and exec is needed, because the kernel forgets a parent-death signal at fork. It is a small program
and not a `preexec_fn`, which would run Python in a forked copy of a process with threads, where a lock held by another
thread at that moment stays locked for ever. It uses the standard library alone and costs about 25 ms.

The kernel sends the signal when the *thread* that forked ends, so `spawn` in process.py forks from the main thread
only. Only Linux has this signal. On macOS the command runs without it and survives a SIGKILL of its supervisor; as
every child inherits the lock of the data directory, the next start then fails and says why.

SLACK_US is the timer slack of the command, which it keeps from here: how late the kernel may wake it; 0 for the
kernel's default, 50 microseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_TIMERSLACK = 29
COULD_NOT_START = 127


def main(argv: list[str]) -> None:
    """Ties this process to its supervisor and becomes the command."""
    supervisor = int(argv[1])
    slack_us = int(argv[2])
    command = argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            _give_up(f"could not be tied to its supervisor: {os.strerror(ctypes.get_errno())}")
        libc.prctl(PR_SET_TIMERSLACK, slack_us * 1000, 0, 0, 0)
    if os.getppid() != supervisor:
        _give_up("its supervisor ended during its start")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        _give_up(f"could not be run: {error.strerror}")


def _give_up(reason: str) -> None:
    sys.stderr.write(f"{sys.argv[3]}: {reason}\n")
    sys.exit(COULD_NOT_START)


if __name__ == "__main__":
    main(sys.argv)
