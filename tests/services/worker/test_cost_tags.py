"""What is kept of a job beside its texts: who pays for it, and the parameters of its calls."""

from __future__ import annotations

from breakwater.kernel.nats.subjects import Header
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker


async def test_attempts_have_their_jobs_cost_tags_and_key_and_its_record_has_the_parameters_all_redacted(
    start_worker: StartWorker,
) -> None:
    models = {"sim/bad": model({"status": 500}), "sim/good": model()}
    agent = {"model": "sim/bad", "fallback_models": ["sim/good"], "retry": {"max_attempts": 1}}
    agents = {"writer": agent, "private": {**agent, "persist_prompts": False}}
    async with start_worker(models, agents, cost_tags=["team", "project", "email"]) as plane:
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

        params = {"user": "jo@example.com", "temperature": 0.5}
        for agent in ("writer", "private"):
            await plane.publish({**job, "agent": agent, "job_id": agent, "params": params})
            assert (await plane.result(agent))["params"] is None
        [[kept], [not_kept]] = [
            await plane.messages("EVENTS", f"bw.executions.{agent}.{agent}") for agent in ("writer", "private")
        ]
        assert kept["params"] == {"user": "[REDACTED]", "temperature": 0.5}
        assert not_kept["params"] is None

        await plane.publish({**job, "job_id": "plain"}, **{Header.SUBMITTED_BY.value: "%FF"})
        [first, _] = (await plane.result("plain"))["attempts"]
        assert (first["submitted_by"], first["cost_tags"]) == (None, {})
