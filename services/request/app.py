"""The request service: the HTTP API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from faststream.exceptions import IncorrectState
from faststream.nats import NatsMessage
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from breakwater.alerts.api.alert_links import LinkRoutes
from breakwater.alerts.api.alerts import ChannelRoutes, IncidentRoutes
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.breakers.api import AgentAvailability, AgentRoutes, BreakerRoutes
from breakwater.breakers.store import Breakers
from breakwater.config import Config, LiveConfig, cipher_of
from breakwater.dialects.api import UNSERVED_PATHS, nothing_at
from breakwater.dialects.api.calls import Calls, NameRequests
from breakwater.dialects.api.chat import ChatRoutes
from breakwater.dialects.api.embeddings import EmbeddingsRoutes
from breakwater.dialects.api.messages import MessageRoutes
from breakwater.dialects.api.models import ModelRoutes
from breakwater.dialects.api.response_store import ResponseStore
from breakwater.dialects.api.responses import ResponsesRoutes
from breakwater.dialects.api.stored_responses import MAX_FOLLOWED, StoredResponseRoutes
from breakwater.dialects.store.response_log import ResponseLog
from breakwater.dialects.store.response_room import ResponseRoom
from breakwater.health.store import Healths
from breakwater.identity.api import OpenIdRoutes, SessionRoutes
from breakwater.identity.api_keys import KeyRing
from breakwater.identity.audit import AuditLog
from breakwater.identity.auth import RequireApiKey
from breakwater.identity.contract import OPENID_CALLBACK
from breakwater.identity.event_stream import OpenStreams
from breakwater.identity.operations import as_routed, routes_of
from breakwater.identity.settings import ConsoleSettings, OpenId
from breakwater.identity.store import PersonSession, Sessions, SignIns
from breakwater.jobs.api.callable_agents import CallableAgentTable
from breakwater.jobs.api.cancels import CancelRequests, CancelRoutes, Cancels
from breakwater.jobs.api.dead_letters import DeadLetterRoutes, Replays
from breakwater.jobs.api.intake import JobIntake
from breakwater.jobs.api.job_queue import JobQueue, QueueQuota
from breakwater.jobs.api.jobs import JobRoutes
from breakwater.jobs.api.plans import PlanRoutes
from breakwater.jobs.api.progress import ProgressRoutes
from breakwater.jobs.api.queues import QueueRoutes
from breakwater.jobs.api.results import JobLookup, ResultReader, Waiters
from breakwater.jobs.plan_changes import PlanLog
from breakwater.jobs.store.accepted import Accepted
from breakwater.jobs.store.executions import Executions
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.jobs.store.plans import Plans
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.http.server import HttpServer, PortTakenError, Shares, listen
from breakwater.kernel.nats.broker import Broker, make_broker, publisher_of, subscribed
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import AGENTS, AGENTS_BY_USER, CANCELS_BY_USER
from breakwater.kernel.process import background
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.telemetry.http_metrics import CountRequests
from breakwater.kernel.telemetry.metrics import GaugeCollector, HttpMetrics, StreamMetrics
from breakwater.limits.api.budgets import BudgetRoutes
from breakwater.limits.api.guards import GuardRoutes
from breakwater.limits.contract import Reconciliation
from breakwater.limits.reconciliation import RecordedSpend, compare
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.deployments import Deployments
from breakwater.limits.store.tasks import Tasks
from breakwater.records import channels
from breakwater.records.api.costs import CostRoutes
from breakwater.records.api.events import EventLog, EventRoutes
from breakwater.records.api.executions import ExecutionRoutes
from breakwater.redaction.rules.redact import Redactor
from services.request.observe import RequestGauges, ServiceRoutes, StreamFill
from services.request.openapi import documentation

if TYPE_CHECKING:
    from breakwater.identity.openid_provider import OpenIdProvider

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
        self._accepted = Accepted(self._redis)
        self._breakers = Breakers(self._redis)
        self._healths = Healths(self._redis)
        self._sessions = Sessions(self._redis)
        self._cipher = cipher_of(config, settings.plane_key)
        self._waiters = Waiters(self._any_connection, self._cipher)
        results = ResultReader(self._connection, self._reconnects, self._cipher)
        self._lookup = JobLookup(results, self._waiters, self._accepted)
        self._publisher = publisher_of(
            self._broker,
            *(channels.JOBS, channels.AGENTS, channels.REPLAYS, channels.AUDIT, channels.ALERTS),
            *(channels.BREAKERS, channels.GUARDS, channels.BUDGETS, channels.PLANS),
            cipher=self._cipher,
            connection=self._connection,
        )
        self._declare_requests()
        self._response_log = ResponseLog(self._publisher, Lookup(self._connection), self._cipher)
        redactor = Redactor.compile(config.redaction)
        self._incidents = IncidentLog(self._connection, self._publisher, redactor)
        self._cancels = Cancels(self._lookup, Executions(self._redis), self._publisher, self._connection)
        self._cancel_requests = CancelRequests(self._cancels, config, redactor)
        self._callable_agents = CallableAgentTable(config)
        self._analytics = connect(settings.clickhouse_url)
        self._live = LiveConfig(config)
        self._quota = QueueQuota(config.limits.jobs_max_bytes_per_agent, Lookup(self._connection))
        self._fill = StreamFill(Lookup(self._connection), StreamMetrics())
        self._streams = OpenStreams()
        # The same limit as for chat completions: following a stored response needs no more memory than one of them.
        self._followed_responses = OpenStreams(MAX_FOLLOWED)
        self._request_shares = Shares()
        self._event_log = EventLog(self._connection)
        app, self._gauges = self._build_app(config, redactor)
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
        redactor = Redactor.compile(config.redaction)
        app, gauges = self._build_app(config, redactor)
        self._incidents.redactor = redactor
        self._quota.set_share(config.limits.jobs_max_bytes_per_agent)
        self._live.reload(config)
        self._cancel_requests.reload(config, redactor)
        self._callable_agents = CallableAgentTable(config)
        self._app.current = app
        self._gauges = gauges

    def _end_streams(self) -> None:
        for streams in (self._streams, self._followed_responses):
            streams.release()

    def stop(self) -> None:
        """Ends serving, as SIGTERM does."""
        self._server.stop()

    def _build_app(self, config: Config, redactor: Redactor) -> tuple[Starlette, RequestGauges]:
        """Returns the app of a config, and the gauges that read the same agents and queues."""
        audit = AuditLog(self._publisher, redactor)
        agents = AgentRoutes(config, self._breakers, self._healths, self._deployments_of(config))
        concurrency = {name: agent.concurrency for name, agent in config.agents.items()}
        queues = QueueRoutes(concurrency, tuple(config.alerts.channels), self._connection)
        queue = JobQueue(self._publisher, self._quota, self._accepted)
        handlers = (
            *self._job_handlers(config, redactor, audit, queue),
            agents,
            queues,
            *self._state_handlers(config, redactor, queue),
            *self._sign_in_handlers(config, audit),
            ServiceRoutes(self._check_ready),
        )
        routes = [*routes_of(handlers, redactor, audit), *self._link_routes(config, redactor, audit)]
        app = Starlette(
            routes=[*routes, *documentation()],
            middleware=[
                Middleware(CountRequests, counted=HttpMetrics(), routes=routes, path_of=as_routed),
                Middleware(NameRequests),
                Middleware(
                    RequireApiKey,
                    keys=KeyRing(self._settings.api_keys_file),
                    sessions=self._sessions,
                    openid=config.console.openid,
                    shares=self._request_shares,
                ),
            ],
            exception_handlers=_ERROR_RESPONSES,
            lifespan=self._lifespan,
        )
        return app, RequestGauges(agents, queues, Lookup(self._connection))

    def _deployments_of(self, config: Config) -> Deployments:
        return Deployments(self._redis, config.retry_budget)

    def _job_handlers(self, config: Config, redactor: Redactor, audit: AuditLog, queue: JobQueue) -> tuple[object, ...]:
        """Returns the handlers that take jobs and plans, in Breakwater's own API and in those of providers."""
        max_body_bytes = config.limits.max_body_bytes
        availability = AgentAvailability(config, self._breakers)
        plan_log = PlanLog(Plans(self._redis), self._publisher)
        intake = JobIntake(config, queue, self._lookup, availability, plan_log)
        calls = Calls(config, intake, InFlightRequests(self._redis), self._connection, self._cancels)
        response_room = ResponseRoom(self._redis)
        response_store = ResponseStore(
            config, self._response_log, self._lookup, self._connection, self._cipher, response_room
        )
        stored_responses = StoredResponseRoutes(response_store, self._cancels, self._followed_responses, audit)
        return (
            JobRoutes(intake, self._lookup, max_body_bytes),
            ProgressRoutes(self._streams, self._lookup),
            CancelRoutes(self._cancels, redactor, audit),
            PlanRoutes(max_body_bytes, intake, availability, plan_log, self._analytics, self._connection),
            ModelRoutes(config),
            ChatRoutes(calls),
            stored_responses,
            EmbeddingsRoutes(calls, config),
            MessageRoutes(calls),
            ResponsesRoutes(calls, stored_responses),
        )

    def _state_handlers(self, config: Config, redactor: Redactor, queue: JobQueue) -> tuple[object, ...]:
        """Returns the handlers that show and change the state of the fleet, except for agents and queues."""
        bus = Lookup(self._connection)
        zone = config.budgets.zone
        counters = BudgetCounters(self._redis, zone)
        recorded_spend = RecordedSpend(self._connection, self._analytics, zone)
        replays = Replays(config, bus, queue, self._publisher, redactor, self._cipher)
        deployments = self._deployments_of(config)

        async def compare_budgets() -> Reconciliation:
            return (await compare(recorded_spend, counters, datetime.now(UTC))).reconciliation()

        return (
            ExecutionRoutes(self._analytics, self._cipher),
            EventRoutes(self._streams, self._event_log),
            BreakerRoutes(config, self._breakers, self._healths, deployments, self._publisher, self._connection),
            GuardRoutes(Tasks(self._redis), self._publisher),
            BudgetRoutes(self._live.caps, counters, self._publisher, compare_budgets),
            CostRoutes(self._analytics, self._live.caps, zone, config.cost_tags),
            IncidentRoutes(self._incidents, config.agents, config.alerts.channels),
            ChannelRoutes(config.alerts.channels, self._connection, bus, self._publisher),
            DeadLetterRoutes(config, bus, replays, redactor),
        )

    def _sign_in_handlers(self, config: Config, audit: AuditLog) -> tuple[object, ...]:
        """Returns the handlers of sessions and of OpenID Connect. Raises ConfigError: the secret can't be read."""
        openid = config.console.openid
        provider = None if openid is None else _provider_of(config.console, openid)

        async def end_at_provider(session: PersonSession) -> str | None:
            return provider and await provider.end_session_url(session.id_token, f"{config.console.url}/sign-in")

        return (
            SessionRoutes(self._sessions, audit, end_at_provider),
            OpenIdRoutes(openid, provider, self._sessions, SignIns(self._redis), audit),
        )

    def _link_routes(self, config: Config, redactor: Redactor, audit: AuditLog) -> list[Route]:
        """Returns the routes of the links in alerts; none if the config signs no links."""
        if config.alerts.links is None:
            return []
        links = LinkRoutes(config.alerts.links.signing_secret(), self._incidents, redactor, audit)
        return [
            Route("/alerts/{incident_id}", links.show, methods=["GET"]),
            Route("/alerts/{incident_id}", links.act, methods=["POST"]),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:  # noqa: ARG002  Starlette passes it
        # Starting does not wait for NATS: without it, the service responds with 503 and the reason.
        self._connecting = asyncio.create_task(self._connect())
        watching = [asyncio.create_task(background.keep_doing(watch.run)) for watch in (self._quota, self._fill)]

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
            await background.stop(*watching, self._connecting)
            await self._broker.stop()
            await self._cancel_requests.stop()
            await self._accepted.close()
            await self._redis.close()
            await self._analytics.close()

    async def _connect(self) -> None:
        slow = asyncio.get_running_loop().call_later(
            SLOW_START_S, lambda: structlog.get_logger().warning("unavailable", what="nats", error="no connection yet")
        )
        try:
            await self._broker.start()
        finally:
            slow.cancel()
        await subscribed(self._broker)
        self._subscribed = True
        structlog.get_logger().info("service_ready")

    def _declare_requests(self) -> None:
        """Subscribes to the requests of programs. The handlers respond themselves, as some have no reply subject."""
        broker = self._broker
        member: dict[str, Any] = {"queue": "request", "no_reply": True, "decoder": _undecoded}

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
            raise unavailable("not_ready", "requests of programs are not subscribed to yet")


class _LiveApp:
    """The app of the current config. A request that began before a reload ends with the app that it began with."""

    def __init__(self, app: Starlette) -> None:
        self.current = app
        self._first = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._first if scope["type"] == "lifespan" else self.current
        await app(scope, receive, send)


def _provider_of(console: ConsoleSettings, openid: OpenId) -> OpenIdProvider:
    """Returns the client of the OpenID provider. Raises ConfigError if its secret can't be read."""
    # Imported only where there is a provider: its library costs 0.13 s of CPU and 3 MB.
    from breakwater.identity.openid_provider import OpenIdProvider

    return OpenIdProvider(openid, openid.secret(), f"{console.url}{OPENID_CALLBACK}")


async def _undecoded(message: NatsMessage) -> bytes:
    # The handler decodes the body itself, so that the response can say what is wrong with it.
    return message.body


async def _respond(message: Msg, response: bytes) -> None:
    # If the program or the connection is gone, the response is of no use.
    if message.reply:
        with suppress(NatsError):
            await message.respond(response)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response(request.url.path)


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
    return problem.response(request.url.path)


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _undecryptable(request: Request, error: Exception) -> Response:
    return unavailable("undecryptable", f"this can't be read now: {error}").response(request.url.path)


async def _bug(request: Request, _error: Exception) -> Response:
    # The server logs the error itself; its text must not leave the plane.
    problem = RequestError(500, "internal", "internal error; see the log of `request`")
    return problem.response(request.url.path)


_ERROR_RESPONSES: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestError: _problem,
    HTTPException: _http_error,
    ClientDisconnect: _disconnected,
    DecryptionError: _undecryptable,
    Exception: _bug,
}
