"""What an attempt says of who pays for it: the key that submitted the job, and its cost tags."""

from __future__ import annotations

from breakwater.contracts.subjects import Header
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker


async def test_every_attempt_of_a_job_has_its_cost_tags_redacted_and_the_key_that_submitted_it(
    start_worker: StartWorker,
) -> None:
    models = {"sim/bad": model({"status": 500}), "sim/good": model()}
    agent = {"model": "sim/bad", "fallback_models": ["sim/good"], "retry": {"max_attempts": 1}}
    async with start_worker(models, {"writer": agent}, cost_tags=["team", "project", "email"]) as plane:
        job = {"agent": "writer", "prompt": "x", "tenant": "acme"}
        metadata = {"team": "growth", "email": "jo@example.com", "note": "not kept", "project": ["no", "text"]}
        await plane.publish(
            {**job, "job_id": "tagged", "metadata": metadata}, **{Header.SUBMITTED_BY.value: "finance%20key"}
        )
        attempts = (await plane.result("tagged"))["attempts"]
        assert [attempt["outcome"] for attempt in attempts] == ["error", "success"]
        for attempt in attempts:
            assert attempt["submitted_by"] == "finance key"
            assert attempt["cost_tags"]["team"] == "growth"
            assert attempt["cost_tags"].keys() == {"team", "email"}
            assert "jo@" not in attempt["cost_tags"]["email"]
        recorded = await plane.messages("EVENTS", "bw.attempts.writer.tagged.*")
        assert [one["cost_tags"] for one in recorded] == [one["cost_tags"] for one in attempts]

        await plane.publish({**job, "job_id": "plain"}, **{Header.SUBMITTED_BY.value: "%FF"})
        [first, _] = (await plane.result("plain"))["attempts"]
        assert (first["submitted_by"], first["cost_tags"]) == (None, {})
