"""The queue of a rate as plain Python: what the script does, for slots and without leases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from breakwater.jobs.rules.turns import CallerTurn, finish_of

PART = 1_000_000
"""What a call takes of all slots, in the script's unit."""


@dataclass
class QueueModel:
    """The calls under way and those that wait for one of so many slots."""

    slots: int
    running: set[str] = field(default_factory=set[str])
    waiting: dict[str, tuple[float, str, CallerTurn]] = field(default_factory=dict[str, tuple[float, str, CallerTurn]])
    """By attempt: the virtual time at which it would be through, its name, and its caller."""
    _virtual_time: float = 0.0
    _last: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def ask(self, attempt: str, turn: CallerTurn) -> int | None:
        """Asks for a slot. Returns the number of calls that wait before it; None if it has one now."""
        if attempt in self.running:
            return None
        if not self.waiting and len(self.running) < self.slots:
            self.running.add(attempt)
            return None
        caller = turn.key, turn.tenant
        place = self.waiting.get(attempt)
        finish = self._finish(turn) if place is None else place[0]
        if place is None:
            ahead = sum(other <= finish for other, *_ in self.waiting.values())
            self._last[caller] = finish
        else:
            ahead = sum(other[:2] < place[:2] for other in self.waiting.values())
        if len(self.running) + ahead < self.slots:
            self.running.add(attempt)
            self._virtual_time = max(self._virtual_time, finish)
            self.waiting.pop(attempt, None)
            if not self.waiting:
                self._virtual_time = 0.0
                self._last.clear()
            return None
        self.waiting[attempt] = finish, attempt, turn
        return ahead

    def end(self, attempt: str) -> None:
        """Ends a call."""
        self.running.discard(attempt)

    def serve(self) -> str | None:
        """Ends a call, and lets all ask in any order until one of them has the slot. Returns it."""
        self.end(next(iter(self.running)))
        before = set(self.running)
        for attempt, (_, _, turn) in tuple(self.waiting.items()):
            self.ask(attempt, turn)
        return next(iter(self.running - before), None)

    def _finish(self, turn: CallerTurn) -> float:
        tenants = {caller.tenant for _, _, caller in self.waiting.values() if caller.key == turn.key} | {turn.tenant}
        last = self._last.get((turn.key, turn.tenant), 0.0)
        return finish_of(self._virtual_time, last, PART / self.slots * len(tenants), turn.share)


def shares_of(model: QueueModel, served: int) -> Counter[CallerTurn]:
    """Returns how many calls of each caller get a slot among the next `served`, if all ask in turn."""
    callers = {attempt: turn for attempt, (_, _, turn) in model.waiting.items()}
    return Counter(callers[attempt] for _ in range(served) if (attempt := model.serve()) is not None)
