"""The operations of the HTTP API. Routes and the document both come from the handlers that are listed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from starlette.routing import Route

from breakwater.alerts.api.alerts import ChannelRoutes, IncidentRoutes
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.breakers.api import AgentAvailability, AgentRoutes, BreakerRoutes
from breakwater.breakers.store import Breakers, shadows_in
from breakwater.config import Config, LiveConfig
from breakwater.config.store import Configs
from breakwater.dialects.api.chat import ChatRoutes
from breakwater.dialects.api.embeddings import EmbeddingsRoutes
from breakwater.dialects.api.messages import MessageRoutes
from breakwater.dialects.api.models import ModelRoutes
from breakwater.dialects.api.request_handler import ModelRequestHandler
from breakwater.dialects.api.response_store import ResponseStore
from breakwater.dialects.api.responses import ResponsesRoutes
from breakwater.dialects.api.stored_responses import StoredResponseRoutes
from breakwater.dialects.store.response_log import ResponseLog
from breakwater.dialects.store.response_room import ResponseRoom
from breakwater.health.store import Healths
from breakwater.identity.api.keys import KeyRoutes
from breakwater.identity.api.sign_in import OpenIdRoutes, SessionRoutes
from breakwater.identity.api_keys import KeyRing
from breakwater.identity.audit import AuditLog
from breakwater.identity.contract import OPENID_CALLBACK
from breakwater.identity.event_stream import OpenStreams
from breakwater.identity.operations import operations_of, routes_of, utc_now
from breakwater.identity.store import PersonSession, Sessions, SignIns
from breakwater.jobs.api.cancels import CancelRoutes, Cancels
from breakwater.jobs.api.current_jobs import CurrentJobRoutes
from breakwater.jobs.api.dead_letters import DeadLetterRoutes, Replays
from breakwater.jobs.api.intake import JobIntake
from breakwater.jobs.api.job_queue import JobQueue, QueueQuota
from breakwater.jobs.api.jobs import JobRoutes
from breakwater.jobs.api.plans import PlanRoutes
from breakwater.jobs.api.progress import ProgressRoutes
from breakwater.jobs.api.queues import QueueRoutes
from breakwater.jobs.api.results import JobLookup
from breakwater.jobs.api.waiting_callers import WaitingCallers
from breakwater.jobs.plan_changes import PlanLog
from breakwater.jobs.store.dismissals import Dismissals
from breakwater.jobs.store.in_flight_requests import InFlightRequests
from breakwater.jobs.store.plans import Plans
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import Cipher
from breakwater.kernel.types import time_from_ms
from breakwater.limits.api.budgets import BudgetRoutes
from breakwater.limits.api.guards import GuardRoutes
from breakwater.limits.api.limits import LimitRoutes
from breakwater.limits.contract import Reconciliation
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.budget import TOTAL, Period
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.scopes import Dimension, Dimensions, dimension_of
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.deployments import Deployments
from breakwater.limits.store.tasks import Tasks
from breakwater.records.api.costs import CostRoutes
from breakwater.records.api.events import EventLog, EventRoutes
from breakwater.records.api.executions import ExecutionRoutes
from breakwater.records.api.export import ExportRoutes
from breakwater.records.api.figures import FigureRoutes
from breakwater.records.api.query import Analyst, QueryRoutes
from breakwater.records.reconciliation import RecordedSpend, compare
from breakwater.records.spend import spend
from breakwater.redaction.rules.redact import Redactor
from breakwater.replay.api import ConfigPlanRoutes, Planner
from breakwater.replay.store import shadow_limits_in
from breakwater.replay.tried_limits import TriedLimitReader
from breakwater.services.request.observe import ServiceRoutes

if TYPE_CHECKING:
    from breakwater.identity.openid_provider import OpenIdProvider


@dataclass(frozen=True, kw_only=True)
class ApiDependencies:
    """The parts that the handlers are made of.

    A reload replaces the config and its redactor. The other fields outlive it; the properties are made anew.
    """

    config: Config
    redactor: Redactor
    connection: ClientGetter
    check_ready: Callable[[], None]
    publisher: Publisher
    redis: Redis
    analytics: Analytics
    analyst: Analyst
    planner: Planner
    cipher: Cipher
    lookup: JobLookup
    quota: QueueQuota
    waiting: WaitingCallers
    live: LiveConfig
    incidents: IncidentLog
    cancels: Cancels
    streams: OpenStreams
    followed_responses: OpenStreams
    event_log: EventLog
    keys: KeyRing
    limit_log: LimitLog
    body_budget: ByteBudget
    """Of the memory for large bodies."""

    @property
    def max_body_bytes(self) -> int:
        """The size limit of the body of a job or a plan."""
        return self.config.limits.max_body_bytes

    @property
    def bus(self) -> Lookup:
        """A reader of NATS' streams that decrypts nothing."""
        return Lookup(self.connection)

    @cached_property
    def dismissals(self) -> Dismissals:
        """The dead letters that were dismissed."""
        return Dismissals(self.bus)

    @cached_property
    def audit(self) -> AuditLog:
        """The log of what people do."""
        return AuditLog(self.publisher, self.redactor)

    @cached_property
    def breakers(self) -> Breakers:
        """The breakers of the fleet."""
        return Breakers(self.redis)

    @cached_property
    def healths(self) -> Healths:
        """The health of the agents."""
        return Healths(self.redis)

    @cached_property
    def sessions(self) -> Sessions:
        """The sessions of keys and persons."""
        return Sessions(self.redis)

    @cached_property
    def deployments(self) -> Deployments:
        """The deployments of the models."""
        return Deployments(self.redis, self.config.retry_budget)

    @cached_property
    def availability(self) -> AgentAvailability:
        """The check that an agent may call a model now."""
        return AgentAvailability(self.config, self.breakers)

    @cached_property
    def agents(self) -> AgentRoutes:
        """The handlers of agents, which the gauges read too."""
        return AgentRoutes(self.config, self.breakers, self.healths, self.deployments)

    @cached_property
    def queues(self) -> QueueRoutes:
        """The handlers of queues, which the gauges read too."""
        concurrency = {name: agent.concurrency for name, agent in self.config.agents.items()}
        return QueueRoutes(concurrency, tuple(self.config.alerts.channels), self.connection)

    @cached_property
    def queue(self) -> JobQueue:
        """The queue that jobs are published to."""
        return JobQueue(self.publisher, self.quota, self.lookup.accepted, self.waiting)

    @cached_property
    def plan_log(self) -> PlanLog:
        """The plans and their changes."""
        return PlanLog(Plans(self.redis), self.publisher)

    @cached_property
    def intake(self) -> JobIntake:
        """The steps by which jobs of all APIs are accepted."""
        return JobIntake(self.config, self.live.limits, self.queue, self.lookup, self.availability, self.plan_log)

    @cached_property
    def request_handler(self) -> ModelRequestHandler:
        """The common part of the providers' APIs."""
        return ModelRequestHandler(
            self.config, self.intake, InFlightRequests(self.redis), self.connection, self.cancels
        )

    @cached_property
    def stored_responses(self) -> StoredResponseRoutes:
        """The handlers of stored responses, which the handler of new ones needs too."""
        log = ResponseLog(self.publisher, self.bus, self.cipher)
        store = ResponseStore(self.config, log, self.lookup, self.connection, self.cipher, ResponseRoom(self.redis))
        return StoredResponseRoutes(store, self.cancels, self.followed_responses, self.audit)

    @cached_property
    def budget_counters(self) -> BudgetCounters:
        """The counters of what the budgets have spent."""
        return BudgetCounters(self.redis, self.config.budgets.zone)

    @cached_property
    def limit_editor(self) -> LimitEditor:
        """The editor of limits."""
        return LimitEditor(
            self.config.cost_tags,
            self.config.limited_names,
            self.limit_log,
            self.live.limits,
            self.budget_counters,
            self.publisher,
            self._recorded_spend,
        )

    async def _recorded_spend(self, period: Period, dimension: Dimension) -> Mapping[str, AttemptSums]:
        every_log = time_from_ms(TOTAL.end_ms)
        dimensions = Dimensions(frozenset((dimension,)))
        sums = await spend(self.analytics, [period], log_created=every_log, upto=0, dimensions=dimensions)
        return {key: figures for (_, key), figures in sums.items() if dimension_of(key, period.window) == dimension}

    @cached_property
    def openid_provider(self) -> OpenIdProvider | None:
        """The client of the OpenID provider; None without one. Raises ConfigError: its secret can't be read."""
        console = self.config.console
        if console.openid is None:
            return None
        # Imported only where there is a provider: its library costs 0.13 s of CPU and 3 MB.
        from breakwater.identity.openid_provider import OpenIdProvider

        return OpenIdProvider(console.openid, console.openid.secret(), f"{console.url}{OPENID_CALLBACK}")

    async def compare_budgets(self) -> Reconciliation:
        """Compares what the budgets have spent with the record."""
        recorded_spend = RecordedSpend(self.connection, self.analytics, self.config.budgets.zone)
        return (await compare(recorded_spend, self.budget_counters, datetime.now(UTC))).reconciliation()

    async def end_at_provider(self, session: PersonSession) -> str | None:
        """Returns the URL that ends a person's session at the OpenID provider; None if there is no such URL."""
        provider = self.openid_provider
        return provider and await provider.end_session_url(session.id_token, f"{self.config.console.url}/sign-in")


HANDLERS: Mapping[type, Callable[[ApiDependencies], object]] = MappingProxyType(
    {
        CurrentJobRoutes: lambda needs: CurrentJobRoutes(
            needs.config, needs.bus, needs.redis, needs.cipher, needs.redactor
        ),
        JobRoutes: lambda needs: JobRoutes(needs.intake, needs.lookup, needs.max_body_bytes),
        ProgressRoutes: lambda needs: ProgressRoutes(needs.streams, needs.lookup),
        CancelRoutes: lambda needs: CancelRoutes(needs.cancels, needs.redactor, needs.audit),
        PlanRoutes: lambda needs: PlanRoutes(
            needs.max_body_bytes, needs.intake, needs.availability, needs.plan_log, needs.analytics, needs.connection
        ),
        ModelRoutes: lambda needs: ModelRoutes(needs.config),
        ChatRoutes: lambda needs: ChatRoutes(needs.request_handler),
        StoredResponseRoutes: lambda needs: needs.stored_responses,
        EmbeddingsRoutes: lambda needs: EmbeddingsRoutes(needs.request_handler, needs.config),
        MessageRoutes: lambda needs: MessageRoutes(needs.request_handler),
        ResponsesRoutes: lambda needs: ResponsesRoutes(needs.request_handler, needs.stored_responses),
        ExecutionRoutes: lambda needs: ExecutionRoutes(needs.analytics, needs.cipher),
        FigureRoutes: lambda needs: FigureRoutes(needs.analytics, needs.budget_counters, needs.config.budgets.zone),
        QueryRoutes: lambda needs: QueryRoutes(needs.analyst),
        ConfigPlanRoutes: lambda needs: ConfigPlanRoutes(needs.config, Configs(needs.redis), needs.planner),
        ExportRoutes: lambda needs: ExportRoutes(needs.analyst),
        EventRoutes: lambda needs: EventRoutes(needs.streams, needs.event_log),
        AgentRoutes: lambda needs: needs.agents,
        BreakerRoutes: lambda needs: BreakerRoutes(
            needs.config,
            needs.breakers,
            shadows_in(needs.redis),
            needs.healths,
            needs.deployments,
            needs.publisher,
            needs.bus,
        ),
        GuardRoutes: lambda needs: GuardRoutes(Tasks(needs.redis), needs.publisher),
        BudgetRoutes: lambda needs: BudgetRoutes(
            needs.live.limits, needs.budget_counters, needs.limit_editor, needs.compare_budgets
        ),
        LimitRoutes: lambda needs: LimitRoutes(
            needs.limit_editor, TriedLimitReader(lambda: needs.live.now, shadow_limits_in(needs.redis), utc_now).listed
        ),
        CostRoutes: lambda needs: CostRoutes(
            needs.analytics, needs.live.limits, needs.config.budgets.zone, needs.config.cost_tags
        ),
        IncidentRoutes: lambda needs: IncidentRoutes(
            needs.incidents, needs.config.agents, needs.config.alerts.channels
        ),
        ChannelRoutes: lambda needs: ChannelRoutes(
            needs.config.alerts.channels, needs.connection, needs.bus, needs.publisher, needs.dismissals
        ),
        DeadLetterRoutes: lambda needs: DeadLetterRoutes(
            needs.config,
            needs.bus,
            Replays(
                needs.config,
                needs.live.limits,
                needs.bus,
                needs.queue,
                needs.publisher,
                needs.redactor,
                needs.body_budget,
                needs.cipher,
            ),
            needs.redactor,
            needs.incidents,
            needs.dismissals,
        ),
        QueueRoutes: lambda needs: needs.queues,
        KeyRoutes: lambda needs: KeyRoutes(needs.config, needs.keys, needs.limit_editor),
        SessionRoutes: lambda needs: SessionRoutes(needs.sessions, needs.audit, needs.end_at_provider),
        OpenIdRoutes: lambda needs: OpenIdRoutes(
            needs.config.console.openid, needs.openid_provider, needs.sessions, SignIns(needs.redis), needs.audit
        ),
        ServiceRoutes: lambda needs: ServiceRoutes(needs.check_ready),
    }
)
"""All classes of handlers, in the order of the document, and how each is made. They declare the operations."""

OPERATIONS = tuple(operation for handlers in HANDLERS for operation in operations_of(handlers))


def routes(needs: ApiDependencies) -> list[Route]:
    """Returns the routes of all operations. Raises ConfigError: the secret of the OpenID client can't be read."""
    return routes_of([make(needs) for make in HANDLERS.values()], needs.redactor, needs.audit)
