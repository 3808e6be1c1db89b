"""No URL, however it is written, and no answer of DNS or of a receiver makes the alerter connect where it must not.

Nothing between a channel and the kernel is replaced but the system's resolver, so that no test asks a real one. What
was connected to is seen by an audit hook of the interpreter, below every library; and a server on loopback counts.
"""

import asyncio
import logging
import socket
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any, Self

import pytest
import uvloop

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.channels.configured_channels import channels_of
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.addresses import IpNetwork, refusal
from breakwater.kernel.security.guarded_http import guarded_session
from tests.services.alerter.kit import AT, SECRET, Answer, Receiver, config_of
from tests.services.alerter.messages import alert
from tests.services.alerter.slack_double import CHANNEL, TOKEN
from tests.tables import each_row

KINDS = ("webhook", "slack webhook", "slack bot")
OWN_MACHINE = ("127.0.0.0/8", "0.0.0.0/8", "::1/128", "::/128")

LOOPBACK = [
    "http://127.0.0.1:{port}/",
    "HTTP://127.0.0.1:{port}/",
    "https://127.0.0.1:{port}/",
    "http://127.0.0.1:0{port}/",
    "http://127.0.0.1.:{port}/",
    "http://127.0.0.2:{port}/",
    "http://127.255.255.254:{port}/",
    "http://127.1:{port}/",
    "http://127.0.1:{port}/",
    "http://127.000.000.001:{port}/",
    "http://2130706433:{port}/",
    "http://02130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0X7F000001:{port}/",
    "http://0x7f.0.0.1:{port}/",
    "http://0x7f.1:{port}/",
    "http://0x7F.0x0.0x0.0x1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://0177.0.0.01:{port}/",
    "http://0177.1:{port}/",
    "http://017700000001:{port}/",
    "http://00000177.0x0.1:{port}/",
    "http://0.0.0.0:{port}/",
    "http://0:{port}/",
    "http://00000000:{port}/",
    "http://0x0:{port}/",
    "http://0.0:{port}/",
    "http://localhost:{port}/",
    "http://LOCALHOST:{port}/",
    "http://localhost.:{port}/",
    "http://localhost..:{port}/",
    "http://localhost.localdomain:{port}/",
    "http://ip6-localhost:{port}/",
    "http://a.localhost:{port}/",
    "http://[::1]:{port}/",
    "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]:{port}/",
    "http://[::]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
    "http://[::ffff:0.0.0.0]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[::ffff:0:127.0.0.1]:{port}/",
    "http://[64:ff9b::127.0.0.1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/",
    "http://[64:ff9b:1::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[2001:0:7f00:1:8000:63bf:80ff:fffe]:{port}/",
    "http://[::1%25lo]:{port}/",
    "http://[::1%lo]:{port}/",
    "http://[::1%251]:{port}/",
    "http://[fe80::1%25lo]:{port}/",
    "http://[2606:4700::1111%25zone.example]:{port}/",
    "http://[::ffff:127.0.0.1%25lo]:{port}/",
    # Written with other digits and dots, or encoded.
    "http://１２７.０.０.１:{port}/",
    "http://127。0。0。1:{port}/",
    "http://127．0．0．1:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://٠x7f.1:{port}/",
    "http://ｌｏｃａｌｈｏｓｔ:{port}/",
    "http://ⓛocalhost:{port}/",
    "http://local\u00adhost:{port}/",
    "http://localhoſt:{port}/",
    "http://%31%32%37.0.0.1:{port}/",
    "http://127%2e0%2e0%2e1:{port}/",
    "http://localhost%00.public.example:{port}/",
    "http://127.0.0.1%00.public.example:{port}/",
    # Where a reader takes another part for the host.
    "http://public.example@127.0.0.1:{port}/",
    "http://public.example:80@127.0.0.1:{port}/",
    "http://public.example%40127.0.0.1:{port}/",
    "http://a@b@127.0.0.1:{port}/",
    "http://user:password@localhost:{port}/",
    "http://127.0.0.1:{port}@public.example/",
    "http://public.example#@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}#@public.example/",
    "http://127.0.0.1:{port}?@public.example/",
    "http://127.0.0.1:{port};@public.example/",
    "http://public.example\\@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@public.example/",
    "http://public.example/\\127.0.0.1:{port}/",
    "http:///127.0.0.1:{port}/",
    "http://\\127.0.0.1:{port}/",
    "http://[::1]public.example:{port}/",
    "http://public.example:{port}/..//127.0.0.1/",
    # Names that lead there.
    "http://loopback.example:{port}/",
    "http://loopback6.example:{port}/",
    "http://mapped.example:{port}/",
    "http://everything.example:{port}/",
    "http://127.0.0.1.nip.example:{port}/",
    "http://LOOPBACK.example.:{port}/",
    "http://unspecified.example:{port}/",
]
ELSEWHERE = [
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.169.254:80/",
    "https://169.254.169.254/",
    "http://2852039166/",
    "http://0xA9FEA9FE/",
    "http://0xa9.0xfe.0xa9.0xfe/",
    "http://0251.0376.0251.0376/",
    "http://169.254.43518/",
    "http://169.16689662/",
    "http://[::ffff:169.254.169.254]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[64:ff9b::169.254.169.254]/",
    "http://[2002:a9fe:a9fe::]/",
    "http://169.254.170.2/v2/credentials",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://[fd00:0ec2:0:0:0:0:0:0254]/",
    "http://[fd20:ce::254]/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://metadata.google.internal./",
    "http://METADATA.google.internal/",
    "http://metadata/",
    "http://instance-data/",
    "http://168.63.129.16/metadata/instance",
    "http://0xa83f8110/",
    "http://100.100.100.200/latest/meta-data/",
    "http://192.0.0.192/opc/v1/instance/",
    "http://public.example@169.254.169.254/",
    "http://１６９.２５４.１６９.２５４/",
    "http://169.254.169.254.nip.example/",
    "http://10.0.0.1/",
    "http://10.1/",
    "http://172.16.0.1/",
    "http://192.168.0.1/",
    "http://192.168.257/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://192.0.2.1/",
    "http://203.0.113.7/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://[fc00::1]/",
    "http://[fe80::1]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[2001:db8::1]/",
    "http://[100::1]/",
    "http://private.example/",
    "http://unique-local.example/",
    "http://nat64.example/",
]
NAMES = {
    "localhost": ("127.0.0.1", "::1"),
    "localhost.": ("127.0.0.1", "::1"),
    "localhost.localdomain": ("127.0.0.1",),
    "ip6-localhost": ("::1",),
    "a.localhost": ("127.0.0.1",),
    "loopback.example": ("127.0.0.1",),
    "loopback.example.": ("127.0.0.1",),
    "loopback6.example": ("::1",),
    "mapped.example": ("::ffff:127.0.0.1",),
    "everything.example": ("10.0.0.7", "127.0.0.1", "::1", "169.254.169.254"),
    "unspecified.example": ("0.0.0.0", "::"),
    "127.0.0.1.nip.example": ("127.0.0.1",),
    "2606:4700::1111%zone.example": ("::1",),
    "metadata.google.internal": ("169.254.169.254",),
    "metadata.google.internal.": ("169.254.169.254",),
    "metadata": ("169.254.169.254",),
    "instance-data": ("169.254.169.254",),
    "169.254.169.254.nip.example": ("169.254.169.254",),
    "private.example": ("10.0.0.7", "192.168.1.1"),
    "unique-local.example": ("fd12::1",),
    "nat64.example": ("64:ff9b::a00:7",),
}


@dataclass
class Resolver:
    """The system's resolver, as far as names go. What is no name is read by the real one, which asks nobody for it."""

    names: dict[str, Sequence[str]] = field(default_factory=lambda: dict(NAMES))
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._real = socket.getaddrinfo

    def __call__(
        self,
        host: Any,
        port: Any,
        family: int = 0,
        type: int = 0,  # noqa: A002  as it is called with
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else str(host)
        self.asked.append(name)
        found = self.names.get(name.lower(), (name,))
        numeric = flags | socket.AI_NUMERICHOST
        return [info for one in found for info in self._real(one, port, family, type, proto, numeric)]


class Connections:
    """Every address that anything in this process has connected to."""

    def __init__(self) -> None:
        self.addresses: list[tuple[Any, ...]] | None = None
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and self.addresses is not None and isinstance(arguments[1], tuple):
            self.addresses.append(arguments[1])


CONNECTIONS = Connections()
"""Made once: an audit hook stays for as long as the process lives."""


class Trap:
    """A server on loopback that counts who connects, and what they say."""

    def __init__(self) -> None:
        self.connected = 0
        self.port = 0
        self._servers: list[asyncio.Server] = []

    async def start(self) -> Self:
        self._servers.append(await asyncio.start_server(self._count, "127.0.0.1", 0))
        self.port = self._servers[0].sockets[0].getsockname()[1]
        for other in ("127.0.0.2", "::1"):
            self._servers.append(await asyncio.start_server(self._count, other, self.port))
        return self

    async def stop(self) -> None:
        for server in self._servers:
            server.close()

    async def _count(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    one = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", one)
    return one


@pytest.fixture
async def trap(resolver: Resolver) -> AsyncGenerator[Trap]:
    one = await Trap().start()
    yield one
    await one.stop()


@pytest.fixture
def connected() -> Iterator[list[tuple[Any, ...]]]:
    CONNECTIONS.addresses = []
    yield CONNECTIONS.addresses
    CONNECTIONS.addresses = None


class NoPosts:
    async def get(self, _incident_id: str, /) -> str | None:
        return None

    async def put(self, _incident_id: str, _ts: str, /) -> None: ...


@asynccontextmanager
async def channel_of(
    kind: str, url: str, monkeypatch: pytest.MonkeyPatch, allowed: Sequence[str] = ()
) -> AsyncGenerator[AlertSender]:
    """A channel as the config makes it."""
    monkeypatch.setenv("SLACK_HOOK", url)
    monkeypatch.setenv("SLACK_TOKEN", TOKEN)
    setting: dict[str, Any] = {
        "webhook": {"webhook": {"url": url, "secret": {"env": "HOOK_SECRET"}, "timeout_s": 5}},
        "slack webhook": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}},
        "slack bot": {"slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": CHANNEL, "api_url": url}},
    }[kind]
    config = config_of(channels={"ops": setting}, allow_networks=list(allowed))
    [channel] = channels_of(config.alerts, sent_messages=lambda _: NoPosts(), now=lambda: AT)
    try:
        yield channel
    finally:
        await channel.close()


def check_connections(connected: list[tuple[Any, ...]], allowed: Sequence[IpNetwork] = ()) -> None:
    for address in connected:
        assert refusal(ip_address(address[0]), allowed) is None, f"connected to {address}"


def test_the_corpus_is_large_and_says_nothing_twice() -> None:
    assert len(set(LOOPBACK)) + len(set(ELSEWHERE)) == len(LOOPBACK) + len(ELSEWHERE) >= 60


@each_row("url", [*LOOPBACK, *ELSEWHERE])
async def test_no_channel_connects_where_it_must_not(
    trap: Trap, connected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    written = url.format(port=trap.port)
    for kind in KINDS:
        try:
            async with channel_of(kind, written, monkeypatch) as channel:
                with pytest.raises(SendError) as caught:
                    await channel.send(alert())
        except ConfigError:
            continue  # refused before anything is sent
        failure = str(caught.value)
        assert "password" not in failure
        if "is refused" in failure:
            assert "`alerts.allow_networks`" in failure
            assert caught.value.permanent
    assert trap.connected == 0
    assert connected == []


async def test_without_the_guard_most_of_the_corpus_reaches_the_server(
    trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above could fail: the same URLs, with all addresses of this machine allowed."""
    reached: list[str] = []
    for url in LOOPBACK:
        before = trap.connected
        try:
            async with channel_of("webhook", url.format(port=trap.port), monkeypatch, OWN_MACHINE) as channel:
                await channel.send(alert())
        except (ConfigError, SendError):
            pass
        if trap.connected > before:
            reached.append(url)
    assert len(reached) >= 30, reached
    for name in ("http://localhost:{port}/", "http://0x7f.1:{port}/", "http://[::ffff:127.0.0.1]:{port}/"):
        assert name in reached


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_names_the_host_the_address_and_the_setting(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = f"http://loopback.example:{trap.port}/p4th?qu3ry"
    async with channel_of(kind, url, monkeypatch) as channel:
        with pytest.raises(SendError) as caught:
            await channel.send(alert())
    assert str(caught.value) == (
        f"nothing is sent to loopback.example:{trap.port}: its address 127.0.0.1 is refused (loopback); if it is "
        "meant, put its network into `alerts.allow_networks`"
    )
    assert caught.value.permanent


@pytest.mark.parametrize("kind", KINDS)
async def test_networks_that_are_allowed_are_connected_to_and_no_others(
    trap: Trap,
    resolver: Resolver,
    connected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    resolver.names["ours.example"] = ("127.0.0.2",)
    for host, allowed, reached in (
        ("ours.example", "127.0.0.2/32", True),
        ("127.0.0.2", "127.0.0.0/8", True),
        ("[::ffff:127.0.0.2]", "127.0.0.2/32", True),
        ("[::1]", "::1/128", True),
        ("ours.example", "127.0.0.3/32", False),
        ("127.0.0.1", "127.0.0.2/32", False),
        ("[::1]", "127.0.0.0/8", False),
    ):
        before = trap.connected
        async with channel_of(kind, f"http://{host}:{trap.port}/", monkeypatch, [allowed]) as channel:
            try:
                await channel.send(alert())
            except SendError as failure:
                assert ("is refused" in str(failure)) is not reached  # noqa: PT017  the bot finds that it is not Slack
        assert (trap.connected > before) is reached
    check_connections(connected, [ip_network("127.0.0.0/8"), ip_network("::1/128")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed_wherever_it_leads(
    trap: Trap,
    connected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    receiver: Receiver,
    kind: str,
    status: int,
) -> None:
    await receiver.start()
    targets = [
        f"http://127.0.0.1:{trap.port}/",
        f"//127.0.0.1:{trap.port}/",
        "http://169.254.169.254/latest/meta-data/",
        f"http://localhost:{trap.port}/",
        "/elsewhere",
    ]
    for target in targets:
        receiver.always = Answer(status, headers={"Location": target})
        async with channel_of(kind, receiver.url, monkeypatch, ["127.0.0.1/32"]) as channel:
            with pytest.raises(SendError, match=f"{status}; redirects are not followed") as caught:
                await channel.send(alert())
            assert caught.value.permanent
    assert len(receiver.seen) == len(targets)
    assert trap.connected == 0
    assert {address[1] for address in connected} == {receiver.port}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_name_that_is_bound_to_another_address_later_is_refused_then(
    trap: Trap,
    resolver: Resolver,
    connected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    # The address that may be connected to is on loopback as well: no test sends anything anywhere else.
    allowed = ["127.0.0.2/32"]
    resolver.names["rebound.example"] = ("127.0.0.2",)
    async with channel_of(kind, f"http://rebound.example:{trap.port}/", monkeypatch, allowed) as channel:
        try:
            await channel.send(alert())
        except SendError as failure:
            assert "refused" not in str(failure)  # noqa: PT017  the bot finds that it is not Slack
        assert trap.connected == 1
        # Resolved once: what was checked is what is connected to.
        assert resolver.asked.count("rebound.example") == 1
        resolver.names["rebound.example"] = ("127.0.0.1",)
    async with channel_of(kind, f"http://rebound.example:{trap.port}/", monkeypatch, allowed) as channel:
        with pytest.raises(SendError, match=r"127\.0\.0\.1 is refused \(loopback\)"):
            await channel.send(alert())
    assert trap.connected == 1
    check_connections(connected, [ip_network(allowed[0])])


class Flipping(Resolver):
    """Answers with a good address at first, and with a bad one whenever it is asked again."""

    def __call__(self, host: Any, *arguments: Any, **named: Any) -> list[Any]:
        if host == "flipping.example":
            first = "flipping.example" not in self.asked
            self.names["flipping.example"] = ("127.0.0.2",) if first else ("127.0.0.1",)
        return super().__call__(host, *arguments, **named)


async def test_a_name_is_not_resolved_again_between_the_check_and_the_connection(
    trap: Trap, connected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping = Flipping()
    flipping._real = socket.getaddrinfo._real  # type: ignore[attr-defined]  # not the resolver of the fixture
    monkeypatch.setattr(socket, "getaddrinfo", flipping)
    async with channel_of("webhook", f"http://flipping.example:{trap.port}/", monkeypatch, ["127.0.0.2/32"]) as channel:
        await channel.send(alert())
    assert flipping.asked == ["flipping.example"]
    assert [address[0] for address in connected] == ["127.0.0.2"]


@pytest.mark.parametrize("order", [("127.0.0.2", "127.0.0.1", "::1"), ("::1", "127.0.0.1", "127.0.0.2")])
async def test_of_several_addresses_only_those_that_may_be_are_tried(
    trap: Trap,
    resolver: Resolver,
    connected: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    order: tuple[str, ...],
) -> None:
    resolver.names["several.example"] = order
    async with channel_of("webhook", f"http://several.example:{trap.port}/", monkeypatch, ["127.0.0.2/32"]) as channel:
        await channel.send(alert())
    assert [address[0] for address in connected] == ["127.0.0.2"]
    # And where that one does not answer, the others are no way out.
    await trap.stop()
    async with channel_of("webhook", "http://several.example:1/", monkeypatch, ["127.0.0.2/32"]) as channel:
        with pytest.raises(SendError):
            await channel.send(alert())
    assert {address[0] for address in connected} == {"127.0.0.2"}


def test_the_guard_holds_on_the_loop_that_services_run_on(connected: list[tuple[Any, ...]]) -> None:
    """uvloop resolves and connects in its own ways. Only literals and `localhost` here: it asks the real resolver."""
    seen: list[str] = []

    async def connect() -> None:
        trap = await Trap().start()
        async with guarded_session((), 5.0) as session:
            for host in ("127.0.0.1", "[::1]", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "[::1%25lo]"):
                try:
                    await session.post(f"http://{host}:{trap.port}/")
                except OSError as error:
                    seen.append(str(error))
        await trap.stop()
        assert trap.connected == 0

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(connect())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(seen) == 6
    assert all("nothing is sent there" in words for words in seen), seen
    assert connected == []


async def test_secrets_are_in_no_log_and_no_error(
    trap: Trap,
    monkeypatch: pytest.MonkeyPatch,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path, query = "T0001/B0002/p4thIsTheSecret", "token=qu3ryIsTheSecret"
    secrets = [TOKEN, TOKEN.removeprefix("xoxb-"), SECRET, SECRET.removeprefix("whsec_"), "p4thIsTheSecret"]
    secrets += ["qu3ryIsTheSecret"]
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "aiohttp.access")  # of the receiver, which knows what it is sent
    await receiver.start()
    reported: list[str] = []
    allowed = ["127.0.0.1/32"]
    answers = [Answer(), Answer(500), Answer(404), Answer(302, headers={"Location": receiver.url}), Answer(429)]
    answers.append(Answer(200, body="not json", headers={"Content-Type": "application/json"}))
    for kind in KINDS:
        for host, plans in (
            (f"127.0.0.1:{receiver.port}", answers),
            ("127.0.0.1:1", [Answer()]),  # nobody is there
            ("private.example", [Answer()]),
            ("nobody.example", [Answer()]),
            ("0177.0.0.1", [Answer()]),
        ):
            url = f"http://{host}/{path}/?{query}"
            for plan in plans:
                receiver.answers = [plan]
                async with channel_of(kind, url, monkeypatch, allowed) as channel:
                    reported.append(repr(channel))
                    reported.append(channel.fingerprint)
                    try:
                        await channel.send(alert())
                    except SendError as failure:
                        reported += [str(failure), repr(failure), *traceback.format_exception(failure)]
        for broken in (f"hooks.example/{path}", f"http:///{path}", f"http://[::1/{path}"):
            with pytest.raises((ConfigError, SendError)) as caught:
                async with channel_of(kind, broken, monkeypatch, allowed) as channel:
                    await channel.send(alert())
            if kind == "slack webhook":  # the other URLs stand in the config, and are shown with the mistake in them
                reported += traceback.format_exception(caught.value)
    assert len(reported) > 100
    captured = capfd.readouterr()
    everything = "\n".join([*reported, caplog.text, captured.out, captured.err])
    for secret in secrets:
        assert secret not in everything, everything[max(0, everything.find(secret) - 400) :][:800]
    # The search works: it is in what was sent.
    sent = "\n".join(str(seen.headers) for seen in receiver.seen)
    assert TOKEN in sent
