"""Who holds connections without end keeps nobody else out: strangers by bodies that never come, keys by waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from breakwater.identity.api_keys import create_key
from tests.held_connections import held, received
from tests.helpers import until
from tests.services.request.conftest import CONFIG, HttpApi, StartApi, answer_jobs, new_id

OPENID = """
console:
  url: https://console.example
  openid: {issuer: "https://issuer.example", client_id: breakwater, default_role: viewer}
"""


MOST = 200
ATTACKERS = MOST + 100


@pytest_asyncio.fixture(loop_scope="package")
async def api(start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[HttpApi]:
    """An HTTP API that takes a tenth of the usual number of connections."""
    monkeypatch.setattr("breakwater.kernel.http.server.MAX_CONNECTIONS", MOST)
    monkeypatch.setattr("breakwater.kernel.http.server._FOR_STRANGERS", MOST // 10)
    async with start_api(CONFIG + OPENID) as api:
        await answer_jobs(api.bus, agents="writer")
        yield api


async def all_goes_on(api: HttpApi) -> None:
    """The health is answered within a second, over a new connection, and another key's job gets its answer."""
    begun = time.monotonic()
    health = await api.ask("GET", "/healthz", headers={"Connection": "close"})
    assert health.status == 200
    assert time.monotonic() - begun < 1.0
    done = await api.post({"agent": "writer", "prompt": "x"}, query="?wait_s=20", Connection="close")
    assert (done.status, done.json["output"]) == (200, "answer to x")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nX-More: ",
        b"POST /api/v1/openid/complete HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
        b"POST /api/v1/openid/complete HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
    ],
    ids=["nothing", "headers", "body", "chunks", "another"],
)
async def test_who_has_no_key_and_sends_half_a_request_keeps_nobody_out(api: HttpApi, sent: bytes) -> None:
    async with held(api.settings.http_port, sent, ATTACKERS):
        for _ in range(3):
            await all_goes_on(api)


async def test_a_body_without_a_key_has_little_time_and_is_small(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.kernel.http.bodies.OPEN_BODY_S", 0.2)
    path = b"POST /api/v1/openid/complete HTTP/1.1\r\nHost: x\r\n"
    async with held(api.settings.http_port, path + b"Content-Length: 500\r\n\r\n{", 100) as connections:
        await asyncio.sleep(0.3)
        assert await received(connections) == {b"408": 100}
    async with held(api.settings.http_port, path + b"Content-Length: 9000\r\n\r\n{", 100) as connections:
        assert await received(connections) == {b"413": 100}


@pytest.mark.parametrize(
    "path",
    [
        "GET /api/v1/jobs/{job_id}?wait_s=300",
        "POST /api/v1/jobs?wait_s=300",
        "POST /api/v1/jobs",
        "POST /api/v1/jobs/{job_id}/cancel",
        "POST /v1/chat/completions",
        "POST /api/v1/plans",
    ],
)
async def test_one_key_leaves_connections_to_others(api: HttpApi, path: str) -> None:
    hostile = create_key(api.settings.api_keys_file, "hostile", ("submit",), agents=("reader",))
    job_id = new_id()
    headers = {"Authorization": f"Bearer {hostile}"}
    await api.post({"agent": "reader", "prompt": "x", "job_id": job_id}, **headers)

    async def known() -> bool:
        return (await api.ask("GET", f"/api/v1/jobs/{job_id}", headers=headers)).status == 202

    await until(known)
    length = "" if path.startswith("GET") else "Content-Length: 500\r\n"
    sent = f"{path.format(job_id=job_id)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {hostile}\r\n{length}\r\n"
    async with held(api.settings.http_port, sent.encode(), ATTACKERS) as connections:
        for _ in range(3):
            await all_goes_on(api)
        answers = await received(connections)
        # 503: those that connect faster than a busy machine answers.
        assert answers.keys() <= {b"429", b"503"}
        least = ATTACKERS - MOST // 2
        assert least <= sum(answers.values())
        assert answers[b"429"] < least + 50  # connections of others may be open at that moment, too
