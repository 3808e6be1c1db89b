"""Programs with users of their own: each has its own agents, and hears nothing of another's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.errors import APIError, NoStreamResponseError

from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.permissions import (
    CONNECTIONS,
    CONNECTIONS_OF_A_PROGRAM,
    GRANTS,
    SUBSCRIPTIONS,
    inbox_prefix,
    program,
)
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import FULL
from breakwater.kernel.nats.subjects import (
    AGENTS,
    AGENTS_BY_USER,
    CANCEL_REQUESTS,
    CANCELS,
    CANCELS_BY_USER,
    agent_of_job,
    cancel,
    cancel_request,
    user_of_job,
)
from breakwater.kernel.nats.topology import Plan, worker_consumer
from breakwater.local.ports import free_port
from breakwater.local.servers import nats_spec
from breakwater.local.supervisor import Supervisor
from tests.helpers import until

PLAN = Plan(agents={"invoice.writer": 1, "support": 1})
PROGRAMS = [program("billing", ["invoice.writer"]), program("help-desk", ["support"])]
WRITER = "invoice%2Ewriter"
OWN = "program-billing"


@dataclass
class Program:
    """A connection, what it has heard, and what was refused to it."""

    client: Client
    heard: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    refused: list[str] = field(default_factory=list[str])

    async def listen(self, *subjects: str) -> None:
        async def hear(message: Msg) -> None:
            self.heard.append((message.subject, message.data))

        for subject in subjects:
            await self.client.subscribe(subject, cb=hear)
        await self.settled()

    async def settled(self) -> None:
        for _ in range(2):
            await self.client.flush(30)
        await asyncio.sleep(0.05)  # nats-py reports refusals in tasks


@asynccontextmanager
async def running(folder: Path, *more: str) -> AsyncGenerator[dict[str, Program]]:
    port = free_port()
    passwords = {grant.user: "p" for grant in (*GRANTS, *PROGRAMS)}
    users: dict[str, Program] = {}
    async with Supervisor() as supervisor:
        await supervisor.start([nats_spec(folder, port, passwords, PROGRAMS)])
        await provision(f"nats://setup:p@127.0.0.1:{port}", PLAN)
        try:
            for user in ("worker", "client", *more, *(grant.user for grant in PROGRAMS)):
                refused: list[str] = []

                async def note(error: Exception, refused: list[str] = refused) -> None:
                    refused.append(str(error))

                url = f"nats://{user}:p@127.0.0.1:{port}"
                client = await nats.connect(url, inbox_prefix=inbox_prefix(user), error_cb=note)
                users[user] = Program(client, refused=refused)
            yield users
        finally:
            for one in users.values():
                await one.client.close()


async def test_a_program_publishes_jobs_for_its_agents_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as users:
        billing = users["program-billing"]
        jetstream = billing.client.jetstream(timeout=0.5)
        assert (await jetstream.publish(f"bw.jobs.{WRITER}", b"{}")).stream == "JOBS"
        for other in ("bw.jobs.support", f"bw.attempts.{WRITER}.e1.1", "bw.results.e1"):
            with pytest.raises(TimeoutError):
                await jetstream.publish(other, b"{}")
        await billing.settled()
        assert len(billing.refused) == 3
        assert (await users["client"].client.jetstream(timeout=5).publish("bw.jobs.support", b"{}")).seq == 2


async def test_answers_and_events_reach_the_program_whose_they_are(tmp_path: Path) -> None:
    async with running(tmp_path) as users:
        billing, desk, worker = users["program-billing"], users["program-help-desk"], users["worker"].client
        inbox = billing.client.new_inbox()
        await billing.listen(inbox, "bw.replies.program-billing.>", f"bw.executions.{WRITER}.>")
        theirs = (inbox, "_INBOX.>", "bw.replies.>", f"bw.executions.{WRITER}.>", "bw.executions.>", "bw.results.>")
        await desk.listen(*theirs, "bw.executions.support.>")
        assert len(desk.refused) == len(theirs)
        record = json.dumps({"execution_id": "e1"}).encode()
        own, other = f"bw.executions.{WRITER}.e1", "bw.executions.support.e2"
        for subject in (own, other, "bw.results.e1"):
            await worker.jetstream(timeout=5).publish(subject, record)
        for subject in (inbox, "bw.replies.program-billing.1", "bw.replies.program-help-desk.1"):
            await worker.publish(subject, b"answer")
        await worker.flush()
        for one in (billing, desk):
            await one.settled()
        assert sorted(billing.heard) == sorted(
            [
                (inbox, b"answer"),
                ("bw.replies.program-billing.1", b"answer"),
                (own, record),
            ]
        )
        assert desk.heard == [(other, record)]


async def test_a_program_neither_hears_nor_reads_what_names_caps(tmp_path: Path) -> None:
    caps = [f"bw.attempts.{WRITER}.e1.1", f"bw.guards.{WRITER}", "bw.budgets.global.daily"]
    async with running(tmp_path) as users:
        billing, worker = users["program-billing"], users["worker"].client.jetstream(timeout=5)
        await billing.listen(*caps, f"bw.attempts.{WRITER}.>", "bw.>")
        for subject in caps[:2]:
            await worker.publish(subject, b"it has $0.0027 of $0.0052 left")
        jetstream = billing.client.jetstream(timeout=0.5)
        for subject in caps:
            with pytest.raises((TimeoutError, NoRespondersError)):
                await jetstream.get_last_msg("EVENTS", subject, direct=True)
        await billing.settled()
        assert billing.heard == []


async def test_a_program_reads_what_is_stored_of_its_agents_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as users:
        for subject in (f"bw.executions.{WRITER}.e1", "bw.executions.support.e2", "bw.results.e1"):
            await users["worker"].client.jetstream(timeout=5).publish(subject, b"stored")
        jetstream = users["program-billing"].client.jetstream(timeout=0.5)
        found = await jetstream.get_last_msg("EVENTS", f"bw.executions.{WRITER}.e1", direct=True)
        assert found.data == b"stored"
        for stream, subject in (("EVENTS", "bw.executions.support.e2"), ("RESULTS", "bw.results.e1")):
            with pytest.raises((TimeoutError, NoRespondersError)):
                await jetstream.get_last_msg(stream, subject, direct=True)
        with pytest.raises((TimeoutError, NoRespondersError)):
            await jetstream.get_msg("EVENTS", 2, direct=True)


def test_the_config_names_the_agents_of_programs() -> None:
    base = "providers: {sim: {base_url: 'http://x'}}\nagents: {a: {model: m, provider: sim}}\n"
    config = parse_config(base + "programs: {billing: {agents: [a]}}\n")
    assert config.programs["billing"].agents == ("a",)
    for wrong in ("{billing: {agents: [b]}}", "{billing: {agents: []}}", "{Billing: {agents: [a]}}"):
        with pytest.raises(ConfigError, match="programs"):
            parse_config(f"{base}programs: {wrong}\n")


async def test_who_asks_for_a_cancel_stands_in_the_subject_and_can_not_be_chosen(tmp_path: Path) -> None:
    async with running(tmp_path, "request") as users:
        request, heard = users["request"].client, list[str]()

        async def answer(message: Msg) -> None:
            heard.append(message.subject)
            await message.respond(b"cancelling")

        for subject in (CANCELS, CANCELS_BY_USER):
            await request.subscribe(subject, queue="request", cb=answer)
        await users["request"].settled()
        for user in ("client", "program-billing", "program-help-desk"):
            assert (await users[user].client.request(cancel("a.b"), b"", timeout=60)).data == b"cancelling"
        assert heard == [
            "bw.cancel.a%2Eb",
            "bw.cancel-by.program-billing.a%2Eb",
            "bw.cancel-by.program-help-desk.a%2Eb",
        ]
        billing = users["program-billing"]
        for other in ("bw.cancel-by.program-help-desk.j1", "bw.cancel-by.program-billing.j1", cancel_request("j1")):
            with pytest.raises((TimeoutError, NoRespondersError)):
                await billing.client.request(other, b"", timeout=0.5)
        await billing.settled()
        assert len(billing.refused) == 3
        assert len(heard) == 3


async def test_who_asks_for_the_agents_stands_in_the_subject(tmp_path: Path) -> None:
    async with running(tmp_path, "request") as users:
        request = users["request"].client

        async def answer(message: Msg) -> None:
            await message.respond(message.subject.encode())

        for subject in (AGENTS, AGENTS_BY_USER):
            await request.subscribe(subject, queue="request", cb=answer)
        await users["request"].settled()
        for user, asked in (("client", "bw.agents"), ("program-billing", "bw.agents-by.program-billing")):
            assert (await users[user].client.request(AGENTS, b"", timeout=60)).data.decode() == asked
        with pytest.raises((TimeoutError, NoRespondersError)):
            await users["program-billing"].client.request("bw.agents-by.program-help-desk", b"", timeout=0.5)


async def test_whose_job_it_is_stands_in_the_subject_and_in_no_header_of_the_program(tmp_path: Path) -> None:
    forged = {
        "Breakwater-Owner": "writer",
        "breakwater-submitted-by": "writer",
        "Breakwater-Unique-Id": "1",
        "Breakwater-Execution-Id": "x-0123456789abcdef0123456789abcdef",
        "breakwater-scope": "key:writer",
        "Breakwater-Job-Id": "order-1",
        "x": "y",
    }
    expected = {
        "client": {"x": "y"},
        "program-billing": {
            "x": "y",
            "Breakwater-Owner": OWN,
            "Breakwater-Submitted-By": OWN,
            "Breakwater-Scope": "program-billing",
        },
        "worker": forged,
    }
    async with running(tmp_path) as users:
        worker = users["worker"].client.jetstream()
        consumer = await worker.pull_subscribe_bind(worker_consumer("invoice.writer"), "JOBS")
        for user, headers in expected.items():
            stored = await users[user].client.jetstream(timeout=5).publish(f"bw.jobs.{WRITER}", b"{}", headers=forged)
            assert stored.stream == "JOBS"
            [message] = await consumer.fetch(1, timeout=30)
            delivery = Delivery(message)
            assert delivery.headers == headers
            assert user_of_job(delivery.subject) == (None if user == "worker" else user)
            assert agent_of_job(delivery.subject) == "invoice.writer"
            await message.ack_sync()
        for subject in (f"bw.jobs.{WRITER}.program-billing", f"bw.jobs.{WRITER}.client", "bw.jobs.support"):
            with pytest.raises((TimeoutError, NoRespondersError)):
                await users["program-billing"].client.jetstream(timeout=0.5).publish(subject, b"{}")
        with pytest.raises((TimeoutError, NoRespondersError, NoStreamResponseError)):
            await users["client"].client.jetstream(timeout=0.5).publish("bw.jobs.unknown", b"{}")


async def test_equal_message_ids_of_two_jobs_lose_neither(tmp_path: Path) -> None:
    headers = {"Nats-Msg-Id": f"{WRITER}/order-777"}
    async with running(tmp_path) as users:
        sequences: list[int] = []
        for user, agent in (
            ("program-help-desk", "support"),
            ("program-billing", WRITER),
            ("client", "support"),
            ("client", WRITER),
            ("worker", WRITER),
        ):
            jetstream = users[user].client.jetstream(timeout=5)
            stored = await jetstream.publish(f"bw.jobs.{agent}", b"{}", headers=headers)
            assert not stored.duplicate
            sequences.append(stored.seq)
        assert sequences == [1, 2, 3, 4, 5]


async def test_workers_receive_cancel_requests_and_programs_do_not(tmp_path: Path) -> None:
    async with running(tmp_path, "request") as users:
        await users["worker"].listen(CANCEL_REQUESTS)
        await users["client"].listen(CANCEL_REQUESTS)
        await users["request"].client.publish(cancel_request("j1"), b"order")
        await users["request"].settled()
        await until(lambda: users["worker"].heard == [(cancel_request("j1"), b"order")])
        assert len(users["client"].refused) == 1


async def test_an_agent_with_as_many_jobs_as_may_wait_is_refused_by_nats_and_others_are_not(tmp_path: Path) -> None:
    async with running(tmp_path) as users:
        address = users["worker"].client.connected_url
        assert address is not None
        setup = f"nats://setup:p@127.0.0.1:{address.port}"
        assert await provision(setup, replace(PLAN, jobs_max_per_agent=3)) != ()
        billing, support = (users[f"program-{name}"].client.jetstream() for name in ("billing", "help-desk"))
        for _ in range(3):
            await billing.publish(f"bw.jobs.{WRITER}", b"{}")
        with pytest.raises(APIError) as refused:
            await billing.publish(f"bw.jobs.{WRITER}", b"{}")
        assert refused.value.err_code in FULL
        assert (await support.publish("bw.jobs.support", b"{}")).stream == "JOBS"
        consumer = (
            await users["worker"].client.jetstream().pull_subscribe_bind(worker_consumer("invoice.writer"), "JOBS")
        )
        [job] = await consumer.fetch(1, timeout=30)
        await job.ack_sync()
        assert (await billing.publish(f"bw.jobs.{WRITER}", b"{}")).stream == "JOBS"
        # The limit goes as it came.
        await provision(setup, PLAN)
        assert await provision(setup, PLAN) == ()
        assert (await billing.publish(f"bw.jobs.{WRITER}", b"{}")).stream == "JOBS"


@pytest.mark.parametrize("user", ["client", "program-billing"])
async def test_a_program_has_a_number_of_subscriptions_and_connections(user: str, tmp_path: Path) -> None:
    async with running(tmp_path) as users:
        one = users[user]
        url, most = one.client.connected_url, CONNECTIONS.get(user, CONNECTIONS_OF_A_PROGRAM)
        assert url is not None
        more: list[Client] = []
        try:
            for _ in range(most - 1):
                more.append(await nats.connect(url.geturl(), inbox_prefix=inbox_prefix(user), max_reconnect_attempts=0))
            with pytest.raises(Exception, match="maximum account active connections exceeded"):
                await nats.connect(url.geturl(), allow_reconnect=False, max_reconnect_attempts=0, connect_timeout=5)
            flood, inbox = more[0], inbox_prefix(user)
            for number in range(SUBSCRIPTIONS + 1):
                await flood.subscribe(f"{inbox}.{number}")
            await until(lambda: not flood.is_connected, what="the end of its connection")
            worker = users["worker"].client
            await worker.publish("bw.progress.support.e1", b"{}")
            await worker.flush()
            assert (await one.client.jetstream(timeout=5).publish(f"bw.jobs.{WRITER}", b"{}")).stream == "JOBS"
        finally:
            for client in more:
                await client.close()
