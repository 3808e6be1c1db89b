"""What a worker does while something else is not confirmed yet, with a crash in between (ADR 0098 has the table)."""

from __future__ import annotations

from decimal import Decimal

from breakwater.kernel.nats import subjects
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.test_outcomes import agent, fill, today

STEPS = {
    "its cost is on its way to Redis, and the attempt is not recorded": (
        "breakwater.services.worker.attempts.record",
        ["worker_lost", "success"],
    ),
    "the attempt is recorded, and nothing is decided": (
        "breakwater.services.worker.handler.finish",
        ["success", "success"],
    ),
    "the caller is answered, and the job is not recorded": ("breakwater.services.worker.conclude._record", ["success"]),
    "the job is recorded, and its claim goes on": (
        "breakwater.jobs.store.executions.Executions.finish",
        ["success"],
    ),
    "its claim has ended, and the delivery is not acknowledged": (
        "breakwater.kernel.nats.publisher.Publisher.acknowledge",
        ["success"],
    ),
}
"""By what is true when the worker dies: the step that it does not make, and the attempts of the job in the end."""


async def test_a_worker_that_dies_between_any_two_steps_decides_records_and_charges_once(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model()}, agent("1")) as plane:
        await fill(plane)
        calls = 0
        spent = Decimal(0)
        for number, (when, (step, outcomes)) in enumerate(STEPS.items()):
            job_id = f"j{number}"
            await plane.run_until(step, job_id)
            decided = await plane.last("RESULTS", subjects.result(job_id))
            plane.begin()
            result = await plane.result(job_id)
            assert decided == (result if outcomes == ["success"] else None), when

            async def acknowledged() -> bool:
                return await plane.pending_jobs() == 0

            await until(acknowledged, when)
            [record] = await plane.messages("EVENTS", subjects.execution("writer", job_id), at_least=1)
            attempts = await plane.attempts("writer", job_id)
            assert [attempt["outcome"] for attempt in attempts] == outcomes, when
            assert [attempt["outcome"] for attempt in record["attempts"]] == outcomes, when
            calls += len(outcomes)
            spent += Decimal(record["total_cost"])
            assert plane.sim.ledger.totals.calls == calls, when
            assert plane.sim.ledger.totals.cost_nano == int(spent * 10**9) > 0, when
            counters = await today(plane)
            assert (counters.figures["agent:writer"].spent, counters.reserved["agent:writer"]) == (
                int(spent * 10**9),
                0,
            ), when
