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
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from socketserver import ThreadingMixIn
from threading import Lock, Thread, active_count
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from breakwater.kernel.errors import ConfigError, UnavailableError
from breakwater.kernel.process.outage import Outage

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

OTHER = "other"
"""The label of all models that the config does not name."""

NONE = "none"
"""The value of a label that does not apply, such as the kind of error of a success."""

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


class SeriesByLabels(dict[tuple[str, ...], _Series], Generic[_Series]):
    """The series of one metric, by their label values: a look-up in the library costs more than counting."""

    def __init__(self, family: _Series) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, labels: tuple[str, ...]) -> _Series:
        child = self[labels] = self._family.labels(*labels)
        return child


# Once for a registry: a process may have several that count the same.
@cache
def counter(registry: CollectorRegistry, name: str, help_text: str, *labels: str) -> SeriesByLabels[Counter]:
    """Returns the series of a counter with labels."""
    return SeriesByLabels(Counter(f"breakwater_{name}", help_text, labels, registry=registry))


@cache
def gauge(registry: CollectorRegistry, name: str, help_text: str, *labels: str) -> SeriesByLabels[Gauge]:
    """Returns the series of a gauge with labels."""
    return SeriesByLabels(Gauge(f"breakwater_{name}", help_text, labels, registry=registry))


@cache
def histogram(
    registry: CollectorRegistry, buckets: tuple[float, ...], name: str, help_text: str, *labels: str
) -> SeriesByLabels[Histogram]:
    """Returns the series of a histogram with labels."""
    return SeriesByLabels(Histogram(f"breakwater_{name}", help_text, labels, buckets=buckets, registry=registry))


@cache
def plain_counter(registry: CollectorRegistry, name: str, help_text: str) -> Counter:
    """Returns a counter without labels."""
    return Counter(f"breakwater_{name}", help_text, registry=registry)


@cache
def plain_gauge(registry: CollectorRegistry, name: str, help_text: str) -> Gauge:
    """Returns a gauge without labels, which is 0 from the beginning."""
    return Gauge(f"breakwater_{name}", help_text, registry=registry)


def dead_letters_refused(registry: CollectorRegistry = REGISTRY) -> SeriesByLabels[Counter]:
    """Returns the counter of messages that were dropped because DLQ refused them, by their stream."""
    help_text = "Messages dropped without a dead letter, because the stream DLQ refused it."
    return counter(registry, "dead_letters_refused_total", help_text, "stream")


class HttpMetrics:
    """Metrics of a service that answers HTTP."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Answered requests."
        self._requests = counter(registry, "http_requests_total", help_text, "route", "method", "status")
        help_text = "Duration of requests, including the wait for results."
        self._seconds = histogram(
            registry, HTTP_BUCKETS_S, "http_request_duration_seconds", help_text, "route", "method"
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an answered request.

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
        self._used = gauge(registry, "stream_used_ratio", help_text, "stream")

    def set_used_share(self, stream: str, ratio: float) -> None:
        """Sets the used share of a stream's limit; 0 for a stream without one."""
        self._used[(stream,)].set(ratio)


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
BUDGET_LIMIT = PlaneGauge("budget_limit_usd", "The effective limit.", _BUDGET)
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
        """Creates a collector, which shows nothing before `start`.

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
        """Shows the gauges, and reads them in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._collector.shown = self

    def stop(self) -> None:
        """Shows nothing from now on."""
        self._loop = None
        if self._collector.shown is self:
            self._collector.shown = None

    def readings(self) -> Readings:
        """Returns the readings, at most `KEPT_S` old. Scrapers call this from their own threads."""
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
        """Returns the gauges without values: the registry asks for their names when they are registered."""
        return self._families({})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns the gauges with all known values."""
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
    """Returns a gauge's readings, by its labels and each of `values`: 1 for the chosen value, 0 for the others."""
    return {(*labels, value): float(value == chosen) for value in values}


@cache
def _config_info(registry: CollectorRegistry) -> Info:
    return Info("breakwater_config", "The effective config of this process.", registry=registry)


def show_config(version: str, registry: CollectorRegistry = REGISTRY, *, refused: bool = False) -> None:
    """Shows the effective version of the config, and whether the config file is invalid."""
    _config_info(registry).info({"version": version})
    plain_gauge(registry, "config_refused", "1 while the config file is invalid.").set(refused)


_MAX_THREADS = 100
"""The number of this process's threads up to which it accepts scrapers; each of their connections takes one."""
_REQUEST_S = 10.0
_SHUT_DOWN_LOOK_S = 3600.0


def serve(host: str, port: int, token: str | None = None) -> None:
    """Serves /metrics from a thread, until the process ends.

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
        outage.note_failure(f"another program already listens on {host}:{port}; {choose}, or stop that program")
        Thread(target=_serve_later, args=(host, port, token, outage), name="metrics", daemon=True).start()


class _Handler(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *_arguments: Any) -> None:  # noqa: A002  its name
        """Overridden: it would log each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, of which there is a limited number."""

    daemon_threads = True

    def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002  as it is called
        """Returns True if there is room for a connection."""
        return active_count() < _MAX_THREADS

    def handle_error(self, request: object, client_address: object) -> None:
        """Overridden: connections that end or are too slow are no errors, and wsgiref logs those of scrapes."""


def _listen(host: str, port: int, token: str | None) -> None:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_class = type("_Server", (_Server,), {"address_family": family})
    handler_class = type("_Handler", (_Handler,), {"timeout": _REQUEST_S})
    server = server_class(cast("tuple[str, int]", address[:2]), handler_class)
    app = cast("WSGIApplication", make_wsgi_app())
    server.set_app(app if token is None else _for_bearers(app, f"Bearer {token}"))
    # It looks so often whether it was shut down, which it never is: twice a second would wake an idle process.
    Thread(target=server.serve_forever, args=(_SHUT_DOWN_LOOK_S,), name="metrics", daemon=True).start()


def _for_bearers(app: WSGIApplication, authorization: str) -> WSGIApplication:
    """Wraps an application so that requests must have this `Authorization`."""

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
            outage.note_failure(error)
        else:
            outage.note_success()


def exposition(accept: str) -> tuple[bytes, str]:
    """Returns all metrics of this process as text, and its content type, by the scraper's `Accept` header."""
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type
