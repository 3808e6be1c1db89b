"""Kills the child programs of a worker that was itself killed, and so could not.

A small process next to the worker, started with its first child. It reads on its stdin which process groups run; when
the worker ends, however it ends, the kernel closes that pipe, and what then still runs is killed. One such process for
all of a worker's children costs a child nothing; a parent-death signal would need an interpreter started before each
program (25 ms and more), and would miss what the program has started itself.
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
        """Starts the guard, before the first group is: between its start and its `watch` nothing else should take time.

        Raises:
            OSError: the guard can't be started.
        """
        if self._process is None:
            self._process = self._spawn()

    def watch(self, group: int) -> None:
        """Has a group killed with this process.

        Raises:
            OSError: a guard that was killed can't be started again.
        """
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Forgets a group that has ended; its number may soon be another's."""
        self._groups.discard(group)
        if self._process is not None:
            with contextlib.suppress(OSError):  # a guard that is gone has nothing to forget
                self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard. What is watched goes on."""
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
        # A service manager may ask all processes of a service to end at the same time; the worker, which then takes its
        # time, needs the guard till last. What is blocked here stays so in the guard, from its first moment.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED_TO_END)
        try:
            process = subprocess.Popen(  # noqa: S603  this file
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env={},  # it needs nothing, and its environment can be read by the programs that it watches
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
    """The guard itself."""
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
