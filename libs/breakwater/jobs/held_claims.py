"""A claim that this process holds: its lease, and the cancellation of its job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.rules.record import cancelled_by
from breakwater.jobs.store.executions import SavedProgress
from breakwater.kernel.errors import BreakwaterError


class JobCancelledError(BreakwaterError):
    """The job was cancelled: it ends without another call."""

    def __init__(self, cancellation: Cancellation) -> None:
        super().__init__("the job was cancelled")
        self.cancellation = cancellation


class CancelSignal:
    """The cancellation of a job that this process has claimed.

    Attributes:
        cancellation: the first one received; None if the job was not cancelled.
    """

    def __init__(self, agent: str, owner: str | None = None, tenant: str | None = None) -> None:
        self.cancellation: Cancellation | None = None
        self._of = agent, owner, tenant
        self._waiting: asyncio.Task[object] | None = None
        self._interrupted = False

    def receive(self, cancels: Iterable[PendingCancel]) -> None:
        """Receives cancel requests, and interrupts the job's current wait if one of them applies to it."""
        if self.cancellation is not None:
            return
        cancellation = cancelled_by(cancels, *self._of)
        if cancellation is None:
            return
        self.cancellation = cancellation
        # If the job's own task receives the request, it is not waiting now, and `cancel` would hit its next wait.
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._interrupted = True
            self._waiting.cancel()

    def check(self) -> None:
        """Raises JobCancelledError if the job was cancelled."""
        if self.cancellation is not None:
            raise JobCancelledError(self.cancellation)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Ends waits of the task in the block with JobCancelledError as soon as the job is cancelled."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        cancels_before = task.cancelling()
        self._waiting = task
        self._interrupted = False
        try:
            yield
        except asyncio.CancelledError:
            # As `asyncio.timeout` does: the task may also be cancelled because the process stops.
            if self._interrupted and task.uncancel() <= cancels_before:
                self.check()
            raise
        except BaseException:
            if self._interrupted:
                task.uncancel()
            raise
        else:
            if self._interrupted:
                task.uncancel()
        finally:
            self._waiting = None


class Restore(Protocol):
    """Writes progress again that Redis has lost, and the lease unless the job is released."""

    def __call__(self, progress: SavedProgress, *, release: bool) -> Awaitable[bool]:
        """Returns False if another handling has the job. Raises StateUnavailableError."""
        ...


def no_progress() -> SavedProgress:
    """Returns the progress of a job that has not begun."""
    return SavedProgress(None)


@dataclass(slots=True)
class ClaimLease:
    """The lease of a claim of this process."""

    cancel: CancelSignal
    lease_valid_until: float = 0.0
    """The time until which no other worker can take the job, by the monotonic clock."""
    on_renew: Callable[[], Awaitable[None]] | None = None
    """Renews the job's lead among identical jobs that share one call."""
    has_children: bool = False
    """True if the job names no task and has children: the job then counts in the task that has the job's id."""
    progress: Callable[[], SavedProgress] = no_progress
    """Returns the progress that Redis must have now."""
    restore: Restore | None = None

    def end(self) -> None:
        """Forgets the run, which refers to this lease: without the cycle, a job needs no garbage collector."""
        self.progress = no_progress
        self.restore = None
