"""The end of the demo: wait until all is calm, read the books, and compare."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from nats.aio.client import Client

from breakwater.analytics.client import Analytics
from breakwater.cli import connect
from breakwater.cli.demo.books import Comparison, Counters, RecordedCall, compare
from breakwater.cli.demo.load import Plan
from breakwater.cli.demo.receiver import Receiver
from breakwater.cli.demo.records import Rows, count_executions, read_counters, read_ledger, read_rows
from breakwater.cli.demo.report import Check, Handover, Report, Told, breaker_lines, checks
from breakwater.cli.demo.settle import on_the_bus, until_settled
from breakwater.cli.setup import bus_plan
from breakwater.config import Config, load_config
from breakwater.embedded.stack import Stack
from breakwater.state.budget_counters import BudgetCounters

SETTLE_S = 20.0


async def close_books(
    stack: Stack, control_url: str, receiver: Receiver, plan: Plan, handover: Handover, began_at: datetime
) -> Report:
    """Settles, reads and compares.

    Args:
        stack: the running stack.
        control_url: where the provider's ledger is.
        receiver: what got the alerts.
        plan: the load.
        handover: how it was handed in.
        began_at: when the run began.

    Raises:
        CliError: a part of the stack does not answer.
        AnalyticsError, StateUnavailable: as far as ClickHouse and Redis are concerned.
    """
    config = load_config(stack.endpoints.config_file)
    async with (
        connect.analytics(stack.endpoints.clickhouse_url) as analytics,
        connect.state(stack.endpoints.redis_url) as redis,
        connect.bus(stack.setup_env["BREAKWATER_NATS_URL"]) as bus,
    ):
        ledgers = _Ledgers(config, analytics, BudgetCounters(redis, config.budgets.zone), bus, control_url, began_at)
        accepted = handover.http + handover.nats

        async def look() -> list[str]:
            return await ledgers.left(accepted)

        left = await until_settled(look, deadline_s=SETTLE_S)
        rows = await read_rows(analytics)
        books = await ledgers.compare(rows)
        told = Told(receiver.alerts, receiver.repeated, receiver.refused)
    cap = config.agents["small-budget"].budget.daily_usd or 0
    found = checks(rows, plan.job_ids, handover, told, cap)
    if left:
        found = (Check("all settled", False, "; ".join(left)), *found)
    return Report(
        jobs=len(plan.job_ids),
        seconds=(datetime.now(UTC) - began_at).total_seconds(),
        agents=rows.agents,
        breakers=breaker_lines(rows),
        alerts=told.alerts,
        books=books,
        checks=found,
    )


class _Ledgers:
    """The three books of this run, and the bus between them."""

    def __init__(
        self,
        config: Config,
        analytics: Analytics,
        budgets: BudgetCounters,
        bus: Client,
        control_url: str,
        began_at: datetime,
    ) -> None:
        self._plan = bus_plan(config)
        self._zone: ZoneInfo = config.budgets.zone
        self._analytics = analytics
        self._budgets = budgets
        self._bus = bus
        self._control_url = control_url
        self._began_at = began_at

    async def left(self, accepted: int) -> list[str]:
        """What is still on its way, in words."""
        left = await on_the_bus(self._bus, self._plan)
        if (stored := await count_executions(self._analytics)) < accepted:
            left.append(f"ClickHouse: {stored} of {accepted} executions")
        if (running := (await read_ledger(self._control_url)).in_progress) > 0:
            left.append(f"provider: {running} calls in progress")
        if reserved := (await self._counters()).get("global", Counters()).reserved:
            left.append(f"Redis: {reserved} nano-dollars reserved")
        return left

    async def compare(self, rows: Rows) -> Comparison:
        """The books side by side."""
        counters = await self._counters()
        by_agent = {key.removeprefix("agent:"): held for key, held in counters.items() if key.startswith("agent:")}
        recorded = [
            RecordedCall(row.attempt_id, row.agent, row.model, row.cost, row.cost_basis)
            for row in rows.attempts
            if not row.short_circuited
        ]
        ledger = await read_ledger(self._control_url)
        return compare(ledger.calls, counters.get("global", Counters()), by_agent, recorded)

    async def _counters(self) -> dict[str, Counters]:
        return await read_counters(self._budgets, self._began_at, datetime.now(UTC))
