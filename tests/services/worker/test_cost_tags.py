"""What is kept of a job beside its texts: who pays for it, and the parameters of its calls."""

from __future__ import annotations

import json
from unittest.mock import ANY

from breakwater.kernel.nats.subjects import Header, encode_token
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
        assert (first["submitted_by"], first["user"], first["team"], first["cost_tags"]) == (None, None, None, {})

        of_key = {Header.USER.value: "ada%40example%2Ecom", Header.TEAM.value: "search"}
        tags = encode_token(json.dumps({"team": "research", "unlisted": "x", "email": "jo@example.com"}))
        await plane.publish({**job, "job_id": "key", "metadata": metadata}, **of_key, **{Header.TAGS.value: tags})
        result = await plane.result("key")
        [record] = await plane.messages("EVENTS", "bw.executions.writer.key")
        for named in (result, record, *result["attempts"]):
            assert (named["user"], named["team"]) == ("ada@example.com", "search")
        assert [attempt["cost_tags"] for attempt in result["attempts"]] == [{"team": "research", "email": ANY}] * 2
        assert "jo@" not in str(result["attempts"][0]["cost_tags"])
