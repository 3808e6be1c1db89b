"""The claims of jobs that have not ended, read for those who look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.rules.checkpoints import SavedCheckpoint
from breakwater.jobs.rules.current_jobs import ClaimState
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.workers import WORKERS
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import time_from_ms

_FIELDS = ("digest", "token", "lease_until", "checkpoint", "wait", "woken", "ended")

ModelT = TypeVar("ModelT", bound=BaseModel)


async def claim_states(redis: Redis, execution_ids: Sequence[str]) -> tuple[datetime, list[ClaimState]]:
    """Reads the time by Redis' clock and the claims of some jobs, in one round trip. Raises StateUnavailableError."""
    async with redis.client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(WORKERS)
        for execution_id in execution_ids:
            key, notices = Claim(execution_id, "").keys
            pipe.hmget(key, *_FIELDS)
            pipe.hvals(notices)
        (seconds, microseconds), heartbeats, *answers = await pipe.execute()
    now_ms = seconds * 1000 + microseconds // 1000
    silent_s = {worker: (now_ms - int(heartbeat.partition(" ")[0])) / 1000 for worker, heartbeat in heartbeats.items()}
    return time_from_ms(now_ms), [_state(*answer, silent_s) for answer in zip(answers[::2], answers[1::2], strict=True)]


def _state(saved: Sequence[str | None], notices: Sequence[str], silent_s: Mapping[str, float]) -> ClaimState:
    digest, token, lease_until, checkpoint, wait, woken, ended = saved
    return ClaimState(
        exists=digest is not None or token is not None,
        claimed=token is not None,
        ended=ended is not None,
        lease_until=None if lease_until is None else time_from_ms(int(lease_until)),
        worker_silent_s=None if token is None else silent_s.get(token.rpartition("/")[0]),
        checkpoint=_parse(SavedCheckpoint, checkpoint),
        wait=_parse(JobWait, wait),
        woken=int(woken or 0),
        cancelling=any(notice.startswith("{") for notice in notices),
    )


def _parse(model: type[ModelT], text: Any) -> ModelT | None:
    with suppress(ValidationError):  # a worker of another version wrote it
        return model.model_validate_json(text) if text else None
    return None
