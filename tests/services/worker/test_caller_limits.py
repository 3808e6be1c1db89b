"""What rate limits leave to a job's caller: in its result, and in the first message of its stream."""

from __future__ import annotations

import json
from typing import Any

from breakwater.jobs.contract.execution import Result
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Stream
from tests.flow.kit import PRICE, model
from tests.services.worker.conftest import StartWorker


async def test_a_result_and_the_first_message_of_a_stream_say_what_is_left_of_the_callers_limits(
    start_worker: StartWorker,
) -> None:
    answer = "".join(f"{number:03d} " for number in range(60))
    models = {"sim/m": model(answer=answer, stream={"tokens_per_s": 100})}
    refuse = {"on_exceeded": "fail"}
    agents = {"writer": {"model": "sim/m", "rate_limit": {"requests_per_minute": 2, **refuse}}}
    # Those of the model are not shown, as other callers share them.
    more_models = {"sim/m": {"price": PRICE, "rate_limit": {"requests_per_minute": 2, "tokens_per_minute": 10**6}}}
    async with start_worker(models, agents, more_models=more_models) as plane:
        messages: list[dict[str, Any]] = []

        async def note(message: Any) -> None:
            messages.append(json.loads(message.data))

        await plane.client.subscribe("bw.chunks.>", cb=note)
        job = {"agent": "writer", "prompt": "x"}
        whole = Result.model_validate(await plane.run(job | {"job_id": "whole"}))
        await plane.run(job | {"job_id": "streamed", "stream": True})
        refused = Result.model_validate(await plane.run(job | {"job_id": "refused"}))
        assert whole.limits is not None
        assert whole.limits.requests is not None
        assert (whole.limits.requests.limit, whole.limits.requests.remaining, whole.limits.tokens) == (2, 1, None)
        assert 59 < (whole.limits.requests.resets_at - whole.queued_at).total_seconds() < 90
        assert messages[0]["limits"]["requests"]["remaining"] == 0
        assert len(messages) > 1
        assert all("limits" not in message for message in messages[1:])
        assert refused.limits is not None
        assert refused.limits.requests is not None
        assert refused.error is not None
        assert refused.error.retry_after_s is not None
        assert refused.limits.requests.remaining == 0
        # There is room for a call before all of it is available again.
        assert refused.error.retry_after_s < (refused.limits.requests.resets_at - refused.queued_at).total_seconds()
        record = await plane.worker.lookup.last(Stream.EVENTS, subjects.execution("writer", whole.execution_id))
        assert record is not None
        assert "limits" not in json.loads(record.data), "the figures of a moment are for the caller alone"
