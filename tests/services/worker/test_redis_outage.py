"""A worker without Redis: the incident that people are told of."""

from __future__ import annotations

from functools import partial

import pytest
from pydantic import SecretStr

from breakwater.alerts import storage_watch
from breakwater.alerts.contract import IncidentStatus
from breakwater.alerts.storage_watch import StorageWatch
from breakwater.alerts.store.incidents import open_log
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.settings import Settings
from breakwater.services.worker import app as worker_app
from tests.helpers import nats_client, until
from tests.servers import RunningServer

CONFIG = parse_config("{providers: {local: {base_url: 'http://127.0.0.1:1/v1'}}, agents: {a: {model: m}}}")


async def test_redis_that_does_not_serve_is_an_incident_until_it_does_also_while_no_job_runs(
    own_nats_server: RunningServer, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_app, "StorageWatch", partial(StorageWatch, patience_s=0.0))
    monkeypatch.setattr(storage_watch, "LOOK_EVERY_S", 0.1)
    await provision(own_nats_server.url, bus_plan(CONFIG))
    settings = Settings(nats_url=SecretStr(own_nats_server.url), redis_url=SecretStr(own_redis_server.url))
    app = worker_app.build(settings, CONFIG)
    async with nats_client(own_nats_server.url) as client:
        log, _ = open_log(lambda: client, Publisher(lambda: client, "test"), CONFIG.alerts, CONFIG.redaction)

        async def status(wanted: IncidentStatus) -> bool:
            return [alert.status for alert in (await log.catch_up()).all()] == [wanted]

        await app.start()
        try:
            own_redis_server.kill()
            await until(lambda: status("firing"), "the incident")
            await own_redis_server.restart_async()
            await until(lambda: status("resolved"), "its end")
        finally:
            await app.stop()
    [alert] = log.incidents.all()
    assert (alert.key, alert.severity, alert.count) == ("storage_failing/redis", "critical", 1)
