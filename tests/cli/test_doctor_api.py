"""What the doctor says of the HTTP API, of the key, and of the console."""

from typing import Any

import pytest

from breakwater.cli.doctor_checks import api_findings, console_findings
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port
from tests.cli.api_stub import KEY, Stub, problem, serving


async def reported(stub: Stub, monkeypatch: pytest.MonkeyPatch, key: str = KEY) -> list[tuple[str, str]]:
    monkeypatch.setenv("BREAKWATER_URL", stub.url)
    monkeypatch.setenv("BREAKWATER_API_KEY", key)
    # Asked without a key, as it is of an interface of ours.
    stub.answers["GET /readyz"] = (200, {"status": "ready"})
    return [(one.verdict, one.text) async for one in api_findings(PlaneLocation(None)) if "ready" not in one.text]


async def test_what_the_key_may_do_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as stub:
        stub.answers["GET key"] = (200, {"id": "0", "name": "laptop", "scopes": ["submit", "read"]})
        assert await reported(stub, monkeypatch) == [("ok", "the API key 'laptop' may submit, read")]


@pytest.mark.parametrize(
    ("key", "answer", "verdict", "words"),
    [
        ("bw_wrong", None, "fail", "the API key is not accepted"),
        ("", None, "warn", "no API key was tried"),
        (KEY, (404, problem("not_found", "no")), "warn", "the rights of the API key are unknown (404)"),
    ],
)
async def test_a_key_that_does_not_open_is_reported(
    monkeypatch: pytest.MonkeyPatch, key: str, answer: Any, verdict: str, words: str
) -> None:
    async with serving() as stub:
        if answer is not None:
            stub.answers["GET key"] = answer
        assert await reported(stub, monkeypatch, key) == [(verdict, words)]


async def test_a_console_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(PlaneLocation, "console_url", nowhere)
    [finding] = [one async for one in console_findings(PlaneLocation(None))]
    assert finding.verdict == "warn"
    assert nowhere in finding.text
    monkeypatch.setattr(PlaneLocation, "console_url", None)
    assert [one async for one in console_findings(PlaneLocation(None))] == []
