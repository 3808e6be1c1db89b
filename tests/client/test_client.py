"""The client of the HTTP API, against a server that answers as configured."""

from __future__ import annotations

import pytest
from aiohttp import web
from pydantic import SecretStr

from breakwater.breakers.contract import BreakerStatus
from breakwater.client import (
    ApiClient,
    ApiError,
    ApiKeyRefusedError,
    ApiRefusedError,
    ApiUnavailableError,
    UnexpectedResponseError,
    parse,
)
from tests.cli.api_stub import KEY, problem, serving
from tests.tables import each_row


async def test_a_document_is_read_with_the_parameters_that_are_given() -> None:
    async with serving() as stub, ApiClient(stub.url + "/", KEY) as api:
        stub.answers["GET alerts"] = (200, {"alerts": []})
        assert await api.get("alerts", {"status": "all", "limit": 5, "agent": None, "event": ""}) == {"alerts": []}
        assert stub.queries == [{"status": "all", "limit": "5"}]


async def test_an_action_sends_the_fields_that_are_given() -> None:
    async with serving() as stub, ApiClient(stub.url, SecretStr(KEY)) as api:
        stub.answers["POST jobs"] = (202, {"job_id": "a"})
        assert await api.post("jobs", {"n": 2**70, "reason": None}) == {"job_id": "a"}
        assert (await api.request("POST", "jobs", body={"n": None}, query={"wait_s": 0.5})).status == 202
        assert [body for _, body in stub.asked] == [{"n": 2**70}, {"n": None}]


async def test_connections_are_shared_by_keys() -> None:
    async with serving() as stub, ApiClient(stub.url) as api:
        stub.answers["GET key"] = (200, {})
        with pytest.raises(ApiKeyRefusedError):
            await api.get("key")
        assert await api.with_key(KEY).get("key") == {}


@each_row(
    ("answer", "kind", "code", "message"),
    [
        ((404, problem("unknown_breaker", "no such")), ApiRefusedError, "unknown_breaker", "no such"),
        ((503, problem("state_unavailable", "Redis")), ApiRefusedError, "state_unavailable", "Redis"),
        ((404, "Not Found"), UnexpectedResponseError, "http", "(404) does not come from Breakwater's HTTP API"),
        ((200, "<html>"), UnexpectedResponseError, "http", "(200) does not come from Breakwater's HTTP API"),
        ((200, None), ApiUnavailableError, "unreachable", "no response from"),
    ],
)
async def test_errors_are_one_tree(answer: tuple[int, object], kind: type[ApiError], code: str, message: str) -> None:
    async with serving() as stub, ApiClient(stub.url, KEY) as api:
        stub.answers["GET breakers"] = answer
        with pytest.raises(kind) as raised:
            await api.get("breakers")
        assert raised.value.code == code
        assert message in raised.value.message


async def test_it_is_known_whether_a_request_may_have_arrived() -> None:
    async with ApiClient("http://127.0.0.1:9") as api:
        with pytest.raises(ApiUnavailableError, match="no server at") as raised:
            await api.post("breakers/reset", {})
        assert not raised.value.connected
    async with serving() as stub, ApiClient(stub.url, KEY) as api:
        stub.answers["POST breakers/reset"] = (200, None)
        with pytest.raises(ApiUnavailableError, match="no response from") as raised:
            await api.post("breakers/reset", {})
        assert raised.value.connected


def test_another_versions_message_is_no_response_of_ours() -> None:
    with pytest.raises(UnexpectedResponseError):
        parse(BreakerStatus, {"agent": "a"})


async def test_a_stream_is_read_line_by_line() -> None:
    async def lines(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\ntwo\n")
        return response

    async with serving({"/api/v1/jobs/a%2Fb/progress": lines}) as stub, ApiClient(stub.url, KEY) as api:
        async with api.open_stream("jobs/a%2Fb/progress") as content:
            assert [line async for line in content] == [b"one\n", b"two\n"]
        with pytest.raises(UnexpectedResponseError):
            async with api.open_stream("other"):
                pass
