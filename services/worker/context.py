"""The context of a worker process: the compiled config and its connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any

from breakwater.breakers.store import Breakers
from breakwater.calls.providers.base import Provider
from breakwater.calls.rules.output import OutputGuard
from breakwater.calls.settings import RetryPolicy
from breakwater.calls.store.cache import AnswerCache
from breakwater.config import Agent, Config
from breakwater.config.targets import Targets
from breakwater.dialects.rules.provider_state import StateRepair
from breakwater.dialects.rules.provider_words import known_or_hash
from breakwater.dialects.store.response_room import ResponseRoom
from breakwater.jobs.contract.job import CallApi
from breakwater.jobs.metrics import WorkerMetrics
from breakwater.jobs.plan_changes import PlanLog
from breakwater.jobs.rules.workers import LIVENESS, Liveness
from breakwater.jobs.store.executions import Executions
from breakwater.jobs.store.plans import Plans
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.outage import Outages
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import OFF, Cipher
from breakwater.kernel.types import is_identifier
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.budget import LimitTable
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, LiveReservation
from breakwater.limits.store.deployments import Deployments
from breakwater.limits.task_guards import TaskGuards
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.rules.scanner import holds_key
from breakwater.services.worker import process
from breakwater.services.worker.balancer import Balancer
from breakwater.services.worker.bodies import Bodies
from breakwater.services.worker.leases import Leases
from breakwater.services.worker.outcomes import Outcomes
from breakwater.services.worker.slots import Slots
from breakwater.services.worker.turns import Turns

utc_now = partial(datetime.now, UTC)
"""The clock of a worker."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Everything that running a job needs. Clock and randomness are here, so that the decisions stay pure."""

    id: str
    """The id of the worker, as its claims have it."""
    config: Config
    config_version: str
    providers: Mapping[str, Provider]
    publisher: Publisher
    lookup: Lookup
    redis: Redis
    executions: Executions
    breakers: Breakers
    budgets: Budgets
    deployments: Deployments
    cache: AnswerCache
    targets: Targets
    leases: Leases
    slots: Slots
    turns: Turns
    outcomes: Outcomes
    balancer: Balancer
    redactor: Redactor
    outages: Outages
    metrics: WorkerMetrics
    guards: TaskGuards
    plans: PlanLog
    room: ResponseRoom
    bodies: Bodies
    cipher: Cipher
    """The cipher of stored texts."""
    output_guards: Mapping[str, OutputGuard]
    """The output guards of the agents that have an output schema."""
    retry_policies: Mapping[str, RetryPolicy]
    """The retry policy of each agent, without rules that a job brings."""
    limits: Callable[[], LimitTable]
    """Returns the limits that apply now."""
    read_limits: Callable[[str, str], Awaitable[None]]
    """Reads the limits that the plane keeps on from a version, as another one is in force; waits while that fails."""
    live_reservations: dict[str, LiveReservation] = field(default_factory=dict[str, LiveReservation])
    """The reservations of the calls in progress, by attempt."""
    left_out: dict[tuple[str, str, CallApi], set[str]] = field(default_factory=dict[tuple[str, str, CallApi], set[str]])
    """Parameters that a model has refused, by the agent that adds them, its deployment, and the API of the call."""
    state_repairs: dict[str, set[StateRepair]] = field(default_factory=dict[str, set[StateRepair]])
    """Repairs without which a model has refused conversations, by its deployment."""
    now: Callable[[], datetime] = utc_now
    clock: Callable[[], float] = monotonic
    """Returns seconds that do not depend on changes to the time of day."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random

    def keeps_error_texts(self, agent: Agent) -> bool:
        """Returns True if a provider's error texts may be stored. Plain texts must not quote encrypted ones."""
        return agent.keeps_error_texts and not self.cipher.on

    def storable_word(self, agent: Agent, word: str) -> str:
        """Returns a provider's word, such as a reason or the name of a model, in a form that may be stored."""
        word_or_hash = known_or_hash(word)
        if word_or_hash == word or not self.keeps_error_texts(agent) or holds_key(word) or not is_identifier(word):
            return word_or_hash
        return word

    def steady_time(self) -> Callable[[], datetime]:
        """Returns a clock that starts at the time of day and then follows the monotonic clock, so it never jumps."""
        started_at = self.now()
        clock_at_start = self.clock()
        return lambda: started_at + timedelta(seconds=self.clock() - clock_at_start)

    def under(self, config: Config, providers: Mapping[str, Provider]) -> WorkerContext:
        """Returns this context under another config, with the same connections, leases and reservations."""
        return replace(self, providers=providers, **_compiled(config, self.redis))


def context_for(
    config: Config,
    limits: Callable[[], LimitTable],
    *,
    redis: Redis,
    publisher: Publisher,
    lookup: Lookup,
    providers: Mapping[str, Provider],
    cipher: Cipher = OFF,
    liveness: Liveness = LIVENESS,
    limit_log: LimitLog | None = None,
) -> WorkerContext:
    """Creates the context of a worker from its connections and its config."""
    executions = Executions(redis, cipher, liveness)
    breakers = Breakers(redis)
    outages = Outages()
    slots = Slots(monotonic)
    counters = BudgetCounters(redis, config.budgets.zone)

    async def read_limits(known_version: str, in_force: str) -> None:
        if limit_log is not None:
            await outages.retry_while_unavailable(partial(limit_log.read_on, known_version, in_force, counters))

    return WorkerContext(
        id=process.own_id(),
        **_compiled(config, redis),
        providers=providers,
        publisher=publisher,
        lookup=lookup,
        redis=redis,
        executions=executions,
        breakers=breakers,
        cache=AnswerCache(redis, cipher),
        cipher=cipher,
        leases=Leases(executions, outages),
        slots=slots,
        turns=Turns(slots, lambda agent: config.agents[agent].concurrency, lookup, publisher),
        outages=outages,
        balancer=Balancer(monotonic, utc_now),
        outcomes=Outcomes(redis, breakers, outages, random.random),
        guards=TaskGuards(redis, executions, publisher, lookup, outages),
        plans=PlanLog(Plans(redis), publisher),
        room=ResponseRoom(redis),
        bodies=Bodies(publisher, lookup, config.limits.bodies_in_memory_bytes),
        limits=limits,
        read_limits=read_limits,
    )


def _compiled(config: Config, redis: Redis) -> dict[str, Any]:
    """Compiles the fields of a context that depend on the config."""
    return {
        "config": config,
        "config_version": config.version,
        "budgets": Budgets(redis, config.budgets.zone),
        "deployments": Deployments(redis, config.retry_budget),
        "targets": Targets(config),
        "redactor": Redactor.compile(config.redaction),
        "metrics": WorkerMetrics(config.known_models),
        "output_guards": {
            name: OutputGuard.compile(agent.output) for name, agent in config.agents.items() if agent.output is not None
        },
        "retry_policies": {name: agent.retry for name, agent in config.agents.items()},
    }
