"""Agents whose answers are often cut off by their output limit."""

from __future__ import annotations

from collections import deque

from breakwater.contracts.execution import Execution
from breakwater.policy.signals import Firing, cut_off

LAST_ANSWERS, FEWEST_ANSWERS = 50, 10
MAX_AGENTS = 2_000


class CutOffAnswers:
    """The latest answers of every agent. In memory, bounded; a new alerter learns them again.

    Args:
        share: of them, from which on the agent is warned of; None for never.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._agents: dict[str, deque[bool]] = {}
        """Whether each answer was cut off, by agent; in the order of their latest ones."""

    def add(self, execution: Execution) -> tuple[Firing, ...]:
        """Counts an answer; a signal where it was cut off, and so many are."""
        if self._share is None or execution.finish_reason is None or execution.cache_hit:
            return ()
        is_cut = execution.finish_reason == "length"
        answers = self._agents.pop(execution.agent, None) or deque(maxlen=LAST_ANSWERS)
        self._agents[execution.agent] = answers
        if len(self._agents) > MAX_AGENTS:
            del self._agents[next(iter(self._agents))]
        answers.append(is_cut)
        cut = sum(answers)
        frequent = len(answers) >= FEWEST_ANSWERS and cut >= self._share * len(answers)
        return (cut_off(execution, cut, len(answers)),) if is_cut and frequent else ()
