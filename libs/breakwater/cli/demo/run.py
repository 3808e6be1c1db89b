"""The course of the demo: a fresh stack, the load, settling, and the report."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import yaml

from breakwater.analytics.client import Analytics
from breakwater.bus.survey import survey
from breakwater.cli import connect, output
from breakwater.cli.demo import scenario
from breakwater.cli.demo.live import Display, Scene, tallying
from breakwater.cli.demo.load import LoadPlan, Submitted, nats_submitter, plan_load, submit_over_http
from breakwater.cli.demo.receiver import Receiver
from breakwater.cli.demo.reconciliation import LedgerComparison, RecordedCall, RedisCounters, compare
from breakwater.cli.demo.records import Rows, count_executions, read_counters, read_ledger, read_rows, start_clock
from breakwater.cli.demo.report import Check, Delivered, Handover, Report, breaker_summaries, checks
from breakwater.cli.setup import bus_plan
from breakwater.cli.up import start_stack
from breakwater.client import ApiClient
from breakwater.config import load_config
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.ports import free_port
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.simulation import provider_process
from breakwater.embedded.stack import Stack, plan_stack
from breakwater.embedded.supervisor import ProcessEvent, Supervisor
from breakwater.files import write_private
from breakwater.state.budget_counters import BudgetCounters

LOAD_DEADLINE_S = 60.0
SETTLE_S = 20.0
LOOK_EVERY_S = 0.25


async def run_demo(
    data: DataDir, lock: int, display: Display, *, jobs: int, seed: int, show: Callable[[Report], None]
) -> Report | signal.Signals:
    """Runs the demo in a data directory, and stops whatever it started.

    Args:
        data: a fresh data directory.
        lock: the descriptor of its lock.
        display: shows how it goes.
        jobs: how many there are.
        seed: the same seed gives the same jobs and the same answers.
        show: gets the report before the stack is stopped, which takes a moment.

    Returns:
        The report, or the signal that ended the demo.

    Raises:
        ProcessFailedError: a part of the stack did not come up.
        CliError: a part of it does not answer.
    """
    demo = _Demo(data, display, jobs, seed)
    fork_log = data.logs / "fork-server.log"
    supervisor = Supervisor(on_event=demo.on_event, inherit=[lock], stop_s=12.0, fork_log=fork_log)

    async def play() -> Report:
        report = await demo.play(supervisor)
        show(report)
        return report

    try:
        return await supervisor.run(play)
    finally:
        data.remove_endpoints()


class _Demo:
    """One run."""

    def __init__(self, data: DataDir, display: Display, jobs: int, seed: int) -> None:
        self._data = data
        self._display = display
        self._jobs = jobs
        self._seed = seed
        self._scene = Scene(jobs)
        self._stopping = False
        self._began_at = datetime.now(UTC)
        self._provider_port = free_port()

    @property
    def _control_url(self) -> str:
        return f"http://127.0.0.1:{self._provider_port}"

    def on_event(self, event: ProcessEvent) -> None:
        """Takes notice of what happens to the stack's processes."""
        if event.kind == "ready" and event.restarts == 0:
            self._scene.ready.append(event.name)
        elif event.kind == "stopping" and not self._stopping:
            self._stopping = True
            output.note("stopping the local stack ...")
        elif event.kind == "exited":
            log = self._data.logs / f"{event.name}.log"
            self._display.note(f"{event.name} ended unexpectedly and is started again; its log is {log}")

    async def play(self, supervisor: Supervisor) -> Report:
        """All of it, from the first process to the report."""
        plan = plan_load(self._jobs, self._seed)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        async with Receiver(secret) as receiver, self._shown(receiver):
            provider, config_file = self._write_files(receiver.url, secret)
            stack = plan_stack(self._data, config_file, environment={}, http_port=free_port(), console_port=free_port())
            await start_stack(supervisor, self._data, stack, beside=[provider])
            async with tallying(stack.endpoints.nats_url) as self._scene.tally:
                handover = await self._load(stack, plan)
                self._scene.phase, self._scene.load_begun = "settling", None
                return await self._report(stack, receiver, plan, handover)

    def _write_files(self, receiver_url: str, secret: str) -> tuple[ProcessSpec, Path]:
        """Puts the provider's script, the secrets and the config of this run into the data directory."""
        data = self._data
        provider_key, _ = data.secret("provider-key"), data.secret("wrong-key")
        write_private(data.secret_file("webhook"), secret)
        surroundings = scenario.Surroundings(
            provider_url=f"{self._control_url}/v1",
            receiver_url=receiver_url,
            provider_key=data.secret_file("provider-key"),
            wrong_key=data.secret_file("wrong-key"),
            webhook_secret=data.secret_file("webhook"),
        )
        script_file, config_file = data.path / "simulation.json", data.path / "breakwater.yaml"
        write_private(script_file, json.dumps(scenario.provider_script(self._jobs, self._seed, provider_key)))
        write_private(config_file, yaml.safe_dump(scenario.config(surroundings, self._jobs), sort_keys=False))
        return provider_process(data, self._provider_port, script_file), config_file

    async def _load(self, stack: Stack, plan: LoadPlan) -> Handover:
        """Submits all jobs, and waits until those who submitted them have the responses."""
        key = stack.endpoints.api_key_file.read_text().strip()
        log_file = self._data.logs / "nats-submitter.log"
        async with (
            ApiClient(stack.endpoints.request_url, key) as api,
            nats_submitter(self._data.path, plan.nats, log_file) as submit_over_nats,
        ):
            await start_clock(self._control_url)
            self._scene.phase, self._scene.load_begun = "running", time.monotonic()
            http = Submitted()
            try:
                async with asyncio.timeout(LOAD_DEADLINE_S):
                    nats, _ = await asyncio.gather(submit_over_nats(), submit_over_http(api, plan.http, http))
            except TimeoutError:
                nats = Submitted(0, {"load": f"was not submitted within {LOAD_DEADLINE_S:g} s"})
        return Handover(http.accepted, nats.accepted, {**http.failed, **nats.failed})

    async def _report(self, stack: Stack, receiver: Receiver, plan: LoadPlan, handover: Handover) -> Report:
        """Waits until all has settled, reads what was stored, and compares."""
        config = load_config(stack.endpoints.config_file)
        async with (
            connect.analytics(stack.endpoints.clickhouse_url) as analytics,
            connect.state(stack.endpoints.redis_url) as redis,
            connect.bus(stack.setup.nats_url.get_secret_value()) as bus,
        ):
            budgets, topology = BudgetCounters(redis, config.budgets.zone), bus_plan(config)

            async def unsettled() -> list[str]:
                return [
                    *[
                        f"{one.name}: {_count(one.waiting)} waiting, {_count(one.in_progress)} in progress"
                        for one in (await survey(bus, topology)).consumers
                        if one.waiting != 0 or one.in_progress != 0
                    ],
                    *await self._unsettled(analytics, budgets, handover.http + handover.nats),
                ]

            left = await until_settled(unsettled)
            rows = await read_rows(analytics)
            comparison = await self._compare(rows, budgets)
        delivered = Delivered(receiver.alerts, receiver.repeated, receiver.refused)
        found = checks(rows, plan.job_ids, handover, delivered, config.agents["small-budget"].budget.daily_usd or 0)
        if left:
            found = (Check("all settled", False, "; ".join(left)), *found)
        return Report(
            jobs=len(plan.job_ids),
            seconds=(datetime.now(UTC) - self._began_at).total_seconds(),
            agents=rows.agents,
            breakers=breaker_summaries(rows),
            alerts=delivered.alerts,
            comparison=comparison,
            checks=found,
        )

    async def _unsettled(self, analytics: Analytics, budgets: BudgetCounters, accepted: int) -> list[str]:
        left: list[str] = []
        if (stored := await count_executions(analytics)) < accepted:
            left.append(f"ClickHouse: {stored} of {accepted} executions")
        if (running := (await read_ledger(self._control_url)).in_progress) > 0:
            left.append(f"provider: {running} calls in progress")
        if reserved := (await self._counters(budgets)).get("global", RedisCounters()).reserved:
            left.append(f"Redis: {reserved} nano-dollars reserved")
        return left

    async def _compare(self, rows: Rows, budgets: BudgetCounters) -> LedgerComparison:
        counters = await self._counters(budgets)
        by_agent = {key.removeprefix("agent:"): one for key, one in counters.items() if key.startswith("agent:")}
        recorded = [
            RecordedCall(row.attempt_id, row.agent, row.model, row.cost, row.cost_basis)
            for row in rows.attempts
            if not row.short_circuited
        ]
        ledger = await read_ledger(self._control_url)
        return compare(ledger.calls, counters.get("global", RedisCounters()), by_agent, recorded)

    async def _counters(self, budgets: BudgetCounters) -> dict[str, RedisCounters]:
        return await read_counters(budgets, self._began_at, datetime.now(UTC))

    @asynccontextmanager
    async def _shown(self, receiver: Receiver) -> AsyncGenerator[None]:
        """Shows the scene for as long as the block lasts."""

        async def show() -> None:
            while True:
                self._scene.alerts = receiver.alerts
                self._display.show(self._scene)
                await asyncio.sleep(self._display.interval_s)

        with self._display:
            showing = asyncio.create_task(show())
            try:
                yield
            finally:
                showing.cancel()


async def until_settled(unsettled: Callable[[], Awaitable[list[str]]], *, deadline_s: float = SETTLE_S) -> list[str]:
    """Looks again and again until nothing is on its way, twice in a row.

    Once is not enough: what has left one place may reach the next one just after that was looked at.

    Returns:
        What was still on its way at the deadline, in words; empty when all settled.
    """
    deadline, calm = time.monotonic() + deadline_s, 0
    while True:
        left = await unsettled()
        calm = 0 if left else calm + 1
        if calm == 2 or time.monotonic() > deadline:
            return left
        await asyncio.sleep(LOOK_EVERY_S)


def _count(number: int | None) -> str:
    return "unknown" if number is None else str(number)
