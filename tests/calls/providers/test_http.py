"""Every way in which a call over HTTP can fail, for every kind of provider that is called over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from breakwater.calls.providers.base import CallError
from breakwater.calls.providers.http import MAX_ANSWER_BYTES
from breakwater.calls.rules.classify import BrokenAnswer, EmptyAnswer, HttpFailure, TransportFailure, classify
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.local.ports import free_port
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from breakwater.redaction.settings import RedactionRules
from tests.calls.providers.kit import KEY, KINDS, answering, call, failure, perform, saying, settings, silent
from tests.flow.kit import model
from tests.tables import each_row

pytestmark = pytest.mark.parametrize("kind", KINDS)

STATUSES = (302, 400, 401, 402, 403, 404, 418, 422, 429, 500, 502, 503, 504, 529)
TIMEOUTS_S = 0.5, 5.0, 50.0
"""Of a call that is tried again where the machine was too busy to send its request in time."""
REPORTED = {"openai": Usage(120, 40, 0), "azure": Usage(120, 40, 0), "anthropic": Usage(120, 40, 0, 0)}


async def failing(kind: str, fault: dict[str, Any], **behaviour: Any) -> CallError:
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model(fault, **behaviour)}}) as sim:
        failed = await failure(settings(kind, sim.url.removesuffix("/v1")))
        assert sim.ledger.totals.calls + sim.ledger.totals.in_progress == 1, "it must never retry by itself"
    assert failed.credential == 1
    return failed


@each_row("status", STATUSES)
async def test_an_error_brings_its_status_and_its_words_and_was_not_billed(kind: str, status: int) -> None:
    failed = await failing(kind, {"status": status, "error": {"message": "Because of reasons."}})
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.message) == (status, "Because of reasons.")
    assert (failed.maybe_billed, failed.usage) == (False, None)


async def test_a_rate_limit_brings_the_wait(kind: str) -> None:
    failed = await failing(kind, {"status": 429, "retry_after_s": 3})
    assert isinstance(failed.failure, HttpFailure)
    assert float(failed.failure.headers["retry-after"]) == 3


@each_row("fault", [{"status": 201}, {"status": 202}, {"status": 206}, {"kind": "byte_order_mark"}])
async def test_any_2xx_with_a_valid_body_is_an_answer_with_its_usage(kind: str, fault: dict[str, Any]) -> None:
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model(fault, answer="hi")}}) as sim:
        answered = await perform(settings(kind, sim.url.removesuffix("/v1")))
        assert sim.ledger.totals.billed_calls == 1
    assert (answered.output, answered.usage) == ("hi", REPORTED[kind])


@each_row(("status", "body"), [(202, {"id": "queued"}), (204, b""), (299, b"accepted")])
async def test_any_other_2xx_is_a_broken_answer_that_may_have_been_billed(kind: str, status: int, body: Any) -> None:
    async with saying(body, status) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, BrokenAnswer)
    assert (failed.failure.status, failed.maybe_billed) == (status, True)


@each_row(
    ("fault", "words"),
    [
        ("malformed_json", "not JSON"),
        ("empty_body", "body is empty"),
        ("no_choices", "has no "),
        ("truncated", "truncated after"),
    ],
)
async def test_a_200_that_cannot_be_used_may_have_been_billed(kind: str, fault: str, words: str) -> None:
    failed = await failing(kind, {"kind": fault})
    assert isinstance(failed.failure, BrokenAnswer | EmptyAnswer)
    assert words in failed.failure.message
    assert failed.maybe_billed
    assert failed.usage == (REPORTED[kind] if fault == "no_choices" else None)


async def test_a_200_that_carries_an_error_was_not_billed(kind: str) -> None:
    failed = await failing(kind, {"kind": "error_in_200", "error": {"message": "Sorry."}})
    assert isinstance(failed.failure, BrokenAnswer | HttpFailure)
    assert "Sorry." in failed.failure.message
    assert not failed.maybe_billed


@each_row(
    ("said", "maybe_billed"),
    [
        ({}, False),
        ({"choices": [], "content": []}, False),
        ({"choices": [{"message": {"content": None}}], "content": None}, False),
        ({"usage": {"prompt_tokens": 9, "input_tokens": 9}}, False),
        ({"choices": [{"message": {"content": "hal"}}], "content": [{"type": "text", "text": "hal"}]}, True),
    ],
)
async def test_only_an_answer_that_had_begun_may_have_been_billed_with_an_error(
    kind: str, said: dict[str, Any], maybe_billed: bool
) -> None:
    async with saying({"error": {"message": "Sorry.", "code": 429}, **said}) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.maybe_billed) == (429, maybe_billed)


async def test_a_connection_that_is_reset_may_have_been_billed(kind: str) -> None:
    failed = await failing(kind, {"kind": "reset"})
    assert isinstance(failed.failure, TransportFailure)
    assert (failed.failure.kind, failed.failure.class_name) == ("network", "ConnectionResetError")
    assert failed.maybe_billed


async def test_no_answer_in_time_may_have_been_billed(kind: str) -> None:
    for timeout_s in TIMEOUTS_S:
        async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model({"hang_s": 60})}}) as sim:
            failed = await failure(settings(kind, sim.url.removesuffix("/v1")), call(timeout_s=timeout_s))
            if sim.ledger.totals.calls + sim.ledger.totals.in_progress:
                break
    assert failed.failure == TransportFailure("timeout", "TimeoutError", f"no answer within {timeout_s:g} s")
    assert (failed.maybe_billed, failed.credential) == (True, 1)


async def test_an_answer_that_stops_in_the_middle_is_a_timeout(kind: str) -> None:
    async def begin(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"choices": [')
        begun.set()
        await asyncio.sleep(60)
        return response

    begun = asyncio.Event()
    async with answering(begin) as origin:
        for timeout_s in TIMEOUTS_S:
            failed = await failure(settings(kind, origin), call(timeout_s=timeout_s))
            if begun.is_set():
                break
    assert failed.failure == TransportFailure("timeout", "TimeoutError", f"no answer within {timeout_s:g} s")
    assert failed.maybe_billed


@pytest.mark.parametrize(
    ("origin", "class_name"),
    [("http://127.0.0.1:{free}", "ConnectionRefusedError"), ("http://no-such-host.invalid", "DnsError")],
)
async def test_a_connection_that_was_never_made_was_never_billed(kind: str, origin: str, class_name: str) -> None:
    failed = await failure(settings(kind, origin.format(free=free_port())), call(timeout_s=30))
    assert isinstance(failed.failure, TransportFailure)
    assert (failed.failure.kind, failed.failure.class_name) == ("network", class_name)
    assert not failed.maybe_billed


async def test_a_failed_tls_handshake_was_never_billed(kind: str) -> None:
    async with saying({}) as origin:
        failed = await failure(settings(kind, origin.replace("http:", "https:")))
    assert isinstance(failed.failure, TransportFailure)
    assert (failed.failure.kind, failed.failure.class_name) == ("network", "TlsError")
    assert not failed.maybe_billed


async def test_a_handshake_that_takes_too_long_was_never_billed(kind: str) -> None:
    async with silent() as port:
        failed = await failure(settings(kind, f"https://127.0.0.1:{port}"), call(timeout_s=0.1))
    assert failed.failure == TransportFailure("timeout", "TimeoutError", "no answer within 0.1 s")
    assert not failed.maybe_billed


@each_row(
    ("body", "words"),
    [
        ([], "not a JSON object"),
        (None, "not a JSON object"),
        ({}, "has no "),
        ({"choices": [], "content": []}, "has no "),
        ({"choices": {}, "content": {}}, "has no "),
        ({"choices": [None], "content": [None]}, "has no "),
        ({"choices": [{}], "content": [{"type": "text"}]}, "has no "),
        ({"choices": [{"message": "hi"}], "content": [{"type": "text", "text": ""}]}, "has no "),
        (b"  ", "body is empty"),
        (b"\xff\xfe", "not JSON"),
        (b'{"choices": "' + b"x" * MAX_ANSWER_BYTES + b'"}', f"over {MAX_ANSWER_BYTES} bytes"),
    ],
)
async def test_an_odd_answer_is_a_broken_one(kind: str, body: Any, words: str) -> None:
    async with saying(body) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, BrokenAnswer | EmptyAnswer)
    assert words in failed.failure.message
    assert failed.maybe_billed


@each_row(
    "body",
    [
        b'{"choices": "' + b"x" * MAX_ANSWER_BYTES + b'"}',
        b'{"choices": ' + b"[" * 240 + b"]" * 240 + b"}",
        b"data: " + b"x" * 5_000_000 + b"\n\n",
        b'data: {"choices": ' + b"[" * 240 + b"]" * 240 + b"}\n\n",
    ],
    ids=["large", "deep", "large event", "deep event"],
)
async def test_an_answer_that_can_not_be_stored_is_not_asked_for_again(kind: str, body: bytes) -> None:
    async with saying(body) as origin:
        failed = await failure(settings(kind, origin))
    verdict = classify(failed.failure, datetime.now(UTC))
    assert (verdict.class_name, verdict.retryable, verdict.counts_for_breaker) == ("AnswerTooLargeError", False, False)
    assert failed.maybe_billed


@each_row("more", [{"error": None}, {"error": {}}, {"error": ""}, {"type": "message", "object": "chat"}])
async def test_a_200_whose_error_is_empty_is_an_answer(kind: str, more: dict[str, Any]) -> None:
    body = {"choices": [{"message": {"content": "hi"}}], "content": [{"type": "text", "text": "hi"}], **more}
    async with saying(body) as origin:
        assert (await perform(settings(kind, origin))).output == "hi"


@each_row("body", [{"error": "no"}, {"type": "error"}, {"object": "error", "message": "no"}])
async def test_an_error_is_seen_wherever_a_200_shows_it(kind: str, body: dict[str, Any]) -> None:
    whole = {"choices": [{"message": {"content": "hi"}}], "content": [{"type": "text", "text": "hi"}], **body}
    async with saying(whole) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, BrokenAnswer)
    assert "a 200 with an error in its body" in failed.failure.message


@each_row("usage", [None, [], "many", {"prompt_tokens": -1, "input_tokens": True}])
async def test_usage_that_makes_no_sense_is_unknown(kind: str, usage: Any) -> None:
    body = {"choices": [{"message": {"content": "hi"}}], "content": [{"type": "text", "text": "hi"}], "usage": usage}
    async with saying(body) as origin:
        answer = await perform(settings(kind, origin))
    assert (answer.output, replace(answer.usage, problem=None)) == ("hi", Usage(None, None))
    assert (answer.usage.problem is not None) == bool(usage)


async def test_a_body_cut_short_keeps_the_status_that_came_before_it(kind: str) -> None:
    async def cut(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(status=503, headers={"Content-Length": "1000", "Retry-After": "7"})
        await response.prepare(request)
        await response.write(b"The service is")
        assert request.transport is not None
        request.transport.close()
        return response

    async with answering(cut) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.headers["retry-after"]) == (503, "7")
    assert failed.failure.message == "The service is"


async def test_a_redirect_is_not_followed(kind: str) -> None:
    asked: list[str] = []

    async def redirect(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with answering(redirect) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, HttpFailure)
    assert failed.failure.status == 307
    assert len(asked) == 1


@pytest.mark.parametrize("status", [200, 401])
async def test_a_key_that_the_provider_repeats_is_in_no_failure(kind: str, status: int) -> None:
    body = {"error": {"message": f"Incorrect API key provided: {KEY}.", "code": KEY}}
    async with saying(body, status, **{"X-Seen": KEY}) as origin:
        failed = await failure(settings(kind, origin))
    assert isinstance(failed.failure, HttpFailure | BrokenAnswer)
    assert "Incorrect API key provided: [REDACTED]." in failed.failure.message


async def test_what_stands_for_a_key_is_the_placeholder_of_the_config(kind: str) -> None:
    async with saying({"error": {"message": f"not {KEY}"}}, 401) as origin:
        with pytest.raises(CallError, match=r"not \(gone\)"):
            await perform(settings(kind, origin), redaction=RedactionRules(placeholder="(gone)"))


async def test_what_goes_with_every_call(kind: str) -> None:
    seen: list[dict[str, str]] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        answer = {"choices": [{"message": {"content": "hi"}}], "content": [{"type": "text", "text": "hi"}]}
        return web.json_response(answer, headers={"Set-Cookie": "tracked=1"})

    async with answering(note) as origin:
        provider = settings(kind, origin, headers={"X-Team": "blue"}).open()
        for _ in range(2):
            await provider.perform(call(traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"))
        await provider.close()
    for headers in seen:
        assert (headers["x-client-request-id"], headers["x-team"]) == ("j:1", "blue")
        assert headers["content-type"] == "application/json"
        assert headers["traceparent"].startswith("00-111")
        assert "cookie" not in headers


async def test_numbers_beyond_64_bits_are_sent_as_they_are(kind: str) -> None:
    bodies: list[str] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        bodies.append((await request.read()).decode())
        return web.Response(status=400)

    async with answering(note) as origin:
        await failure(settings(kind, origin), call(params={"max_tokens": 1, "top_k": 2**70}))
    assert str(2**70) in bodies[0]


async def test_a_repr_shows_no_more_than_the_host(kind: str) -> None:
    provider = settings(kind, "http://example.invalid/with/secret-path").open()
    assert "http://example.invalid" in repr(provider)
    assert "secret-path" not in repr(provider)
    assert KEY not in repr(provider)


@each_row(
    ("origin", "more", "words"),
    [
        ("http://user:hunter22@host", {}, "must not contain user and password"),
        ("http://host:port", {}, "not a valid URL"),
        ("http:///x", {}, "not a valid URL"),
        ("http://host", {"headers": {"X-A": "b\r\nX-Injected: c"}}, "'X-A'"),
        ("http://host", {"headers": {"X A": "b"}}, "'X A'"),
        ("http://host", {"api_key": SecretRef(env="NOT_SET_ANYWHERE")}, "NOT_SET_ANYWHERE is not set"),
    ],
)
async def test_what_could_never_be_called_is_refused_at_once(
    kind: str, origin: str, more: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, ValidationError)) as caught:
        settings(kind, origin, **more).open()
    assert words in str(caught.value)
    assert "hunter22" not in str(caught.value)


async def test_a_refused_key_is_read_again_and_the_next_call_has_the_new_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SimulatedProvider({"api_keys": ["sk-new"], "models": {"m": model()}}) as sim:
        provider = settings(kind, sim.url.removesuffix("/v1")).open()
        try:
            with pytest.raises(CallError) as caught:
                await provider.perform(call())
            assert isinstance(caught.value.failure, HttpFailure)
            assert (caught.value.failure.status, caught.value.credential) == (401, 1)
            assert await provider.refresh_credential(caught.value.credential) is False
            monkeypatch.setenv("PLANTED_KEY", "sk-new")
            assert await provider.refresh_credential(caught.value.credential) is True
            assert (await provider.perform(call())).output
        finally:
            await provider.close()
