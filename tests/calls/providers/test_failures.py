from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import aiohttp
import orjson
import pytest
from aiohttp.abc import AbstractResolver
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.providers.failures import (
    MAX_ERROR_TEXT,
    carries_error,
    error_in_answer,
    http_failure,
    read_json,
    transport_failure,
)
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, TransportFailure, classify
from breakwater.local.ports import free_port
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)

OPENAI = {
    "error": {
        "message": "Rate limit reached for gpt-4o in organization org-1 on tokens per min (TPM): Limit 30000, "
        "Used 29000, Requested 2000. Please try again in 2s.",
        "type": "tokens",
        "param": None,
        "code": "rate_limit_exceeded",
    }
}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "overloaded_error", "message": "Overloaded"},
    "request_id": "req_011CSHoEeqs5C35K2UUqR7Fy",
}
GEMINI = {
    "error": {
        "code": 429,
        "message": "You exceeded your current quota.",
        "status": "RESOURCE_EXHAUSTED",
        "details": [
            {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": "PerMinute"}]},
            {"@type": "type.googleapis.com/google.rpc.Help", "links": [{"url": "https://ai.example"}]},
            {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37s"},
        ],
    }
}


@each_row("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_body_in_another_form_of_unicode_is_json(encoding: str) -> None:
    payload = orjson.dumps(OPENAI).decode().encode(encoding)
    assert read_json(payload) == OPENAI
    assert http_failure(429, payload, {}).code == "rate_limit_exceeded"


@each_row("payload", [b"", b"\xff\xfe", b"\xff\xfe{", b"\xef\xbb\xbf", b"\x00\x00\xd8\x00"])
def test_what_only_begins_like_unicode_is_no_json(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(payload)
    assert http_failure(400, payload, {}).status == 400


@each_row(
    ("status", "body", "message", "code", "type_", "delay"),
    [
        (429, OPENAI, OPENAI["error"]["message"], "rate_limit_exceeded", "tokens", 2.0),
        (529, ANTHROPIC, "Overloaded", None, "overloaded_error", None),
        (429, GEMINI, "You exceeded your current quota.", "429", "RESOURCE_EXHAUSTED", 37.0),
        (429, [GEMINI], "You exceeded your current quota.", "429", "RESOURCE_EXHAUSTED", 37.0),
        (400, {"error": "model 'x' not found, try pulling it first"}, "model 'x' not found, try pulling it first",
         None, None, None),
        (400, {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400},
         "too long", "400", "BadRequestError", None),
        (401, {"statusCode": 401, "message": "Access denied due to invalid subscription key."},
         "Access denied due to invalid subscription key.", "401", None, None),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "not an integer"}, {"msg": "field required"}]},
         "not an integer; field required", None, None, None),
        (422, {"object": "error", "message": {"detail": [{"msg": "not an integer"}]}, "type": "invalid_request_error"},
         "not an integer", None, "invalid_request_error", None),
        (500, {"error": {"type": "api_error"}}, "api_error", None, "api_error", None),
        (500, {"error": {}}, "HTTP 500 without a text", None, None, None),
        (500, {"fault": 1}, '{"fault":1}', None, None, None),
    ],
)  # fmt: skip
def test_the_error_bodies_of_providers_are_read(
    status: int, body: Any, message: str, code: str | None, type_: str | None, delay: float | None
) -> None:
    failure = http_failure(status, orjson.dumps(body), {"X-Request-Id": "r", "Retry-After": "1"})
    headers = {"x-request-id": "r", "retry-after": "1"}
    assert replace(failure, param=None, limits=()) == HttpFailure(status, message, code, type_, headers, delay)


@each_row(
    ("payload", "message"),
    [
        (b"", "HTTP 502 without a text"),
        (b"  \n", "HTTP 502 without a text"),
        (b"upstream connect error or disconnect/reset before headers\n", "upstream connect error or disconnect/reset"
         " before headers"),
        (b"<html>\r\n<head><title>502 Bad\n Gateway</title></head><body><h1>no</h1>", "502 Bad Gateway"),
        (b"<!DOCTYPE html><html><title>Tom &amp; Jerry</title>", "Tom & Jerry"),
        (b"<!doctype html><style>p {}</style><script>let a = 1</script><!-- hi --><p>Error <b>1015</b></p> limited",
         "Error 1015 limited"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "AccessDenied"),
        (b"<html><title></title></html>", "HTTP 502 without a text"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"error": {"mess', '{"error": {"mess'),
        (b"<3 is not a page", "<3 is not a page"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_is_its_text(payload: bytes, message: str) -> None:
    assert http_failure(502, payload, {}).message == message


@pytest.mark.parametrize("payload", [b"xyz " * 20_000, orjson.dumps({"error": {"message": "xyz " * 20_000}})])
def test_a_text_is_cut_between_words(payload: bytes) -> None:
    message = http_failure(500, payload, {}).message
    assert MAX_ERROR_TEXT - 4 <= len(message) <= MAX_ERROR_TEXT
    assert message.endswith("xyz")
    assert len(http_failure(500, b"<html><p>" + payload, {}).message) <= MAX_ERROR_TEXT


def test_no_half_of_a_word_is_left_anywhere() -> None:
    for length in (199, 200, 3_999, 4_000, 15_999, 16_000):
        text = "x" * (length - 4) + " sk-1234"
        title = f"<html><title>{text}</title>".encode()
        bodies = (
            text.encode(),
            title,
            f"<html><p>{text}".encode(),
            orjson.dumps({"error": {"message": "m", "code": text}}),
        )
        for body in bodies:
            failed = http_failure(500, body, {})
            for said in (failed.message, failed.code or ""):
                assert "sk-1" not in said.replace("sk-1234", "")


@each_row(
    ("body", "status", "class_name"),
    [
        ({"error": {"code": 429, "message": "slow down"}}, 429, "RateLimitError"),
        ({"error": {"code": "503", "message": "no"}}, 503, "ServiceUnavailableError"),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}, 400, "BadRequestError"),
        ({"type": "error", "error": {"type": "authentication_error", "message": "no"}}, 401, "UnauthorizedError"),
        ({"type": "error", "error": {"type": "billing_error", "message": "no"}}, 402, "QuotaExceededError"),
        ({"type": "error", "error": {"type": "permission_error", "message": "no"}}, 403, "ForbiddenError"),
        ({"type": "error", "error": {"type": "not_found_error", "message": "no"}}, 404, "NotFoundError"),
        ({"type": "error", "error": {"type": "request_too_large", "message": "no"}}, 413, "RequestTooLargeError"),
        ({"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}, 429, "RateLimitError"),
        ({"type": "error", "error": {"type": "api_error", "message": "no"}}, 500, "ServerError"),
        ({"type": "error", "error": {"type": "timeout_error", "message": "no"}}, 504, "GatewayTimeoutError"),
        (ANTHROPIC, 529, "OverloadedError"),
        ({"error": {"status": "INVALID_ARGUMENT", "message": "no"}}, 400, "BadRequestError"),
        ({"error": {"status": "UNAUTHENTICATED", "message": "no"}}, 401, "UnauthorizedError"),
        ({"error": {"status": "PERMISSION_DENIED", "message": "no"}}, 403, "ForbiddenError"),
        ({"error": {"status": "NOT_FOUND", "message": "no"}}, 404, "NotFoundError"),
        ({"error": {"status": "RESOURCE_EXHAUSTED", "message": "no"}}, 429, "RateLimitError"),
        ({"error": {"status": "INTERNAL", "message": "no"}}, 500, "ServerError"),
        ({"error": {"status": "UNAVAILABLE", "message": "no"}}, 503, "ServiceUnavailableError"),
        ({"error": {"status": "DEADLINE_EXCEEDED", "message": "no"}}, 504, "GatewayTimeoutError"),
        (GEMINI, 429, "RateLimitError"),
        (OPENAI, 429, "RateLimitError"),
        ({"error": {"type": "invalid_request_error", "code": "invalid_api_key"}}, 401, "UnauthorizedError"),
        ({"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}, 429, "QuotaExceededError"),
        ({"error": {"code": "context_length_exceeded", "message": "no"}}, 400, "ContextOverflowError"),
        ({"object": "error", "message": "no", "type": "NotFoundError", "code": 404}, 404, "NotFoundError"),
    ],
)
def test_a_200_that_says_which_error_it_is_is_that_error(body: dict[str, Any], status: int, class_name: str) -> None:
    failure = error_in_answer(body)
    assert isinstance(failure, HttpFailure)
    assert failure.status == status
    assert classify(failure, NOW).class_name == class_name


def test_a_delay_in_a_200_is_kept() -> None:
    failure = error_in_answer(GEMINI)
    assert classify(failure, NOW).retry_after_s == 37


@each_row(
    "body",
    [
        {"error": "something broke"},
        {"error": {"message": "something broke"}},
        {"error": {"message": "something broke", "type": "server_error", "code": None}},
        {"error": {"message": "something broke", "code": 200}},
        {"error": {"message": "something broke", "code": 12345}},
        {"error": {"message": "something broke", "code": True}},
        {"object": "error", "message": "something broke"},
        {"error": {"message": "something broke"}, "choices": [{"message": {"content": "half an ans"}}]},
    ],
)
def test_a_200_with_an_error_of_no_known_sort_is_a_broken_answer(body: dict[str, Any]) -> None:
    assert error_in_answer(body) == BrokenAnswer("a 200 with an error in its body: something broke")


@each_row("body", [{"error": True}, {"error": ["x"]}, {"type": "error"}, {"object": "error"}])
def test_an_error_that_says_nothing_is_still_one(body: dict[str, Any]) -> None:
    assert error_in_answer(body) == BrokenAnswer("a 200 with an error in its body: an error without a text")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "error",
                    "message",
                    "code",
                    "type",
                    "status",
                    "details",
                    "retryDelay",
                    "detail",
                    "object",
                    "metadata",
                    "raw",
                    "headers",
                    "violations",
                    "quotaId",
                    "resets_at",
                    "resets_in_seconds",
                    "loc",
                    "base_resp",
                    "status_code",
                    "status_msg",
                    "msg",
                    "limit_source",
                    "choices",
                    "content",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON, st.integers(100, 999))
def test_no_body_breaks_the_reading(body: Any, status: int) -> None:
    failure = http_failure(status, orjson.dumps(body), {})
    assert failure.status == status
    assert failure.message
    assert isinstance(classify(failure, NOW).message, str)
    if isinstance(body, dict):
        assert isinstance(carries_error(body), bool)
        error_in_answer(body)


@settings(deadline=None)
@given(st.binary() | st.text(alphabet="<>!-/title scrp").map(str.encode))
def test_no_bytes_break_the_reading(payload: bytes) -> None:
    assert http_failure(500, payload, {}).message


@each_row(
    "unit",
    [
        "<title",
        "<script>",
        "<!--",
        "<",
        "&lt;",
        "try again in 1",
        "[",
        '{"error":',
        "exceeded ",
        "prompt exceeds ",
        "usage limit a ",
        "rate a ",
        "hit a-",
        "until 2026-01-01 ",
    ],
)
def test_a_hostile_page_is_read_in_no_time(unit: str) -> None:
    payload = ("<html>" + unit * 40_000).encode()
    started = time.process_time()
    classify(http_failure(400, payload, {}), NOW)
    classify(http_failure(400, payload[6:], {}), NOW)
    assert time.process_time() - started < 3, "what is quadratic takes longer"


# The network

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class NoSuchHost(AbstractResolver):
    async def resolve(self, host: str, port: int = 0, family: int = 0) -> NoReturn:  # noqa: ARG002
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def close(self) -> None:
        pass


async def get(url: str, timeout_s: float = 5.0) -> TransportFailure:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(resolver=NoSuchHost())
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        with pytest.raises((aiohttp.ClientError, OSError)) as caught:
            async with session.get(url) as response:
                await response.read()
    return transport_failure(caught.value)


async def serve(handler: Handler, scheme: str = "http", timeout_s: float = 5.0) -> TransportFailure:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        return await get(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout_s)
    finally:
        server.close()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65_536)
    writer.close()


async def stop_halfway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65_536)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()


async def say_no_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65_536)
    writer.write(b"hello there\r\n\r\n")
    await writer.drain()
    writer.close()


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_a_refused_connection_is_named() -> None:
    failure = await get(f"http://127.0.0.1:{free_port()}/")
    assert (failure.kind, failure.class_name) == ("network", "ConnectionRefusedError")
    assert failure.message.endswith("it is not running, or not at this address (ECONNREFUSED)")


async def test_an_unknown_host_is_named() -> None:
    failure = await get("http://no-such-host.invalid/")
    assert (failure.kind, failure.class_name) == ("network", "DnsError")


@each_row(
    ("handler", "scheme", "class_name"),
    [
        (reset, "http", "ConnectionResetError"),
        (reset, "https", "ConnectionResetError"),
        (hang_up, "http", "ServerDisconnectedError"),
        (hang_up, "https", "ConnectionResetError"),
        (stop_halfway, "http", "TruncatedAnswerError"),
        (stop_halfway, "https", "TlsError"),
        (say_no_http, "http", "ClientResponseError"),
    ],
)
async def test_a_connection_that_fails_is_named_by_its_cause(handler: Handler, scheme: str, class_name: str) -> None:
    failure = await serve(handler, scheme)
    assert (failure.kind, failure.class_name) == ("network", class_name)
    assert failure.message
    verdict = classify(failure, NOW)
    assert (verdict.class_name, verdict.retryable, verdict.counts_for_breaker) == (class_name, True, True)


async def test_no_answer_in_time_is_a_timeout() -> None:
    failure = await serve(say_nothing, timeout_s=0.1)
    assert (failure.kind, failure.class_name) == ("timeout", "TimeoutError")
    assert failure.message


KEY: Any = aiohttp.client_reqrep.ConnectionKey("h", 443, True, True, None, None, None, None)  # pyright: ignore


@each_row(
    ("error", "kind", "class_name"),
    [
        (TimeoutError(), "timeout", "TimeoutError"),
        (TimeoutError(110, "Connection timed out"), "timeout", "TimeoutError"),
        (aiohttp.ServerTimeoutError("Connection timeout"), "timeout", "TimeoutError"),
        (aiohttp.ClientConnectorError(KEY, TimeoutError(110, "Connect call failed")), "timeout", "TimeoutError"),
        (ConnectionRefusedError(111, "refused"), "network", "ConnectionRefusedError"),
        (ConnectionResetError(104, "reset"), "network", "ConnectionResetError"),
        (BrokenPipeError(32, "broken pipe"), "network", "ConnectionResetError"),
        (aiohttp.ClientConnectionResetError("Cannot write to closing transport"), "network", "ConnectionResetError"),
        (aiohttp.ClientOSError(104, "reset"), "network", "ConnectionResetError"),
        (OSError(113, "No route to host"), "network", "HostUnreachableError"),
        (OSError(101, "Network is unreachable"), "network", "HostUnreachableError"),
        (aiohttp.ClientConnectorError(KEY, OSError(101, "unreachable")), "network", "HostUnreachableError"),
        (socket.gaierror(-2, "Name or service not known"), "network", "DnsError"),
        (aiohttp.ClientConnectorDNSError(KEY, OSError(None, "Timeout while contacting DNS servers")), "network",
         "DnsError"),
        (ssl.SSLError(1, "wrong version number"), "network", "TlsError"),
        (ssl.SSLCertVerificationError("certificate has expired"), "network", "TlsError"),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "no")), "network", "TlsError"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError("expired")), "network", "TlsError"),
        (aiohttp.ServerFingerprintMismatch(b"a", b"b", "h", 443), "network", "TlsError"),
        (aiohttp.ClientPayloadError("Response payload is not completed"), "network", "TruncatedAnswerError"),
        (OSError("odd"), "network", "OSError"),
        (aiohttp.TooManyRedirects(None, ()), "network", "TooManyRedirectsError"),  # pyright: ignore
    ],
)  # fmt: skip
def test_every_error_has_a_kind_and_a_class(error: BaseException, kind: str, class_name: str) -> None:
    failure = transport_failure(error)
    assert (failure.kind, failure.class_name) == (kind, class_name)
    assert failure.message
    assert not any(text in failure.message for text in error.args if isinstance(text, str) and len(text) > 9)


@pytest.mark.parametrize(("number", "words"), [(10, "has expired"), (62, "is for another"), (4711, "is not valid")])
def test_what_is_wrong_with_a_certificate_is_said(number: int, words: str) -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1006)")
    error.verify_code = number
    message = transport_failure(aiohttp.ClientConnectorCertificateError(KEY, error)).message
    assert message.startswith(f"the provider's certificate {words}")
    assert "_ssl" not in message


def test_a_url_that_may_hold_a_secret_is_not_repeated() -> None:
    assert "secret" not in transport_failure(aiohttp.InvalidURL("http://user:secret@host:99999/")).message


def test_it_is_read_without_a_client_library() -> None:
    program = "import sys, breakwater.calls.providers.failures; sys.exit('aiohttp' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_param_is_the_name_of_a_place_and_no_words() -> None:
    for named, param in (
        ("messages[0].content", "messages[0].content"),
        ("the key sk-1 is wrong", None),
        ("", None),
        (None, None),
        (7, None),
    ):
        payload = orjson.dumps({"error": {"message": "no", "param": named}})
        assert http_failure(400, payload, {}).param == param
