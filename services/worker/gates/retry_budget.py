"""The fleet's retry budget: first tries on a model earn the retries that an outage of it may cost."""

from __future__ import annotations

from typing import Any

from breakwater.config import Agent
from breakwater.contracts.execution import ErrorInfo
from breakwater.state.connection import ScriptCall
from services.worker.context import WorkerContext
from services.worker.gates.gate import Gate, Refused


class RetryBudgetGate(Gate):
    """Counts a job's first try on a model. It refuses nothing here: a retry is asked for before its wait."""

    @classmethod
    def applies(cls, worker: WorkerContext, agent: Agent) -> bool:
        """Not where there is no retry budget."""
        del agent
        return worker.config.retry_budget is not None

    def ask(self) -> ScriptCall | None:
        """Counts the call, if it is the job's first on this model."""
        return None if self.request.lease_ms is None else self._count(1)

    def read(self, answer: Any) -> None:
        """The script answers nothing."""

    def give_back(self) -> ScriptCall | None:
        """A try that was not made earns nothing."""
        return self._count(-1)

    def _count(self, count: int) -> ScriptCall | None:
        model = self.request.flight.model
        if self.request.checkpoint.tried(model):
            return None
        return self.worker.retry_budgets.first_try_call(model, count)


def retry_budget_spent(model: str) -> Refused:
    """What a retry is refused with when the fleet has made too many of them."""
    return Refused(
        "error",
        ErrorInfo(
            kind="retry_budget",
            class_="RetryBudgetExceededError",
            message=f"too many calls to {model} are retries already; this one was not made",
            user_message="This agent is temporarily unavailable because of recent failures. Please try again later.",
        ),
    )
