"""Runs the demo: starts a fresh stack, submits the load, waits until it settles, and reports."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import shlex
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import nats.errors
import yaml
from aiohttp import web
from nats.aio.client import Client
from standardwebhooks import Webhook, WebhookVerificationError

from breakwater.alerts.contract import Alert
from breakwater.client import ApiError, AsyncClient, JobFailedError
from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.contract.job import Job
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import unreachable
from breakwater.kernel.nats.provision import survey
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.files import write_private
from breakwater.limits.rules.budget import periods_since
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.local.commands.console import sign_in_link
from breakwater.local.commands.up import start_stack
from breakwater.local.datadir import DataDir, Endpoints
from breakwater.local.demo import report, scenario
from breakwater.local.demo.reconciliation import ProviderCall, compare
from breakwater.local.demo.report import DeliveredAlerts, DemoCheck, DemoReport, DemoRun
from breakwater.local.ports import free_port
from breakwater.local.simulation import SCRIPT, provider_process
from breakwater.local.stack import Stack, plan_stack
from breakwater.local.supervisor import ProcessEvent, Supervisor

CONFIG = "breakwater.yaml"
MAX_IN_FLIGHT = 32
DEADLINE_S = 120.0
SETTLE_TIMEOUT_S = 20.0
CHECK_EVERY_S = 0.25
LINE_EVERY_S = 2.0


async def run_demo(
    data: DataDir, lock: int, *, jobs: int, seed: int, as_json: bool, stays: bool
) -> DemoReport | signal.Signals:
    """Runs the demo in a data directory, prints the report, and stops everything it started.

    Args:
        data: a fresh data directory.
        lock: file descriptor of the directory's lock.
        jobs: number of jobs.
        seed: seed of the jobs and the answers.
        as_json: True to print only the report, as JSON.
        stays: True to keep everything running after the report, until a signal.

    Returns:
        The report, or the signal that ended the demo before it.

    Raises:
        ProcessFailedError: if a process of the stack does not start.
        CliError: if a server or service does not answer.
    """
    demo = DemoRun(scenario.plan_load(jobs, seed))
    stopping = False
    printed_reports: list[DemoReport] = []

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

    supervisor = Supervisor(on_event=on_event, inherit=[lock], fork=True)

    def progress_line() -> str:
        return f"{demo.elapsed_s:4.0f} s  {demo.describe()}"

    async def run_and_report() -> DemoReport:
        async with AsyncExitStack() as running:
            async with nullcontext() if as_json else connect.progress(progress_line, lines_every_s=LINE_EVERY_S):
                demo_report, stack = await running.enter_async_context(_running_demo(data, supervisor, demo, seed))
            printed_reports.append(demo_report)
            # Prints the report before it stops the stack, which takes a moment.
            if as_json:
                output.json_document(demo_report.document())
            else:
                report.show(demo_report)
            if stays:
                await _show_console(demo, stack)
                await asyncio.Event().wait()
        return demo_report

    if not as_json:
        report.announce(jobs)
    try:
        outcome = await supervisor.run(run_and_report)
        return printed_reports[0] if printed_reports else outcome
    finally:
        data.remove_endpoints()


async def _show_console(demo: DemoRun, stack: Stack) -> None:
    """Prints a link to the console's overview of the time in which the demo ran."""
    assert demo.load_began_at is not None
    ended_at = datetime.now(UTC) + timedelta(seconds=1)
    page = f"/?from={demo.load_began_at:%Y-%m-%dT%H:%M:%SZ}&to={ended_at:%Y-%m-%dT%H:%M:%SZ}"
    link = await sign_in_link(stack.endpoints, page)
    data_dir = shlex.quote(str(stack.endpoints.data_dir))
    output.print_styled("\nThe stack goes on running. See in the console what happened; this link signs in once:")
    output.print_styled(("  " + link, "bold"))
    output.print_styled((f"  `{formats.breakwater_command()} console --data {data_dir}` prints another link.", "dim"))
    output.print_styled(("  Ctrl-C stops everything.", "dim"))


@asynccontextmanager
async def _running_demo(
    data: DataDir, supervisor: Supervisor, demo: DemoRun, seed: int
) -> AsyncGenerator[tuple[DemoReport, Stack]]:
    """Starts the stack, submits the load and yields the report. The receiver of alerts runs while the block does."""
    port = free_port()
    jobs = len(demo.planned)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    write_private(data.secret_file("webhook"), secret)
    async with (
        alert_receiver(secret, demo.delivered) as receiver_url,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", raise_for_status=True) as provider,
    ):
        api_key = data.secret("provider-key")
        data.secret("wrong-key")
        directory = data.secret_file("provider-key").parent
        config = scenario.config(f"http://127.0.0.1:{port}/v1", receiver_url, directory, jobs)
        write_private(data.path / CONFIG, yaml.safe_dump(config, sort_keys=False))
        write_private(data.path / SCRIPT, json.dumps(scenario.provider_script(config, jobs, seed, api_key)))
        stack = plan_stack(data, data.path / CONFIG, environment={}, http_port=free_port(), console_port=free_port())
        await start_stack(supervisor, data, stack, also=[provider_process(data, port, data.path / SCRIPT)])
        try:
            async with provider.post("/_sim/start"):
                demo.phase = "running"
                demo.load_began_at = datetime.now(UTC)
            await _submit_all(demo, stack.endpoints)
            demo.phase = "settling"
            demo_report = await _report(demo, stack, provider)
        except aiohttp.ClientError as error:
            raise unreachable(f"the simulated provider does not answer: {error}") from error
        yield demo_report, stack


@asynccontextmanager
async def alert_receiver(secret: str, delivered: DeliveredAlerts) -> AsyncGenerator[str]:
    """Runs a receiver of alerts, which checks all signatures with the Standard Webhooks package as a user's would.

    It listens on a free port of loopback while the block runs. Yields the URL to post to.
    """
    webhook = Webhook(secret)

    async def receive(request: web.Request) -> web.Response:
        try:
            event = webhook.verify(await request.read(), dict(request.headers))
        except WebhookVerificationError as error:
            delivered.refused += 1
            return web.Response(status=401, text=str(error))
        alert = Alert.model_validate(event["data"])
        if any(alert.alert_id == earlier.alert_id for earlier in delivered.alerts):
            delivered.repeated += 1
        else:
            delivered.alerts.append(alert)
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/alerts", receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/alerts"
    finally:
        await runner.cleanup()


async def _submit_all(run: DemoRun, endpoints: Endpoints) -> None:
    """Submits each job at its time, over HTTP or NATS, and waits for all results."""
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def submit(job: Job) -> None:
        try:
            if job.metadata["way"] == "nats":
                await _run_over_nats(bus, job)
            else:
                with suppress(JobFailedError):
                    await http.run(job, timeout_s=DEADLINE_S)
            run.results += 1
        except (ApiError, TimeoutError, nats.errors.Error) as error:
            run.failed[str(job.job_id)] = str(error) or type(error).__name__
        finally:
            slots.release()

    api_key = endpoints.api_key_file.read_text(encoding="utf-8").strip()
    async with (
        AsyncClient(endpoints.request_url, api_key) as http,
        connect.bus(endpoints.nats_url, reconnects=True) as bus,
    ):
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as submitting:
                for at_s, job in run.planned:
                    await asyncio.sleep(max(0.0, started_at + at_s - time.monotonic()))
                    await slots.acquire()
                    submitting.create_task(submit(job))
        except TimeoutError:
            run.failed["load"] = f"was not done within {DEADLINE_S:g} s"


async def _run_over_nats(client: Client, job: Job) -> None:
    """Submits a job as a program in any language does, and waits for the result in an inbox."""
    inbox = client.new_inbox()
    body = job.model_copy(update={"reply_to": inbox}).model_dump_json(exclude_unset=True)
    headers = {"Nats-Msg-Id": str(job.job_id)}
    results = await client.subscribe(inbox)
    try:
        await client.jetstream(timeout=10).publish(f"bw.jobs.{job.agent}", body.encode(), headers=headers)
        await results.next_msg(timeout=DEADLINE_S)
    finally:
        await results.unsubscribe()  # the server limits the subscriptions of a connection


async def _report(demo: DemoRun, stack: Stack, provider: aiohttp.ClientSession) -> DemoReport:
    """Waits until the plane has settled, reads the stored rows, and compares the ledgers."""
    config = load_config(stack.endpoints.config_file)
    zone = config.budgets.zone
    async with (
        connect.analytics(stack.endpoints.clickhouse_url) as analytics,
        connect.state(stack.endpoints.redis_url) as redis,
    ):
        unsettled = await _await_settled(stack.setup.nats_url.get_secret_value(), bus_plan(config), provider)
        stored = await report.read_stored(analytics)
        # A run across midnight falls into two days.
        days = [period for period in periods_since(demo.began_at, datetime.now(UTC), zone) if period.window == "daily"]
        redis_now = await BudgetCounters(redis, zone).read(days)
        ledger = await _ledger(provider)
    calls = [ProviderCall(call["client_request_id"], call["model"], call["cost_nano"]) for call in ledger["calls"]]
    demo_checks = report.checks(demo, stored, config.agents["small-budget"].budget.daily_usd or 0)
    return DemoReport(
        jobs=len(demo.planned),
        seconds=demo.elapsed_s,
        stored=stored,
        alerts=tuple(demo.delivered.alerts),
        comparison=compare(calls, redis_now.figures, redis_now.reserved, stored.attempts, zone),
        checks=(DemoCheck("all settled", False, "; ".join(unsettled)), *demo_checks) if unsettled else demo_checks,
    )


async def _await_settled(nats_url: str, plan: Plan, provider: aiohttp.ClientSession) -> list[str]:
    """Waits until two checks in a row find nothing in progress. Describes what is still in progress at the deadline.

    One check is not enough, because a message may move from one stream to another while they are checked.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    settled_checks = 0
    async with connect.bus(nats_url) as bus:
        while True:
            unsettled = [
                f"{consumer.name}: {consumer.waiting} waiting, {consumer.in_progress} in progress"
                for consumer in (await survey(bus, plan)).consumers
                if (consumer.waiting, consumer.in_progress) != (0, 0)
            ]
            if open_calls := (await _ledger(provider))["totals"]["in_progress"]:
                unsettled.append(f"provider: {open_calls} calls in progress")
            settled_checks = 0 if unsettled else settled_checks + 1
            if settled_checks == 2 or time.monotonic() > deadline:
                return unsettled
            await asyncio.sleep(CHECK_EVERY_S)


async def _ledger(provider: aiohttp.ClientSession) -> Any:
    async with provider.get("/_sim/ledger?calls=1") as response:
        return await response.json()
