"""Records changes of plans: in Redis with the job that makes them, and in EVENTS."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.store.plans import NotedJob, PlanMove, Plans, Stage
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A request or a job that changes a plan."""

    tenant: str | None
    owner: str | None
    correlation_id: str | None
    """W3C trace id."""
    execution_id: str | None = None
    job_id: str | None = None
    """The job's own id."""


@dataclass(frozen=True, slots=True)
class PlanName:
    """A plan: its key in the plane, and its id as its caller chose it."""

    key: str
    plan_id: str


@dataclass(frozen=True, slots=True)
class PlanLog:
    """Plans whose changes of state are recorded. All methods raise StateUnavailableError and BusError."""

    plans: Plans
    _publisher: Publisher

    async def announce(self, plan: PlanName, by: str, source: PlanSource, refusal: str | None = None) -> None:
        """Records a plan without jobs: a draft, or one that was refused. Raises TooManyPlansError."""
        move = await self.plans.announce(plan.key, by, refusal, plan_id=plan.plan_id)
        await self._publish(plan, move, refusal or "it was announced without jobs", source)

    async def change(
        self,
        plan: PlanName,
        stage: Stage,
        jobs: Mapping[str, NotedJob | None],
        reason: str,
        source: PlanSource,
        by: str | None = None,
    ) -> None:
        """Brings jobs to a stage, as `Plans.change` does, and records how that changes the plan."""
        if jobs:
            move = await self.plans.change(plan.key, stage, jobs, by, plan_id=plan.plan_id)
            await self._publish(plan, move, reason, source)

    async def withdraw(self, plan_key: str, execution_ids: Collection[str]) -> None:
        """Forgets jobs that were not accepted after all."""
        await self.plans.withdraw(plan_key, execution_ids)

    async def _publish(self, plan: PlanName, move: PlanMove | None, reason: str, source: PlanSource) -> None:
        if move is None:
            return
        change = PlanChange(
            change_id=f"{plan.key}#{move.version}",
            plan_id=plan.plan_id,
            plan_key=plan.key,
            from_state=move.before,
            to_state=move.after,
            reason=reason,
            execution_id=source.execution_id,
            job_id=source.job_id,
            tenant=source.tenant,
            owner=source.owner,
            correlation_id=source.correlation_id,
            version=move.version,
            at=datetime.now(UTC),
        )
        await self._publisher.event(subjects.plan(plan.key), change, id=change.change_id, at=change.at)
