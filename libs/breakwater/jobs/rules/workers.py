"""Decisions among workers: the slots that one caller may hold, and the death of another worker.

A worker that stalls or is cut off must never be taken for dead: its calls would be made a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

MISSED_S = 3.0
"""Time that a worker may take to come back."""

LATEST_S = 8.0
"""Time after which a missing connection is no evidence any more.

From 10 s on, a NATS server also closes that of a process that is stopped, if it can't write to it; later, each side
closes one on which nothing comes.
"""


@dataclass(frozen=True, slots=True)
class Silence:
    """Knowledge of another worker whose heartbeat is late."""

    silent_s: float
    """Seconds since its last heartbeat."""
    runs: bool | None
    """True if its process runs; None where it is one of another machine."""
    connected: bool | None
    """True if NATS has its connection; None where it had none at its last heartbeat, either."""
    same_nats: bool
    """True if NATS knows what became of the connection that it had then: one that was started again does not."""
    watched_s: float
    """Time for which the observer's own heartbeat was answered. Before, Redis may have been away for all."""


def is_dead(silence: Silence) -> bool:
    """True if a worker is dead for sure, and NATS sends it nothing more."""
    if silence.runs is not None:
        # NATS closes its connection a moment later, and may send jobs there until then.
        return not silence.runs and (not silence.connected or silence.silent_s > LATEST_S)
    return (
        MISSED_S <= silence.silent_s <= LATEST_S
        and silence.connected is False
        and silence.same_nats
        and silence.watched_s >= MISSED_S
    )


def may_take(slots: int, own: int, others: int) -> bool:
    """True if a caller may take one more slot.

    It leaves as many free as the others needed lately, and one more, up to half of all. Where no other calls, it may
    take all.

    Args:
        slots: how many there are.
        own: how many the caller holds.
        others: how many the other callers held at most, in the last minute.
    """
    half = slots // 2
    return not others or own < half or own + min(half, others + 1) < slots
