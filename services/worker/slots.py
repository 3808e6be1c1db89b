"""The slots of an agent in this worker, shared fairly: one caller's slow calls must not block the other callers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from breakwater.identity.contract import PRIORITIES
from breakwater.jobs.rules.turns import CallerTurn, FairQueue, rank
from breakwater.jobs.rules.workers import may_take, may_take_beside_higher
from breakwater.kernel.nats.delivery import Delivery, PutBack

HALVED_EVERY_S = 2.0
"""The slots that a caller is expected to need halve after so long."""

FORGOTTEN = 2.0**-30
"""A caller that is expected to need no more than this has not called for a minute, and is forgotten."""

SHARED_FOR_S = 3600.0
"""An agent counts as shared for so long after another caller than the one before has called it."""


@dataclass(slots=True)
class _Caller:
    """The slots of one caller."""

    weight: int
    running: int = 0
    """The slots that it holds now."""
    needs: float = 0.0
    """The most slots that it held lately, halved for each `HALVED_EVERY_S` since."""


class Callers:
    """The callers of one agent: the slots that each holds, and those that it is expected to need."""

    __slots__ = ("_callers", "_halved_at", "_heaviest")

    def __init__(self, now: float) -> None:
        self._callers: dict[str, _Caller] = {}
        self._heaviest = 1
        self._halved_at = now

    def may_take(self, slots: int, caller: str, weight: int, now: float) -> bool:
        """Returns True if a caller may take one more of the agent's slots."""
        running = self.running(caller)
        if running < slots * weight // (weight + self._heaviest):
            return True
        self._halve(now)
        competitors = [competitor for name, competitor in self._callers.items() if name != caller]
        if not competitors:
            return True
        needed_by_others = math.ceil(sum(competitor.needs for competitor in competitors))
        heaviest = max(competitor.weight for competitor in competitors)
        return may_take(slots, running, needed_by_others, weight / (weight + heaviest))

    def running(self, caller: str) -> int:
        """Returns the number of slots that a caller holds."""
        return self._callers[caller].running if caller in self._callers else 0

    def needs(self, caller: str, now: float) -> float:
        """Returns the number of slots that a caller is expected to need."""
        self._halve(now)
        return self._callers[caller].needs if caller in self._callers else 0.0

    def take(self, caller: str, weight: int, now: float) -> None:
        """Counts a slot that a caller takes."""
        taking = self._note(caller, weight, now)
        taking.running += 1
        taking.needs = max(taking.needs, float(taking.running))

    def expect(self, caller: str, weight: int, now: float) -> None:
        """Counts a caller that is about to need a slot."""
        expected = self._note(caller, weight, now)
        expected.needs = max(expected.needs, 1.0)

    def release(self, caller: str) -> None:
        """Counts a slot that a caller releases."""
        self._callers[caller].running -= 1

    def _note(self, caller: str, weight: int, now: float) -> _Caller:
        self._halve(now)
        if (noted_caller := self._callers.get(caller)) is None:
            noted_caller = self._callers[caller] = _Caller(weight)
        noted_caller.weight = weight
        self._heaviest = max(self._heaviest, weight)
        return noted_caller

    def _halve(self, now: float) -> None:
        """Expects callers to need half as much for each `HALVED_EVERY_S` that has passed."""
        if now - self._halved_at < HALVED_EVERY_S:
            return
        times = int((now - self._halved_at) / HALVED_EVERY_S)
        self._halved_at += times * HALVED_EVERY_S
        for caller in self._callers.values():
            caller.needs = max(float(caller.running), math.ldexp(caller.needs, -times))
        self._callers = {name: caller for name, caller in self._callers.items() if caller.needs > FORGOTTEN}
        self._heaviest = max((caller.weight for caller in self._callers.values()), default=1)


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
        self._last_turn: CallerTurn | None = None
        self._shared_until = now

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
        needed = sum(self._priorities.needs(higher, now) for higher in PRIORITIES[: rank(turn.priority)])
        held_slots = sum(self._priorities.running(lower) for lower in PRIORITIES[rank(turn.priority) :])
        return may_take_beside_higher(slots, held_slots, math.ceil(needed))

    def is_shared(self, now: float) -> bool:
        """Returns True if different callers have called the agent in the last hour."""
        return now < self._shared_until

    def expect(self, turn: CallerTurn, now: float) -> None:
        """Counts a caller that begins to call among those that need a slot."""
        self._note(turn, now)
        self._keys.expect(turn.key, turn.weight, now)
        self._tenants.expect(turn.tenant, turn.weight, now)
        self._priorities.expect(turn.priority, 1, now)

    def take(self, turn: CallerTurn, now: float) -> None:
        """Counts a slot that a job takes."""
        self._note(turn, now)
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

    def _note(self, turn: CallerTurn, now: float) -> None:
        if turn != self._last_turn:
            if self._last_turn is not None:
                self._shared_until = now + SHARED_FOR_S
            self._last_turn = turn


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
