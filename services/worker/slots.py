"""The slots of an agent in this worker, shared fairly: one caller's slow calls must not block the other callers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from breakwater.jobs.rules.workers import may_take

WINDOW_S = 60.0
MIN_DELAY_S = 0.5
DELAY_STEP_S = 0.02
"""The shortest interval of one caller's delayed jobs: each redelivery costs as much as a small job."""


class Callers:
    """The callers of one agent: the slots that each holds now, and its peak of the last minute."""

    __slots__ = ("_peak", "_previous_peak", "_running", "_since")

    def __init__(self, now: float) -> None:
        self._running: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._previous_peak: Counter[str] = Counter()
        self._since = now

    def may_take(self, slots: int, caller: str, now: float) -> bool:
        """Returns True if a caller may take one more of the agent's slots."""
        running = self._running[caller]
        if running < slots // 2:
            return True
        self._roll(now)
        peak_of_others = sum((self._peak | self._previous_peak).values()) - max(
            self._peak[caller], self._previous_peak[caller]
        )
        return may_take(slots, running, peak_of_others)

    def take(self, caller: str, now: float) -> None:
        """Counts a slot that a caller takes."""
        self._roll(now)
        self._running[caller] += 1
        self._peak[caller] = max(self._peak[caller], self._running[caller])

    def release(self, caller: str) -> None:
        """Counts a slot that a caller releases."""
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]

    def _roll(self, now: float) -> None:
        if now - self._since >= WINDOW_S:
            self._previous_peak = self._peak if now - self._since < 2 * WINDOW_S else Counter()
            self._peak = Counter(self._running)
            self._since = now


class Slots:
    """The slots of all agents in this worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes the clock, in seconds."""
        self._clock = clock
        self._agents: defaultdict[tuple[str, str], Callers] = defaultdict(lambda: Callers(clock()))
        """The callers by agent and kind, such as key or tenant."""
        self._delayed: dict[tuple[str, str], float] = {}
        self.workers = 1
        """The number of workers that share the slots of each agent."""

    def has_room(self, agent: str, concurrency: int, callers: dict[str, str]) -> bool:
        """Returns True if a job may take a slot.

        Args:
            agent: the agent of the job.
            concurrency: the concurrency of the agent, over all workers.
            callers: the callers that the job counts for, by kind: its key and its tenant.
        """
        slots = -(-concurrency // self.workers)
        now = self._clock()
        return all(self._agents[agent, kind].may_take(slots, caller, now) for kind, caller in callers.items())

    @contextmanager
    def taking(self, agent: str, callers: dict[str, str]) -> Generator[None]:
        """Holds a slot while the block runs."""
        now = self._clock()
        for kind, caller in callers.items():
            self._agents[agent, kind].take(caller, now)
        try:
            yield
        finally:
            for kind, caller in callers.items():
                self._agents[agent, kind].release(caller)

    def retry_delay_s(self, agent: str, callers: dict[str, str]) -> float:
        """Returns the delay, in seconds, of a job without a slot. The jobs of one caller return one after the other."""
        now = self._clock()
        delay_key = (agent, "\n".join(callers.values()))
        self._delayed = {key: due for key, due in self._delayed.items() if due > now}
        due = self._delayed[delay_key] = max(now + MIN_DELAY_S, self._delayed.get(delay_key, 0.0) + DELAY_STEP_S)
        return due - now
