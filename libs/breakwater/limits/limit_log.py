"""The limits that the plane keeps, followed in LIMITS and changed there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from breakwater.kernel.nats.state_log import StateLog
from breakwater.kernel.nats.subjects import LIMIT_CHANGES, LIMIT_SETTINGS, Stream
from breakwater.limits.contract import LimitRecord
from breakwater.limits.rules.limit_changes import unreadable_limit
from breakwater.limits.rules.limit_index import PlaneLimit
from breakwater.limits.store.budget_counters import BudgetCounters


def is_older(version: str, other_version: str) -> bool:
    """Returns True if a version of the log is older than another, or of another stream."""
    stream, _, sequence = version.rpartition("/")
    other_stream, _, other_sequence = other_version.rpartition("/")
    return stream != other_stream or int(sequence) < int(other_sequence)


class LimitLog(StateLog[LimitRecord, PlaneLimit]):
    """The limits of LIMITS, and the raises of limits of the config: follows the stream, and publishes changes."""

    stream = Stream.LIMITS
    subjects = LIMIT_SETTINGS
    notices = LIMIT_CHANGES
    log_name = "limits"

    def feed(self, take: Callable[[Iterable[str], Mapping[str, PlaneLimit], str], None]) -> None:
        """Has changes taken into a table, given the ids of changed limits, all limits, and their version."""
        self.note_change = lambda changed_ids: take(changed_ids, self.states, self.version)

    def state_of(self, record: LimitRecord, document: bytes) -> PlaneLimit | None:
        """Returns a limit; None if it was deleted and has no raises.

        A process that changes none, and lists none, needs no records.
        """
        if record.limit is None and not record.raises:
            return None
        return PlaneLimit.of(record, b"" if self._publisher is None else document)

    def unreadable_state(self, state_id: str, document: bytes) -> PlaneLimit | None:
        """Returns what keeps the calls waiting that a limit may hold for, though this version can't read it."""
        return unreadable_limit(document, self.states.get(state_id))

    async def read_on(self, known_version: str, in_force: str, counters: BudgetCounters) -> None:
        """Reads on, as Redis has another version than a call was to be admitted under.

        If the stream contradicts Redis, which happens where one of them was lost or restored, the stream is right.

        Args:
            known_version: the version that the call was to be admitted under.
            in_force: the version in Redis; empty if it has none.
            counters: those in Redis.

        Raises:
            BusError, StateUnavailableError: repeat it.
        """
        await self.catch_up(since=known_version)
        if in_force and is_older(self.version, in_force):
            await self.catch_up()  # another caller may have read before this version was in force
        if not in_force or is_older(self.version, in_force):
            await counters.note_limits(self.version, in_force)

    def read_record(self, document: bytes) -> LimitRecord:
        """Parses a record. Raises ValidationError."""
        return LimitRecord.model_validate_json(document)
