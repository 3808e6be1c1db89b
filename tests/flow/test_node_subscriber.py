"""A program in another language validates every alert by the schema of the wire contract alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules import incidents
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.signals import Signal, of_execution, signals_of
from breakwater.alerts.settings import Reminders
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.kernel.nats.permissions import GRANTS, inbox_prefix, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.local.ports import free_port
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.nats_node import start_nats
from tests.nodejs import EXAMPLES, node_with
from tests.records import samples

PACKAGES = ("@nats-io/transport-node", "ajv", "ajv-formats")
RULES = IncidentRules(
    on_events=("breaker_open", "budget_soft_cap", "guard_tripped", "agent_anomaly", "retries_exhausted"),
    quiet_s=60,
    escalate=("guard_tripped",),
    reminders=Reminders(),
)
OPENED, FOREVER = samples.transition(open_for="key app"), samples.NOON + timedelta(days=400)
OPENED_FOR_ALL = samples.transition(2, transition_id="writer/gpt-4.1#e.1a", from_state="open")
CLOSED = samples.transition(2, transition_id="writer/gpt-4.1#e.2", from_state="half_open", to_state="closed")


def signals() -> Iterable[Signal]:
    for event in (
        OPENED,
        OPENED_FOR_ALL,
        CLOSED,
        samples.guard_event(),
        samples.full_guard_event(),
        samples.budget_event(),
    ):
        yield from signals_of(event)
    yield from of_execution(samples.execution(status="dead_lettered", reason="error", attempts_count=3), 1, 1)


@pytest.fixture
def node() -> str:
    return node_with(*PACKAGES)


@pytest.fixture
def data(tmp_path: Path) -> Generator[Path]:
    """As `breakwater up` leaves it: endpoints.json has the address of the user `client`, of a server with all users."""
    port = free_port()
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{tmp_path}/jetstream" }}\n'
    server = start_nats(tmp_path, settings + render(GRANTS, lambda user: f'"secret-of-{user}"'), port)
    server.wait_until_ready()
    asyncio.run(provision(url(port, "setup"), Plan(agents={"writer": 1})))
    (tmp_path / "endpoints.json").write_text(json.dumps({"nats_url": url(port, "client"), "port": port}))
    yield tmp_path
    server.stop()


def url(port: int, user: str) -> str:
    return f"nats://{user}:secret-of-{user}@127.0.0.1:{port}"


@asynccontextmanager
async def alerter(data: Path) -> AsyncGenerator[Client]:
    port = json.loads((data / "endpoints.json").read_text())["port"]
    client = await nats.connect(url(port, "alerter"), inbox_prefix=inbox_prefix("alerter"))
    yield client
    await client.close()


@contextmanager
def subscriber(node: str, data: Path, *arguments: str) -> Generator[subprocess.Popen[str]]:
    program = subprocess.Popen(
        [node, str(EXAMPLES / "check_alerts.mjs"), str(data), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        first = program.stdout.readline()
        assert first == "watching\n", program.communicate()[1]
        yield program
    finally:
        program.kill()
        program.wait()


async def publish_everything(client: Client) -> list[Alert]:
    """All that becomes of incidents: opened, repeated, worsened, acknowledged, reminded, resolved, reopened."""
    log = IncidentLog(lambda: client, Publisher(lambda: client, "alerter"), Redactor.compile(RedactionRules()))
    received: list[Alert | None] = []
    for signal in signals():
        received.append(
            await log.decide(lambda known, signal=signal: incidents.decide(signal, known.of(signal.key), RULES))
        )
    again = samples.transition(3, transition_id="writer/gpt-4.1#e.3", at=samples.NOON + timedelta(seconds=30))
    repeated = samples.execution("e2", status="dead_lettered", reason="error", attempts_count=3)
    stopped = samples.guard_event("/task-8@1", task_id="task-8")
    for signal in (*signals_of(again), *of_execution(repeated, None, None), *signals_of(stopped)):
        received.append(
            await log.decide(lambda known, signal=signal: incidents.decide(signal, known.of(signal.key), RULES))
        )
    for current in log.incidents.unresolved():
        received.append(await log.decide(lambda _, one=current: incidents.due(one, FOREVER, RULES)))
    for current in log.incidents.unresolved():
        received.append(
            await log.decide(lambda _, one=current: incidents.acknowledge(one, "ops: Zoë", "seen", FOREVER))
        )
    for current in log.incidents.unresolved():
        received.append(await log.decide(lambda _, one=current: incidents.resolve(one, "ops", None, FOREVER)))
    return [alert for alert in received if alert is not None]


async def test_every_alert_is_valid_for_a_program_in_another_language(node: str, data: Path) -> None:
    async with alerter(data) as client:
        with subscriber(node, data) as program:
            received = await publish_everything(client)
            assert program.stdout is not None
            shown = [await asyncio.to_thread(program.stdout.readline) for _ in received]
            assert program.poll() is None
    assert {alert.change for alert in received} == {
        *("opened", "repeated", "worsened", "reopened", "acknowledged", "reminded", "resolved")
    }
    for alert, line in zip(received, shown, strict=True):
        assert f"{alert.severity} {alert.change}: {alert.title} ({alert.incident_id}, {alert.status})" in line


async def test_the_program_ends_after_as_many_alerts_as_it_was_asked_for(node: str, data: Path) -> None:
    async with alerter(data) as client:
        with subscriber(node, data, "--count", "2") as program:
            await publish_everything(client)
            out, err = await asyncio.to_thread(program.communicate, timeout=60)
    assert (program.returncode, len(out.splitlines()), err) == (0, 2, "")


async def test_an_alert_that_is_none_is_reported_and_ends_the_program_with_a_failure(node: str, data: Path) -> None:
    wrong = {**json.loads(samples.alert().json_bytes()), "status": "over", "at": "yesterday"}
    del wrong["incident_id"]
    async with alerter(data) as client:
        with subscriber(node, data) as program:
            await client.publish("bw.alerts.breaker_open", samples.alert().json_bytes())
            await client.publish("bw.alerts.breaker_open", json.dumps(wrong).encode())
            await client.flush()
            out, err = await asyncio.to_thread(program.communicate, timeout=60)
    assert (program.returncode, len(out.splitlines())) == (1, 1)
    assert "must have required property 'incident_id'" in err
    assert "/status: must be equal to one of the allowed values" in err
    assert '/at: must match format "date-time"' in err
