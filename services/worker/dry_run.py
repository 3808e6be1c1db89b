"""A dry run: what a job would call, its worst-case cost, and which gate would refuse it. No model is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from breakwater.contracts.types import usd_from_nano
from services.worker.assignment import Assignment, Finished
from services.worker.attempts import request_for
from services.worker.checkpoint import Checkpoint
from services.worker.context import WorkerContext
from services.worker.gates import ALL_GATES, check
from services.worker.gates.gate import AdmissionRequest, Refused, WaitForCapacity


async def dry_run(worker: WorkerContext, job: Assignment, *, coarse: bool = False) -> Finished:
    """The outcome of a dry run, with the plan as its output: each model of the chain, as if it were called now.

    Args:
        worker: this one.
        job: the job.
        coarse: of budgets, caps and limits it is only to be known whether they are used up. Whoever may ask for calls
            of any size for nothing finds out else, by halves, what is left of them.
    """
    now = worker.now()
    start = Checkpoint(dispatched_at=now, deadline=now)
    requests = [
        request_for(worker, job, start.at_model(index), job.agent.timeout_s, dry_run=True)
        for index in range(len(job.chain))
    ]
    models: list[JsonValue] = [await _planned(worker, request, coarse=coarse) for request in requests]
    output: JsonValue = {"dry_run": True, "models": models, "worst_case_cost_basis": "per attempt"}
    return Finished(start, output, None, None, None)


async def _planned(worker: WorkerContext, request: AdmissionRequest, *, coarse: bool) -> dict[str, Any]:
    agent, worst = request.job.agent, request.flight.reserved
    asked = request
    if coarse:
        least = request.flight.model_copy(update={"reserved": None if worst is None else min(worst, 1)})
        asked = replace(request, flight=least, worst_tokens=1)
    verdict = await worker.outages.retry_while_unavailable(lambda: check(worker, asked, ALL_GATES))
    return {
        "model": request.flight.model,
        "provider": request.flight.provider or None,
        "max_attempts": agent.retry.max_attempts,
        "max_corrections": 0 if agent.output is None else agent.output.max_corrections,
        "worst_case_cost": None if worst is None else usd_from_nano(worst),
        **_admission(verdict),
    }


def _admission(verdict: Refused | WaitForCapacity | None) -> dict[str, Any]:
    """What the gates would say now: `admitted`, `refused` or `wait`, and in the latter cases why."""
    if verdict is None:
        return {"admission": "admitted", "refusal": None}
    waits = isinstance(verdict, WaitForCapacity)
    refused = verdict.refused if waits else verdict
    return {
        "admission": "wait" if waits else "refused",
        "refusal": {
            "reason": refused.reason,
            "refused_by": refused.refused_by,
            "message": refused.error.message,
            "retry_after_s": verdict.delay_s if waits else refused.error.retry_after_s,
        },
    }
