"""Answers what a job would call and what that would cost at worst, and calls nothing."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from breakwater.contracts.execution import Result
from breakwater.contracts.types import usd_from_nano
from services.worker.assignment import Assignment
from services.worker.conclude import Ask, finish
from services.worker.plane import Plane


async def dry_run(plane: Plane, ask: Ask, assignment: Assignment) -> None:
    """Decides the job with the plan as its output."""
    agent, job, chain = assignment.agent, assignment.job, assignment.chain
    execution_id, agent_name = assignment.execution_id, assignment.agent_name
    corrections = 0 if agent.output is None else agent.output.max_corrections
    models: list[JsonValue] = []
    for model in chain:
        worst = plane.worst_case(agent, model, assignment.input_size, assignment.max_output_tokens)
        planned: dict[str, Any] = {
            "model": model,
            "provider": plane.config.provider_name(agent, model),
            "max_attempts": agent.retry.max_attempts,
            "max_corrections": corrections,
            "worst_case_cost": None if worst is None else usd_from_nano(worst),
        }
        models.append(planned)
    now = plane.now()
    result = Result(
        job_id=execution_id,
        execution_id=execution_id,
        agent=agent_name,
        tenant=job.tenant,
        task_id=job.task_id,
        parent_execution_id=job.parent_execution_id,
        status="succeeded",
        requested_model=chain[0],
        fallback_chain=chain,
        total_cost=0,
        wasted_cost=0,
        cost_basis="billed",
        output={"dry_run": True, "models": models, "worst_case_cost_basis": "per attempt"},
        metadata=job.metadata,
        queued_at=ask.delivery.published_at,
        dispatched_at=now,
        completed_at=now,
        duration_ms=0,
        dry_run=True,
    )
    await finish(plane, ask, result)
