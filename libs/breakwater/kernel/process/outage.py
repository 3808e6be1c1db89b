"""Outages of servers: logged once each, and retried until they end.

An outage of NATS, Redis or ClickHouse delays work and never fails it. Therefore work that is run by
`Outages.retry_while_unavailable` must be idempotent: a try whose answer was lost may have succeeded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from breakwater.kernel.errors import BreakwaterError, UnavailableError

Value = TypeVar("Value")
Errors = type[Exception] | tuple[type[Exception], ...]

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 2.0


class Outage:
    """One outage in the log: a line when it begins and a line when it ends, however many tries fail in between."""

    def __init__(self, resource: str) -> None:
        """Creates it for a server or resource, by its name in the log."""
        self._resource = resource
        self._failed_tries = 0
        self._since = 0.0
        self.error: BaseException | str | None = None
        """The latest error while it is unavailable; otherwise None."""

    @property
    def lasting(self) -> bool:
        """Returns True while it is unavailable."""
        return self._failed_tries > 0

    @property
    def lasts_s(self) -> float:
        """Returns the seconds for which it has been unavailable; 0 while it is available."""
        return time.monotonic() - self._since if self.lasting else 0.0

    def note_failure(self, error: BaseException | str) -> None:
        """Counts a failed try; the first one is logged."""
        self._failed_tries += 1
        self.error = error
        if self._failed_tries == 1:
            self._since = time.monotonic()
            structlog.get_logger().warning("unavailable", what=self._resource, error=str(error) or repr(error))

    async def retry_until_available(self, work: Callable[[], Awaitable[Value]], *, on: Errors, retry_s: float) -> Value:
        """Retries work until it succeeds, and returns its value; errors other than `on` are raised.

        Args:
            work: the work, which must be idempotent.
            on: the errors that begin or continue the outage.
            retry_s: the wait between two tries.
        """
        while True:
            try:
                value = await work()
            except on as error:
                self.note_failure(error)
                await asyncio.sleep(retry_s)
            else:
                if self._failed_tries:
                    self.note_success()
                return value

    async def run_logged(self, work: Callable[[], Awaitable[object]], *, expected: Errors, unless: Errors = ()) -> bool:
        """Runs periodic work once and logs its errors, so that a failure does not end the loop around it.

        Args:
            work: the work to run.
            expected: errors that need no traceback in the log.
            unless: errors to raise, which are not part of this outage.

        Returns:
            True if the work succeeded.
        """
        try:
            await work()
        except unless:
            raise
        except Exception as error:  # noqa: BLE001  ending the loop would be worse than any error
            if not (isinstance(error, expected) or self.lasting):
                structlog.get_logger().exception("failed_unexpectedly", what=self._resource)
            self.note_failure(error)
            return False
        self.note_success()
        return True

    def note_success(self) -> None:
        """Ends the outage; the first success after failures is logged."""
        if self._failed_tries:
            structlog.get_logger().info("available_again", what=self._resource, failed_tries=self._failed_tries)
            self._failed_tries = 0
            self.error = None


class StoppedWaitingError(BreakwaterError):
    """`Outages.stop` was called while a server was unavailable."""


class Outages:
    """The outages of the servers that a process depends on, one for each server."""

    def __init__(self, report: Callable[[str, bool], None] = lambda _server, _unavailable: None) -> None:
        """Creates it with every server available.

        Args:
            report: called with a server's name and whether it is unavailable, after each failed try and at the end of
                its outage.
        """
        self._report = report
        self._outages: dict[str, Outage] = {}
        self._failing: Counter[str] = Counter()
        """Retrying callers that have failed, by server."""
        self._stopping = asyncio.Event()

    def of(self, server: str) -> Outage | None:
        """Returns the outage of a server; None if it never had one."""
        return self._outages.get(server)

    def stop(self) -> None:
        """Ends all waiting, now and in future. Work that succeeds at the first try is still done."""
        self._stopping.set()

    async def retry_while_unavailable(
        self,
        work: Callable[[], Awaitable[Value]],
        *,
        unless: type[UnavailableError] | tuple[type[UnavailableError], ...] = (),
    ) -> Value:
        """Retries work until no server is unavailable; any other exception is raised.

        Args:
            work: the work, which must be idempotent.
            unless: unavailability errors to raise without a retry.

        Raises:
            StoppedWaitingError: `stop` was called meanwhile.
        """
        failed_on: set[str] = set()
        delay_s = FIRST_DELAY_S
        try:
            while True:
                try:
                    value = await work()
                except unless:
                    raise
                except UnavailableError as error:
                    server = error.server
                    self._failing[server] += server not in failed_on
                    failed_on.add(server)
                    self._outages.setdefault(server, Outage(server)).note_failure(error)
                    self._report(server, True)
                else:
                    if failed_on:
                        self._report_answer(failed_on)
                    return value
                await self._pause(delay_s)
                delay_s = min(delay_s * 2, LAST_DELAY_S)
        except (asyncio.CancelledError, StoppedWaitingError):
            raise
        except Exception:
            self._report_answer(failed_on)
            raise
        finally:
            if failed_on:
                self._failing.subtract(failed_on)
                self._forget(failed_on)

    def _report_answer(self, failed_on: set[str]) -> None:
        for server in failed_on:
            # The outage is over once no caller fails because of it: until then, one success may be luck.
            if self._failing[server] == 1:
                self._outages[server].note_success()
                self._report(server, False)

    def _forget(self, failed_on: set[str]) -> None:
        """Drops outages whose last waiting caller was cancelled, because nothing would notice their end."""
        for server in failed_on:
            if not self._failing[server] and self._outages[server].lasting:
                del self._outages[server]
                if not self._stopping.is_set():
                    self._report(server, False)

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return
        raise StoppedWaitingError
