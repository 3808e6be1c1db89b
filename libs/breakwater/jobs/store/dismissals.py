"""The dead letters that people have dismissed: notes in DLQ, whose subjects tell which ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream

LIST_AGE_S = 5.0
"""The age up to which a list may use what was read before: the dismissals of this process are known at once."""


class Dismissals:
    """The dismissed dead letters that are still kept. They are read again only when DLQ has changed.

    Args:
        lookup: reads DLQ.
        clock: monotonic seconds.
    """

    def __init__(self, lookup: Lookup, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookup = lookup
        self._clock = clock
        self._lock = asyncio.Lock()
        self._subjects: dict[int, str] = {}
        self._stream = ""
        """The identity of DLQ when it was read."""
        self._last = 0
        """Its last sequence then."""
        self._read_at = -LIST_AGE_S

    async def by_number(self, *, max_age_s: float = 0.0) -> Mapping[int, str]:
        """Returns the subject of each dismissed dead letter, by its number.

        Args:
            max_age_s: the seconds for which dismissals by other processes may be missing.

        Raises:
            BusError: NATS can't be read.
        """
        async with self._lock:
            now = self._clock()
            stream = await self._lookup.facts(Stream.DLQ)
            is_another = stream.identity != self._stream or stream.last < self._last
            if is_another or (stream.last > self._last and now - self._read_at >= max_age_s):
                self._subjects = _parse(await self._lookup.counts(Stream.DLQ, subjects.ALL_DISMISSALS))
                self._stream = stream.identity
                self._last = stream.last
                self._read_at = now
            # A dead letter may have expired before the note.
            self._subjects = {number: subject for number, subject in self._subjects.items() if number >= stream.first}
            return self._subjects

    async def add(self, number: int, subject: str) -> None:
        """Notes a dismissal that this process has stored."""
        async with self._lock:
            self._subjects = self._subjects | {number: subject}


def _parse(notes: Mapping[str, int]) -> dict[int, str]:
    dismissed: dict[int, str] = {}
    for subject in notes:
        match subject.split("."):
            case [_, _, reason, agent, number] if number.isdecimal():
                dismissed[int(number)] = f"bw.dlq.{reason}.{agent}"
            case _:
                continue  # not published by us
    return dismissed
