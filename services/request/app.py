"""The request service: the HTTP API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from faststream.exceptions import IncorrectState
from faststream.nats import NatsMessage
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from breakwater.alerts.api.alert_links import LinkRoutes
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import Config, LiveConfig, cipher_of
from breakwater.dialects.api import UNSERVED_PATHS, nothing_at
from breakwater.dialects.api.errors import error_response
from breakwater.dialects.api.stored_responses import MAX_FOLLOWED
from breakwater.identity.api_keys import KeyRing
from breakwater.identity.auth import AcceptedTokens, KeyGuard
from breakwater.identity.event_stream import OpenStreams
from breakwater.identity.key_log import KeyLog
from breakwater.identity.operations import as_routed
from breakwater.jobs.api.callable_agents import CallableAgentTable
from breakwater.jobs.api.cancels import CancelRequests, Cancels
from breakwater.jobs.api.job_queue import QueueQuota
from breakwater.jobs.api.results import JobLookup, ResultReader, Waiters
from breakwater.jobs.api.waiting_callers import WaitingCallers
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.executions import Executions
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.http.server import HttpServer, PortTakenError, Shares, listen
from breakwater.kernel.nats.broker import Broker, make_broker, publisher_of, subscribed
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import AGENTS, AGENTS_BY_USER, CANCELS_BY_USER
from breakwater.kernel.process import background
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.telemetry.http_metrics import RequestCounter
from breakwater.kernel.telemetry.metrics import GaugeCollector, HttpMetrics, StreamMetrics
from breakwater.limits.limit_log import LimitLog
from breakwater.records import channels
from breakwater.records.api.events import EventLog
from breakwater.records.api.query import Analyst
from breakwater.records.api.streamed_rows import ANSWER_MARGIN_S
from breakwater.records.contract import LONGEST_S
from breakwater.redaction.rules.redact import Redactor
from breakwater.replay.api import Planner
from breakwater.services.request.exchange import ErrorResponses, Exchanges
from breakwater.services.request.observe import RequestGauges, StreamFill
from breakwater.services.request.openapi import documentation
from breakwater.services.request.operations import ApiDependencies, routes

KEEP_AGAIN_S = 1.0
SLOW_START_S = 3.0


def build(settings: Settings, config: Config) -> RequestService:
    """Wires the service. Connects to nothing yet.

    Raises:
        ConfigError: the secret of the links in alerts, or of the OpenID client, is missing or unusable.
    """
    return RequestService(settings, config)


class RequestService:
    """Serves the HTTP API."""

    def __init__(self, settings: Settings, config: Config) -> None:
        self._settings = settings
        self._broker = make_broker(settings.nats_url.get_secret_value(), "request")
        self._redis = Redis(settings.redis_url.get_secret_value())
        self._accepted = AcceptedJobs(self._redis)
        cipher = cipher_of(config, settings.plane_key)
        results = ResultReader(self._connection, self._reconnects, cipher)
        self._waiters = Waiters(self._any_connection, results)
        lookup = JobLookup(results, self._waiters, self._accepted)
        publisher = publisher_of(
            self._broker,
            *(channels.JOBS, channels.AGENTS, channels.REPLAYS, channels.DISMISSALS, channels.AUDIT, channels.ALERTS),
            *(channels.BREAKERS, channels.GUARDS, channels.BUDGETS, channels.PLANS, channels.KEYS),
            *(channels.LIMITS, channels.LIMIT_EVENTS),
            cipher=cipher,
            connection=self._connection,
        )
        self._declare_requests()
        redactor = Redactor.compile(config.redaction)
        cancels = Cancels(lookup, Executions(self._redis), publisher, self._connection)
        self._cancel_requests = CancelRequests(cancels, config, redactor)
        self._callable_agents = CallableAgentTable(config)
        self._key_log = KeyLog(self._connection, publisher)
        self._limit_log = LimitLog(self._connection, publisher)
        self._keys = KeyRing(settings.api_keys_file, self._key_log)
        self._fill = StreamFill(Lookup(self._connection), StreamMetrics())
        self._request_shares = Shares()
        self._tokens = AcceptedTokens()
        self._tokens.reload(config.identity.jwt)
        self._body_budget = ByteBudget(config.limits.bodies_in_memory_bytes)
        self._needs = ApiDependencies(
            config=config,
            redactor=redactor,
            connection=self._connection,
            check_ready=self._check_ready,
            publisher=publisher,
            redis=self._redis,
            analytics=connect(settings.clickhouse_url),
            analyst=Analyst(
                None
                if settings.clickhouse_analyst_url is None
                else connect(settings.clickhouse_analyst_url, answer_timeout_s=LONGEST_S + ANSWER_MARGIN_S)
            ),
            planner=Planner(settings.clickhouse_url),
            cipher=cipher,
            lookup=lookup,
            quota=QueueQuota(config.limits.jobs_max_bytes_per_agent, Lookup(self._connection)),
            waiting=WaitingCallers(publisher),
            live=LiveConfig(config),
            incidents=IncidentLog(self._connection, publisher, redactor),
            cancels=cancels,
            streams=OpenStreams(),
            # The same limit as for chat completions: following a stored response needs no more memory than one of them.
            followed_responses=OpenStreams(MAX_FOLLOWED),
            event_log=EventLog(self._connection),
            keys=self._keys,
            limit_log=self._limit_log,
            body_budget=self._body_budget,
        )
        self._limit_log.feed(self._needs.live.change_limits)
        app, self._gauges = self._build_app(self._needs)
        self._app = _LiveApp(app)
        self._collector = GaugeCollector("request", lambda: self._gauges.health(), lambda: self._gauges.backlog())
        self._server = HttpServer(
            self._app,
            drain_s=config.limits.drain_s,
            release=self._waiters.release,
            # Streams end immediately: their readers connect again, and a job of hours must not delay a restart.
            stopping=self._end_streams,
        )
        self._connecting: asyncio.Task[None] | None = None
        self._following: list[asyncio.Task[None]] = []
        self._subscribed = False

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains.

        Raises:
            SystemExit: with code 1, the port is taken; the reason is on stderr.
        """
        try:
            listening = listen(self._settings.http_host, self._settings.http_port)
        except PortTakenError as error:
            sys.stderr.write(f"request: {error}\n")
            raise SystemExit(1) from None
        with listening:
            await self._server.serve(listening)
        if self._connecting is not None and self._connecting.done() and not self._connecting.cancelled():
            self._connecting.result()

    @property
    def broker(self) -> Broker:
        """The broker, with everything that the service reads and publishes on the bus."""
        return self._broker

    async def is_alive(self) -> bool:
        """Returns True, which proves that the event loop runs. /readyz says whether the service is ready."""
        return True

    async def reload(self, config: Config) -> None:
        """Uses another config for new requests.

        Raises:
            ConfigError: a secret can't be read; the service keeps its current config.
        """
        needs = replace(self._needs, config=config, redactor=Redactor.compile(config.redaction))
        app, gauges = self._build_app(needs)
        needs.incidents.redactor = needs.redactor
        needs.quota.set_share(config.limits.jobs_max_bytes_per_agent)
        needs.live.reload(config)
        self._tokens.reload(config.identity.jwt)
        self._body_budget.resize(config.limits.bodies_in_memory_bytes)
        self._cancel_requests.reload(config, needs.redactor)
        self._callable_agents = CallableAgentTable(config)
        self._needs = needs
        self._app.current = app
        self._gauges = gauges

    def _end_streams(self) -> None:
        needs = self._needs
        for streams in (needs.streams, needs.followed_responses, needs.analyst.running, needs.planner.running):
            streams.release()

    def stop(self) -> None:
        """Ends serving, as SIGTERM does."""
        self._server.stop()

    def _build_app(self, needs: ApiDependencies) -> tuple[Exchanges, RequestGauges]:
        """Returns the app of a config, and the gauges that read the same agents and queues."""
        all_routes = [*routes(needs), *_link_routes(needs)]
        app = Exchanges(
            Starlette(
                routes=[*all_routes, *documentation()],
                exception_handlers=dict[Any, Any](_ERROR_RESPONSES),
                lifespan=self._lifespan,
            ),
            all_routes,
            counter=RequestCounter(HttpMetrics(), all_routes, path_of=as_routed),
            guard=KeyGuard(
                keys=self._keys,
                sessions=needs.sessions,
                openid=needs.config.console.openid,
                tokens=self._tokens,
                proxy_headers=needs.config.identity.headers,
                shares=self._request_shares,
            ),
            budget=self._body_budget,
            error_responses=_ERROR_RESPONSES,
        )
        return app, RequestGauges(needs.agents, needs.queues, needs.bus)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:  # noqa: ARG002  Starlette passes it
        # Starting does not wait for NATS: without it, the service responds with 503 and the reason.
        self._connecting = asyncio.create_task(self._connect())
        follow_callers = partial(self._needs.waiting.follow, self._any_connection)
        watches = (self._needs.quota.run, self._fill.run, follow_callers)
        watching = [asyncio.create_task(background.keep_doing(watch)) for watch in watches]

        def stop_if_failed(connecting: asyncio.Task[None]) -> None:
            if not connecting.cancelled() and connecting.exception() is not None:
                self.stop()

        self._connecting.add_done_callback(stop_if_failed)
        self._collector.start()
        structlog.get_logger().info(
            "listening", url=f"http://{self._settings.http_host}:{self._settings.http_port}", docs="/docs"
        )
        try:
            yield
        finally:
            self._collector.stop()
            await background.stop(*watching, self._connecting, *self._following)
            await self._broker.stop()
            await self._cancel_requests.stop()
            await self._accepted.close()
            await self._redis.close()
            await self._needs.analytics.close()
            if self._needs.analyst.analytics is not None:
                await self._needs.analyst.analytics.close()

    async def _connect(self) -> None:
        slow = asyncio.get_running_loop().call_later(
            SLOW_START_S, lambda: structlog.get_logger().warning("unavailable", what="nats", error="no connection yet")
        )
        try:
            await self._broker.start()
        finally:
            slow.cancel()
        await subscribed(self._broker)
        logs = (self._key_log, self._limit_log)
        self._following = [asyncio.create_task(background.keep_doing(log.run)) for log in logs]
        for log in logs:
            await log.filled.wait()
        tell = partial(self._needs.limit_editor.keep_told, Lookup(self._connection))
        self._following += [
            asyncio.create_task(background.keep_doing(work)) for work in (tell, self._keep_stored_raises)
        ]
        self._subscribed = True
        structlog.get_logger().info("service_ready")

    async def _keep_stored_raises(self) -> None:
        while True:
            with suppress(UnavailableError, BusError):
                return await self._needs.limit_editor.keep_stored_raises(datetime.now(UTC))
            await asyncio.sleep(KEEP_AGAIN_S)

    def _declare_requests(self) -> None:
        """Subscribes to the requests of programs. The handlers respond themselves, as some have no reply subject."""
        broker = self._broker
        member: dict[str, Any] = {"queue": "request", "no_reply": True, "decoder": _raw_body}

        @broker.subscriber(channels.CANCEL, **member)
        @broker.subscriber(CANCELS_BY_USER, include_in_schema=False, **member)
        async def cancel(message: NatsMessage) -> None:
            raw = message.raw_message
            await self._cancel_requests.receive(raw.subject, raw.data, partial(_respond, raw))

        @broker.subscriber(AGENTS, include_in_schema=False, **member)
        @broker.subscriber(AGENTS_BY_USER, include_in_schema=False, **member)
        async def list_agents(message: NatsMessage) -> None:
            await _respond(message.raw_message, self._callable_agents.response(message.raw_message.subject))

    def _any_connection(self) -> Client:
        """Returns the connection even while it is lost: NATS makes its subscriptions again when it is back."""
        try:
            return self._broker.connection
        except IncorrectState:
            raise BusUnavailableError("NATS is not connected yet") from None

    def _connection(self) -> Client:
        connection = self._any_connection()
        if not connection.is_connected:
            raise BusUnavailableError("NATS is not connected")
        return connection

    def _reconnects(self) -> int:
        try:
            return self._broker.connection.stats["reconnects"]
        except IncorrectState:
            return 0

    def _check_ready(self) -> None:
        try:
            self._connection()
        except BusUnavailableError as error:
            raise unavailable("not_ready", str(error)) from None
        if not self._subscribed:
            message = "requests of programs are not subscribed to, or API keys or limits are not read; the log says why"
            raise unavailable("not_ready", message)


class _LiveApp:
    """The app of the current config. A request that began before a reload ends with the app that it began with."""

    def __init__(self, app: Exchanges) -> None:
        self.current = app
        self._first = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._first if scope["type"] == "lifespan" else self.current
        await app(scope, receive, send)


def _link_routes(needs: ApiDependencies) -> list[Route]:
    """Returns the routes of the links in alerts; none if the config signs no links."""
    links_settings = needs.config.alerts.links
    if links_settings is None:
        return []
    links = LinkRoutes(links_settings.signing_secret(), needs.incidents, needs.redactor, needs.audit)
    return [
        Route("/alerts/{incident_id}", links.show, methods=["GET"]),
        Route("/alerts/{incident_id}", links.act, methods=["POST"]),
    ]


async def _raw_body(message: NatsMessage) -> bytes:
    # The handler decodes the body itself, so that the response can say what is wrong with it.
    return message.body


async def _respond(message: Msg, response: bytes) -> None:
    # If the program or the connection is gone, the response is of no use.
    if message.reply:
        with suppress(NatsError):
            await message.respond(response)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case status if status == 404 or request.url.path in UNSERVED_PATHS:
            problem = RequestError(404, "not_found", nothing_at(request.url.path))
        case 405:
            message = f"{request.method} is not possible here; see the Allow header"
            problem = RequestError(405, "method_not_allowed", message, headers=error.headers)
        case status:
            problem = RequestError(status, "http_error", str(error.detail), headers=error.headers)
    return error_response(problem, request.url.path)


async def _respond_disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _undecryptable(request: Request, error: Exception) -> Response:
    problem = unavailable("undecryptable", f"this can't be read now: {error}")
    return error_response(problem, request.url.path)


async def _bug(request: Request, _error: Exception) -> Response:
    # The server logs the error itself; its text must not leave the plane.
    problem = RequestError(500, "internal", "internal error; see the log of `request`")
    return error_response(problem, request.url.path)


_ERROR_RESPONSES: ErrorResponses = {
    RequestError: _problem,
    HTTPException: _http_error,
    ClientDisconnect: _respond_disconnected,
    DecryptionError: _undecryptable,
    Exception: _bug,
}
