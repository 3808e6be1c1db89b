"""Tests of what `bench.hour` calls growth, and of its picture."""

import xml.etree.ElementTree as ET
from typing import Any

from bench.growth import drawn, fitted, judged

SERIES = (
    *("done", "done.kept", "jobs_per_s", "failed_per_s", "cpu_ms", "cost_usd", "p50", "p95", "p99"),
    *(f"memory.{role}" for role in ("worker", "request", "sink", "budget", "breaker", "alerter")),
    *(f"{kind}.{server}" for kind in ("memory", "disk") for server in ("nats", "redis", "clickhouse")),
    *("disk.logs", "messages.all", "messages.EVENTS", "messages.RESULTS", "messages.DLQ", "bytes.all"),
    *("rows.executions", "rows.attempts", "rows.all", "redis.keys", "redis.used", "parts.mb", "parts", "failed"),
    *(f"lag.{consumer}" for consumer in ("sink-events", "budget", "breaker", "alerter-executions")),
    *(f"fds.{process}" for process in ("nats", "clickhouse", "worker", "request")),
)


def run_of(**a_minute: float) -> list[dict[str, Any]]:
    """An hour of samples that stay at 100, but for some series that grow."""
    begin = {"kind": "run", "at_s": 0.0, "in_flight": 64, "keep_minutes": 10}
    samples = [
        {"kind": "sample", "at_s": 60.0 * minute}
        | {name: 100.0 + a_minute.get(name.replace(".", "_"), 0.0) * minute for name in SERIES}
        for minute in range(61)
    ]
    return [begin, *samples, {"kind": "ledgers", "at_s": 3_600.0, "agree": True}]


def test_a_series_that_grows_is_named_unless_what_is_stored_explains_it() -> None:
    stored = {"done": 10_000.0, "rows_executions": 10_000.0, "messages_all": 30_000.0, "done_kept": 10_000.0}
    _, unexplained = judged(run_of(**stored, memory_nats=8.0, memory_worker=0.5))
    assert unexplained == ["memory.worker +15"]
    _, unexplained = judged(run_of(**stored, memory_nats=24.0))
    assert unexplained == ["memory.nats +720"]


def test_an_outage_is_no_growth() -> None:
    points = [(float(minute), 900.0 if 50 <= minute < 54 else 5.0) for minute in range(30, 61)]
    assert fitted(points) == (5.0, 0.0)


def test_the_picture_is_a_small_svg() -> None:
    picture = drawn(run_of(done=10_000.0))
    assert len(picture) < 60_000
    labels = [text.text for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"memory of services, MB", "0 min", "60", "ClickHouse"} <= set(labels)
