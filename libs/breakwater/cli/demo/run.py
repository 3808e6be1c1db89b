"""The course of the demo: a fresh stack, the load, settling, and the report."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import signal
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import aiohttp
import yaml

from breakwater.bus.survey import survey
from breakwater.bus.topology import Plan
from breakwater.cli import connect, output
from breakwater.cli.demo import scenario, screen
from breakwater.cli.demo.load import submit_all
from breakwater.cli.demo.progress import DemoRun, shown
from breakwater.cli.demo.receiver import receiving
from breakwater.cli.demo.reconciliation import ProviderCall, compare
from breakwater.cli.demo.report import Check, Report, checks, read_stored
from breakwater.cli.errors import unreachable
from breakwater.cli.setup import bus_plan
from breakwater.cli.up import start_stack
from breakwater.config import load_config
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.ports import free_port
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.simulation import SCRIPT, provider_process
from breakwater.embedded.stack import Stack, plan_stack
from breakwater.embedded.supervisor import ProcessEvent, Supervisor
from breakwater.files import write_private
from breakwater.policy.budget import periods_since
from breakwater.state.budget_counters import BudgetCounters

CONFIG = "breakwater.yaml"
SETTLE_S = 20.0
LOOK_EVERY_S = 0.25


async def run_demo(data: DataDir, lock: int, *, jobs: int, seed: int, as_json: bool) -> Report | signal.Signals:
    """Runs the demo in a data directory, prints the report, and stops whatever it started.

    Args:
        data: a fresh data directory.
        lock: the descriptor of its lock.
        jobs: how many there are.
        seed: the same seed gives the same jobs and the same answers.
        as_json: prints the report as JSON, and nothing else.

    Returns:
        The report, or the signal that ended the demo.

    Raises:
        ProcessFailedError: a part of the stack did not come up.
        CliError: a part of it does not answer.
    """
    demo = DemoRun(scenario.plan_load(jobs, seed))
    stopping = False

    def on_event(event: ProcessEvent) -> None:
        nonlocal stopping
        if event.kind == "ready" and event.restarts == 0:
            demo.ready.append(event.name)
        elif event.kind == "stopping" and not stopping:
            stopping = True
            output.note("stopping the local stack ...")
        elif event.kind == "exited":
            log = data.logs / f"{event.name}.log"
            output.note(f"{event.name} ended unexpectedly and is started again; its log is {log}", "yellow")

    supervisor = Supervisor(on_event=on_event, inherit=[lock], stop_s=12.0, fork_log=data.logs / "fork-server.log")

    async def play() -> Report:
        async with nullcontext() if as_json else shown(demo):
            report = await _play(data, supervisor, demo, seed)
        # Printed before the stack is stopped, which takes a moment.
        if as_json:
            output.json_document(report.document())
        else:
            screen.show(report)
        return report

    try:
        return await supervisor.run(play)
    finally:
        data.remove_endpoints()


async def _play(data: DataDir, supervisor: Supervisor, demo: DemoRun, seed: int) -> Report:
    """All of it, from the first process to the report."""
    port = free_port()
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    write_private(data.secret_file("webhook"), secret)
    async with (
        receiving(secret, demo.delivered) as receiver_url,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", raise_for_status=True) as provider,
    ):
        process = _write_files(data, receiver_url, port, len(demo.planned), seed)
        stack = plan_stack(data, data.path / CONFIG, environment={}, http_port=free_port(), console_port=free_port())
        await start_stack(supervisor, data, stack, beside=[process])
        try:
            async with provider.post("/_sim/start"):
                demo.phase, demo.load_began_at = "running", datetime.now(UTC)
            await submit_all(demo, stack.endpoints)
            demo.phase = "settling"
            return await _report(demo, stack, provider)
        except aiohttp.ClientError as error:
            raise unreachable(f"the simulated provider does not answer: {error}") from error


def _write_files(data: DataDir, receiver_url: str, port: int, jobs: int, seed: int) -> ProcessSpec:
    """Writes the config of this run and the provider's script into the data directory; gives the provider."""
    key, _ = data.secret("provider-key"), data.secret("wrong-key")
    directory = data.secret_file("provider-key").parent
    config = scenario.config(f"http://127.0.0.1:{port}/v1", receiver_url, directory, jobs)
    write_private(data.path / CONFIG, yaml.safe_dump(config, sort_keys=False))
    write_private(data.path / SCRIPT, json.dumps(scenario.provider_script(config, jobs, seed, key)))
    return provider_process(data, port, data.path / SCRIPT)


async def _report(demo: DemoRun, stack: Stack, provider: aiohttp.ClientSession) -> Report:
    """Waits until all has settled, reads what was stored, and compares."""
    config = load_config(stack.endpoints.config_file)
    zone = config.budgets.zone
    async with (
        connect.analytics(stack.endpoints.clickhouse_url) as analytics,
        connect.state(stack.endpoints.redis_url) as redis,
    ):
        left = await _unsettled(stack.setup.nats_url.get_secret_value(), bus_plan(config), provider)
        stored = await read_stored(analytics)
        # A run across midnight has two days.
        days = [one for one in periods_since(demo.began_at, datetime.now(UTC), zone) if one.window == "daily"]
        redis_now = await BudgetCounters(redis, zone).snapshot(days)
        ledger = await _ledger(provider)
    calls = [ProviderCall(call["client_request_id"], call["model"], call["cost_nano"]) for call in ledger["calls"]]
    found = checks(demo, stored, config.agents["small-budget"].budget.daily_usd or 0)
    return Report(
        jobs=len(demo.planned),
        seconds=demo.elapsed_s,
        stored=stored,
        alerts=tuple(demo.delivered.alerts),
        comparison=compare(calls, redis_now.figures, redis_now.reserved, stored.attempts, zone),
        checks=(Check("all settled", False, "; ".join(left)), *found) if left else found,
    )


async def _unsettled(nats_url: str, plan: Plan, provider: aiohttp.ClientSession) -> list[str]:
    """Waits until nothing is on its way, seen so twice in a row; gives what still was at the deadline, in words.

    Once is not enough: what has left one place may reach the next one just after that was looked at.
    """
    deadline, calm = time.monotonic() + SETTLE_S, 0
    async with connect.bus(nats_url) as bus:
        while True:
            left = [
                f"{one.name}: {one.waiting} waiting, {one.in_progress} in progress"
                for one in (await survey(bus, plan)).consumers
                if (one.waiting, one.in_progress) != (0, 0)
            ]
            if open_calls := (await _ledger(provider))["totals"]["in_progress"]:
                left.append(f"provider: {open_calls} calls in progress")
            calm = 0 if left else calm + 1
            if calm == 2 or time.monotonic() > deadline:
                return left
            await asyncio.sleep(LOOK_EVERY_S)


async def _ledger(provider: aiohttp.ClientSession) -> Any:
    async with provider.get("/_sim/ledger?calls=1") as answer:
        return await answer.json()
