"""Answers what a job would call and what that would cost at worst, and calls nothing."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from breakwater.contracts.execution import Result
from breakwater.contracts.job import Job
from breakwater.contracts.types import usd_from_nano
from breakwater.policy.price import choices_of, max_tokens_of
from services.worker.conclude import Ask, finish
from services.worker.plane import Plane


async def dry_run(plane: Plane, ask: Ask, job: Job, execution_id: str, agent_name: str, chain: tuple[str, ...]) -> None:
    """Decides the job with the plan as its output."""
    agent = ask.agent
    max_tokens = max_tokens_of({**agent.params, **job.params}, agent.max_tokens) * choices_of(job.params)
    input_bytes = len(ask.delivery.data) + len((agent.system_prompt or "").encode())
    models: list[JsonValue] = []
    for model in chain:
        worst = plane.worst_case(agent, model, input_bytes, max_tokens)
        planned: dict[str, Any] = {
            "model": model,
            "provider": plane.config.provider_name(agent, model),
            "max_attempts": agent.retry.max_attempts,
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
