"""A job that is cancelled while this process runs it: what it waits for is interrupted, such as an answer.

A cancel request is kept in Redis, and comes with whatever is asked there about the job's claim: before each call, and
when its lease is renewed. So it holds also where the notification of it was lost, or the job's worker has died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from breakwater.bus.core import hearing
from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection
from breakwater.contracts.execution import Cancellation, PendingCancel
from breakwater.contracts.subjects import CANCEL_REQUESTS
from breakwater.outage import Outage
from breakwater.policy.record import cancelled_by

RETRY_S = 1.0


class JobCancelled(Exception):  # noqa: N818  not an error: somebody wanted it so
    """The job is to end as it is, without another call."""

    def __init__(self, cancellation: Cancellation) -> None:
        super().__init__("the job was cancelled")
        self.cancellation = cancellation


class CancelSignal:
    """Whether a job that this process has claimed was cancelled.

    Attributes:
        cancellation: the first that was heard of; None where it was not cancelled.
    """

    def __init__(self, agent: str, owner: str | None = None, tenant: str | None = None) -> None:
        self.cancellation: Cancellation | None = None
        self._of = agent, owner, tenant
        self._waiting: asyncio.Task[object] | None = None
        self._interrupted = False

    def receive(self, cancels: Iterable[PendingCancel]) -> None:
        """Takes cancel requests for the job, and interrupts what it waits for where one of them holds for it."""
        if self.cancellation is not None or (found := cancelled_by(cancels, *self._of)) is None:
            return
        self.cancellation = found
        # A task that hears it itself waits for nothing: its own cancelling would hit whatever it waits for next.
        if self._waiting is not None and self._waiting is not asyncio.current_task():
            self._interrupted = True
            self._waiting.cancel()

    def check(self) -> None:
        """Raises JobCancelled if the job was cancelled."""
        if self.cancellation is not None:
            raise JobCancelled(self.cancellation)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """What the task waits for in the block ends at once, with JobCancelled, when the job is cancelled."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        before, self._waiting, self._interrupted = task.cancelling(), task, False
        try:
            yield
        except asyncio.CancelledError:
            # As `asyncio.timeout` does: somebody else may want the task to end, too, as the process stops.
            if self._interrupted and task.uncancel() <= before:
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


async def receive_cancel_requests(connection: Connection, take: Callable[[PendingCancel], None]) -> None:
    """Takes requests to cancel jobs as they are sent, until cancelled itself."""

    async def receive() -> None:
        async with hearing(connection, CANCEL_REQUESTS, lambda data: take(PendingCancel.model_validate_json(data))):
            await asyncio.Event().wait()

    await Outage("cancel requests").retry_until_available(receive, on=BusUnavailable, retry_s=RETRY_S)
