"""The course of the demo: a fresh stack, the load, calm, and the books."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from breakwater.cli import output
from breakwater.cli.demo import scenario
from breakwater.cli.demo.closing import close_books
from breakwater.cli.demo.display import Display, Scene
from breakwater.cli.demo.load import Handed, HttpSubmitter, Plan, plan_load, to_lines
from breakwater.cli.demo.nats_program import nats_program
from breakwater.cli.demo.receiver import Receiver
from breakwater.cli.demo.records import start_clock
from breakwater.cli.demo.report import Handover, Report
from breakwater.cli.demo.watch import watching
from breakwater.cli.raise_stack import raise_stack
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.events import ProcessEvent
from breakwater.embedded.ports import free_port
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.simulation import provider_process
from breakwater.embedded.stack import Stack, plan_stack
from breakwater.embedded.supervisor import Supervisor
from breakwater.files import write_private

LOAD_DEADLINE_S = 60.0


async def run_demo(
    data: DataDir, lock: int, display: Display, *, jobs: int, seed: int, tell: Callable[[Report], None]
) -> Report | signal.Signals:
    """Runs the demo in a data directory, and stops whatever it started.

    Args:
        data: a fresh data directory.
        lock: the descriptor of its lock.
        display: shows how it goes.
        jobs: how many there are.
        seed: the same seed gives the same jobs and the same answers.
        tell: is told the report before the stack is stopped, which takes a moment.

    Returns:
        The report, or the signal that ended the demo.

    Raises:
        ProcessFailedError: a part of the stack did not come up.
        CliError: a part of it does not answer.
    """
    demo = _Demo(data, display, jobs, seed)
    supervisor = Supervisor(on_event=demo.on_event, inherit=[lock], stop_s=12.0, fork_log=data.logs / "fork-server.log")

    async def play() -> Report:
        report = await demo.play(supervisor)
        tell(report)
        return report

    try:
        return await supervisor.run(play)
    finally:
        data.remove_endpoints()


@dataclass(frozen=True, slots=True)
class _Provider:
    process: ProcessSpec
    control_url: str


class _Demo:
    """One run."""

    def __init__(self, data: DataDir, display: Display, jobs: int, seed: int) -> None:
        self._data = data
        self._display = display
        self._jobs = jobs
        self._seed = seed
        self._scene = Scene(jobs)
        self._stopping = False

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
        began_at = datetime.now(UTC)
        plan = plan_load(self._jobs, self._seed)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        async with Receiver(secret) as receiver, self._shown(receiver):
            provider, config_file = self._write_files(receiver.url, secret)
            stack = plan_stack(self._data, config_file, environment={}, port=_distinct_ports())
            await raise_stack(supervisor, self._data, stack, beside=[provider.process])
            async with watching(stack.endpoints.nats_url) as self._scene.tally:
                handover = await self._load(stack, provider, plan)
                self._scene.phase, self._scene.load_begun = "settling", None
                return await close_books(stack, provider.control_url, receiver, plan, handover, began_at)

    def _write_files(self, receiver_url: str, secret: str) -> tuple[_Provider, Path]:
        """Puts the provider's script, the secrets and the config of this run into the data directory."""
        data, port = self._data, free_port()
        url = f"http://127.0.0.1:{port}"
        provider_key, _ = data.secret("provider-key"), data.secret("wrong-key")
        write_private(data.secret_file("webhook"), secret)
        surroundings = scenario.Surroundings(
            provider_url=f"{url}/v1",
            receiver_url=receiver_url,
            provider_key=data.secret_file("provider-key"),
            wrong_key=data.secret_file("wrong-key"),
            webhook_secret=data.secret_file("webhook"),
        )
        script_file, config_file = data.path / "simulation.json", data.path / "breakwater.yaml"
        write_private(script_file, json.dumps(scenario.provider_script(self._jobs, self._seed, provider_key)))
        write_private(config_file, yaml.safe_dump(scenario.config(surroundings, self._jobs), sort_keys=False))
        return _Provider(provider_process(data, port, script_file), url), config_file

    async def _load(self, stack: Stack, provider: _Provider, plan: Plan) -> Handover:
        """Hands all jobs in, and waits until whoever handed them in has the answers."""
        http = HttpSubmitter(stack.endpoints.request_url, stack.endpoints.api_key_file.read_text().strip())
        jobs_file = self._data.path / "nats-jobs.jsonl"
        write_private(jobs_file, to_lines(plan.nats))
        nats = Handed()
        async with nats_program(self._data.path, jobs_file, self._data.logs / "nats-submitter.log") as program:
            await start_clock(provider.control_url)
            self._scene.phase, self._scene.load_begun = "running", time.monotonic()
            try:
                async with asyncio.timeout(LOAD_DEADLINE_S):
                    nats, _ = await asyncio.gather(program.run(), http.run(plan.http))
            except TimeoutError:
                nats = Handed(0, {"load": f"was not handed in within {LOAD_DEADLINE_S:g} s"})
        return Handover(http.handed.accepted, nats.accepted, {**http.handed.failed, **nats.failed})

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


def _distinct_ports() -> Callable[[int], int]:
    """Ports for a stack that stays out of the way of any other: free ones, and none twice."""
    given: set[int] = set()

    def port(_standard: int) -> int:
        while (found := free_port()) in given:
            pass
        given.add(found)
        return found

    return port
