"""Dry runs: the plan of a job whose models are not called."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from breakwater.calls.assignment import Assignment, Checkpoint, JobEnd
from breakwater.calls.gate import Admission, Refused, WaitForCapacity
from breakwater.calls.providers.base import Answer
from breakwater.calls.rules.refusals import for_operators, outside_region
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.types import usd_from_nano
from breakwater.services.worker.admission import Gates, check
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.next_call import admission_for


async def dry_run(worker: WorkerContext, job: Assignment, gates: Gates) -> JobEnd:
    """Plans a job without calling a model: the output says whether each model of the chain would be admitted now.

    For API keys other than operators', the plan is coarse: it omits the limits of the config and shows only which
    limits are exhausted. Otherwise, a caller could find what remains of each by a binary search with
    free dry runs.
    """
    by_key = job.submitted_by is not None or job.owner is not None
    coarse = by_key and Header.OPERATOR.value not in job.delivery.headers
    now = worker.now()
    start = Checkpoint(dispatched_at=now, deadline=now)
    models: list[JsonValue] = []
    for index, model in enumerate(job.chain):
        targets = worker.targets.all_of(job.agent_name, model)
        for target in job.may_use(targets) or targets:
            checkpoint = start.at_model(index)
            admission = admission_for(worker, job, checkpoint, target, job.agent.timeout_s, is_dry_run=True)
            models.append(await _planned(worker, admission, gates, coarse=coarse))
    output: JsonValue = {"dry_run": True, "models": models, "worst_case_cost_basis": "per attempt"}
    return JobEnd(start, Answer(output), dry_run=True)


async def _planned(worker: WorkerContext, admission: Admission, gates: Gates, *, coarse: bool) -> dict[str, Any]:
    agent = admission.job.agent
    worst = admission.flight.reserved
    checked = admission
    if coarse:
        minimal_flight = admission.flight.model_copy(
            update={"reserved": None if worst is None else min(worst, 1), "reserved_tokens": 1}
        )
        checked = replace(admission, flight=minimal_flight)
    verdict: Refused | WaitForCapacity | None = None
    if not admission.job.may_use([admission.target]):
        verdict = Refused("error", outside_region(admission.target.model, admission.job.residency))
    verdict = verdict or await worker.outages.retry_while_unavailable(partial(check, worker, checked, gates))
    return {
        "model": admission.flight.model,
        "provider": admission.flight.provider or None,
        **({} if admission.flight.deployment is None else {"deployment": admission.flight.deployment}),
        "max_attempts": None if coarse else agent.retry.max_attempts,
        "max_corrections": None if coarse else 0 if agent.output is None else agent.output.max_corrections,
        "worst_case_cost": None if worst is None else usd_from_nano(worst),
        **_admission(verdict, coarse=coarse),
    }


def _admission(verdict: Refused | WaitForCapacity | None, *, coarse: bool) -> dict[str, Any]:
    """Describes the verdict of the gates: `admitted`, `refused` or `wait`, with the reason for the latter two.

    With `coarse`, the description has no figures.
    """
    if verdict is None:
        return {"admission": "admitted", "refusal": None}
    waits = isinstance(verdict, WaitForCapacity)
    refused = verdict.refused if waits else verdict
    return {
        "admission": "wait" if waits else "refused",
        "refusal": {
            "reason": refused.reason,
            "refused_by": refused.refused_by,
            "message": refused.error.message if coarse else for_operators(refused.error),
            "retry_after_s": verdict.delay_s if waits else refused.error.retry_after_s,
        },
    }
