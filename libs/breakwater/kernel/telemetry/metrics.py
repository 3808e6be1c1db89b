"""Metrics for Prometheus. Labels are bounded: names of the config and the contract, never a job or a text.

A process always counts its own work; a setting serves the metrics. Gauges of the whole plane are read on a scrape, and
every replica of a service shows the same values. Money is a float here, because Prometheus has no other numbers: use it
for graphs and alerts, and ClickHouse for accounting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import hmac
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from threading import Lock, Thread, active_count
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Metric,
    disable_created_metrics,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from breakwater.breakers.contract import BreakerState
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.errors import ConfigError, UnavailableError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import NANO_PER_USD
from breakwater.limits.contract import BudgetEvent

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

OTHER = "other"
"""The label of all models that the config does not name."""

NONE = "none"
"""The value of a label that does not apply, such as the kind of error of a success."""

LLM_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
TOKENS_PER_S_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)
HTTP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)


RETRY_S = 2.0
"""The seconds between tries to listen on a port that another program has."""

KEPT_S = 5.0
"""The lifetime of a reading of the plane, of which any number of scrapers cause only one in this time."""

READ_TIMEOUT_S = 3.0
"""The time limit of a reading. It is shorter than Prometheus waits, so that a process's own counters are shown even if
a server is unavailable."""

# One more series for each counter, and nothing that a scraper of this format would use.
disable_created_metrics()

_Series = TypeVar("_Series", Counter, Gauge, Histogram)


class _Children(dict[tuple[str, ...], _Series], Generic[_Series]):
    """The series of one metric, by their label values: a look-up in the library costs more than counting."""

    def __init__(self, family: _Series) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, labels: tuple[str, ...]) -> _Series:
        child = self[labels] = self._family.labels(*labels)
        return child


# Once for a registry: a process may have several that count the same.
@cache
def _counter(registry: CollectorRegistry, name: str, help_text: str, *labels: str) -> _Children[Counter]:
    return _Children(Counter(f"breakwater_{name}", help_text, labels, registry=registry))


@cache
def _gauge(registry: CollectorRegistry, name: str, help_text: str, *labels: str) -> _Children[Gauge]:
    return _Children(Gauge(f"breakwater_{name}", help_text, labels, registry=registry))


@cache
def _histogram(
    registry: CollectorRegistry, buckets: tuple[float, ...], name: str, help_text: str, *labels: str
) -> _Children[Histogram]:
    return _Children(Histogram(f"breakwater_{name}", help_text, labels, buckets=buckets, registry=registry))


@cache
def _plain_counter(registry: CollectorRegistry, name: str, help_text: str) -> Counter:
    return Counter(f"breakwater_{name}", help_text, registry=registry)


@cache
def _plain_gauge(registry: CollectorRegistry, name: str, help_text: str) -> Gauge:
    """Return a gauge without labels, which is 0 from the beginning."""
    return Gauge(f"breakwater_{name}", help_text, registry=registry)


def dead_letters_refused(registry: CollectorRegistry = REGISTRY) -> _Children[Counter]:
    """Return the counter of messages that were dropped because DLQ refused them, by their stream."""
    help_text = "Messages dropped without a dead letter, because DLQ refused it."
    return _counter(registry, "dead_letters_refused_total", help_text, "stream")


class WorkerMetrics:
    """Metrics of a worker. They cost a few microseconds for each attempt."""

    def __init__(self, models: Collection[str], registry: CollectorRegistry = REGISTRY) -> None:
        """Create the metrics in a registry; several workers of one process share its series.

        Args:
            models: the ids that the config names; any other model is counted as `other`.
            registry: the registry that is scraped.
        """
        self._models = frozenset(models)
        self._registry = registry
        dead_letters_refused(registry)
        counter = partial(_counter, registry)
        seconds = partial(_histogram, registry, LLM_BUCKETS_S)
        by_call = ("agent", "model", "kind")
        self._jobs = counter("jobs_total", "Jobs that have ended.", "agent", "status", "reason")
        self._job_seconds = seconds("job_duration_seconds", "Time from a job's acceptance to its end.", "agent")
        help_text = "Recorded attempts, including refused ones."
        self._attempts = counter("attempts_total", help_text, "agent", "model", "outcome", "kind")
        self._attempt_seconds = seconds("attempt_duration_seconds", "Duration of calls.", "agent", "model")
        help_text = "Time from the start of a call to the first content of its streamed answer."
        self._first_token_seconds = seconds("first_token_seconds", help_text, "agent", "model")
        rates = partial(_histogram, registry, TOKENS_PER_S_BUCKETS)
        help_text = "Speed of streamed answers: output tokens after the first one, per second."
        self._tokens_per_s = rates("output_tokens_per_second", help_text, "agent", "model")
        self._tokens = counter("tokens_total", "Tokens that providers reported.", "agent", "model", "direction")
        help_text = "Known costs of calls, including estimates."
        self._cost = counter("cost_usd_total", help_text, "agent", "model")
        help_text = "Calls whose reported usage is implausible, has no price, or belongs to another model."
        self._usage_problems = counter("usage_problems_total", help_text, "provider")
        help_text = "Cost of calls that did not produce the answer."
        self._wasted_cost = counter("wasted_cost_usd_total", help_text, "agent", "cause")
        self._retries = counter("retries_total", "Retries, by the error of the failed attempt.", *by_call)
        help_text = "Jobs in progress in this process."
        self._in_progress = _gauge(registry, "jobs_in_progress", help_text, "agent")
        self._parked = counter(
            "jobs_parked_total", "Number of times that jobs were parked until their next attempt.", "agent"
        )
        self._cache_hits = counter("cache_hits_total", "Jobs answered from the cache.", "agent")
        self._short_circuits = counter("short_circuits_total", "Refused calls, which were not made.", *by_call)

    def attempt(self, attempt: Attempt, trace_id: str | None = None) -> None:
        """Count a recorded attempt. A sampled trace becomes the exemplar of the attempt's buckets."""
        agent = attempt.agent
        exemplar = _exemplar(trace_id)
        model = attempt.model if attempt.model in self._models else OTHER
        kind = NONE if attempt.error is None else attempt.error.kind
        self._attempts[agent, model, attempt.outcome, kind].inc()
        if attempt.short_circuited:
            self._short_circuits[agent, model, kind].inc()
            return
        if attempt.outcome != "worker_lost":  # the call's duration is unknown
            self._attempt_seconds[agent, model].observe(attempt.duration_ms / 1000, exemplar)
        if attempt.first_token_ms is not None:
            self._first_token_seconds[agent, model].observe(attempt.first_token_ms / 1000, exemplar)
            if (rate := attempt.tokens_per_s) is not None:
                self._tokens_per_s[agent, model].observe(rate, exemplar)
        if attempt.input_tokens is not None:
            self._tokens[agent, model, "input"].inc(attempt.input_tokens)
        if attempt.output_tokens is not None:
            self._tokens[agent, model, "output"].inc(attempt.output_tokens)
        if attempt.usage_problem is not None or attempt.response_model is not None:
            self._usage_problems[(attempt.provider,)].inc()
        if attempt.cost is not None:
            self._cost[agent, model].inc(attempt.cost / NANO_PER_USD)

    def job(self, result: Execution, trace_id: str | None = None) -> None:
        """Count a decided job, with its trace as `attempt` does. Dry runs are not counted."""
        if result.dry_run:
            return
        agent = result.agent
        self._jobs[agent, result.status, result.reason or NONE].inc()
        self._job_seconds[(agent,)].observe(result.duration_ms / 1000, _exemplar(trace_id))
        if result.cache_hit:
            self._cache_hits[(agent,)].inc()
        for cause, nano in result.wasted_by_cause.items():
            self._wasted_cost[agent, cause].inc(nano / NANO_PER_USD)
        # The error that caused a retry is that of the attempt before it, which only the whole job has.
        for before, attempt in zip(result.attempts, result.attempts[1:], strict=False):
            if attempt.cause == "retry":
                model = attempt.model if attempt.model in self._models else OTHER
                kind = NONE if before.error is None else before.error.kind
                self._retries[agent, model, kind].inc()

    def breaker_service_alive(self, alive: bool) -> None:
        """Set whether a breaker service is running; there is no series before the first call."""
        help_text = "1 while a breaker service is running. Without one, failures open no breaker."
        _plain_gauge(self._registry, "breaker_service_alive", help_text).set(alive)

    def began(self, agent: str) -> None:
        """Count a job in progress."""
        self._in_progress[(agent,)].inc()

    def ended(self, agent: str) -> None:
        """Count a job that is no longer in progress: decided, parked, or lost to another worker."""
        self._in_progress[(agent,)].dec()

    def parked(self, agent: str) -> None:
        """Count a job that was parked until its next attempt."""
        self._parked[(agent,)].inc()


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


class HttpMetrics:
    """Metrics of a service that answers HTTP."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Answered requests."
        self._requests = _counter(registry, "http_requests_total", help_text, "route", "method", "status")
        help_text = "Duration of requests, including the wait for results."
        self._seconds = _histogram(
            registry, HTTP_BUCKETS_S, "http_request_duration_seconds", help_text, "route", "method"
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request.

        Args:
            route: the pattern of its path, never the path itself.
            method: the HTTP method.
            status: the answer's status.
            seconds: the time until the answer was sent.
        """
        self._requests[route, method, str(status)].inc()
        self._seconds[route, method].observe(seconds)


class StreamMetrics:
    """Metrics of the fill levels of streams."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Used share of a stream's limit in bytes."
        self._used = _gauge(registry, "stream_used_ratio", help_text, "stream")

    def used(self, stream: str, ratio: float) -> None:
        """Set the used share of a stream's limit; 0 for a stream without one."""
        self._used[(stream,)].set(ratio)


class BreakerMetrics:
    """Metrics of the breaker service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Transitions published by the breaker service."
        self._transitions = _counter(registry, "breaker_transitions_total", help_text, "agent", "model", "to")

    def transition(self, agent: str, model: str, to: BreakerState) -> None:
        """Count a breaker's transition; its labels are those of `BREAKER_STATE`."""
        self._transitions[agent, model, to].inc()


class BudgetMetrics:
    """Metrics of the budget service: settled calls, and the state of the budgets' counters."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Calls whose cost was counted, including redelivered ones."
        self._settled = _plain_counter(registry, "budget_calls_settled_total", help_text)
        help_text = "Thresholds of caps that were reached and published."
        self._thresholds = _counter(registry, "budget_thresholds_total", help_text, "scope", "window", "kind")
        self._filled = _plain_gauge(registry, "budgets_filled", "1 while the budgets' counters are complete.")
        help_text = "Counters that differed from the record and were repaired."
        self._repairs = _plain_counter(registry, "budget_repairs_total", help_text)
        help_text = "Time of the last comparison of the counters with the record."
        self._compared = _plain_gauge(registry, "budgets_compared_timestamp_seconds", help_text)

    def settled(self, calls: int) -> None:
        """Count calls whose cost was settled."""
        self._settled.inc(calls)

    def threshold(self, reached: BudgetEvent) -> None:
        """Count a threshold that was announced."""
        self._thresholds[reached.scope, reached.window, reached.kind].inc()

    def filled(self, *, yes: bool) -> None:
        """Set whether the counters are complete."""
        self._filled.set(yes)

    def repaired(self) -> None:
        """Count a counter that differed from the record."""
        self._repairs.inc()

    def compared(self, at: datetime) -> None:
        """Set the time at which all counters were compared with the record."""
        self._compared.set(at.timestamp())


class AlerterMetrics:
    """Metrics of the delivery of alerts."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(_counter, registry)
        self._sent = counter("alert_messages_total", "Messages delivered to the channel.", "channel")
        self._failed = counter("alert_failures_total", "Failed tries to send a message.", "channel")
        self._given_up = counter("alert_dead_letters_total", "Messages that were given up.", "channel")
        self._waiting = _gauge(registry, "alerts_held", "Alerts that wait for a channel.", "channel")

    def of(self, channel: str) -> ChannelMetrics:
        """Return the metrics of a channel, by its name in the config."""
        labels = (channel,)
        return ChannelMetrics(self._sent[labels], self._failed[labels], self._given_up[labels], self._waiting[labels])


@dataclass(frozen=True, slots=True)
class ChannelMetrics:
    """Metrics of a channel's messages."""

    _sent: Counter
    _failed: Counter
    _given_up: Counter
    _waiting: Gauge

    def sent(self) -> None:
        """Count a delivered message."""
        self._sent.inc()

    def failed(self) -> None:
        """Count a failed try to send a message."""
        self._failed.inc()

    def given_up(self) -> None:
        """Count a message that became a dead letter."""
        self._given_up.inc()

    def held(self, alerts: int) -> None:
        """Set the number of alerts that wait."""
        self._waiting.set(alerts)


class SinkMetrics:
    """Metrics of the sink: stored rows, and the lag behind the event log."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(_counter, registry)
        gauge = partial(_gauge, registry)
        dead_letters_refused(registry)
        self._rows = counter("sink_rows_total", "Stored rows, including redelivered ones.", "table")
        help_text = "Duration of successful inserts."
        self._insert_seconds = _histogram(registry, HTTP_BUCKETS_S, "sink_insert_duration_seconds", help_text, "table")
        self._batches = counter("sink_batches_total", "Batches stored and acknowledged.", "stream")
        help_text = "Messages that no table accepts and that became dead letters."
        self._dead_letters = counter("sink_dead_letters_total", help_text, "stream")
        for stream in (Stream.EVENTS, Stream.ALERTS, Stream.AUDIT):
            # A series that begins at 1 would show no increase.
            self._dead_letters[(stream.value,)].inc(0)
        help_text = "Acknowledged events that were missing in ClickHouse and were stored again."
        self._lost = _plain_counter(registry, "sink_lost_events_total", help_text)
        help_text = "Age of the oldest event that is held, or its age when it was stored."
        self._lag = gauge("sink_lag_seconds", help_text, "stream")
        help_text = "Messages waiting behind the newest batch when it arrived."
        self._waiting = gauge("sink_waiting_messages", help_text, "stream")
        self._unavailable = gauge("sink_unavailable", "1 while a required server is unavailable.", "what")

    def began(self, stream: str, waiting: int) -> None:
        """Set the number of messages that wait behind a batch of a stream."""
        self._waiting[(stream,)].set(waiting)

    def ended(self, stream: str) -> None:
        """Count a batch that was stored and acknowledged."""
        self._batches[(stream,)].inc()

    def behind(self, stream: str, seconds: float) -> None:
        """Set the age of the oldest event of a batch, or its age when it was stored."""
        # The clocks of two machines may differ: nothing is stored before it happened.
        self._lag[(stream,)].set(max(seconds, 0.0))

    def stored(self, table: str, rows: int, seconds: float) -> None:
        """Count the rows of an insert, and its duration."""
        self._rows[(table,)].inc(rows)
        self._insert_seconds[(table,)].observe(seconds)

    def dead_lettered(self, stream: str) -> None:
        """Count a message that became a dead letter, because no table accepts it."""
        self._dead_letters[(stream,)].inc()

    def lost(self, events: int) -> None:
        """Count acknowledged events that were missing in ClickHouse."""
        self._lost.inc(events)

    def unavailable(self, server: str, *, yes: bool) -> None:
        """Set whether a server is unavailable, by its name in the log."""
        self._unavailable[(server,)].set(yes)


@dataclass(frozen=True, slots=True)
class PlaneGauge:
    """A gauge of the plane, not of a process: every replica of a service shows the same value."""

    name: str
    help_text: str
    labels: tuple[str, ...] = ()


Readings = Mapping[PlaneGauge, Mapping[tuple[str, ...], float]]
"""The values of gauges, by the values of their labels. Unknown values are missing."""

BREAKER_STATE = PlaneGauge(
    "breaker_state", "1 for the current state of a breaker, 0 for the others.", ("agent", "model", "state")
)

AGENT_HEALTH = PlaneGauge(
    "agent_health", "1 for the current health of an agent, 0 for the others.", ("agent", "health")
)
JOBS_WAITING = PlaneGauge("jobs_waiting", "Jobs waiting for a worker.", ("agent",))
PARKED_JOBS = PlaneGauge("parked_jobs", "Parked jobs, waiting for their next attempt.")
OLDEST_JOB = PlaneGauge("oldest_job_age_seconds", "Time at which the oldest job in the queue was accepted.", ("agent",))
CONSUMER_WAITING = PlaneGauge("consumer_waiting_messages", "Messages not yet delivered.", ("consumer",))
CONSUMER_IN_PROGRESS = PlaneGauge(
    "consumer_in_progress_messages", "Messages delivered and not acknowledged.", ("consumer",)
)

_BUDGET = ("budget", "scope", "window", "enforcement")
BUDGET_SPENT = PlaneGauge("budget_spent_usd", "Spent in the current period.", _BUDGET)
BUDGET_RESERVED = PlaneGauge("budget_reserved_usd", "Reserved by calls in flight.", _BUDGET)
BUDGET_LIMIT = PlaneGauge("budget_limit_usd", "The effective cap.", _BUDGET)
BUDGET_FORECAST = PlaneGauge("budget_forecast_usd", "Forecast of the spend at the end of the period.", _BUDGET)

INCIDENTS = PlaneGauge("incidents", "Unresolved incidents.", ("event", "severity", "status"))

PLANE_GAUGES: Mapping[str, tuple[PlaneGauge, ...]] = {
    "breaker": (BREAKER_STATE,),
    "request": (AGENT_HEALTH, JOBS_WAITING, PARKED_JOBS, OLDEST_JOB, CONSUMER_WAITING, CONSUMER_IN_PROGRESS),
    "budget": (BUDGET_SPENT, BUDGET_RESERVED, BUDGET_LIMIT, BUDGET_FORECAST),
    "alerter": (INCIDENTS,),
}
"""The gauges of each service, which knows their values or reads them anyway."""


class GaugeCollector:
    """Serves gauges of the plane, which are read only on a scrape."""

    def __init__(
        self, service: str, *reads: Callable[[], Awaitable[Readings]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Create a collector, which shows nothing before `start`.

        Args:
            service: the service whose `PLANE_GAUGES` are shown.
            reads: functions that each read a part of them. If one raises, mostly `UnavailableError`, its part is
                missing until the next reading; the beginning of an outage is logged.
            registry: the registry that is scraped.
        """
        self._reads = [(read, Outage(f"what {service} shows of the plane in its metrics")) for read in reads]
        self._collector = _plane_collector(registry, PLANE_GAUGES[service])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_reads = Lock()
        self._readings: Readings = {}
        self._until = 0.0

    def start(self) -> None:
        """Show the gauges, and read them in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._collector.shown = self

    def stop(self) -> None:
        """Show nothing from now on."""
        self._loop = None
        if self._collector.shown is self:
            self._collector.shown = None

    def readings(self) -> Readings:
        """Return the readings, at most `KEPT_S` old. Scrapers call this from their own threads."""
        with self._one_reads:
            if self._loop is not None and time.monotonic() >= self._until:
                reading = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
                try:
                    self._readings = reading.result(READ_TIMEOUT_S + 1)
                except (TimeoutError, concurrent.futures.CancelledError):
                    reading.cancel()
                    self._readings = {}  # the loop is blocked, or has ended
                self._until = time.monotonic() + KEPT_S
            return self._readings

    async def _look(self) -> Readings:
        readings: dict[PlaneGauge, Mapping[tuple[str, ...], float]] = {}

        async def look(read: Callable[[], Awaitable[Readings]]) -> None:
            async with asyncio.timeout(READ_TIMEOUT_S):
                readings.update(await read())

        expected = (UnavailableError, TimeoutError)
        await asyncio.gather(
            *(outage.run_logged(partial(look, read), expected=expected) for read, outage in self._reads)
        )
        return readings


class _PlaneCollector(Collector):
    """The gauges of one service in one registry. If a process starts the service several times, it shows the last."""

    def __init__(self, gauges: tuple[PlaneGauge, ...]) -> None:
        self._gauges = gauges
        self.shown: GaugeCollector | None = None

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges without values: the registry asks for their names when they are registered."""
        return self._families({})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges with all known values."""
        collector = self.shown
        return self._families({} if collector is None else collector.readings())

    def _families(self, readings: Readings) -> Iterable[GaugeMetricFamily]:
        for gauge in self._gauges:
            family = GaugeMetricFamily(f"breakwater_{gauge.name}", gauge.help_text, labels=gauge.labels)
            for labels, value in readings.get(gauge, {}).items():
                family.add_metric(labels, value)
            yield family


@cache
def _plane_collector(registry: CollectorRegistry, gauges: tuple[PlaneGauge, ...]) -> _PlaneCollector:
    collector = _PlaneCollector(gauges)
    registry.register(collector)
    return collector


def one_of(chosen: str, values: Iterable[str], *labels: str) -> dict[tuple[str, ...], float]:
    """Return a gauge's readings, by its labels and each of `values`: 1 for the chosen value, 0 for the others."""
    return {(*labels, value): float(value == chosen) for value in values}


@cache
def _config_info(registry: CollectorRegistry) -> Info:
    return Info("breakwater_config", "The effective config of this process.", registry=registry)


def show_config(version: str, registry: CollectorRegistry = REGISTRY, *, refused: bool = False) -> None:
    """Show the effective version of the config, and whether the config file is invalid."""
    _config_info(registry).info({"version": version})
    _plain_gauge(registry, "config_refused", "1 while the config file is invalid.").set(refused)


_MAX_THREADS = 100
"""The number of this process's threads up to which it accepts scrapers; each of their connections takes one."""
_REQUEST_S = 10.0


def serve(host: str, port: int, token: str | None = None) -> None:
    """Serve /metrics from a thread, until the process ends.

    If another program has the port, it is tried again until it is free; the service works meanwhile.

    Args:
        host: the address.
        port: the port.
        token: the token that scrapers must send; None for none.

    Raises:
        ConfigError: the address or the port is not available on this machine.
    """
    choose = "choose with BREAKWATER_METRICS_HOST and BREAKWATER_METRICS_PORT"
    try:
        _listen(host, port, token)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = error.strerror or os.strerror(error.errno or 0)
            raise ConfigError(f"metrics: can't listen on {host}:{port}: {reason}; {choose}") from error
        outage = Outage("metrics")
        outage.failed(f"another program already listens on {host}:{port}; {choose}, or stop that program")
        Thread(target=_serve_later, args=(host, port, token, outage), name="metrics", daemon=True).start()


class _Closed(CollectorRegistry):
    """The registry of a server that does not check its token yet: it ends connections that come so early."""

    def collect(self) -> Iterable[Metric]:
        raise ConnectionResetError


def _listen(host: str, port: int, token: str | None) -> None:
    server, _ = start_http_server(port, host, REGISTRY if token is None else _Closed())
    if token is not None:
        server.set_app(_for_bearers(cast("WSGIApplication", make_wsgi_app()), f"Bearer {token}"))
    options: Any = server  # whose type has no room for these
    options.RequestHandlerClass.timeout = _REQUEST_S
    options.verify_request = _has_room
    options.handle_error = _ignore  # connections that end or are too slow; wsgiref logs errors of scrapes


def _has_room(*_connection: object) -> bool:
    return active_count() < _MAX_THREADS


def _ignore(*_connection: object) -> None: ...


def _for_bearers(app: WSGIApplication, authorization: str) -> WSGIApplication:
    """Wrap an application so that requests must have this `Authorization`."""

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # WSGI passes the bytes of headers on as Latin-1.
        sent_authorization = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1")
        if hmac.compare_digest(sent_authorization, authorization.encode()):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"metrics are for those who send BREAKWATER_METRICS_TOKEN as a bearer token\n"]

    return respond


def _serve_later(host: str, port: int, token: str | None, outage: Outage) -> None:
    while outage.lasting:
        time.sleep(RETRY_S)
        try:
            _listen(host, port, token)
        except OSError as error:
            outage.failed(error)
        else:
            outage.worked()


def exposition(accept: str) -> tuple[bytes, str]:
    """Return all metrics of this process as text, and its content type, by the scraper's `Accept` header."""
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type
