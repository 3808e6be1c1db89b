"""Jobs as a worker reads them, without servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg

from breakwater.calls.assignment import Assignment
from breakwater.config import Config, LiveConfig
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.redis.connection import Redis
from breakwater.services.worker.context import WorkerContext, context_for
from breakwater.services.worker.parsing import JobReader


def worker_without_servers(config: Config) -> WorkerContext:
    nothing: Any = None
    return context_for(
        config,
        LiveConfig(config).limits,
        redis=Redis("redis://127.0.0.1:1"),
        publisher=nothing,
        lookup=nothing,
        providers={},
    )


def assignment_of(worker: WorkerContext, job: Job | Mapping[str, Any]) -> Assignment:
    """The assignment of a valid job that the plane has published."""
    body = job.model_dump(mode="json", exclude_defaults=True) if isinstance(job, Job) else dict(job)
    client: Any = None
    reply = "$JS.ACK.JOBS.worker.1.1.1.1764000000000000000.0"
    message = Msg(client, subjects.job(body["agent"]), reply, json.dumps(body).encode(), {})
    reader = JobReader(worker, body["agent"], worker.config.agents[body["agent"]])
    assignment = reader.read(Delivery(message))
    assert assignment.problem == ""
    return assignment
