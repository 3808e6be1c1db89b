"""The signals of the ends of jobs: of their deployments, quotas, failures, costs and durations, and cut-off answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.deployments import DeploymentWatch
from breakwater.alerts.rules.signals import Firing, Signal, cut_off, of_execution, of_quotas
from breakwater.alerts.settings import Alerts
from breakwater.jobs.contract.execution import Execution

LAST_ANSWERS = 50
"""The number of its latest answers by which `CutOffAnswers` judges an agent."""

FEWEST_ANSWERS = 10
"""The fewest answers by which it judges an agent."""

MAX_AGENTS = 2_000
"""The most agents whose answers it remembers."""


class CutOffAnswers:
    """The latest answers of every agent, for warnings of agents whose answers are often cut off by their output limit.

    In memory, bounded; a new alerter learns them again.

    Args:
        share: the share of cut-off answers from which on there is a warning; None for never.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._agents: dict[str, deque[bool]] = {}
        """True for each answer that was cut off, by agent; in the order of the agents' latest answers."""

    def add(self, execution: Execution) -> tuple[Firing, ...]:
        """Counts an answer. Returns a signal if it was cut off, as is a large share."""
        if self._share is None or execution.finish_reason is None or execution.cache_hit:
            return ()
        is_cut = execution.finish_reason == "length"
        answers = self._agents.pop(execution.agent, None) or deque(maxlen=LAST_ANSWERS)
        self._agents[execution.agent] = answers
        if len(self._agents) > MAX_AGENTS:
            del self._agents[next(iter(self._agents))]
        answers.append(is_cut)
        if not is_cut or len(answers) < FEWEST_ANSWERS:
            return ()
        cut = sum(answers)
        return (cut_off(execution, cut, len(answers)),) if cut >= self._share * len(answers) else ()


class JobEnds:
    """Turns the ends of jobs into signals, in the order of the log."""

    def __init__(self, alerts: Alerts, newest: Callable[[str], Alert | None]) -> None:
        """Creates it.

        Args:
            alerts: the settings of the config.
            newest: a function that returns the newest alert of the latest incident with a key.
        """
        rules = alerts.anomalies
        self._newest = newest
        self._costly = rules.execution_cost_usd
        self._long_ms = None if rules.execution_duration_s is None else int(rules.execution_duration_s * 1000)
        self._answers = CutOffAnswers(rules.cut_off_share)
        self._deployments = DeploymentWatch(alerts.deployments, newest)

    def signals(self, execution: Execution) -> tuple[Signal, ...]:
        """Returns the signals of a job's end: first what is behind its failure, which then is not reported."""
        causes = self._deployments.add(execution)
        quotas = of_quotas(execution, self._newest, self._deployments.traffic_in_words)
        of_job = of_execution(execution, self._costly, self._long_ms)
        return (*causes, *quotas, *of_job, *self._answers.add(execution))
