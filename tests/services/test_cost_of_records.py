"""What the records of a job that succeeds cost the services that read them, in instructions of our Python.

Counted from reading a batch of messages to acknowledging it, with one attempt for each job. They see a step more, not a
slower one: CPU time is measured by `python -m bench.consumers`. Budgets are those of `worker/test_cost_of_a_job.py`:
`pytest tests/services/test_cost_of_records.py -rP` prints the figures.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from bench.consumers import publish_jobs
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.store import Breakers, shadows_in
from breakwater.config import LiveConfig, parse_config
from breakwater.config.servers import bus_plan
from breakwater.health.store import Healths
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.pull import Pull
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets
from breakwater.records.metrics import SinkMetrics
from breakwater.redaction.rules.redact import Redactor
from breakwater.services.alerter.clock import SYSTEM_CLOCK
from breakwater.services.alerter.handlers import Grouping, of_executions
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from breakwater.services.breaker.handlers import BreakerHandler
from breakwater.services.budget.handlers import BudgetHandler
from breakwater.services.sink.handlers import Sink
from tests.helpers import nats_client
from tests.records.samples import new_database
from tests.servers import RunningServer
from tests.services.worker.test_cost_of_a_job import Instructions, check

JOBS = 100
LOG = "log"
CONFIG = """
providers: {sim: {base_url: "http://127.0.0.1:9/v1"}}
budgets: {global: {daily_usd: 1000}}
agents: {writer: {model: sim/m, budget: {daily_usd: 1000, monthly_usd: 10000}}}
"""

BUDGETS = {"breaker": 1_125, "budget": 1_085, "alerter-executions": 855, "sink-events": 2_430}
"""By consumer. The sink reads the attempt and the execution, the alerter the execution, the others the attempt."""


async def is_log(_: str | None) -> bool:
    return True


async def filled(_: bool) -> str:
    return LOG


async def test_records_cost_their_readers_what_they_did(
    own_nats_server: RunningServer, redis: Redis, clickhouse_server: RunningServer
) -> None:
    config = parse_config(CONFIG)
    await provision(own_nats_server.url, bus_plan(config))
    zone = config.budgets.zone
    counters = BudgetCounters(redis, zone)
    await counters.fill(None, LOG, 0, counters.periods(datetime.now(UTC)), {}, {})
    used: dict[str, float] = {}
    async with nats_client(own_nats_server.url) as client, new_database(clickhouse_server.url) as analytics:
        publisher, lookup = Publisher(lambda: client, "worker"), Lookup(lambda: client)
        breakers = BreakerHandler(
            config, Breakers(redis), shadows_in(redis), Healths(redis), publisher, BreakerMetrics()
        )
        budget = BudgetHandler(
            LiveConfig(config).limits, Budgets(redis, zone), counters, publisher, lookup, filled, BudgetMetrics()
        )
        sink = Sink(analytics, publisher, lambda: datetime.now(UTC), SinkMetrics())
        incidents = IncidentRecorder(
            IncidentLog(lambda: client, publisher, Redactor.compile(config.redaction)), IncidentRules.of(config.alerts)
        )
        pulls = {name: Pull(lambda: client, Stream.EVENTS, name) for name in BUDGETS}
        grouping = Grouping(incidents, pulls["alerter-executions"], lookup, SYSTEM_CLOCK)
        signals = of_executions(config.alerts, incidents.known.of)
        handle: dict[str, Callable[[list[Delivery[Any]]], Awaitable[None]]] = {
            "breaker": lambda batch: breakers.handle(batch, is_log),
            "budget": budget.handle,
            "alerter-executions": lambda batch: grouping._group(batch, signals),
            "sink-events": sink.store,
        }
        # No job pays for what the first batch makes known, nor for messages that arrive in several pieces.
        for number in range(4):
            await publish_jobs(publisher, JOBS, per_s=1_000_000)
            for name, pull in pulls.items():
                batch: list[Delivery[Any]] = []
                with Instructions() as instructions:
                    while missing := JOBS * (2 if name == "sink-events" else 1) - len(batch):
                        # No request for more than that stays open: its messages would come before they are counted.
                        batch += await pull.fetch(missing, 30, 0, batch=missing)
                    await handle[name](batch)
                if number:
                    used[name] = min(used.get(name, math.inf), instructions.count / JOBS)
        for pull in pulls.values():
            await pull.close()
    check(used, BUDGETS)
