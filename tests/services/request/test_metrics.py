"""What the API counts, and who may see it."""

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from breakwater.breakers.contract import Health
from breakwater.identity.api_keys import revoke_key
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, new_id

JOB = {"agent": "writer", "prompt": "x"}
REQUESTS = "breakwater_http_requests_total"
SECONDS = "breakwater_http_request_duration_seconds_count"


async def samples(api: HttpApi) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = await api.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    # Four of five lines are buckets of histograms, which cost a second to read.
    lines = [line for line in answer.body.decode().splitlines(keepends=True) if "_bucket{" not in line]
    families = list(text_string_to_metric_families("".join(lines)))
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_metrics_are_for_who_has_a_key(api: HttpApi) -> None:
    for path in ("/metrics", "/metrics/", "/metrics/x", "/%6Detrics"):
        for header in ("", "Bearer bw_0123456789ab_x"):
            answer = await api.ask("GET", path, headers={"Authorization": header}, allow_redirects=False)
            assert (answer.status, answer.code) == (401, "unauthorized"), path
            assert b"breakwater_" not in answer.body
    assert (await api.ask("GET", "/metrics")).status == 200
    assert (await api.ask("POST", "/metrics")).status == 405
    revoke_key(api.settings.api_keys_file, api.http.headers["Authorization"].split("_")[1])
    assert (await api.ask("GET", "/metrics")).status == 401


async def test_requests_are_counted_by_route_method_and_status(api: HttpApi) -> None:
    before = await samples(api)
    await api.post(JOB)
    await api.post(JOB)
    await api.post(b"nonsense")
    await api.ask("POST", "/api/v1/jobs", json=JOB, headers={"Authorization": ""})
    await api.ask("GET", f"/api/v1/jobs/{new_id()}")
    await api.ask("GET", f"/api/v1/jobs/a/b%2F{new_id()}")
    await api.ask("DELETE", "/api/v1/jobs")
    await api.ask("PROPFIND", "/api/v1/jobs")
    await api.ask("GET", "/nothing/here")
    after = await samples(api)

    def grown(name: str, **labels: str) -> float:
        return after.get(key(name, **labels), 0.0) - before.get(key(name, **labels), 0.0)

    jobs, one = "/api/v1/jobs", "/api/v1/jobs/{job_id}"
    assert grown(REQUESTS, route=jobs, method="POST", status="202") == 2
    assert grown(REQUESTS, route=jobs, method="POST", status="400") == 1
    assert grown(REQUESTS, route=jobs, method="POST", status="401") == 1
    assert grown(REQUESTS, route=one, method="GET", status="404") == 2
    assert grown(REQUESTS, route=jobs, method="DELETE", status="405") == 1
    assert grown(REQUESTS, route=jobs, method="other", status="405") == 1
    assert grown(REQUESTS, route="other", method="GET", status="404") == 1
    assert grown(SECONDS, route=jobs, method="POST") == 4
    assert grown(REQUESTS, route="/metrics", method="GET", status="200") == 1


async def test_nothing_that_a_caller_chooses_becomes_a_label(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    # jobs that are not known are looked for twice
    monkeypatch.setattr("breakwater.jobs.store.accepted.LINGER_S", 0.0)
    job_id = new_id()

    async def ask(number: int) -> None:
        await api.post(JOB | {"job_id": job_id, "tenant": "a tenant"}, query="?wait_s=0.01")
        await api.ask("GET", f"/api/v1/jobs/{job_id}-{number}")
        await api.ask("GET", f"/{job_id}-{number}")

    await ask(0)  # the first of a kind makes labels
    before = len(await samples(api))
    for number in range(1, 10):
        await ask(number)
    text = (await api.ask("GET", "/metrics")).body.decode()
    assert job_id not in text
    assert "a tenant" not in text
    assert len(await samples(api)) - before < 20


async def test_the_process_itself_is_measured_too(api: HttpApi) -> None:
    names = {name for name, _ in await samples(api)}
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "python_info"} <= names
    assert not [name for name in names if name.endswith("_created")]


async def test_openmetrics_is_given_to_who_accepts_it(api: HttpApi) -> None:
    answer = await api.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


async def test_queues_and_agents_are_shown_with_how_old_the_oldest_job_is(
    own_nats_server: RunningServer, redis: Redis, api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of several HTTP APIs in a process the one that was started last is shown.
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics.KEPT_S", 0.0)
    stream = api.bus.jetstream()
    hour_ago = format_time(datetime.now(UTC) - timedelta(hours=1))
    await stream.publish(subjects.job("writer"), b"{}", headers={Header.QUEUED_AT.value: hour_ago})
    await stream.publish(subjects.job("writer"), b"{}")
    await stream.publish(subjects.job("reader"), b"{}")
    await stream.publish("bw.attempts.writer.e1.1", b"{}")

    async def shown() -> dict[tuple[str, frozenset[tuple[str, str]]], float] | None:
        found = await samples(api)
        return found if found.get(key("breakwater_jobs_waiting", agent="writer")) == 2 else None

    found = await until(shown)
    ages = {name: found[key("breakwater_oldest_job_age_seconds", agent=name)] for name in ("writer", "reader")}
    assert 3600 <= ages["writer"] < 3700
    assert 0 < ages["reader"] < 100
    assert found[key("breakwater_consumer_waiting_messages", consumer="sink-events")] == 1
    assert found[key("breakwater_consumer_in_progress_messages", consumer="sink-events")] == 0
    assert found[key("breakwater_parked_jobs")] == 0
    healths = {
        health: found[key("breakwater_agent_health", agent="writer", health=health)] for health in get_args(Health)
    }
    assert healths == {"healthy": 1, "degraded": 0, "unhealthy": 0}


async def test_without_nats_the_queues_are_missing_and_all_else_is_shown(
    own_nats_server: RunningServer, api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics.KEPT_S", 0.0)
    own_nats_server.kill()

    async def missing() -> bool:
        return key("breakwater_jobs_waiting", agent="writer") not in await samples(api)

    await until(missing)
    found = await samples(api)
    assert key("breakwater_agent_health", agent="writer", health="healthy") in found
    assert any(name == REQUESTS for name, _ in found)
