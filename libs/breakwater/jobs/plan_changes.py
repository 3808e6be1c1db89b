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


@dataclass(frozen=True, slots=True)
class PlanLog:
    """Plans whose changes of state are recorded. All methods raise StateUnavailableError and BusError."""

    plans: Plans
    _publisher: Publisher

    async def announce(self, plan_id: str, by: str, source: PlanSource, refusal: str | None = None) -> None:
        """Records a plan without jobs: a draft, or one that was refused. Raises TooManyPlansError."""
        move = await self.plans.announce(plan_id, by, refusal)
        await self._publish(plan_id, move, refusal or "it was announced without jobs", source)

    async def change(
        self,
        plan_id: str,
        stage: Stage,
        jobs: Mapping[str, NotedJob | None],
        reason: str,
        source: PlanSource,
        by: str | None = None,
    ) -> None:
        """Brings jobs to a stage, as `Plans.change` does, and records how that changes the plan."""
        if jobs:
            await self._publish(plan_id, await self.plans.change(plan_id, stage, jobs, by), reason, source)

    async def withdraw(self, plan_id: str, job_ids: Collection[str]) -> None:
        """Forgets jobs that were not accepted after all."""
        await self.plans.withdraw(plan_id, job_ids)

    async def _publish(self, plan_id: str, move: PlanMove | None, reason: str, source: PlanSource) -> None:
        if move is None:
            return
        change = PlanChange(
            change_id=f"{plan_id}#{move.version}",
            plan_id=plan_id,
            from_state=move.before,
            to_state=move.after,
            reason=reason,
            execution_id=source.execution_id,
            tenant=source.tenant,
            owner=source.owner,
            correlation_id=source.correlation_id,
            version=move.version,
            at=datetime.now(UTC),
        )
        await self._publisher.event(subjects.plan(plan_id), change, id=change.change_id, at=change.at)
