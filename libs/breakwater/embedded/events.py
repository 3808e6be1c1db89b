"""The events that a supervisor reports about its processes."""

from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Literal

EventKind = Literal["started", "ready", "exited", "restarting_in", "stopping", "stopped", "gave_up"]


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """One thing that happened to one process.

    Attributes:
        kind: `stopping` is reported when a process is asked to end, `stopped` when it has. An end that was not asked
            for is `exited`; `gave_up` means that it never came up, and the stack stops.
        name: The process' name in the stack.
        pid: Its process id; None while it has none, between two runs.
        code: Exit code, for `exited`, `restarting_in` and `stopped`; None if a signal ended it.
        signal: The signal that ended it, for the same.
        delay_s: How long until the next start, for `restarting_in`.
        restarts: How often it has been started again so far.
        failures: For `exited` and `restarting_in`: how often it has ended so without being healthy in between.
        message: For `restarting_in`: how it ended, in words. For `gave_up`: the same, with the end of its log.
    """

    kind: EventKind
    name: str
    pid: int | None = None
    code: int | None = None
    signal: Signals | None = None
    delay_s: float | None = None
    restarts: int = 0
    failures: int = 0
    message: str | None = None


class ProcessFailedError(RuntimeError):
    """A process did not come up, or one that is not to be started again has ended.

    Args:
        name: The process' name in the stack.
        reason: What happened, in words.
        exit_code: Its exit code; negative for a signal, None if it still ran.
        log_file: Where all its output is.
        log_tail: The last lines of this run's output.
    """

    def __init__(self, name: str, reason: str, exit_code: int | None, log_file: Path, log_tail: str) -> None:
        self.exit_code = exit_code
        output = f"the last lines of its log:\n{log_tail}" if log_tail else "it wrote nothing to its log"
        super().__init__(f"{name} {reason} (log: {log_file}); {output}")


def describe_exit(returncode: int) -> str:
    """Say in words how a process ended; a negative code is a signal, as in subprocess."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    return f"was killed by {Signals(-returncode).name}"
