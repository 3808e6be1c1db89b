"""Bedrock, against a double that checks signatures and bodies with botocore's own parts."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import structlog
from aiohttp import web
from botocore.config import Config as ClientConfig
from botocore.credentials import Credentials
from pydantic import ValidationError

from breakwater.calls.providers.base import Answer, Call, CallError, Streaming
from breakwater.calls.providers.registry import BedrockSettings
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, TransportFailure, classify
from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.prices.rules.usage import Usage
from tests.bedrock import (
    ACCESS_KEY,
    BEARER,
    REGION,
    SECRET_KEY,
    TOKEN,
    Bedrock,
    RefusedError,
    Reply,
    bedrock,
    converse_frames,
    corrupt,
    invoke_frames,
    said,
    stream_of,
)
from tests.calls.providers.kit import answering, call
from tests.tables import each_row

NOVA = "eu.amazon.nova-pro-v1:0"
CLAUDE = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0"
PROFILE_ARN = "arn:aws:bedrock:eu-central-1:123456789012:inference-profile/eu.amazon.nova-pro-v1:0"
NOW = datetime(2026, 11, 29, 10, 0, tzinfo=UTC)
HELLO = said({"text": "Hello back."})
USE = {"toolUse": {"toolUseId": "tooluse_1", "name": "look_up", "input": {"id": 7}}}
THOUGHT = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "c2ln"}}}
MESSAGE: dict[str, Any] = {
    "id": "msg_bdrk_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4-5-20250929",
    "content": [{"type": "text", "text": "Aye."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 3},
}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Aye."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 3},
    },
    {"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 12, "outputTokenCount": 3}},
]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment has the planted credentials, and no other place has any."""
    for name in BedrockSettings.variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)


def settings(origin: str, **more: Any) -> BedrockSettings:
    return BedrockSettings.model_validate({"kind": "bedrock", "region": REGION, "base_url": origin, **more})


def streaming(chunks: list[Chunk] | None = None) -> Streaming:
    async def take(arrived: Any) -> None:
        if chunks is not None:
            chunks.extend(arrived)

    return Streaming(take, idle_timeout_s=5, total_timeout_s=20)


def asking(model: str = NOVA, **more: Any) -> Call:
    return call(model=model, **more)


async def perform(chosen: BedrockSettings, asked: Call | None = None) -> Answer:
    provider = chosen.open()
    try:
        return await provider.perform(asked or asking())
    finally:
        await provider.close()


async def failure(chosen: BedrockSettings, asked: Call | None = None) -> CallError:
    """The failure of a call, in which no secret stands."""
    with pytest.raises(CallError) as caught:
        await perform(chosen, asked)
    reported = "".join((*traceback.format_exception(caught.value), repr(caught.value), repr(caught.value.failure)))
    assert not any(secret in reported for secret in (SECRET_KEY, TOKEN, BEARER))
    return caught.value


@each_row("model", [NOVA, CLAUDE, PROFILE_ARN])
async def test_a_chat_is_signed_and_answered(model: str) -> None:
    async with bedrock([HELLO]) as double:
        answer = await perform(settings(double.origin), asking(model))
    assert (answer.output, answer.finish_reason) == ("Hello back.", "stop")
    assert answer.usage == Usage(20, 9)
    [request] = double.requests
    assert (request.operation, request.model) == ("Converse", model)


async def test_a_stream_has_the_chunks_and_the_record_of_a_whole_answer() -> None:
    reply = said(THOUGHT, {"text": "Let me see."}, USE, stop="tool_use")
    chunks = list[Chunk]()
    async with bedrock([reply, converse_frames(stream_of(reply))]) as double:
        whole = await perform(settings(double.origin))
        streamed = await perform(settings(double.origin), asking(streaming=streaming(chunks)))
    assert [request.operation for request in double.requests] == ["Converse", "ConverseStream"]
    assert (streamed.output, streamed.usage, streamed.finish_reason) == (
        whole.output,
        whole.usage,
        whole.finish_reason,
    )
    message: Any = whole.output
    assert message["thinking_blocks"] == [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"id": 7}
    texts = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert texts == "Let me see."


async def test_native_messages_pass_unchanged_but_for_bedrocks_envelope() -> None:
    native = {"messages": [{"role": "user", "content": "Ahoy"}], "max_tokens": 9, "novel": {"a": 1}}
    asked = {"native": native, "api": "messages", "headers": {"anthropic-beta": "context-1m-2025-08-07"}}
    configured = {"headers": {"anthropic-beta": "novel-2026-01-01"}}
    async with bedrock([MESSAGE, invoke_frames(MESSAGE_EVENTS)]) as double:
        whole = await perform(settings(double.origin, **configured), asking(CLAUDE, **asked))
        chunks = list[Chunk]()
        streamed = await perform(settings(double.origin), asking(CLAUDE, **asked, streaming=streaming(chunks)))
    assert [request.operation for request in double.requests] == ["InvokeModel", "InvokeModelWithResponseStream"]
    betas = [request.body.pop("anthropic_beta") for request in double.requests]
    assert betas == [["novel-2026-01-01", "context-1m-2025-08-07"], ["context-1m-2025-08-07"]]
    assert [request.body for request in double.requests] == [{"anthropic_version": "bedrock-2023-05-31", **native}] * 2
    assert whole.response == MESSAGE
    assert streamed.output == whole.output == "Aye."
    assert streamed.usage == whole.usage
    assert [chunk["event"]["type"] for chunk in chunks if "event" in chunk][:2] == [
        "message_start",
        "content_block_start",
    ]


async def test_claude_alone_has_messages_and_an_api_of_openais_has_responses() -> None:
    chosen = settings("https://bedrock.example")
    assert chosen.apis_of(CLAUDE) == ("chat", "messages")
    assert chosen.apis_of(NOVA) == ("chat",)
    assert chosen.translates_chats(NOVA)
    compatible = settings("https://bedrock.example/openai/v1", api="responses")
    assert compatible.apis_of(CLAUDE) == ("chat", "responses")
    assert not compatible.translates_chats(CLAUDE)


async def test_the_endpoint_that_is_compatible_with_openais_is_signed_too() -> None:
    completion = {
        "id": "c",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    async with bedrock([completion]) as double:
        answer = await perform(settings(f"{double.origin}/openai/v1", api="chat"), asking("openai.gpt-oss-120b-1:0"))
    assert answer.output == "Hi."
    assert double.requests[0].body["model"] == "openai.gpt-oss-120b-1:0"


# Credentials


async def test_one_of_bedrocks_own_keys_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    without_credentials(monkeypatch)
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", BEARER)
    monkeypatch.setenv("OTHER_KEY", BEARER)
    async with bedrock([HELLO]) as double:
        assert (await perform(settings(double.origin))).output == "Hello back."
        monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK")
        chosen = settings(double.origin, api_key=SecretRef(env="OTHER_KEY"))
        assert (await perform(chosen)).output == "Hello back."
    assert all(request.headers["Authorization"] == f"Bearer {BEARER}" for request in double.requests)


async def test_a_profile_is_read_from_aws_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_credentials(monkeypatch)
    (tmp_path / "credentials").write_text(
        f"[ships]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\naws_session_token={TOKEN}\n"
    )
    async with bedrock([HELLO]) as double:
        assert (await perform(settings(double.origin, profile="ships"))).output == "Hello back."
        missing = await failure(settings(double.origin, profile="boats"))
    assert isinstance(missing.failure, TransportFailure)
    assert missing.failure.class_name == "CredentialError"
    assert "there is no AWS profile boats" in missing.failure.message
    assert not missing.maybe_billed


async def test_where_it_looked_for_credentials_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_credentials(monkeypatch)
    failed = await failure(settings("http://127.0.0.1:9"))
    assert isinstance(failed.failure, TransportFailure)
    for place in (
        "the environment (AWS_ACCESS_KEY_ID)",
        "web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
        str(tmp_path / "credentials"),
        "instance metadata (off: AWS_EC2_METADATA_DISABLED)",
        "api_key",
    ):
        assert place in failed.failure.message


def sts_answer(action: str, secret: str, ends_at: datetime) -> str:
    return (
        f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials>'
        f"<AccessKeyId>{ACCESS_KEY}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>"
        f"<SessionToken>{TOKEN}</SessionToken><Expiration>{ends_at.isoformat()}</Expiration></Credentials>"
        f"<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/x/y</Arn><AssumedRoleId>r:y</AssumedRoleId>"
        f"</AssumedRoleUser></{action}Result></{action}Response>"
    )


@each_row("way", ["role", "web identity"])
async def test_a_role_is_assumed_by_sts_and_renewed_before_it_ends(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first credentials end in two seconds; calls until then and after it succeed."""
    asked = list[dict[str, Any]]()
    threads = set[int]()

    async def sts(raw: web.BaseRequest) -> web.StreamResponse:
        form = dict((await raw.post()).items())
        asked.append(form)
        life = timedelta(seconds=2) if len(asked) == 1 else timedelta(hours=1)
        return web.Response(
            text=sts_answer(str(form["Action"]), SECRET_KEY, datetime.now(UTC) + life), content_type="text/xml"
        )

    more: dict[str, Any] = {"role_arn": "arn:aws:iam::123456789012:role/caller", "external_id": "ships"}
    if way == "web identity":
        without_credentials(monkeypatch)
        (tmp_path / "token").write_text("planted.jwt.token")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
        more = {}
    async with bedrock([HELLO]) as double, answering(sts) as origin:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", origin)
        threads.add(threading.get_ident())
        provider = settings(double.origin, **more).open()
        try:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert (await provider.perform(asking())).output == "Hello back."
                await asyncio.sleep(0.2)
        finally:
            await provider.close()
    assert not double.refused
    assert len(asked) == 2
    if way == "role":
        assert (asked[0]["Action"], asked[0]["ExternalId"]) == ("AssumeRole", "ships")
    else:
        assert (asked[0]["Action"], asked[0]["WebIdentityToken"]) == ("AssumeRoleWithWebIdentity", "planted.jwt.token")


async def test_a_role_that_may_not_be_assumed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deny(_: web.BaseRequest) -> web.StreamResponse:
        text = (
            "<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>User: x is not authorized to "
            "perform: sts:AssumeRole</Message></Error></ErrorResponse>"
        )
        return web.Response(status=403, text=text, content_type="text/xml")

    async with answering(deny) as origin:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", origin)
        chosen = settings("http://127.0.0.1:9", role_arn="arn:aws:iam::123456789012:role/caller")
        failed = await failure(chosen)
    assert isinstance(failed.failure, TransportFailure)
    assert "not authorized to perform: sts:AssumeRole" in failed.failure.message


async def test_the_role_of_an_instance_is_asked_of_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    without_credentials(monkeypatch)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    paths = list[str]()

    async def metadata(raw: web.BaseRequest) -> web.StreamResponse:
        paths.append(f"{raw.method} {raw.path}")
        if raw.method == "PUT":
            return web.Response(text="imds-token")
        assert raw.headers["x-aws-ec2-metadata-token"] == "imds-token"
        if raw.path.endswith("/security-credentials/"):
            return web.Response(text="worker")
        ends_at = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": TOKEN, "Expiration": ends_at}
        return web.json_response({"Code": "Success", **keys})

    async with bedrock([HELLO]) as double, answering(metadata) as origin:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", origin)
        assert (await perform(settings(double.origin))).output == "Hello back."
    assert paths[-1] == "GET /latest/meta-data/iam/security-credentials/worker"


async def test_credentials_that_block_stop_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that takes long is asked once for all calls, outside of the loop."""
    without_credentials(monkeypatch)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    asked = list[str]()

    async def slow(raw: web.BaseRequest) -> web.StreamResponse:
        asked.append(raw.path)
        await asyncio.sleep(0.7)
        return web.Response(status=404)

    async with answering(slow) as origin:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", origin)
        provider = settings("http://127.0.0.1:9").open()
        longest_s = 0.0

        async def watch() -> None:
            nonlocal longest_s
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - began)

        watching = asyncio.create_task(watch())
        try:
            failed = await asyncio.gather(*(provider.perform(asking()) for _ in range(5)), return_exceptions=True)
        finally:
            watching.cancel()
            await provider.close()
    assert all(isinstance(error, CallError) for error in failed)
    assert len([path for path in asked if path.endswith("/security-credentials/")]) <= 2
    assert longest_s < 0.6


async def test_a_credential_that_was_refused_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bedrock([HELLO]) as double:
        provider = settings(double.origin).open()
        try:
            assert (await provider.perform(asking())).output == "Hello back."
            double.credentials = [Credentials(ACCESS_KEY, "another/secret", "another-token")]
            with pytest.raises(CallError) as refused:
                await provider.perform(asking())
            assert classify(refused.value.failure, NOW).class_name == "UnauthorizedError"
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another/secret")
            monkeypatch.setenv("AWS_SESSION_TOKEN", "another-token")
            assert await provider.refresh_credential(refused.value.credential)
            assert (await provider.perform(asking())).output == "Hello back."
        finally:
            await provider.close()


async def test_a_signature_that_is_wrong_is_refused_and_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double compares: the real one's answer quotes the request, with its session token."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted/secret+key-of-somebody-else")
    async with bedrock([HELLO]) as double:
        failed = await failure(settings(double.origin))
    assert TOKEN in double.refused[0]
    assert isinstance(failed.failure, HttpFailure)
    assert failed.failure.code == "InvalidSignatureException"
    assert classify(failed.failure, NOW).class_name == "UnauthorizedError"


async def test_no_log_of_botocores_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), structlog.testing.capture_logs() as logged:
        async with bedrock([HELLO]) as double:
            await perform(settings(double.origin))
    assert not any(secret in f"{caplog.text} {logged}" for secret in (SECRET_KEY, TOKEN))


# Errors


async def thrown(reply: Reply, **more: Any) -> CallError:
    async with bedrock([reply]) as double:
        return await failure(settings(double.origin), asking(**more))


@each_row(
    ("status", "code", "message", "kind", "class_name", "says"),
    [
        (429, "ThrottlingException", "Too many requests, please wait before trying again.", "rate_limit",
         "RateLimitError", ""),
        (429, "ThrottlingException", "Too many tokens per day, please wait before trying again.", "quota",
         "QuotaExceededError", ""),
        (408, "ModelTimeoutException", "Model processing time exceeded.", "transient", "RequestTimeoutError", ""),
        (400, "ServiceQuotaExceededException", "Your request exceeds the service quota for your account.", "quota",
         "QuotaExceededError", ""),
        (429, "ModelNotReadyException", "Model is not ready for inference.", "transient", "ServiceUnavailableError",
         ""),
        (424, "ModelErrorException", "The system encountered an unexpected error.", "server", "ServerError", ""),
        (500, "InternalServerException", "An internal server error occurred.", "server", "ServerError", ""),
        (503, "ServiceUnavailableException", "Bedrock is unable to process your request.", "server",
         "ServiceUnavailableError", ""),
        (403, "AccessDeniedException", "You don't have access to the model with the specified model ID.", "client",
         "ForbiddenError", "the account has no access to this model in this region"),
        (403, "AccessDeniedException", "User: arn:aws:iam::1:user/x is not authorized to perform: "
         "bedrock:InvokeModelWithResponseStream", "client", "ForbiddenError", "allow the role this action"),
        (403, "ExpiredTokenException", "The security token included in the request is expired", "client",
         "UnauthorizedError", ""),
        (404, "ResourceNotFoundException", "This model version has reached the end of its life.", "client",
         "NotFoundError", ""),
        (400, "ValidationException", "The provided model identifier is invalid.", "client", "NotFoundError",
         "the model may not exist in this region"),
        (400, "ValidationException", "Invocation of model ID amazon.nova-pro-v1:0 with on-demand throughput isn’t "
         "supported. Retry your request with the ID or ARN of an inference profile that contains this model.",
         "client", "NotFoundError", "use the id of an inference profile"),
        (400, "ValidationException", "Input is too long for requested model.", "context_overflow",
         "ContextOverflowError", ""),
        (400, "ValidationException", "The model returned the following errors: prompt is too long: 215000 tokens > "
         "200000 maximum", "context_overflow", "ContextOverflowError", ""),
        (400, "ValidationException", "Expected toolResult blocks at messages.2.content for the following Ids: "
         "tooluse_1", "orphan_tool_calls", "OrphanToolCallsError", ""),
        (400, "ValidationException", "The value at messages.0.content is not supported.", "client",
         "BadRequestError", ""),
    ],
)  # fmt: skip
async def test_each_error_is_what_it_means(
    status: int, code: str, message: str, kind: str, class_name: str, says: str
) -> None:
    failed = await thrown(RefusedError(status, code, message))
    assert isinstance(failed.failure, HttpFailure)
    verdict = classify(failed.failure, NOW)
    assert (verdict.kind, verdict.class_name, verdict.status_code) == (kind, class_name, status)
    assert message in verdict.message
    assert says in verdict.message


async def test_a_key_that_is_refused_is_no_missing_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", f"{BEARER}-of-yesterday")
    async with bedrock([HELLO]) as double:
        failed = await failure(settings(double.origin))
    assert classify(failed.failure, NOW).class_name == "UnauthorizedError"


@each_row(
    ("kind", "class_name"),
    [
        ("throttlingException", "RateLimitError"),
        ("validationException", "BadRequestError"),
        ("modelStreamErrorException", "ServerError"),
        ("serviceUnavailableException", "ServiceUnavailableError"),
        ("internalServerException", "ServerError"),
    ],
)
async def test_an_exception_in_a_stream_ends_it_with_what_was_billed(kind: str, class_name: str) -> None:
    events = stream_of(HELLO)[:3]
    failed = await thrown(converse_frames([*events, (kind, {"message": "Please try again."})]), streaming=streaming())
    assert classify(failed.failure, NOW).class_name == class_name
    assert failed.maybe_billed


async def test_an_expired_key_in_the_middle_of_a_stream_keeps_what_has_arrived() -> None:
    chunks = list[Chunk]()
    events = [*stream_of(HELLO)[:3], ("validationException", {"message": "The security token is expired"})]
    failed = await thrown(converse_frames(events), streaming=streaming(chunks))
    assert isinstance(failed.failure, HttpFailure)
    assert chunks[1]["choices"][0]["delta"]["content"] == "Hell"


async def test_a_corrupt_frame_is_a_broken_answer_after_the_chunks_before_it() -> None:
    first, second, third, *rest = converse_frames(stream_of(HELLO))
    chunks = list[Chunk]()
    failed = await thrown([first, second, corrupt(third), *rest], streaming=streaming(chunks))
    assert isinstance(failed.failure, BrokenAnswer)
    assert "corrupt (ChecksumMismatch)" in failed.failure.message
    assert classify(failed.failure, NOW).retryable
    assert failed.maybe_billed
    assert len(chunks) == 2


async def test_a_stream_that_is_cut_off_is_broken() -> None:
    frames = converse_frames(stream_of(HELLO))
    failed = await thrown([b"".join(frames[:3])[:-5]], streaming=streaming())
    assert isinstance(failed.failure, BrokenAnswer)
    assert "ended early" in failed.failure.message


async def test_a_stream_without_its_usage_is_an_answer_whose_usage_is_unknown() -> None:
    async with bedrock([converse_frames(stream_of(HELLO)[:-1])]) as double:
        answer = await perform(settings(double.origin), asking(streaming=streaming()))
    assert answer.output == "Hello back."
    assert answer.usage.output_tokens is None


async def test_what_a_guardrail_says_is_an_answer_that_was_filtered() -> None:
    """As it is configured for: the words are for the caller, and the trace says why."""
    trace = {"guardrail": {"actionReason": "Guardrail blocked."}}
    reply = {**said({"text": "I can't talk of that."}, stop="guardrail_intervened"), "trace": trace}
    async with bedrock([reply, converse_frames(stream_of(reply))]) as double:
        answers = [
            await perform(settings(double.origin)),
            await perform(settings(double.origin), asking(streaming=streaming())),
        ]
    for answer in answers:
        assert (answer.output, answer.finish_reason) == ("I can't talk of that.", "content_filter")
        assert answer.response is not None
        assert answer.response["trace"] == trace


async def test_a_filtered_answer_without_a_text_is_a_failure() -> None:
    failed = await thrown(said(stop="content_filtered"))
    assert classify(failed.failure, NOW).class_name == "ContentFilteredError"


async def test_a_malformed_call_of_a_tool_is_tried_again() -> None:
    failed = await thrown(said({"text": "<fn"}, stop="malformed_tool_use"))
    assert isinstance(failed.failure, BrokenAnswer)


# The config


@each_row("region", ["eu-centrl-1", "us-east-9"])
def test_an_unknown_region_is_an_error_of_the_config(region: str) -> None:
    chosen = BedrockSettings.model_validate({"kind": "bedrock", "region": region})
    with pytest.raises(
        ConfigError, match=rf"AWS has no region '{region}'; did you mean '(eu-central-1|us-east-1|us-east-2)'"
    ):
        chosen.open()


@each_row(
    ("region", "api", "base_url"),
    [
        ("eu-central-1", "converse", "https://bedrock-runtime.eu-central-1.amazonaws.com"),
        ("us-gov-west-1", "converse", "https://bedrock-runtime.us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "converse", "https://bedrock-runtime.cn-north-1.amazonaws.com.cn"),
        ("us-west-2", "responses", "https://bedrock-runtime.us-west-2.amazonaws.com/openai/v1"),
    ],
)
async def test_the_endpoint_follows_from_the_region(region: str, api: str, base_url: str) -> None:
    chosen = BedrockSettings.model_validate({"kind": "bedrock", "region": region, "api": api})
    assert chosen.base_url == base_url
    await chosen.open().close()


@each_row(
    "wrong",
    [
        {"region": "Frankfurt"},
        {},
        {"region": REGION, "profile": "x", "api_key": {"env": "X"}},
        {"region": REGION, "external_id": "ships"},
        {"region": REGION, "role_arn": "caller"},
    ],
)
def test_what_can_not_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BedrockSettings.model_validate({"kind": "bedrock", **wrong})


def test_without_botocore_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "breakwater.calls.providers.bedrock", raising=False)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(
        ConfigError, match=r"botocore.* is not installed; install it with: pip install 'breakwater-plane\[aws\]'"
    ):
        settings("https://bedrock.example").open()


# The double


def client_of(double: Bedrock, **more: Any) -> Any:
    return botocore.session.Session().create_client(
        "bedrock-runtime",
        region_name=REGION,
        endpoint_url=double.origin,
        config=ClientConfig(retries={"total_max_attempts": 1}),
        **more,
    )


async def test_botocores_own_client_reads_the_double() -> None:
    """What the double says is what AWS' client takes for Bedrock's, signed and whole."""
    reply = said(THOUGHT, {"text": "Let me see."}, USE, stop="tool_use")
    asked: dict[str, Any] = {"modelId": NOVA, "messages": [{"role": "user", "content": [{"text": "Ahoy"}]}]}

    def use(double: Bedrock) -> tuple[Any, Any, bytes]:
        client = client_of(double)
        whole = client.converse(**asked)
        streamed = list(client.converse_stream(**asked)["stream"])
        body = json.dumps({"anthropic_version": "bedrock-2023-05-31", "messages": []})
        invoked = client.invoke_model_with_response_stream(modelId=CLAUDE, body=body)
        return whole, streamed, b"".join(event["chunk"]["bytes"] for event in invoked["body"])

    async with bedrock([reply, converse_frames(stream_of(reply)), invoke_frames(MESSAGE_EVENTS)]) as double:
        whole, streamed, invoked = await asyncio.to_thread(use, double)
    assert whole["output"]["message"]["content"][1] == {"text": "Let me see."}
    assert streamed[-1]["metadata"]["usage"]["outputTokens"] == 9
    assert invoked.startswith(b'{"type": "message_start"')
    assert not double.refused


async def test_botocores_own_client_refuses_what_the_double_corrupts() -> None:
    first, *rest = converse_frames(stream_of(HELLO))
    asked: dict[str, Any] = {"modelId": NOVA, "messages": [{"role": "user", "content": [{"text": "Ahoy"}]}]}
    read: Callable[[Bedrock], Any] = lambda double: list(client_of(double).converse_stream(**asked)["stream"])  # noqa: E731
    async with bedrock([[corrupt(first), *rest]]) as double:
        with pytest.raises(Exception, match="Checksum mismatch"):
            await asyncio.to_thread(read, double)
