"""Metrics for Prometheus. Labels are bounded: names of the config and the contract, never a job or a text.

A process always counts its own work; serving the metrics is a setting. Gauges of the whole plane are read on a scrape
and are equal from each replica of a service. Money is a float here, as Prometheus has no other number: use it for
graphs and alerts, and ClickHouse for accounting.
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

from breakwater.jobs.contract.events import BreakerState, BudgetEvent
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.errors import ConfigError, UnavailableError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.types import NANO_PER_USD

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

OTHER = "other"
"""Label of all models that jobs may ask for and the config does not name."""

NONE = "none"
"""The value of a label that does not apply, such as the kind of error of a success."""

LLM_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
TOKENS_PER_S_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)
HTTP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)


RETRY_S = 2.0
"""Retries of a port that another program has."""

KEPT_S = 5.0
"""Lifetime of a reading of the plane: any number of scrapers cost Redis and NATS one reading in this time."""

READ_TIMEOUT_S = 3.0
"""Less than Prometheus waits for an answer: what a process counts is shown also where a server is unavailable."""

# One more series for each counter, and nothing that a scraper of this format would use.
disable_created_metrics()

_Series = TypeVar("_Series", Counter, Gauge, Histogram)


class _Children(dict[tuple[str, ...], _Series], Generic[_Series]):
    """The series of one metric by their label values: looking one up in the library costs more than counting."""

    def __init__(self, family: _Series) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, labels: tuple[str, ...]) -> _Series:
        child = self[labels] = self._family.labels(*labels)
        return child


# Once for a registry: a process may have several that count the same.
@cache
def _counter(registry: CollectorRegistry, name: str, what: str, *labels: str) -> _Children[Counter]:
    return _Children(Counter(f"breakwater_{name}", what, labels, registry=registry))


@cache
def _gauge(registry: CollectorRegistry, name: str, what: str, *labels: str) -> _Children[Gauge]:
    return _Children(Gauge(f"breakwater_{name}", what, labels, registry=registry))


@cache
def _histogram(
    registry: CollectorRegistry, buckets: tuple[float, ...], name: str, what: str, *labels: str
) -> _Children[Histogram]:
    return _Children(Histogram(f"breakwater_{name}", what, labels, buckets=buckets, registry=registry))


@cache
def _plain_counter(registry: CollectorRegistry, name: str, what: str) -> Counter:
    return Counter(f"breakwater_{name}", what, registry=registry)


@cache
def _plain_gauge(registry: CollectorRegistry, name: str, what: str) -> Gauge:
    """Without labels, it says 0 from the moment it is made."""
    return Gauge(f"breakwater_{name}", what, registry=registry)


def dead_letters_refused(registry: CollectorRegistry = REGISTRY) -> _Children[Counter]:
    """Of messages of which DLQ took nothing, and which were ended all the same; by their stream."""
    what = "Messages dropped without a dead letter, because DLQ refused it."
    return _counter(registry, "dead_letters_refused_total", what, "stream")


class WorkerMetrics:
    """Counts what a worker does. Costs a few microseconds for each attempt."""

    def __init__(self, models: Collection[str], registry: CollectorRegistry = REGISTRY) -> None:
        """Counts into a registry; several of one process share its series.

        Args:
            models: the ids that the config names; any other is counted as `other`.
            registry: what is scraped.
        """
        self._models = frozenset(models)
        self._registry = registry
        dead_letters_refused(registry)
        counter = partial(_counter, registry)
        seconds = partial(_histogram, registry, LLM_BUCKETS_S)
        by_call = ("agent", "model", "kind")
        self._jobs = counter("jobs_total", "Jobs that have ended.", "agent", "status", "reason")
        self._job_seconds = seconds("job_duration_seconds", "Time from a job's acceptance to its end.", "agent")
        what = "Recorded attempts, including refused ones."
        self._attempts = counter("attempts_total", what, "agent", "model", "outcome", "kind")
        self._attempt_seconds = seconds("attempt_duration_seconds", "Duration of calls.", "agent", "model")
        what = "Time from the start of a call to the first content of its streamed answer."
        self._first_token_seconds = seconds("first_token_seconds", what, "agent", "model")
        rates = partial(_histogram, registry, TOKENS_PER_S_BUCKETS)
        what = "Speed of streamed answers: output tokens after the first one, per second."
        self._tokens_per_s = rates("output_tokens_per_second", what, "agent", "model")
        self._tokens = counter("tokens_total", "Tokens that providers reported.", "agent", "model", "direction")
        what = "Known costs of calls, including estimates."
        self._cost = counter("cost_usd_total", what, "agent", "model")
        what = "Calls whose reported usage is implausible, has no price, or belongs to another model."
        self._usage_problems = counter("usage_problems_total", what, "provider")
        what = "Cost of calls that did not produce the answer."
        self._wasted_cost = counter("wasted_cost_usd_total", what, "agent", "cause")
        self._retries = counter("retries_total", "Retries, by the error of the failed attempt.", *by_call)
        what = "Jobs in progress in this process."
        self._in_progress = _gauge(registry, "jobs_in_progress", what, "agent")
        self._parked = counter(
            "jobs_parked_total", "Number of times that jobs were parked until their next attempt.", "agent"
        )
        self._cache_hits = counter("cache_hits_total", "Jobs answered from the cache.", "agent")
        self._short_circuits = counter("short_circuits_total", "Refused calls, which were not made.", *by_call)

    def attempt(self, attempt: Attempt, trace_id: str | None = None) -> None:
        """Counts an attempt that has been recorded; a trace that is recorded becomes the exemplar of its buckets."""
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
        """Counts a job that has been decided, with its trace as `attempt` does. A dry run is none."""
        if result.dry_run:
            return
        agent = result.agent
        self._jobs[agent, result.status, result.reason or NONE].inc()
        self._job_seconds[(agent,)].observe(result.duration_ms / 1000, _exemplar(trace_id))
        if result.cache_hit:
            self._cache_hits[(agent,)].inc()
        for cause, nano in result.wasted_by_cause.items():
            self._wasted_cost[agent, cause].inc(nano / NANO_PER_USD)
        # Only here is it known what a retry was made for: the error of the attempt before it.
        for before, attempt in zip(result.attempts, result.attempts[1:], strict=False):
            if attempt.cause == "retry":
                model = attempt.model if attempt.model in self._models else OTHER
                kind = NONE if before.error is None else before.error.kind
                self._retries[agent, model, kind].inc()

    def breaker_service_alive(self, alive: bool) -> None:
        """Sets whether a breaker service is running; there is no series before the first call."""
        what = "1 while a breaker service is running. Without one, failures open no breaker."
        _plain_gauge(self._registry, "breaker_service_alive", what).set(alive)

    def began(self, agent: str) -> None:
        """A job is being worked on."""
        self._in_progress[(agent,)].inc()

    def ended(self, agent: str) -> None:
        """It no longer is: decided, put to sleep, or lost to another worker."""
        self._in_progress[(agent,)].dec()

    def parked(self, agent: str) -> None:
        """A job was put to sleep until its next attempt."""
        self._parked[(agent,)].inc()


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}


class HttpMetrics:
    """Counts the requests to a service that answers HTTP."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        what = "Answered requests."
        self._requests = _counter(registry, "http_requests_total", what, "route", "method", "status")
        what = "Duration of requests, including the wait for results."
        self._seconds = _histogram(registry, HTTP_BUCKETS_S, "http_request_duration_seconds", what, "route", "method")

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request that was answered.

        Args:
            route: the pattern of its path, never the path itself.
            method: one of HTTP's own.
            status: of the answer.
            seconds: until the answer was out.
        """
        self._requests[route, method, str(status)].inc()
        self._seconds[route, method].observe(seconds)


class StreamMetrics:
    """Fill levels of streams."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        what = "Used share of a stream's limit in bytes."
        self._used = _gauge(registry, "stream_used_ratio", what, "stream")

    def used(self, stream: str, ratio: float) -> None:
        """Sets a stream's part: 0 for one without a limit."""
        self._used[(stream,)].set(ratio)


class BreakerMetrics:
    """Counts what breakers do."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        what = "Transitions published by the breaker service."
        self._transitions = _counter(registry, "breaker_transitions_total", what, "agent", "model", "to")

    def transition(self, agent: str, model: str, to: BreakerState) -> None:
        """A breaker came into a state; its labels are those of `BREAKER_STATE`."""
        self._transitions[agent, model, to].inc()


class BudgetMetrics:
    """Counts what is settled, and shows the state of the budgets' counters."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        what = "Calls whose cost was counted, including redelivered ones."
        self._settled = _plain_counter(registry, "budget_calls_settled_total", what)
        what = "Thresholds of caps that were reached and published."
        self._thresholds = _counter(registry, "budget_thresholds_total", what, "scope", "window", "kind")
        self._filled = _plain_gauge(registry, "budgets_filled", "1 while the budgets' counters are complete.")
        what = "Counters that differed from the record and were repaired."
        self._repairs = _plain_counter(registry, "budget_repairs_total", what)
        what = "Time of the last comparison of the counters with the record."
        self._compared = _plain_gauge(registry, "budgets_compared_timestamp_seconds", what)

    def settled(self, calls: int) -> None:
        """The costs of so many calls are counted."""
        self._settled.inc(calls)

    def threshold(self, reached: BudgetEvent) -> None:
        """A threshold was announced."""
        self._thresholds[reached.scope, reached.window, reached.kind].inc()

    def filled(self, *, yes: bool) -> None:
        """Reports if the counters are filled."""
        self._filled.set(yes)

    def repaired(self) -> None:
        """A counter differed from the record."""
        self._repairs.inc()

    def compared(self, at: datetime) -> None:
        """All counters were compared with the record."""
        self._compared.set(at.timestamp())


class AlerterMetrics:
    """Delivery of alerts."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(_counter, registry)
        self._sent = counter("alert_messages_total", "Messages delivered to the channel.", "channel")
        self._failed = counter("alert_failures_total", "Failed tries to send a message.", "channel")
        self._given_up = counter("alert_dead_letters_total", "Messages that were given up.", "channel")
        self._held = _gauge(registry, "alerts_held", "Alerts that wait for a channel.", "channel")

    def of(self, channel: str) -> ChannelMetrics:
        """A channel's; `channel` is its name in the config."""
        labels = (channel,)
        return ChannelMetrics(self._sent[labels], self._failed[labels], self._given_up[labels], self._held[labels])


@dataclass(frozen=True, slots=True)
class ChannelMetrics:
    """Counts a channel's messages."""

    _sent: Counter
    _failed: Counter
    _given_up: Counter
    _held: Gauge

    def sent(self) -> None:
        """A message arrived."""
        self._sent.inc()

    def failed(self) -> None:
        """A try to send one failed."""
        self._failed.inc()

    def given_up(self) -> None:
        """A message became a dead letter."""
        self._given_up.inc()

    def held(self, alerts: int) -> None:
        """So many alerts wait."""
        self._held.set(alerts)


class SinkMetrics:
    """Rows stored, and the lag behind the log."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter = partial(_counter, registry)
        gauge = partial(_gauge, registry)
        dead_letters_refused(registry)
        self._rows = counter("sink_rows_total", "Stored rows, including redelivered ones.", "table")
        what = "Duration of successful inserts."
        self._insert_seconds = _histogram(registry, HTTP_BUCKETS_S, "sink_insert_duration_seconds", what, "table")
        self._batches = counter("sink_batches_total", "Batches stored and acknowledged.", "stream")
        what = "Messages that no table accepts and that became dead letters."
        self._dead_letters = counter("sink_dead_letters_total", what, "stream")
        for stream in (Stream.EVENTS, Stream.ALERTS, Stream.AUDIT):
            # From 0: a counter that begins with its first one shows no increase.
            self._dead_letters[(stream.value,)].inc(0)
        what = "Acknowledged events that were missing in ClickHouse and were stored again."
        self._lost = _plain_counter(registry, "sink_lost_events_total", what)
        what = "Age of the oldest event that is held, or its age when it was stored."
        self._lag = gauge("sink_lag_seconds", what, "stream")
        what = "Messages waiting behind the newest batch when it arrived."
        self._waiting = gauge("sink_waiting_messages", what, "stream")
        self._unavailable = gauge("sink_unavailable", "1 while a required server is unavailable.", "what")

    def began(self, stream: str, waiting: int) -> None:
        """A batch came; so many messages of its stream wait behind it."""
        self._waiting[(stream,)].set(waiting)

    def ended(self, stream: str) -> None:
        """A batch is stored and acknowledged."""
        self._batches[(stream,)].inc()

    def behind(self, stream: str, seconds: float) -> None:
        """Age of the oldest event of a batch, or its age when it was stored."""
        # The two clocks are two machines': nothing is stored before it happened.
        self._lag[(stream,)].set(max(seconds, 0.0))

    def stored(self, table: str, rows: int, seconds: float) -> None:
        """An insert is done, which took so long."""
        self._rows[(table,)].inc(rows)
        self._insert_seconds[(table,)].observe(seconds)

    def dead_lettered(self, stream: str) -> None:
        """A message became a dead letter, as no table takes it."""
        self._dead_letters[(stream,)].inc()

    def lost(self, events: int) -> None:
        """ClickHouse lacked so many events that were acknowledged."""
        self._lost.inc(events)

    def unavailable(self, what: str, *, yes: bool) -> None:
        """Reports if a server is unavailable, by its name in the log."""
        self._unavailable[(what,)].set(yes)


@dataclass(frozen=True, slots=True)
class PlaneGauge:
    """A gauge of the plane and not of a process: each replica of a service shows the same."""

    name: str
    what: str
    labels: tuple[str, ...] = ()


Readings = Mapping[PlaneGauge, Mapping[tuple[str, ...], float]]
"""Values by those of the labels. What is unknown is missing."""

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
"""Gauges by service: the one that knows the value, or reads it anyway."""


class GaugeCollector:
    """Gauges of the plane that a service serves: read on a scrape only."""

    def __init__(
        self, service: str, *reads: Callable[[], Awaitable[Readings]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Shows nothing before `start`.

        Args:
            service: which of `PLANE_GAUGES` are shown.
            reads: each reads a part of them. What one raises, mostly `UnavailableError`, drops its part until the
                next reading, and is logged when it begins.
            registry: what is scraped.
        """
        self._reads = [(read, Outage(f"what {service} shows of the plane in its metrics")) for read in reads]
        self._collector = _plane_collector(registry, PLANE_GAUGES[service])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_reads = Lock()
        self._readings: Readings = {}
        self._until = 0.0

    def start(self) -> None:
        """Reads in the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._collector.shown = self

    def stop(self) -> None:
        """Shows nothing from now on."""
        self._loop = None
        if self._collector.shown is self:
            self._collector.shown = None

    def readings(self) -> Readings:
        """The readings, at most `KEPT_S` old. Called by scrapers, in threads of theirs."""
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
        found: dict[PlaneGauge, Mapping[tuple[str, ...], float]] = {}

        async def look(read: Callable[[], Awaitable[Readings]]) -> None:
            async with asyncio.timeout(READ_TIMEOUT_S):
                found.update(await read())

        expected = (UnavailableError, TimeoutError)
        await asyncio.gather(
            *(outage.run_logged(partial(look, read), expected=expected) for read, outage in self._reads)
        )
        return found


class _PlaneCollector(Collector):
    """The gauges of one service in one registry. A process may have several such services, and shows the last one's."""

    def __init__(self, gauges: tuple[PlaneGauge, ...]) -> None:
        self._gauges = gauges
        self.shown: GaugeCollector | None = None

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Their names, without reading any: the registry asks when they are registered."""
        return self._families({})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """All that is known."""
        shown = self.shown
        return self._families({} if shown is None else shown.readings())

    def _families(self, readings: Readings) -> Iterable[GaugeMetricFamily]:
        for gauge in self._gauges:
            family = GaugeMetricFamily(f"breakwater_{gauge.name}", gauge.what, labels=gauge.labels)
            for labels, value in readings.get(gauge, {}).items():
                family.add_metric(labels, value)
            yield family


@cache
def _plane_collector(registry: CollectorRegistry, gauges: tuple[PlaneGauge, ...]) -> _PlaneCollector:
    collector = _PlaneCollector(gauges)
    registry.register(collector)
    return collector


def one_of(chosen: str, values: Iterable[str], *labels: str) -> dict[tuple[str, ...], float]:
    """A gauge that is 1 for one of some values and 0 for the others, the value being its last label."""
    return {(*labels, value): float(value == chosen) for value in values}


@cache
def _config_info(registry: CollectorRegistry) -> Info:
    return Info("breakwater_config", "The effective config of this process.", registry=registry)


def show_config(version: str, registry: CollectorRegistry = REGISTRY, *, refused: bool = False) -> None:
    """Shows which version of the config this process works under, and whether its file is refused for another."""
    _config_info(registry).info({"version": version})
    _plain_gauge(registry, "config_refused", "1 while the config file is invalid.").set(refused)


_MAX_THREADS = 100
"""Of this process, while it accepts scrapers. Each of their connections takes a thread."""
_REQUEST_S = 10.0


def serve(host: str, port: int, token: str | None = None) -> None:
    """Serves /metrics from a thread, until the process ends; where another program has the port, as soon as it can.

    The service does its work meanwhile: metrics are the least that it is there for.

    Args:
        host: the address.
        port: its port.
        token: what scrapers have to send; None for nothing.

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
    """The registry of a server that does not ask for its token yet: it ends the connections that come so early."""

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
    """An application for those who send this as `Authorization`."""

    def respond(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # Latin-1 is how WSGI passes on whatever bytes came.
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1")
        if hmac.compare_digest(given, authorization.encode()):
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
    """All metrics of this process as text, and its content type, by what the scraper accepts."""
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type
