"""Kills the child programs of a worker that was killed itself.

A small process next to the worker starts with its first child. It reads on its stdin which process groups run. When the
worker ends in any way, the kernel closes that pipe, and the guard kills the groups that still run. One guard for all
children costs a child nothing. A parent-death signal would need an interpreter in front of each program (25 ms and
more), and would miss the processes that the program has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OrphanGuard:
    """Makes sure that process groups don't outlive this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def start(self) -> None:
        """Starts the guard. Call it before starting a group, so that `watch` follows without delay.

        Raises:
            OSError: the guard can't be started.
        """
        if self._process is None:
            self._process = self._spawn()

    def watch(self, group: int) -> None:
        """Has a group killed when this process ends.

        Raises:
            OSError: a guard that was killed can't be started again.
        """
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Forgets a group that has ended, as another group may get its number."""
        self._groups.discard(group)
        if self._process is not None:
            with contextlib.suppress(OSError):  # a guard that is gone has nothing to forget
                self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard. The watched groups go on."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process = None

    def _send(self, line: str) -> None:
        if self._process is not None:
            try:
                self._write(self._process, line)
            except OSError:
                self.close()  # it was killed from outside
            else:
                return
        self._process = self._spawn()
        self._write(self._process, "".join(f"+{group}\n" for group in self._groups))

    @staticmethod
    def _spawn() -> subprocess.Popen[bytes]:
        # A service manager may send a signal to all processes of a service at the same time. The worker then takes its
        # time to end, and needs the guard until the end. Signals that are blocked here are blocked in the guard, too.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
        try:
            process = subprocess.Popen(  # noqa: S603  this file
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env={},  # the guard needs none, and the programs that it watches could read it
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    @staticmethod
    def _write(process: subprocess.Popen[bytes], lines: str) -> None:
        assert process.stdin is not None
        os.write(process.stdin.fileno(), lines.encode())


def main() -> None:
    """Runs the guard."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
