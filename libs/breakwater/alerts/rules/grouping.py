"""Groups the signals that come with every job: those of one incident are recorded together, to prevent a flood.

The first signal of a group waits, as a breaker may open by its event, which says more, or a success end the incident.
Those of an incident that was just recorded wait longer, but not its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from breakwater.alerts.rules.signals import Firing, Signal

GROUP_WAIT_S = 2.0
"""The time for which the first event of an incident waits for others."""

GROUP_INTERVAL_S = 10.0
"""The interval at which an incident that keeps happening is updated with its count."""

SourceT = TypeVar("SourceT")


@dataclass(slots=True)
class SignalGroup(Generic[SourceT]):
    """The signals of one incident that are recorded together.

    Attributes:
        signal: all of them as one: the last, with how often it happened.
        since_s: the time of the first, in seconds.
        sources: their events, as far as they were given.
    """

    signal: Signal
    since_s: float
    sources: list[SourceT] = field(default_factory=list[SourceT])


class SignalGroups(Generic[SourceT]):
    """The groups that wait to be recorded, by the keys of their incidents. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._groups: dict[str, SignalGroup[SourceT]] = {}
        self._ended_s: dict[str, float] = {}
        """When the latest group of a key ended, if a new one waits for it."""

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, signal: Signal, source: SourceT | None, now_s: float) -> SignalGroup[SourceT]:
        """Adds a signal of an event, which is kept unless it is None. Returns its group."""
        group = self._groups.get(signal.key)
        if group is None:
            group = self._groups[signal.key] = SignalGroup(signal, now_s)
        elif isinstance(signal, Firing) and isinstance(group.signal, Firing):
            group.signal = signal.after(group.signal)
        else:
            group.signal = signal  # the last one is how it is now
        if source is not None:
            group.sources.append(source)
        return group

    def of(self, key: str) -> SignalGroup[SourceT] | None:
        """Returns the group that waits for the incident with a key; None if none does."""
        return self._groups.get(key)

    def due_s(self, group: SignalGroup[SourceT]) -> float:
        """Returns the earliest time at which a group is recorded."""
        due_s = group.since_s + GROUP_WAIT_S
        ended_s = self._ended_s.get(group.signal.key)
        if ended_s is None or not isinstance(group.signal, Firing):
            return due_s
        return max(due_s, ended_s + GROUP_INTERVAL_S)

    def due(self, now_s: float) -> list[SignalGroup[SourceT]]:
        """Returns the groups that are due."""
        return [group for group in self._groups.values() if self.due_s(group) <= now_s]

    def end(self, group: SignalGroup[SourceT], now_s: float) -> None:
        """Notes that a group is recorded, or that nothing of it needs to be."""
        del self._groups[group.signal.key]
        self._ended_s = {key: at_s for key, at_s in self._ended_s.items() if now_s - at_s < GROUP_INTERVAL_S}
        self._ended_s[group.signal.key] = now_s
