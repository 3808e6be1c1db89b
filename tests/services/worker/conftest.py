"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.server_sources import RunningServer, Servers
from tests.services.worker.harness import WorkerPlane, running_worker

StartWorker = Callable[..., AbstractAsyncContextManager[WorkerPlane]]


@pytest.fixture(scope="session")
def worker_nats(servers: Servers) -> RunningServer:
    """A NATS server for workers in this process: each test finds its streams empty."""
    return servers.nats()


@pytest.fixture(scope="session")
def worker_redis(servers: Servers) -> RunningServer:
    """A Redis server for the same."""
    return servers.redis()


@pytest.fixture
def start_worker(tmp_path: Path, worker_nats: RunningServer, worker_redis: RunningServer) -> StartWorker:
    """`start_worker(models={...}, agents={...})`: a worker in this process, on empty servers."""

    def start(
        models: dict[str, Any], agents: dict[str, Any], *, script: dict[str, Any] | None = None, **more: Any
    ) -> AbstractAsyncContextManager[WorkerPlane]:
        return running_worker(
            tmp_path,
            nats_url=worker_nats.url,
            redis_url=worker_redis.url,
            script={"models": models, **(script or {})},
            agents=agents,
            **more,
        )

    return start
