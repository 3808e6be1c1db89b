"""The slots of an agent in this worker, shared fairly: one caller's slow calls must not block the other callers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from breakwater.identity.contract import PRIORITIES
from breakwater.jobs.rules.turns import CallerTurn, FairQueue, rank
from breakwater.jobs.rules.workers import may_take, may_take_beside_higher
from breakwater.kernel.nats.delivery import Delivery, PutBack

WINDOW_S = 60.0


class Callers:
    """The callers of one agent: the slots that each holds now, and its peak of the last minute."""

    __slots__ = ("_heaviest", "_peak", "_previous_peak", "_running", "_since", "_weights")

    def __init__(self, now: float) -> None:
        self._running: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._previous_peak: Counter[str] = Counter()
        self._weights: dict[str, int] = {}
        self._heaviest = 1
        self._since = now

    def may_take(self, slots: int, caller: str, weight: int, now: float) -> bool:
        """Returns True if a caller may take one more of the agent's slots."""
        running = self._running[caller]
        if running < slots * weight // (weight + self._heaviest):
            return True
        self._roll(now)
        peaks = self._peak | self._previous_peak
        peak_of_others = sum(peaks.values()) - peaks[caller]
        if not peak_of_others:
            return True
        heaviest = max(self._weights.get(name, 1) for name in peaks if name != caller)
        return may_take(slots, running, peak_of_others, weight / (weight + heaviest))

    def running(self, caller: str) -> int:
        """Returns the number of slots that a caller holds."""
        return self._running[caller]

    def peak(self, caller: str, now: float) -> int:
        """Returns the most slots that a caller held in the last minute."""
        self._roll(now)
        return max(self._peak[caller], self._previous_peak[caller])

    def take(self, caller: str, weight: int, now: float) -> None:
        """Counts a slot that a caller takes."""
        self._note(caller, weight, now)
        self._running[caller] += 1
        self._peak[caller] = max(self._peak[caller], self._running[caller])

    def expect(self, caller: str, weight: int, now: float) -> None:
        """Counts a caller that is about to need a slot."""
        self._note(caller, weight, now)
        self._peak[caller] = max(self._peak[caller], 1)

    def release(self, caller: str) -> None:
        """Counts a slot that a caller releases."""
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]

    def _note(self, caller: str, weight: int, now: float) -> None:
        self._roll(now)
        self._weights[caller] = weight
        self._heaviest = max(self._heaviest, weight)

    def _roll(self, now: float) -> None:
        if now - self._since >= WINDOW_S:
            self._previous_peak = self._peak if now - self._since < 2 * WINDOW_S else Counter()
            self._peak = Counter(self._running)
            self._weights = {caller: self._weights[caller] for caller in self._peak | self._previous_peak}
            self._heaviest = max(self._weights.values(), default=1)
            self._since = now


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A message on PARKED whose job waits for its turn."""

    execution_id: str
    turn: CallerTurn
    delivery: Delivery
    until: float
    """When NATS may deliver it to another worker."""
    put_back: PutBack


class AgentSlots:
    """The slots of one agent in this worker: who holds them, and whose jobs wait for one."""

    def __init__(self, now: float) -> None:
        self._keys = Callers(now)
        self._tenants = Callers(now)
        self._priorities = Callers(now)
        self.held = 0
        self.waiting = FairQueue[WaitingJob]()
        self._returning: dict[str, CallerTurn] = {}
        """By execution, the jobs on the way back to their queue, each of which holds a slot."""

    def may_take(self, slots: int, turn: CallerTurn, now: float) -> bool:
        """Returns True if a job may take one of `slots`."""
        return self.key_may_take(slots, turn, now) and self.tenant_may_take(slots, turn, now)

    def tenant_may_take(self, slots: int, turn: CallerTurn, now: float) -> bool:
        """Returns True if it may as far as its tenant is concerned."""
        return self._tenants.may_take(slots, turn.tenant, turn.weight, now)

    def key_may_take(self, slots: int, turn: CallerTurn, now: float) -> bool:
        """Returns True if it may as far as its key and its priority are concerned."""
        if not self._keys.may_take(slots, turn.key, turn.weight, now):
            return False
        needed_by_higher = sum(self._priorities.peak(higher, now) for higher in PRIORITIES[: rank(turn.priority)])
        held_slots = sum(self._priorities.running(lower) for lower in PRIORITIES[rank(turn.priority) :])
        return may_take_beside_higher(slots, held_slots, needed_by_higher)

    def expect(self, turn: CallerTurn, now: float) -> None:
        """Counts a caller that begins to call among those that need a slot."""
        self._keys.expect(turn.key, turn.weight, now)
        self._tenants.expect(turn.tenant, turn.weight, now)
        self._priorities.expect(turn.priority, 1, now)

    def take(self, turn: CallerTurn, now: float) -> None:
        """Counts a slot that a job takes."""
        self.held += 1
        self._keys.take(turn.key, turn.weight, now)
        self._tenants.take(turn.tenant, turn.weight, now)
        self._priorities.take(turn.priority, 1, now)

    def keep_for(self, job: WaitingJob, now: float) -> None:
        """Takes a slot for a job that returns to its queue."""
        self._returning[job.execution_id] = job.turn
        self.take(job.turn, now)

    def arrived(self, execution_id: str) -> bool:
        """Releases the slot that was kept for a job. Returns False if none was."""
        turn = self._returning.pop(execution_id, None)
        if turn is not None:
            self.release(turn)
        return turn is not None

    def release(self, turn: CallerTurn) -> None:
        """Counts a slot that a job releases."""
        self.held -= 1
        self._keys.release(turn.key)
        self._tenants.release(turn.tenant)
        self._priorities.release(turn.priority)


class Slots:
    """The slots of all agents in this worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes the clock, in seconds."""
        self.clock = clock
        self._agents: defaultdict[str, AgentSlots] = defaultdict(lambda: AgentSlots(clock()))
        self.workers = 1
        """The number of workers that share the slots of each agent."""
        self.on_release: Callable[[str], None] = lambda _: None
        """Called with the name of an agent when one of its slots is free again."""

    def __getitem__(self, agent: str) -> AgentSlots:
        return self._agents[agent]

    def share(self, concurrency: int) -> int:
        """Returns this worker's part of an agent's concurrency."""
        return -(-concurrency // self.workers)

    def has_room(self, agent: str, concurrency: int, turn: CallerTurn) -> bool:
        """Returns True if a job may take a slot. `concurrency` is the agent's, over all workers."""
        return self._agents[agent].may_take(self.share(concurrency), turn, self.clock())

    @contextmanager
    def taking(self, agent: str, turn: CallerTurn) -> Generator[None]:
        """Holds a slot while the block runs."""
        slots = self._agents[agent]
        slots.take(turn, self.clock())
        try:
            yield
        finally:
            slots.release(turn)
            self.on_release(agent)
