"""Decides how many slots a caller may hold, and whether another worker is dead.

A worker that stalls or is cut off from the network must never be taken for dead: its calls would be made twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Liveness:
    """The times, in seconds, by which workers hold jobs and take each other for dead. All workers need the same.

    Attributes:
        beat_every_s: between two heartbeats of a worker.
        late_s: the age from which a heartbeat is late.
        gap_s: a longer gap between two heartbeats means that Redis or the worker itself was unavailable.
        missed_s: a worker may take so long to reconnect.
        latest_s: later, a missing connection proves nothing. From 10 s on, a NATS server also closes the connection of
            a stopped process to which it can't write; later, each side closes an idle connection.
        renew_every_s: between two renewals of a worker's claims.
        claim_lease_s: a claim lasts so long without a renewal.
        grace_s: a holder whose lease has ended may still renew it for so long after another worker has first asked for
            the job.
    """

    beat_every_s: float = 1.0
    late_s: float = 1.5
    gap_s: float = 2.5
    missed_s: float = 3.0
    latest_s: float = 8.0
    renew_every_s: float = 3.0
    claim_lease_s: float = 12.0
    grace_s: float = 4.0

    @property
    def unclaimed_s(self) -> float:
        """A job that has been unclaimed for so long has no holder: a holder would have restored a lost claim."""
        return self.renew_every_s + self.beat_every_s

    @property
    def late_ms(self) -> int:
        """The same as `late_s`, for Redis."""
        return round(self.late_s * 1000)

    @property
    def claim_lease_ms(self) -> int:
        """The same as `claim_lease_s`, for Redis."""
        return round(self.claim_lease_s * 1000)

    @property
    def grace_ms(self) -> int:
        """The same as `grace_s`, for Redis."""
        return round(self.grace_s * 1000)


LIVENESS = Liveness()
"""The times in production."""


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


def is_dead(silence: Silence, liveness: Liveness = LIVENESS) -> bool:
    """Returns True if a worker is certainly dead, and NATS sends it nothing more."""
    if silence.runs is not None:
        # NATS closes the connection a moment after the process ends, and may send jobs there until then.
        return not silence.runs and (not silence.connected or silence.silent_s > liveness.latest_s)
    return (
        liveness.missed_s <= silence.silent_s <= liveness.latest_s
        and silence.connected is False
        and silence.same_nats
        and silence.watched_s >= liveness.missed_s
    )


def may_take(slots: int, held_slots: int, needed_by_others: int, share: float = 0.5) -> bool:
    """Returns True if a caller may take one more slot.

    It must leave as many slots free as other callers are expected to need, and one more, up to their share of all. A
    caller that is alone may take all slots.

    Args:
        slots: the number of slots.
        held_slots: the number of slots that the caller holds.
        needed_by_others: the slots that the other callers are expected to need.
        share: the caller's share of the slots.
    """
    if not needed_by_others or held_slots < int(slots * share):
        return True
    return held_slots + min(int(slots * (1 - share)), needed_by_others + 1) < slots


def may_take_beside_higher(slots: int, held_slots: int, needed_by_higher: int) -> bool:
    """Returns True if a job may take one more slot beside jobs of higher priority.

    It must leave as many slots free as those are expected to need, and one more, but not the last one.

    Args:
        slots: the number of slots.
        held_slots: the number of slots that jobs of its own and of lower priority hold.
        needed_by_higher: the slots that jobs of higher priority are expected to need.
    """
    return not needed_by_higher or held_slots + min(slots - 1, needed_by_higher + 1) < slots
