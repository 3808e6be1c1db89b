"""TLS towards NATS, Redis and ClickHouse, with a certificate authority of the test's own."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from breakwater.kernel.clickhouse import client as analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.commands import connect
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.broker import make_broker
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.kernel.security.tls import tls_settings
from breakwater.local.ports import free_port
from breakwater.local.servers import nats_spec
from tests.helpers import accepts
from tests.sentinel import NAME, SENTINEL_PASSWORD, start_sentinel
from tests.server_sources import ProcessRunner
from tests.servers import RunningServer


class Certificates:
    """Files of an authority, of a server called `localhost`, and of a client."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca, self.server, self.client = (directory / f"{name}.pem" for name in ("ca", "server", "client"))
        self.key, self.other_key = directory / "client.key", directory / "other.key"
        authority.cert_pem.write_to_path(str(self.ca))
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(self.server))
        client = authority.issue_cert("client@breakwater.example")
        client.private_key_and_cert_chain_pem.write_to_path(str(self.client))
        client.private_key_pem.write_to_path(str(self.key))
        authority.issue_cert("other.example").private_key_pem.write_to_path(str(self.other_key))
        (directory / "text.pem").write_text("no certificate")
        self.text = directory / "text.pem"

    def server_context(self) -> ssl.SSLContext:
        """One that wants a client's certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.load_cert_chain(self.server)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def trusting(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process trusts the authority, and has a certificate of it."""
    monkeypatch.setenv("BREAKWATER_TLS_CA", str(certificates.ca))
    monkeypatch.setenv("BREAKWATER_TLS_CERT", str(certificates.client))


@pytest.fixture(scope="module")
def tls_nats(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[bool], str]]:
    """Starts a nats-server that encrypts, and wants a certificate; returns where it is, without the scheme."""
    running: dict[bool, RunningServer] = {}

    def start(handshake_first: bool) -> str:
        if handshake_first not in running:
            data, port = tmp_path_factory.mktemp("nats"), free_port()
            spec = nats_spec(data, port, {})
            with (data / "nats.conf").open("a") as config:
                config.write(
                    f'tls {{ cert_file: "{certificates.server}", key_file: "{certificates.server}", '
                    f'ca_file: "{certificates.ca}", verify: true, handshake_first: {str(handshake_first).lower()} }}\n'
                )
            # A server that wants the handshake first does not greet in plain text, by which `nats_ready` knows it.
            server = RunningServer(f"localhost:{port}", ProcessRunner(spec), lambda: accepts("localhost", port))
            running[handshake_first] = server
            server.restart()
        return running[handshake_first].url

    yield start
    for server in running.values():
        server.stop()


@asynccontextmanager
async def terminated(certificates: Certificates, url: str) -> AsyncGenerator[int]:
    """A proxy that takes TLS off on its way to a server; its port. The engines that come as wheels have none."""
    target = urlsplit(url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(copy(reader, back), copy(onward, writer), return_exceptions=True)

    server = await asyncio.start_server(serve, "localhost", 0, ssl=certificates.server_context())
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def terminated_or_plain(certificates: Certificates, url: str) -> AsyncGenerator[int]:
    """The same, which also takes clients without TLS, as Sentinels here are: their first byte tells."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("localhost", 0)) as listening:
        listening.setblocking(False)
        async with terminated(certificates, url) as encrypted:

            async def copy(source: socket.socket, target: socket.socket) -> None:
                while data := await loop.sock_recv(source, 65_536):
                    await loop.sock_sendall(target, data)

            async def serve(client: socket.socket) -> None:
                while True:
                    try:
                        first = client.recv(1, socket.MSG_PEEK)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0.01)
                server = socket.create_connection(
                    ("localhost", encrypted) if first == b"\x16" else (urlsplit(url).hostname, urlsplit(url).port)
                )
                server.setblocking(False)
                with client, server:
                    copying = [asyncio.create_task(copy(client, server)), asyncio.create_task(copy(server, client))]
                    await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
                    for task in copying:
                        task.cancel()
                    await asyncio.gather(*copying, return_exceptions=True)

            async def accept() -> None:
                async with asyncio.TaskGroup() as serving:
                    while True:
                        client, _ = await loop.sock_accept(listening)
                        client.setblocking(False)
                        serving.create_task(serve(client))

            accepting = asyncio.create_task(accept())
            yield listening.getsockname()[1]
            await background.stop(accepting)


async def connects(url: str) -> bool:
    async with connect.bus(url) as client:
        await client.flush()
        return True


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize(("scheme", "handshake_first"), [("tls", True), ("nats", False)])
async def test_nats_is_reached_over_tls_by_commands_and_services(
    tls_nats: Callable[[bool], str], scheme: str, handshake_first: bool
) -> None:
    url = f"{scheme}://{tls_nats(handshake_first)}"
    assert await connects(url)
    broker = make_broker(url, "sink")
    await broker.start()
    try:
        assert await broker.ping(timeout=5)
    finally:
        await broker.stop()


@pytest.mark.usefixtures("trusting")
async def test_a_tls_url_never_falls_back_to_plain_text(nats_server: RunningServer) -> None:
    with pytest.raises(CliError, match="WRONG_VERSION_NUMBER"):
        await connects(nats_server.url.replace("nats:", "tls:"))


async def test_a_certificate_of_an_unknown_authority_is_refused(
    tls_nats: Callable[[bool], str],
    certificates: Certificates,
    redis_server: RunningServer,
    clickhouse_server: RunningServer,
) -> None:
    with pytest.raises(CliError, match="CERTIFICATE_VERIFY_FAILED"):
        await connects(f"nats://{tls_nats(False)}")
    async with terminated(certificates, redis_server.url) as port:
        with pytest.raises(StateUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await pinged(f"rediss://localhost:{port}/0")
    async with terminated(certificates, clickhouse_server.url) as port:
        with pytest.raises(AnalyticsUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            await answered_one(https(clickhouse_server.url, port))


async def pinged(url: str) -> None:
    redis = Redis(url)
    try:
        await redis.ping()
        assert await redis.command("PING") == "PONG"
    finally:
        await redis.close()


async def answered_one(url: str) -> None:
    client = analytics.connect(url)
    try:
        assert (await client.query("SELECT 1 AS one")).rows == ((1,),)
    finally:
        await client.close()


def https(url: str, port: int) -> str:
    parts = urlsplit(url)
    return f"https://{parts.username}:{parts.password}@localhost:{port}/default"


@pytest.mark.usefixtures("trusting")
async def test_redis_and_clickhouse_are_reached_over_tls(
    certificates: Certificates, redis_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    async with terminated(certificates, redis_server.url) as port:
        await pinged(f"rediss://localhost:{port}/0")
        with pytest.raises(StateUnavailableError, match="not valid for"):
            await pinged(f"rediss://127.0.0.1:{port}/0")
    async with terminated(certificates, clickhouse_server.url) as port:
        await answered_one(https(clickhouse_server.url, port))


@pytest.mark.usefixtures("trusting")
async def test_sentinels_are_asked_over_tls_for_a_host_that_certificates_name(
    certificates: Certificates, redis_server: RunningServer, tmp_path: Path
) -> None:
    async with terminated_or_plain(certificates, redis_server.url) as primary:
        port = free_port()
        sentinel = start_sentinel(
            *(tmp_path / "sentinel", port, f"localhost {primary}"), more=["sentinel announce-hostnames yes"]
        )
        try:
            await asyncio.to_thread(sentinel.wait_until_ready)
            async with terminated(certificates, f"redis://127.0.0.1:{port}") as encrypted:
                url = f"rediss+sentinel://localhost:{encrypted}/{NAME}/0?sentinel_password={SENTINEL_PASSWORD}"
                await pinged(url)
                with pytest.raises(StateUnavailableError, match="no Sentinel answers"):
                    await pinged(url.replace("localhost", "127.0.0.1"))
        finally:
            sentinel.stop()


@pytest.mark.usefixtures("trusting")
async def test_a_rediss_url_never_falls_back_to_plain_text(redis_server: RunningServer) -> None:
    with pytest.raises(StateUnavailableError):
        await pinged(redis_server.url.replace("redis:", "rediss:"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"CA": "missing"}, r"BREAKWATER_TLS_CA: .*missing: No such file or directory"),
        ({"CA": "text"}, r"BREAKWATER_TLS_CA: .*text.pem: not a valid PEM file"),
        ({"CERT": "ca"}, r"BREAKWATER_TLS_CERT: .*ca.pem: not a valid PEM file"),
        ({"KEY": "key"}, r"BREAKWATER_TLS_KEY is set without BREAKWATER_TLS_CERT"),
        ({"CERT": "client", "KEY": "other_key"}, r"BREAKWATER_TLS_CERT and .*: the key does not match the certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    for name, file in files.items():
        monkeypatch.setenv(f"BREAKWATER_TLS_{name}", str(getattr(certificates, file, certificates.ca.with_name(file))))
    with pytest.raises(ConfigError, match=message):
        tls_settings()
    with pytest.raises(ConfigError, match=message):
        make_broker("nats://localhost", "sink")
