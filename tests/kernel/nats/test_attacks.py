"""What a user of NATS can do to others with what it may do: nothing, whichever reply subject its requests name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.permissions import GRANTS, STREAMS_ACCOUNT, Grant, inbox_prefix, program, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan, consumers, streams
from breakwater.local.ports import free_port
from tests.nats_node import start_nats

PLAN = Plan(agents={"writer": 2, "critic": 1}, alert_channels=("ops",))
USERS = (*GRANTS, program("billing", ["writer"]))

STORED = {
    "bw.jobs.writer": b'{"prompt":"of another program"}',
    "bw.jobs.critic": b'{"prompt":"of another program"}',
    "bw.parked.writer.e2": b'{"prompt":"sleeps"}',
    "bw.attempts.writer.e1.1": b'{"attempt_id":"e1:1","cost":"0.0015"}',
    "bw.executions.writer.e1": b'{"execution_id":"e1"}',
    "bw.results.e1": b'{"execution_id":"e1","output":"private"}',
    "bw.breakers.writer.m": b'{"to":"open"}',
    "bw.budgets.global.daily": b"{}",
    "bw.guards.writer": b"{}",
    "bw.alerts.breaker_open": b"{}",
    "bw.dlq.invalid.writer": b"{}",
    "bw.replayed.17": b"{}",
    "bw.dismissed.error.writer.17": b"{}",
    "bw.alerter.leader": b"{}",
    "bw.audit.raise_cap": b"{}",
    "bw.keys.3f9c01d2a77b": b'{"sha256":"of another"}',
    "bw.alerter.replays.ops.1": b"{}",
}
"""A message in every stream."""

SUBJECTS = {config.name: config.subjects or [] for config in streams(PLAN)}

APART = [grant for grant in USERS if grant.user != "worker"]
DURABLES = tuple((stream, consumer.durable_name or "") for stream, consumer in consumers(PLAN))


@dataclass(frozen=True, slots=True)
class Request:
    """Something to ask of the server. Its answer is what an attack aims somewhere."""

    subject: str
    body: bytes = b""


def every_request() -> Iterable[Request]:
    """All that some user may ask, with bodies that give different answers: a message, several, an empty one."""
    for stream in Stream:
        for body in (b'{"last_by_subj":"nope"}', b'{"seq":1}', b'{"multi_last":["bw.>"],"batch":1000}'):
            yield Request(f"$JS.API.DIRECT.GET.{stream}", body)
        stored = [subject for subject in STORED if any(covers(own, subject) for own in SUBJECTS.get(stream, ()))]
        yield from (Request(f"$JS.API.DIRECT.GET.{stream}.{subject}") for subject in ("nope", *stored))
        yield from (Request(f"$JS.API.STREAM.{call}.{stream}") for call in ("INFO", "UPDATE", "DELETE", "PURGE"))
        yield from (Request(f"$JS.API.CONSUMER.{call}.{stream}") for call in ("LIST", "NAMES"))
    for stream, durable in DURABLES:
        yield Request(f"$JS.API.CONSUMER.INFO.{stream}.{durable}")
        yield Request(f"$JS.API.CONSUMER.CREATE.{stream}.{durable}", b"no JSON")
        # The first takes what waits; then there is nothing, which the server answers with an empty message.
        for body in (b'{"batch":50,"no_wait":true}', b'{"batch":1,"no_wait":true}', b'{"batch":1,"expires":200000000}'):
            yield Request(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}", body)
        for place in ("", "domain.account."):
            yield Request(f"$JS.ACK.{place}{stream}.{durable}.1.1.1.1.0", b"+WPI")
    yield from (Request(f"$JS.API.{call}") for call in ("INFO", "STREAM.LIST", "STREAM.NAMES"))
    yield from (Request(subject, b"mine") for subject in (*STORED, "bw.progress.writer.e1", "_INBOX.mine"))


def victims() -> Iterable[str]:
    """The subjects where an answer of the server does harm, or is taken for somebody else's."""
    for stream in Stream:
        yield from (f"$JS.API.STREAM.{call}.{stream}" for call in ("DELETE", "PURGE", "MSG.DELETE", "UPDATE"))
        yield f"$JS.API.STREAM.CREATE.X{stream}"
    for stream, name in DURABLES:
        yield from (f"$JS.API.CONSUMER.{call}.{stream}.{name}" for call in ("DELETE", "PAUSE", "RESET", "UNPIN"))
        yield f"$JS.ACK.{stream}.{name}.1.1.1.1.0"
        yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        yield f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
    yield from STORED
    yield from ("bw.results.victim", "bw.attempts.writer.victim.1", "bw.executions.writer.victim")
    yield from ("bw.alerter.test.ops", "bw.progress.writer.victim", "bw.replies.victim")
    yield from (f"{inbox_prefix(grant.user)}.victim" for grant in USERS)


def may(grant: Grant, subject: str) -> bool:
    """Whether a user may publish there anyway."""
    return any(covers(own, subject) for own in (*grant.publish, *grant.sends))


def covers(pattern: str, subject: str) -> bool:
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, tokens = wanted[:-1], tokens[: len(wanted) - 1] if len(tokens) >= len(wanted) else []
    return len(wanted) == len(tokens) and all(want in ("*", token) for want, token in zip(wanted, tokens, strict=True))


@asynccontextmanager
async def running_plane(folder: Path) -> AsyncGenerator[dict[str, Client]]:
    """A server with the plane's users and streams, filled; a connection of each user, and `root`'s, who sees all."""
    port = free_port()
    accounts = render(USERS, lambda user: f'"{user}"')
    entry = f'  "{STREAMS_ACCOUNT}": {{\n    "jetstream": "enabled",\n    "users": [\n'
    assert entry in accounts
    accounts = accounts.replace(entry, entry + '      {"user": "root", "password": "root"},\n')
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}" }}\n'
    server = start_nats(folder, settings + accounts, port)
    clients: dict[str, Client] = {}

    async def refused(_: Exception) -> None: ...

    try:
        await asyncio.to_thread(server.wait_until_ready)
        await provision(f"nats://setup:setup@127.0.0.1:{port}", PLAN)
        for user in ("root", *(grant.user for grant in USERS)):
            clients[user] = await nats.connect(
                f"nats://{user}:{user}@127.0.0.1:{port}", inbox_prefix=inbox_prefix(user), error_cb=refused
            )
        for subject, data in STORED.items():
            await clients["root"].jetstream(timeout=10).publish(subject, data)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
        server.stop()


async def holdings(root: Client) -> dict[str, object]:
    """Every stream and consumer with its config, and every stored message."""
    jetstream = root.jetstream(timeout=10)
    found: dict[str, object] = {}
    for stream in await jetstream.streams_info():
        name = stream.config.name or ""
        found[name] = stream.config
        for consumer in await jetstream.consumers_info(name):
            found[f"{name}/{consumer.name}"] = consumer.config
        async for message in Lookup(lambda: root).scan(Stream(name), ">"):
            found[f"{name}#{message.sequence}"] = (message.subject, message.data)
    return found


def changes(before: Mapping[str, object], after: Mapping[str, object], grant: Grant) -> dict[str, object]:
    """What is gone, other, or new, without the messages on subjects where the user may publish anyway."""
    grant = replace(grant, publish=(*grant.publish, *(becomes for _, becomes in grant.publish_as)))
    differing = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()}
    return {
        name: both
        for name, both in differing.items()
        if both[0] != both[1] and not any(isinstance(one, tuple) and may(grant, str(one[0])) for one in both)
    }


def test_only_the_worker_is_where_the_streams_are() -> None:
    assert [grant.user for grant in USERS if grant.account == STREAMS_ACCOUNT] == ["worker"]
    own = [grant.account for grant in USERS]
    assert len(own) == len(set(own))


@pytest.mark.parametrize("grant", APART, ids=[grant.user for grant in APART])
async def test_no_answer_to_a_users_requests_does_harm_elsewhere(tmp_path: Path, grant: Grant) -> None:
    async with running_plane(tmp_path) as clients:
        attacker, root = clients[grant.user], clients["root"]
        before = await holdings(root)
        heard: list[str] = []

        async def hear(message: Msg) -> None:
            heard.append(f"{message.subject}: {message.data[:80]!r}")

        for other in USERS:
            if other is not grant:
                for subject in (f"{inbox_prefix(other.user)}.victim", *other.subscribe, *other.serves):
                    await clients[other.user].subscribe(subject, cb=hear)
                await clients[other.user].flush()
                await clients[other.user].flush()
        aims = [subject for subject in victims() if not may(grant, subject)]
        for request in every_request():
            if may(grant, request.subject):
                for aim in aims:
                    await attacker.publish(request.subject, request.body, reply=aim)
        await attacker.flush(30)
        await asyncio.sleep(0.5)  # for pulls that wait
        for client in clients.values():
            await client.flush(30)
        assert changes(before, await holdings(root), grant) == {}
        assert [line for line in heard if not may(grant, line.partition(":")[0])] == []
