"""What the flow tests share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.flow.kit import Plane, running_plane
from tests.servers import RunningServer

StartPlane = Callable[..., AbstractAsyncContextManager[Plane]]


@pytest.fixture
def start_plane(tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer) -> StartPlane:
    """`start_plane(models={...}, agents={...})`: a plane on servers of its own."""

    def start(
        models: dict[str, Any], agents: dict[str, Any], *, script: dict[str, Any] | None = None, **more: Any
    ) -> AbstractAsyncContextManager[Plane]:
        return running_plane(
            tmp_path,
            nats_url=own_nats_server.url,
            redis_url=own_redis_server.url,
            script={"models": models, **(script or {})},
            agents=agents,
            **more,
        )

    return start
