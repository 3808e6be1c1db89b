"""Leader election: a lease, stored as the last message on a subject, written with its expected last sequence.

Clocks are not compared: a lease has lapsed when a waiting process has seen no renewal for `lease_s` by its own clock;
its holder stops by its own clock sooner than that. Two may still overlap for a moment, where a machine was suspended;
decisions that must be made once are made by the stream (see `breakwater.alerts.store.incidents`), not by the leader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from breakwater.kernel.nats.errors import AlreadyDecidedError, BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage

_FREE = b""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The times of a lease, in seconds. All processes that compete for it need the same.

    Attributes:
        lease_s: it lapses so long after its last renewal.
        renew_s: between two renewals.
        stop_s: before its end, at which a holder begins to stop: work in progress may take so long.
        watch_s: between two looks of a process that waits for it.
    """

    lease_s: float = 16.0
    renew_s: float = 3.0
    stop_s: float = 6.0
    watch_s: float = 1.0


LEASE_TIMES = LeaseTimes()
"""The times in production."""


class LeaderLease:
    """A lease that one process holds at a time. The others wait, and one takes over when it is released or lapses."""

    def __init__(
        self,
        lookup: Lookup,
        publisher: Publisher,
        stream: Stream,
        subject: str,
        holder: str,
        *,
        times: LeaseTimes = LEASE_TIMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup
        self._publisher = publisher
        self._stream = stream
        self._subject = subject
        self._holder = holder.encode()
        self._times = times
        self._clock = clock
        self._sequence = 0  # of our own last message, while we hold the lease
        self.storing = Outage(f"storing {subject}")
        """The outage of the stream, by the tries to take or to renew the lease."""
        self.led_last = False
        """True if no other process is known to have had the lease since this one took it."""

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeatedly waits for the lease, works while it lasts, and stops the work when it is lost; until cancelled."""
        while True:
            await self._take()
            structlog.get_logger().info("leader_lease_taken", subject=self._subject)
            task = asyncio.ensure_future(work())
            try:
                await self._keep_renewing(task)
            finally:
                # Wait for its end, however often we are cancelled: the lease must not be released before that.
                stopped = await _end(task)
                if not task.cancelled() and (error := task.exception()) is not None:
                    structlog.get_logger().error("leader_work_failed", subject=self._subject, exc_info=error)
                await self._release()
                if stopped:
                    raise asyncio.CancelledError
            structlog.get_logger().warning("leader_lease_lost", subject=self._subject)

    async def _take(self) -> None:
        last_sequence = -1
        since = self._clock()
        while True:
            try:
                last = await self._lookup.last(self._stream, self._subject)
                self.led_last &= last is None or last.data in (_FREE, self._holder)
                sequence = 0 if last is None else last.sequence
                if sequence != last_sequence:
                    last_sequence = sequence
                    since = self._clock()
                if last is None or last.data == _FREE or self._clock() - since >= self._times.lease_s:
                    await self._write(self._holder, sequence)
                    self.led_last = True
                    return
                self.storing.note_success()  # the process that has it renews it
            except BusError as error:
                # NATS is unavailable, or another process was quicker: the next poll finds out.
                if not isinstance(error, AlreadyDecidedError):
                    self.storing.note_failure(error)
                structlog.get_logger().debug("leader_lease_not_taken", subject=self._subject, error=str(error))
            await asyncio.sleep(background.aligned_delay(self._times.watch_s))

    async def _keep_renewing(self, task: asyncio.Future[None]) -> None:
        """Returns when the lease is lost, or the work has ended."""
        lasts_s = self._times.lease_s - self._times.stop_s
        renewed = self._clock()
        while (left_s := renewed + lasts_s - self._clock()) > 0:
            ended, _ = await asyncio.wait([task], timeout=min(self._times.renew_s, left_s))
            if ended:
                return
            before = self._clock()
            try:
                async with asyncio.timeout(max(renewed + lasts_s - before, 0.1)):
                    if not await self._renew():
                        return
                renewed = before
            except (BusError, TimeoutError) as error:
                is_silent = isinstance(error, TimeoutError)
                self.storing.note_failure(f"NATS did not acknowledge {self._subject} in time" if is_silent else error)
                structlog.get_logger().debug("leader_lease_not_renewed", subject=self._subject, error=str(error))

    async def _renew(self) -> bool:
        """Renews the lease. Returns False if another process has it. Raises BusError."""
        try:
            await self._write(self._holder, self._sequence)
        except AlreadyDecidedError:
            # An earlier renewal may have been stored although its acknowledgement was lost.
            last = await self._lookup.last(self._stream, self._subject)
            if last is None or last.data != self._holder:
                self.led_last = False
                return False
            self._sequence = last.sequence
        return True

    async def _release(self) -> None:
        try:
            await self._write(_FREE, self._sequence)
        except BusError as error:
            # It lapses by itself.
            structlog.get_logger().debug("leader_lease_not_released", subject=self._subject, error=str(error))

    async def _write(self, data: bytes, after: int) -> None:
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after)}
        self._sequence = (await self._publisher.raw(self._subject, data, headers)).sequence
        self.storing.note_success()


async def _end(task: asyncio.Future[None]) -> bool:
    """Cancels a task and waits for its end. Returns True if we were cancelled meanwhile."""
    try:
        await background.stop(task)
    except asyncio.CancelledError:
        return True
    return False
