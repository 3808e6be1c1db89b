"""Credentials that are renewed, commands that print them, client certificates and proxies."""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import encode_basic_auth, web
from pydantic import ValidationError

from breakwater.calls.providers.base import CallError
from breakwater.calls.providers.connection import LOOK_EVERY_S
from breakwater.calls.providers.credentials import RETRY_S, Credential, CredentialError, Issued, renewal_time
from breakwater.calls.providers.registry import OpenAISettings
from breakwater.calls.providers.settings import CommandAuth, TlsFiles
from breakwater.calls.rules.classify import TransportFailure
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef
from tests.calls.providers.kit import KEY, answering, call, failure, perform, settings

ANSWER = {"choices": [{"message": {"content": "hi"}}]}


class Tokens:
    """A source of tokens that last 1,000 s, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.fetched = 0
        self.problem: str | None = None
        self.blocked = threading.Event()
        self.blocked.set()

    def __str__(self) -> str:
        return "the source of tokens"

    def fetch(self) -> Issued[str]:
        self.blocked.wait(5)
        self.fetched += 1
        if self.problem is not None:
            raise ConfigError(self.problem)
        ends_at = self.now + 1_000
        return Issued(f"token-{self.fetched}", (f"token-{self.fetched}",), renewal_time(ends_at, self.now), ends_at)

    def credential(self) -> Credential[str]:
        return Credential(self, clock=lambda: self.now)


async def _fetch_ends(credential: Credential[str]) -> None:
    while credential._fetching is not None:
        await asyncio.sleep(0.001)


async def test_a_token_is_renewed_before_it_ends_while_calls_still_use_it() -> None:
    tokens = Tokens()
    credential = tokens.credential()
    assert (credential.value, credential.version) == (None, 0)
    assert await asyncio.gather(*(credential.current() for _ in range(20))) == ["token-1"] * 20
    tokens.now += 819
    assert await credential.current() == "token-1"
    assert tokens.fetched == 1
    tokens.now += 2
    tokens.blocked.clear()
    assert [await credential.current() for _ in range(5)] == ["token-1"] * 5
    tokens.blocked.set()
    await _fetch_ends(credential)
    assert (await credential.current(), credential.version, tokens.fetched) == ("token-2", 2, 2)
    assert "token" not in repr(credential).replace("the source of tokens", "")


async def test_a_failing_source_is_asked_again_after_a_pause_and_a_valid_token_used_to_its_end() -> None:
    tokens = Tokens()
    credential = tokens.credential()
    await credential.current()
    tokens.problem = "nothing in /etc/here, nothing at http://there"
    tokens.now += 900
    assert [await credential.current() for _ in range(3)] == ["token-1"] * 3
    await _fetch_ends(credential)
    assert await credential.current() == "token-1"
    assert tokens.fetched == 2, "the next one only after a pause"
    tokens.now += 101
    for _ in range(3):
        with pytest.raises(CredentialError, match="nothing in /etc/here, nothing at http://there"):
            await credential.current()
    assert tokens.fetched == 3
    tokens.problem = None
    tokens.now += 6
    assert await credential.current() == "token-4"


async def test_a_refused_token_is_fetched_again_at_once() -> None:
    tokens = Tokens()
    credential = tokens.credential()
    await credential.current()
    assert await asyncio.gather(*(credential.refresh(1) for _ in range(20))) == [True] * 20
    assert (credential.value, tokens.fetched) == ("token-2", 2)


async def test_a_token_that_has_ended_when_it_comes_is_no_credential() -> None:
    tokens = Tokens()
    credential = Credential(tokens, clock=lambda: tokens.now + 2_000)
    with pytest.raises(CredentialError, match="already ended: check the clock"):
        await credential.current()


PRINTS = "import sys; p = sys.argv[1]; n = len(open(p).read()); open(p, 'a').write('x'); print(f'secret-{n}')"


@asynccontextmanager
async def noting(refused: str = "") -> AsyncGenerator[tuple[str, list[dict[str, str]]]]:
    seen: list[dict[str, str]] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(dict(request.headers))
        if refused and refused in str(seen[-1]):
            return web.json_response({"error": {"message": f"{refused} is no good"}}, status=401)
        return web.json_response(ANSWER)

    async with answering(note) as origin:
        yield origin, seen


def command(tmp_path: Path, **more: Any) -> CommandAuth:
    file = tmp_path / "runs"
    file.write_text("")
    return CommandAuth(command=(sys.executable, "-c", PRINTS, str(file)), **more)


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        ({}, "Authorization", "Bearer secret-0"),
        ({"scheme": "Token"}, "Authorization", "Token secret-0"),
        ({"header": "X-Gateway-Key"}, "X-Gateway-Key", "secret-0"),
    ],
)
@pytest.mark.parametrize("kind", ["openai", "azure", "anthropic"])
async def test_a_command_gives_the_credential_of_any_header(
    kind: str, more: dict[str, str], name: str, value: str, tmp_path: Path
) -> None:
    async with noting() as (origin, seen):
        chosen = settings(kind, origin, api_key=None, auth=command(tmp_path, **more))
        answer = {"content": "hi"} if kind == "anthropic" else ANSWER
        assert answer
        if kind == "anthropic":
            with pytest.raises(CallError, match="no content"):
                await perform(chosen)
        else:
            await perform(chosen)
    assert seen[0][name] == value
    assert not {"api-key", "x-api-key"} & {header.lower() for header in seen[0]}


async def test_a_command_runs_again_when_its_time_is_over_and_after_a_refusal(tmp_path: Path) -> None:
    async with noting(refused="secret-0") as (origin, seen):
        provider = settings("openai", origin, api_key=None, auth=command(tmp_path, refresh_s=1)).open()
        with pytest.raises(CallError) as caught:
            await provider.perform(call())
        assert "secret-0" not in str(caught.value)
        assert await provider.refresh_credential(caught.value.credential) is True
        await provider.perform(call())
        await asyncio.sleep(1.1)
        await provider.perform(call())
        for _ in range(200):
            if seen[-1]["Authorization"] != "Bearer secret-1":
                break
            await asyncio.sleep(0.02)
            await provider.perform(call())
        await provider.close()
    used = [headers["Authorization"] for headers in seen]
    assert used[:2] == ["Bearer secret-0", "Bearer secret-1"]
    assert used[-1] == "Bearer secret-2"


async def test_a_command_that_fails_is_a_failure_of_the_call_before_anything_is_sent() -> None:
    async with noting() as (origin, seen):
        error = await failure(settings("openai", origin, api_key=None, auth=CommandAuth(command=("no-such-program",))))
    words = "the secret command no-such-program can't be used: No such file or directory"
    assert isinstance(error.failure, TransportFailure)
    assert replace(error.failure, wait_s=None) == TransportFailure("network", "CredentialError", words)
    assert RETRY_S - 1 < (error.failure.wait_s or 0) <= RETRY_S, "nobody looks for it before"
    assert not error.maybe_billed
    assert not seen


async def test_a_slow_command_does_not_outlast_the_call() -> None:
    async with noting() as (origin, seen):
        auth = CommandAuth(command=(sys.executable, "-c", "import time; time.sleep(2)"))
        error = await failure(settings("openai", origin, api_key=None, auth=auth), call(timeout_s=0.1))
    assert "the output of the secret command gives no credential within 0.1 s" in str(error)
    assert not seen


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"api_key": {"env": "A"}, "auth": {"command": ["x"]}}, "give either api_key or auth"),
        ({"proxy_auth": {"env": "A"}}, "proxy_auth is set without proxy"),
        ({"proxy": "http://user:secret@proxy"}, "proxy"),
        ({"organization": "two lines\n"}, "organization"),
        ({"auth": {"command": ["x"], "refresh_s": 0}}, "refresh_s"),
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        OpenAISettings.model_validate({"base_url": "http://x/v1", **fields})


async def test_organization_and_project_go_with_every_call() -> None:
    async with noting() as (origin, seen):
        await perform(settings("openai", origin, organization="org-1", project="proj_2", headers={"X-A": "b"}))
    assert (seen[0]["OpenAI-Organization"], seen[0]["OpenAI-Project"], seen[0]["X-A"]) == ("org-1", "proj_2", "b")


class MutualTls:
    """A server that demands certificates of an authority, and notes those that it saw."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.directory = directory
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.seen: list[int] = []

    def issue(self) -> Path:
        cert = self.authority.issue_cert("client.example")
        file = self.directory / "client.pem"
        cert.private_key_and_cert_chain_pem.write_to_path(str(file))
        return file

    def issue_apart(self, cert: Path, key: Path) -> None:
        issued = self.authority.issue_cert("client.example")
        issued.private_key_pem.write_to_path(str(key))
        issued.cert_chain_pems[0].write_to_path(str(cert))

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[str]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.authority.issue_cert("localhost").configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            assert request.transport is not None
            self.seen.append(request.transport.get_extra_info("peercert")["serialNumber"])
            return web.json_response(ANSWER, headers={"Connection": "close"})

        runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, "localhost", 0, ssl_context=context).start()
            yield f"https://localhost:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def test_a_client_certificate_is_shown_and_a_replaced_one_is_used_by_new_connections(tmp_path: Path) -> None:
    server = MutualTls(tmp_path)
    file = server.issue()
    async with server.serve() as origin:
        provider = settings("openai", origin, tls=TlsFiles(ca=server.ca, cert=file)).open()
        await provider.perform(call())
        file.write_text("half of a certif")
        await asyncio.sleep(LOOK_EVERY_S)
        await provider.perform(call())
        server.issue()
        await asyncio.sleep(LOOK_EVERY_S)
        await provider.perform(call())
        await provider.close()
        error = await failure(settings("openai", origin, tls=TlsFiles(ca=server.ca)))
        assert isinstance(error.failure, TransportFailure)
        error = await failure(settings("openai", origin))
        assert "signed by an authority that the system does not trust" in str(error)
    first, second, third = server.seen
    assert first == second != third


async def test_a_certificate_and_its_key_are_replaced_one_after_the_other_without_a_failed_call(tmp_path: Path) -> None:
    server = MutualTls(tmp_path)
    files = TlsFiles(ca=server.ca, cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    async with server.serve() as origin:
        server.issue_apart(tmp_path / "cert.pem", tmp_path / "key.pem")
        provider = settings("openai", origin, tls=files).open()
        await provider.perform(call())
        server.issue_apart(tmp_path / "cert.pem", tmp_path / "new-key.pem")
        await asyncio.sleep(LOOK_EVERY_S)
        await provider.perform(call())
        (tmp_path / "new-key.pem").replace(tmp_path / "key.pem")
        await asyncio.sleep(LOOK_EVERY_S)
        await provider.perform(call())
        await provider.close()
    first, second, third = server.seen
    assert first == second != third


async def test_another_authority_is_trusted_once_its_file_is_replaced(tmp_path: Path) -> None:
    server = MutualTls(tmp_path)
    ca = tmp_path / "trusted.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    async with server.serve() as origin:
        provider = settings("openai", origin, tls=TlsFiles(ca=ca, cert=server.issue())).open()
        with pytest.raises(CallError, match="an authority that the system does not trust"):
            await provider.perform(call())
        ca.write_text(server.ca.read_text())
        await asyncio.sleep(LOOK_EVERY_S)
        await provider.perform(call())
        await provider.close()


async def test_the_files_of_certificates_are_looked_at_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MutualTls(tmp_path)
    in_loop = list[str]()
    stat = Path.stat

    def noting_stat(path: Path, **options: Any) -> Any:
        if path.parent == tmp_path and threading.current_thread() is threading.main_thread():
            in_loop.append(path.name)
        return stat(path, **options)

    async with server.serve() as origin:
        provider = settings("openai", origin, tls=TlsFiles(ca=server.ca, cert=server.issue())).open()
        monkeypatch.setattr(Path, "stat", noting_stat)
        for _ in range(3):
            await provider.perform(call())
        await provider.close()
    assert not in_loop


def test_certificates_that_cannot_be_used_are_errors_of_the_config(tmp_path: Path) -> None:
    odd = tmp_path / "odd.pem"
    odd.write_text("odd")
    for files, problem in (
        (TlsFiles(cert=odd), "tls.cert: .*odd.pem: not a valid PEM file"),
        (TlsFiles(ca=odd), "tls.ca: .*odd.pem: not a valid PEM file"),
        (TlsFiles(ca=tmp_path / "none"), "tls.ca: .*No such file"),
        (TlsFiles(key=odd), "tls.key is set without tls.cert"),
    ):
        with pytest.raises(ConfigError, match=problem):
            settings("openai", "https://x", tls=files).open()


async def test_calls_go_through_the_proxy_with_its_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_AUTH", "me:proxy-secret-1")
    seen: list[tuple[str, str | None]] = []

    async def relay(request: web.BaseRequest) -> web.StreamResponse:
        seen.append((request.raw_path, request.headers.get("Proxy-Authorization")))
        return web.json_response(ANSWER)

    async with answering(relay) as proxy:
        chosen = settings("openai", "http://provider.example", proxy=proxy, proxy_auth=SecretRef(env="PROXY_AUTH"))
        await perform(chosen)
        monkeypatch.setenv("PROXY_AUTH", "me")
        with pytest.raises(ConfigError, match="proxy_auth must hold user:password"):
            chosen.open()
    expected = encode_basic_auth("me", "proxy-secret-1")
    assert seen == [("http://provider.example/v1/chat/completions", expected)]


async def test_a_tunnel_through_the_proxy_is_asked_for_with_its_credential_and_not_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROXY_AUTH", "me:proxy-secret-1")
    heads: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    auth = SecretRef(env="PROXY_AUTH")
    error = await failure(settings("openai", "https://provider.example", proxy=proxy, proxy_auth=auth))
    server.close()
    assert heads[0].startswith("CONNECT provider.example:443 HTTP/1.1")
    assert encode_basic_auth("me", "proxy-secret-1") in heads[0]
    assert KEY not in heads[0]
    assert "proxy-secret-1" not in str(error)
