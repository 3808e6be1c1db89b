"""Decides how many slots a caller may hold, and whether another worker is dead.

A worker that stalls or is cut off from the network must never be taken for dead: its calls would be made twice.
"""

from __future__ import annotations

from dataclasses import dataclass

MISSED_S = 3.0
"""The seconds that a worker may take to reconnect."""

LATEST_S = 8.0
"""The seconds after which a missing connection proves nothing.

From 10 s on, a NATS server also closes the connection of a stopped process to which it can't write; later, each side
closes an idle connection.
"""


@dataclass(frozen=True, slots=True)
class Silence:
    """The evidence on another worker whose heartbeat is late.

    Attributes:
        silent_s: the seconds since its last heartbeat.
        runs: True if its process runs; None if it is on another machine.
        connected: True if it is connected to NATS; None if it was not connected at its last heartbeat, either.
        same_nats: True if the same NATS server still runs; a restarted one does not know the connection.
        watched_s: the seconds for which the observer's own heartbeats were answered. Before that, Redis may have been
            unavailable to all.
    """

    silent_s: float
    runs: bool | None
    connected: bool | None
    same_nats: bool
    watched_s: float


def is_dead(silence: Silence) -> bool:
    """Return True if a worker is certainly dead, and NATS sends it nothing more."""
    if silence.runs is not None:
        # NATS closes the connection a moment after the process ends, and may send jobs there until then.
        return not silence.runs and (not silence.connected or silence.silent_s > LATEST_S)
    return (
        MISSED_S <= silence.silent_s <= LATEST_S
        and silence.connected is False
        and silence.same_nats
        and silence.watched_s >= MISSED_S
    )


def may_take(slots: int, held_slots: int, needed_by_others: int) -> bool:
    """Return True if a caller may take one more slot.

    It must leave as many slots free as other callers needed recently, and one more, up to half of all. A caller that is
    alone may take all slots.

    Args:
        slots: the number of slots.
        held_slots: the number of slots that the caller holds.
        needed_by_others: the most slots that the other callers held in the last minute.
    """
    half = slots // 2
    return not needed_by_others or held_slots < half or held_slots + min(half, needed_by_others + 1) < slots
