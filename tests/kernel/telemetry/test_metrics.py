"""What is counted, with which labels, and where it is served."""

import asyncio
import json
import os
import random
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from breakwater.alerts.metrics import AlerterMetrics
from breakwater.breakers.metrics import BreakerMetrics
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, Cause, ErrorInfo, Outcome, Result
from breakwater.jobs.metrics import WorkerMetrics
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.telemetry.metrics import (
    AGENT_HEALTH,
    KEPT_S,
    PARKED_JOBS,
    PLANE_GAUGES,
    GaugeCollector,
    HttpMetrics,
    Readings,
    StreamMetrics,
    dead_letters_refused,
    one_of,
    serve,
    show_config,
)
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.metrics import BudgetMetrics
from breakwater.local.datadir import DataDir
from breakwater.local.ports import free_port
from breakwater.local.stack import plan_stack
from breakwater.records.metrics import SinkMetrics
from breakwater.services.__main__ import NAMES
from tests.docs.markdown import rows
from tests.helpers import ServiceProcess, start_service, wait_until
from tests.tables import each_row

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, tzinfo=UTC)
LABELS = ("agent", "model", "status", "reason", "outcome", "kind", "direction", "cause")
METRICS_TABLE = [
    (name, *type_and_labels.partition(", ")[::2], served_by, what)
    for name, type_and_labels, served_by, what in rows(ROOT / "proto" / "metrics.md", "metric")
]
THRESHOLD = BudgetEvent(
    event_id="global/daily/2026-11-21/50/1",
    kind="soft_cap",
    scope="global",
    window="daily",
    period="2026-11-21",
    enforcement="soft",
    total=1,
    resets_at=NOW,
    at=NOW,
)
CONFIG = 'providers: {p: {base_url: "http://127.0.0.1:9/v1"}}\nagents: {a: {model: m}}\n'


class Counted:
    """A worker's metrics as a scraper reads them."""

    def __init__(self, *models: str) -> None:
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(models, self.registry)

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def samples(self) -> dict[tuple[str, ...], float]:
        """Values by name and label values, without the buckets of histograms."""
        return {
            (
                sample.name.removeprefix("breakwater_"),
                *(sample.labels[name] for name in LABELS if name in sample.labels),
            ): (sample.value)
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }


def attempt(
    outcome: Outcome = "success", kind: ErrorKind | None = None, *, cause: Cause = "first", **fields: Any
) -> Attempt:
    error = None if kind is None else ErrorInfo(kind=kind, class_="SomeError", message="sk-secret")
    reported: dict[str, Any] = {
        "attempt_id": "job-1:1",
        "execution_id": "job-1",
        "job_id": "job-1",
        "agent": "writer",
        "tenant": "a tenant",
        "number": 1,
        "model": "m",
        "provider": "p",
        "started_at": NOW,
        "completed_at": NOW,
        "duration_ms": 1500,
        "outcome": outcome,
        "short_circuited": outcome == "short_circuited",
        "error": error,
        "cause": cause,
    }
    return Attempt.model_validate(reported | fields)


def result(**fields: Any) -> Result:
    reported: dict[str, Any] = {
        "job_id": "job-1",
        "execution_id": "job-1",
        "agent": "writer",
        "tenant": "a tenant",
        "status": "succeeded",
        "queued_at": NOW,
        "dispatched_at": NOW,
        "completed_at": NOW,
        "duration_ms": 2500,
    }
    return Result.model_validate(reported | fields)


# What is counted


def test_an_attempt_is_counted_with_its_time_tokens_and_cost() -> None:
    counted = Counted("m")
    for _ in range(2):
        counted.metrics.count_attempt(attempt(input_tokens=10, output_tokens=5, cost=1_500_000, cost_basis="billed"))
    assert counted.samples() == {
        ("attempts_total", "writer", "m", "success", "none"): 2,
        ("attempt_duration_seconds_count", "writer", "m"): 2,
        ("attempt_duration_seconds_sum", "writer", "m"): 3,
        ("tokens_total", "writer", "m", "input"): 20,
        ("tokens_total", "writer", "m", "output"): 10,
        ("cost_usd_total", "writer", "m"): 0.003,
    }


def test_a_streamed_answer_is_counted_with_the_time_until_it_began() -> None:
    counted = Counted("m")
    counted.metrics.count_attempt(attempt(first_token_ms=250, chunks=40, output_tokens=101))
    counted.metrics.count_attempt(attempt(first_token_ms=250, chunks=1, output_tokens=101))
    samples = counted.samples()
    assert samples["first_token_seconds_sum", "writer", "m"] == 0.5
    assert samples["output_tokens_per_second_sum", "writer", "m"] == 80
    assert samples["output_tokens_per_second_count", "writer", "m"] == 1


def test_what_is_unknown_is_not_counted_as_nothing() -> None:
    counted = Counted("m")
    counted.metrics.count_attempt(attempt("error", "timeout"))
    assert counted.samples() == {
        ("attempts_total", "writer", "m", "error", "timeout"): 1,
        ("attempt_duration_seconds_count", "writer", "m"): 1,
        ("attempt_duration_seconds_sum", "writer", "m"): 1.5,
    }


def test_a_call_that_was_not_made_has_no_duration_nor_cost() -> None:
    counted = Counted("m")
    counted.metrics.count_attempt(attempt("short_circuited", "breaker_open", cost=0))
    assert counted.samples() == {
        ("attempts_total", "writer", "m", "short_circuited", "breaker_open"): 1,
        ("short_circuits_total", "writer", "m", "breaker_open"): 1,
    }


def test_a_call_whose_worker_was_lost_has_a_cost_and_no_duration() -> None:
    counted = Counted("m")
    counted.metrics.count_attempt(attempt("worker_lost", "worker_lost", cost=10**9))
    assert counted.samples() == {
        ("attempts_total", "writer", "m", "worker_lost", "worker_lost"): 1,
        ("cost_usd_total", "writer", "m"): 1,
    }


def test_a_job_is_counted_with_how_it_ended() -> None:
    counted = Counted()
    counted.metrics.count_job(result())
    counted.metrics.count_job(result(status="dead_lettered", reason="timeout"))
    assert counted.samples() == {
        ("jobs_total", "writer", "succeeded", "none"): 1,
        ("jobs_total", "writer", "dead_lettered", "timeout"): 1,
        ("job_duration_seconds_count", "writer"): 2,
        ("job_duration_seconds_sum", "writer"): 5,
    }


def test_waste_is_counted_by_its_cause_and_a_hit_of_the_cache_as_one() -> None:
    counted = Counted()
    counted.metrics.count_job(result(wasted_by_cause={"retry": 250_000_000, "fallback": 10**9}))
    counted.metrics.count_job(result(cache_hit=True))
    samples = counted.samples()
    assert samples["wasted_cost_usd_total", "writer", "retry"] == 0.25
    assert samples["wasted_cost_usd_total", "writer", "fallback"] == 1
    assert samples["cache_hits_total", "writer"] == 1


def test_an_answer_of_a_fallback_is_counted_with_its_cost_and_that_of_the_requested_model() -> None:
    counted = Counted("m", "mini")
    fell_back = {"requested_model": "m", "chosen_model": "mini", "requested_model_cost": 10**9}
    paid = {"total_cost": 3 * 10**9, "wasted_cost": 10**9, "cost_basis": "billed"}
    for job in (
        {**fell_back, **paid},
        {**fell_back, **paid, "requested_model_cost": None},
        {**fell_back, "chosen_model": "m"},
    ):
        counted.metrics.count_job(result(**job))
    samples = counted.samples()
    assert samples["fallback_answers_total", "writer", "mini"] == 2
    assert samples["fallback_cost_usd_total", "writer"] == 2
    assert samples["requested_model_cost_usd_total", "writer"] == 1


def test_a_retry_is_counted_by_the_error_that_it_was_made_for() -> None:
    counted = Counted("m")
    attempts = (
        attempt("error", "rate_limit"),
        attempt("error", "server", cause="retry"),
        attempt("error", "logic", cause="retry"),
        attempt("success", cause="self_correction"),
    )
    counted.metrics.count_job(result(attempts=attempts))
    retries = {key: value for key, value in counted.samples().items() if key[0] == "retries_total"}
    assert retries == {
        ("retries_total", "writer", "m", "rate_limit"): 1,
        ("retries_total", "writer", "m", "server"): 1,
    }


def test_a_dry_run_is_no_job() -> None:
    counted = Counted()
    counted.metrics.count_job(result(dry_run=True))
    assert counted.samples() == {}


def test_jobs_in_progress_are_those_that_began_and_have_not_ended() -> None:
    counted = Counted()
    counted.metrics.begin_job("writer")
    counted.metrics.begin_job("writer")
    counted.metrics.end_job("writer")
    assert counted.samples() == {("jobs_in_progress", "writer"): 1}


def test_several_workers_of_one_process_count_together() -> None:
    counted = Counted("m")
    other = WorkerMetrics(["n"], counted.registry)
    counted.metrics.count_attempt(attempt())
    other.count_attempt(attempt())
    other.count_attempt(attempt(model="n"))
    samples = counted.samples()
    assert samples["attempts_total", "writer", "m", "success", "none"] == 1
    assert samples["attempts_total", "writer", "other", "success", "none"] == 1
    assert samples["attempts_total", "writer", "n", "success", "none"] == 1


def test_histograms_carry_the_trace_of_a_job_that_is_recorded_and_only_in_openmetrics() -> None:
    counted, trace_id = Counted("m"), "0af7651916cd43dd8448eb211c80319c"
    counted.metrics.count_attempt(attempt(first_token_ms=250, chunks=40, output_tokens=101), trace_id)
    counted.metrics.count_job(result(), trace_id)
    counted.metrics.count_attempt(attempt(duration_ms=9_000))
    exemplars = {
        (sample.name.removeprefix("breakwater_"), sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for family in openmetrics_families(generate_openmetrics(counted.registry).decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    of_trace = {"trace_id": trace_id}
    assert exemplars == {
        ("attempt_duration_seconds_bucket", "2.5"): (of_trace, 1.5),
        ("first_token_seconds_bucket", "0.25"): (of_trace, 0.25),
        ("output_tokens_per_second_bucket", "100.0"): (of_trace, 80.0),
        ("job_duration_seconds_bucket", "2.5"): (of_trace, 2.5),
    }
    assert trace_id not in counted.text


# What is shown of the plane


class Shown:
    """The gauges of a service, as a scraper reads them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.readings: list[str] = []
        self.healthy, self.parked = "healthy", 3.0
        self.unavailable = False
        self.gauges = GaugeCollector("request", self._health, self._queues, registry=self.registry)

    async def _health(self) -> Readings:
        self.readings.append("health")
        if self.unavailable:
            raise UnavailableError("Redis does not answer")
        return {AGENT_HEALTH: one_of(self.healthy, ("healthy", "degraded"), "writer")}

    async def _queues(self) -> Readings:
        self.readings.append("queues")
        return {PARKED_JOBS: {(): self.parked}}

    async def scrape(self) -> dict[str, float]:
        text = (await asyncio.to_thread(generate_latest, self.registry)).decode()
        return {
            "/".join((sample.name.removeprefix("breakwater_"), *sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


async def test_what_is_shown_of_the_plane_is_read_by_scrapes_alone_and_once_for_many() -> None:
    shown = Shown()
    assert await shown.scrape() == {}
    shown.gauges.start()
    assert shown.readings == []
    scrapes = await asyncio.gather(*(shown.scrape() for _ in range(10)))
    assert scrapes == [{"agent_health/writer/healthy": 1, "agent_health/writer/degraded": 0, "parked_jobs": 3}] * 10
    assert shown.readings == ["health", "queues"]
    shown.gauges.stop()
    assert await shown.scrape() == {}


async def test_what_cannot_be_read_is_missing_and_what_can_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    shown.gauges.start()
    assert "agent_health/writer/healthy" in await shown.scrape()
    shown.unavailable, shown.parked = True, 4
    later = time.monotonic() + KEPT_S
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics.time.monotonic", lambda: later)
    assert await shown.scrape() == {"parked_jobs": 4}
    shown.gauges.stop()


async def test_a_reading_that_hangs_holds_up_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics.READ_TIMEOUT_S", 0.05)
    registry = CollectorRegistry()

    async def never() -> Readings:
        await asyncio.Event().wait()
        raise AssertionError

    gauges = GaugeCollector("alerter", never, registry=registry)
    gauges.start()
    async with asyncio.timeout(30):
        assert b"breakwater_incidents{" not in await asyncio.to_thread(generate_latest, registry)
    gauges.stop()


async def test_of_several_services_in_a_process_the_last_one_is_shown() -> None:
    first = Shown()
    second = GaugeCollector("request", first._queues, registry=first.registry)
    first.gauges.start()
    second.start()
    first.gauges.stop()
    assert await first.scrape() == {"parked_jobs": 3}
    second.stop()


# Labels


def test_labels_stay_bounded_whatever_jobs_ask_for() -> None:
    counted = Counted("m", "n")
    some = random.Random(1)
    for number in range(2_000):
        model = some.choice(["m", "n", f"org/model-{number}", f"sk-secret-{number}"])
        ids = {"execution_id": f"job-{number}", "tenant": f"tenant-{number}", "model": model}
        tried = (
            attempt("error", "server", input_tokens=1, output_tokens=1, cost=1, **ids),
            attempt(cause="retry", **ids),
            attempt("short_circuited", "budget_exceeded", **ids),
        )
        for one in tried:
            counted.metrics.count_attempt(one)
        counted.metrics.count_job(
            result(execution_id=f"job-{number}", metadata={"x": f"note-{number}"}, attempts=tried)
        )
    text = counted.text
    for private in ("job-", "tenant", "sk-secret", "org/", "note-"):
        assert private not in text
    models = set(re.findall(r'model="([^"]*)"', text))
    assert models == {"m", "n", "other"}
    assert len(text.splitlines()) < 150


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {
        name.strip("`"): (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _, _ in METRICS_TABLE
    }


def test_the_documented_metrics_are_those_that_are_served() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(["m"], registry)
    metrics.count_attempt(attempt(input_tokens=1, cost=1, usage_problem="the total is 1"))
    metrics.count_attempt(attempt("short_circuited", "breaker_open"))
    metrics.set_breaker_service_alive(True)
    metrics.begin_job("writer")
    retried = (attempt("error", "server"), attempt(cause="retry"))
    metrics.count_attempt(attempt(first_token_ms=250, chunks=40, output_tokens=9))
    metrics.count_job(result(cache_hit=True, wasted_by_cause={"retry": 1}, attempts=retried))
    metrics.count_job(
        result(requested_model="m", chosen_model="n", requested_model_cost=1, total_cost=1, cost_basis="billed")
    )
    HttpMetrics(registry).request("/api/v1/jobs", "POST", 202, 0.01)
    StreamMetrics(registry).set_used_share("EVENTS", 0.5)
    metrics.count_parked_job("writer")
    BudgetMetrics(registry).count_repair()
    BudgetMetrics(registry).count_threshold(THRESHOLD)
    BreakerMetrics(registry).count_transition("writer", "m", "open")
    plane = [gauge for gauges in PLANE_GAUGES.values() for gauge in gauges]
    assert {name for name, gauges in PLANE_GAUGES.items() for _ in gauges} <= set(NAMES)
    AlerterMetrics(registry).of("ops").count_delivery()
    sink = SinkMetrics(registry)
    dead_letters_refused(registry)[("JOBS",)].inc()
    sink.begin_batch("EVENTS", 7)
    sink.count_rows("attempts", 3, 0.02)
    sink.count_dead_letter("EVENTS")
    sink.set_lag("EVENTS", 1.5)
    sink.end_batch("EVENTS")
    sink.set_unavailable("clickhouse", yes=False)
    show_config("0123456789ab", registry)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    served = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            tuple(name for name in family.samples[-1].labels if name != "le"),
        )
        for family in families
    }
    served |= {f"breakwater_{gauge.name}": ("gauge", gauge.labels) for gauge in plane}
    assert {name: (kind, set(labels)) for name, (kind, labels) in served.items()} == {
        name: (kind, set(labels)) for name, (kind, labels) in documented().items()
    }
    assert all(family.documentation.endswith(".") for family in families)
    assert all(gauge.help_text.endswith(".") for gauge in plane)
    of_plane = {name.strip("`"): by for name, _, _, by, what in METRICS_TABLE if what.endswith("(plane)")}
    assert of_plane == {f"breakwater_{one.name}": by for by, gauges in PLANE_GAUGES.items() for one in gauges}


# Where they are served


def environment_for(directory: Path, **variables: str) -> dict[str, str]:
    config = directory / "breakwater.yaml"
    config.write_text(CONFIG)
    surroundings = {
        "BREAKWATER_CONFIG": str(config),
        "BREAKWATER_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "BREAKWATER_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
        "BREAKWATER_HTTP_PORT": str(free_port()),
        "BREAKWATER_CONSOLE_PORT": str(free_port()),
    }
    return {**os.environ, **surroundings, **variables}


@contextmanager
def service(name: str, environment: Mapping[str, str], log: Path) -> Generator[ServiceProcess]:
    process = start_service(name, environment, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def scrape(process: ServiceProcess, url: str) -> set[str]:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return {family.name for family in text_string_to_metric_families(answer.read().decode())}
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("name", ["worker", "request", "sink", "console"])
def test_a_service_serves_its_metrics_where_it_is_configured(tmp_path: Path, name: str) -> None:
    port = str(free_port())
    with service(name, environment_for(tmp_path, BREAKWATER_METRICS_PORT=port), tmp_path / "log") as process:
        names = scrape(process, f"http://127.0.0.1:{port}/metrics")
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_gc_objects_collected"} <= names
    own = {
        metric.strip("`").removesuffix("_total")
        for metric, _, _, served_by, _ in METRICS_TABLE
        if {name, "all"} & set(served_by.split(", "))
    }
    # Alive or not is unknown before somebody has looked, for which there is no Redis here.
    own.discard("breakwater_breaker_service_alive")
    assert {one for one in names if one.startswith("breakwater_")} == own
    assert own


def test_a_port_with_a_token_shows_nothing_to_who_has_not_got_it(tmp_path: Path) -> None:
    port, token = free_port(), "a token of an operator"
    variables = {"BREAKWATER_METRICS_PORT": str(port), "BREAKWATER_METRICS_TOKEN": token}
    with service("sink", environment_for(tmp_path, **variables), tmp_path / "log") as process:

        def answer(authorization: str = "") -> tuple[int, bool] | None:
            """The status, and whether there are metrics; None where nobody listens yet."""
            assert process.poll() is None
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request("GET", "/metrics", headers={"Authorization": authorization})
                response = connection.getresponse()
            except ConnectionError:
                return None
            return response.status, b"breakwater_sink" in response.read()

        assert wait_until(answer) == (401, False)
        for wrong in ("Bearer ", f"Bearer {token}x", f"Basic {token}", token, "Bearer \u00fc"):
            assert answer(wrong) == (401, False), wrong
        assert answer(f"Bearer {token}") == (200, True)


def test_connections_without_a_request_end_and_those_past_a_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics._REQUEST_S", 4)
    port = free_port()
    serve("127.0.0.1", port)
    others = threading.active_count()
    monkeypatch.setattr("breakwater.kernel.telemetry.metrics._MAX_THREADS", others + 3)
    with ExitStack() as held:
        for number in range(1, 4):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
            wait_until(lambda threads=others + number: threading.active_count() >= threads)
        with socket.create_connection(("127.0.0.1", port), timeout=2) as refused:
            assert refused.recv(1) == b"", "it is closed before those that are held"

        def scrapes() -> bytes | None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
                    return response.read()
            except OSError:
                return None

        assert b"python_gc_objects_collected" in wait_until(scrapes)
    assert "Traceback" not in capfd.readouterr().err


def test_a_service_whose_port_is_taken_works_without_metrics_and_serves_them_once_the_port_is_free(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with service("sink", environment_for(tmp_path, BREAKWATER_METRICS_PORT=str(port)), log) as process:
            wait_until(lambda: "another program already listens" in log.read_text() or process.poll() is not None)
            assert process.poll() is None
            assert "BREAKWATER_METRICS_PORT" in log.read_text()
            taken.close()
            assert scrape(process, f"http://127.0.0.1:{port}/metrics")
    assert "Traceback" not in log.read_text()


@each_row("host", ["192.0.2.1", "no such host"])
def test_an_address_that_cannot_be_had_is_reported(tmp_path: Path, host: str) -> None:
    environment = environment_for(tmp_path, BREAKWATER_METRICS_PORT=str(free_port()), BREAKWATER_METRICS_HOST=host)
    log = tmp_path / f"{host}.log"
    with service("sink", environment, log) as process:
        assert process.wait(60) == os.EX_CONFIG
    assert f"can't listen on {host}:" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_every_process_of_the_local_stack_has_a_port_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "breakwater.yaml"
    config.write_text(CONFIG)
    data = DataDir(tmp_path / "data")
    data.create()
    stack = plan_stack(data, config, workers=3, environment={})
    ports = {spec.name: int(spec.env["BREAKWATER_METRICS_PORT"]) for spec in stack.services}
    assert len(set(ports.values())) == len(ports) == len(NAMES) + 2
    assert {spec.env["BREAKWATER_METRICS_HOST"] for spec in stack.services} == {"127.0.0.1"}
    urls = {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}
    assert stack.endpoints.metrics == urls
    assert json.loads(stack.endpoints.model_dump_json())["metrics"] == urls
    # Prometheus, and programs that use NATS, find them there after the next start, too.
    again = plan_stack(data, config, workers=3, environment={})
    assert (again.endpoints.metrics, again.endpoints.nats_url) == (urls, stack.endpoints.nats_url)


def test_every_container_serves_its_metrics_inside_its_network_alone() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name in NAMES:
        environment = services[name]["environment"]
        assert (environment["BREAKWATER_METRICS_HOST"], environment["BREAKWATER_METRICS_PORT"]) == ("0.0.0.0", 9464)
        assert not any("9464" in port for port in services[name].get("ports", ()))
