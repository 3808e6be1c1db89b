"""Notes of accepted jobs."""

from __future__ import annotations

from typing import Any

import pytest

from breakwater.jobs.store import accepted
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.executions import Claim
from breakwater.kernel.redis.connection import Redis
from tests.helpers import until


async def test_the_note_of_a_claimed_job_is_found_while_it_is_being_saved(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "LINGER_S", 0.0)
    jobs = AcceptedJobs(redis)
    await redis.client.hset(Claim("e1", "").key, "owner", "1")
    pipeline_class = type(redis.client.pipeline(transaction=False))
    execute = pipeline_class.execute

    async def execute_and_save(pipeline: Any) -> Any:
        answers = await execute(pipeline)
        if (saving := jobs._saving) is not None:
            await until(saving.done)
        return answers

    jobs.mark("e1", "writer")
    monkeypatch.setattr(pipeline_class, "execute", execute_and_save)
    status = await jobs.status("e1")
    assert status is not None
    assert (status.agent, status.taken) == ("writer", True)
