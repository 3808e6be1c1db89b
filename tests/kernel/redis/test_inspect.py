"""The facts that the doctor judges a server of Redis by."""

from dataclasses import replace
from pathlib import Path

import pytest

from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.redis.inspect import inspect
from breakwater.local.ports import free_port
from breakwater.local.servers import redis_spec
from tests.helpers import until
from tests.server_sources import ProcessRunner


@pytest.mark.parametrize("enabled", ["no", "yes"])
async def test_a_node_of_a_cluster_is_known_for_one(tmp_path: Path, enabled: str) -> None:
    port = free_port()
    spec = redis_spec(tmp_path, port, None)
    runner = ProcessRunner(replace(spec, argv=(*spec.argv, "--cluster-enabled", enabled)))
    runner.start()
    redis = Redis(f"redis://127.0.0.1:{port}/0")
    try:
        await until(spec.ready, "the server")
        assert (await inspect(redis)).is_cluster is (enabled == "yes")
    finally:
        await redis.close()
        runner.stop()
