"""A double of Bedrock's runtime that checks what the real one checks, by the parts of botocore that AWS ships.

Each request's signature is made again by botocore's signer, and compared. Requests and answers are validated by the
service's model, and streams are frames with checksums, which botocore's own client reads as well (`test_bedrock.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

import botocore.session
from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.validate import ParamValidator

ACCESS_KEY = "AKIAPLANTED000000000"
SECRET_KEY = "planted/secret+key0123456789abcdefghijkl"
TOKEN = "planted-session-token-0123456789=="
BEARER = "bedrock-api-key-planted0123456789abcdefghijklmnopqrstuv"
REGION = "eu-central-1"
MODEL = botocore.session.Session().get_service_model("bedrock-runtime")
OPERATIONS = {
    "converse": "Converse",
    "converse-stream": "ConverseStream",
    "invoke": "InvokeModel",
    "invoke-with-response-stream": "InvokeModelWithResponseStream",
}


def blobs_as_bytes(value: Any, shape: Any) -> Any:
    """A value of JSON as botocore has it: a blob is base64 there, and must be."""
    if shape.type_name == "blob":
        return base64.b64decode(value, validate=True)
    if shape.type_name == "structure" and isinstance(value, dict) and not getattr(shape, "is_document_type", False):
        return {
            name: blobs_as_bytes(inner, shape.members[name]) if name in shape.members else inner
            for name, inner in value.items()
        }
    if shape.type_name == "list" and isinstance(value, list):
        return [blobs_as_bytes(inner, shape.member) for inner in value]
    if shape.type_name == "map" and isinstance(value, dict):
        return {name: blobs_as_bytes(inner, shape.value) for name, inner in value.items()}
    return value


def problems(value: Mapping[str, Any], shape: Any) -> str:
    """What is wrong with a value of JSON by the service's model; empty if nothing is."""
    report = ParamValidator().validate(blobs_as_bytes(value, shape), shape)
    return report.generate_report() if report.has_errors() else ""


def valid(value: dict[str, Any], operation: str) -> dict[str, Any]:
    """An answer that the service's model allows."""
    wrong = problems(value, MODEL.operation_model(operation).output_shape)
    assert not wrong, wrong
    return value


def frame(kind: str | None, payload: Any, *, message_type: str = "event") -> bytes:
    """An event of a binary stream, with its checksums; one that names no type, if that is None."""
    name = {"event": ":event-type", "exception": ":exception-type"}[message_type]
    headers = b"".join(
        bytes([len(header)]) + header.encode() + b"\x07" + struct.pack("!H", len(text)) + text.encode()
        for header, text in ((":message-type", message_type), (name, kind), (":content-type", "application/json"))
        if text is not None
    )
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    prelude = struct.pack("!II", len(headers) + len(body) + 16, len(headers))
    start = prelude + struct.pack("!I", binascii.crc32(prelude))
    return start + headers + body + struct.pack("!I", binascii.crc32(start + headers + body))


def corrupt(event: bytes) -> bytes:
    """The same event with one bit of its payload changed on the way."""
    place = len(event) - 8
    return event[:place] + bytes([event[place] ^ 1]) + event[place + 1 :]


def converse_frames(events: Iterable[tuple[str, dict[str, Any]]]) -> list[bytes]:
    """Events of a streamed answer, each allowed by the service's model."""
    stream = MODEL.operation_model("ConverseStream").output_shape.members["stream"]
    frames = list[bytes]()
    for kind, payload in events:
        is_exception = kind.endswith("Exception")
        wrong = problems(payload, stream.members[kind])
        assert not wrong, f"{kind}: {wrong}"
        frames.append(frame(kind, payload, message_type="exception" if is_exception else "event"))
    return frames


def invoke_frames(events: Iterable[dict[str, Any]]) -> list[bytes]:
    """Events of Anthropic's in the chunks of `InvokeModelWithResponseStream`, with padding as Bedrock sends it."""
    return [
        frame("chunk", {"bytes": base64.b64encode(json.dumps(event).encode()).decode(), "p": "abcdefgh"})
        for event in events
    ]


def stream_of(answer: Mapping[str, Any], piece: int = 4) -> list[tuple[str, dict[str, Any]]]:
    """The events of a whole answer, its texts in pieces."""
    events: list[tuple[str, dict[str, Any]]] = [("messageStart", {"role": "assistant"})]
    for index, block in enumerate(answer["output"]["message"]["content"]):
        deltas = list[dict[str, Any]]()
        if "text" in block:
            deltas = [{"text": part} for part in pieces(block["text"], piece)]
        elif "toolUse" in block:
            start = {name: block["toolUse"][name] for name in ("toolUseId", "name")}
            events.append(("contentBlockStart", {"start": {"toolUse": start}, "contentBlockIndex": index}))
            deltas = [
                {"toolUse": {"input": part}}
                for part in pieces(json.dumps(block["toolUse"]["input"], separators=(",", ":")), piece)
            ]
        elif "redactedContent" in block["reasoningContent"]:
            deltas = [{"reasoningContent": block["reasoningContent"]}]
        else:
            thought = block["reasoningContent"]["reasoningText"]
            deltas = [{"reasoningContent": {"text": part}} for part in pieces(thought["text"], piece)]
            if "signature" in thought:
                deltas.append({"reasoningContent": {"signature": thought["signature"]}})
        events += [("contentBlockDelta", {"delta": delta, "contentBlockIndex": index}) for delta in deltas]
        events.append(("contentBlockStop", {"contentBlockIndex": index}))
    events.append(("messageStop", {"stopReason": answer["stopReason"]}))
    rest = {name: answer[name] for name in ("usage", "metrics", "trace", "serviceTier") if name in answer}
    return [*events, ("metadata", rest)]


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@dataclass(slots=True)
class Request:
    """A request that was signed as it must be, and that the service's model allows."""

    operation: str
    model: str
    body: dict[str, Any]
    headers: Mapping[str, str]


class RefusedError(Exception):
    """An error in AWS' form."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


Reply = dict[str, Any] | Sequence[bytes] | RefusedError
"""A whole answer, the frames of a streamed one, or an error."""


@dataclass(slots=True)
class Bedrock:
    """The double. It gives the replies in turn, the last one again and again, or what a function says of a request."""

    replies: list[Reply] | Callable[[Request], Reply]
    bearer: str = BEARER
    credentials: list[Credentials] = field(default_factory=lambda: [Credentials(ACCESS_KEY, SECRET_KEY, TOKEN)])
    requests: list[Request] = field(default_factory=list[Request])
    refused: list[str] = field(default_factory=list[str])
    region: str = REGION
    origin: str = ""

    async def answer(self, raw: web.BaseRequest) -> web.StreamResponse:
        body = await raw.read()
        try:
            request = self._check(raw, body)
            reply = self.replies(request) if callable(self.replies) else self._next()
            if isinstance(reply, RefusedError):
                raise reply
        except RefusedError as refusal:
            self.refused.append(f"{refusal.code}: {refusal.message}")
            headers = {"x-amzn-ErrorType": f"{refusal.code}:http://internal.amazon.com/coral/com.amazon.bedrock/"}
            return web.json_response({"message": refusal.message}, status=refusal.status, headers=headers)
        if isinstance(reply, dict):
            if request.operation in OPERATIONS.values():
                reply = reply if request.operation == "InvokeModel" else valid(reply, request.operation)
            texts = request.body.get("texts", ())  # of embeddings, whose tokens are characters here
            counts = {"X-Amzn-Bedrock-Input-Token-Count": str(sum(map(len, texts)))} if texts else {}
            return web.json_response(reply, headers=counts)
        kind = "text/event-stream" if request.operation == "compatible" else "application/vnd.amazon.eventstream"
        response = web.StreamResponse(headers={"Content-Type": kind, "x-amzn-bedrock-content-type": "application/json"})
        await response.prepare(raw)
        for event in reply:
            await response.write(event)
        return response

    def _next(self) -> Reply:
        assert not callable(self.replies)
        return self.replies[min(len(self.requests), len(self.replies)) - 1]

    def _check(self, raw: web.BaseRequest, body: bytes) -> Request:
        self._check_caller(raw, body)
        parts = raw.raw_path.split("/")
        if parts[1:3] == ["openai", "v1"]:
            request = Request("compatible", "", json.loads(body), dict(raw.headers))
            self.requests.append(request)
            return request
        _, root, model, operation = parts
        if root != "model" or operation not in OPERATIONS or ":" in model:
            raise RefusedError(404, "UnknownOperationException", raw.raw_path)
        named = OPERATIONS[operation]
        content = json.loads(body)
        params = {"body": base64.b64encode(body).decode()} if "invoke" in operation else content
        shape = MODEL.operation_model(named).input_shape
        if wrong := problems({**params, "modelId": unquote(model)}, shape):
            raise RefusedError(400, "ValidationException", wrong)
        if "invoke" in operation and "embed" in model:
            _check_embeddings(unquote(model), content)
        elif "invoke" in operation:
            _check_messages(content)
        request = Request(named, unquote(model), content, dict(raw.headers))
        self.requests.append(request)
        return request

    def _check_caller(self, raw: web.BaseRequest, body: bytes) -> None:
        claimed = raw.headers.get("Authorization", "")
        if claimed.startswith("Bearer "):
            if claimed != f"Bearer {self.bearer}":
                message = "Authentication failed: Please make sure your API Key is valid."
                raise RefusedError(403, "AccessDeniedException", message)
            return
        if not claimed.startswith("AWS4-HMAC-SHA256 "):
            raise RefusedError(403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        fields = dict(part.strip().split("=", 1) for part in claimed.removeprefix("AWS4-HMAC-SHA256 ").split(","))
        access_key, _, region, service, _ = fields["Credential"].split("/")
        token = raw.headers.get("X-Amz-Security-Token")
        known = next((one for one in self.credentials if one.access_key == access_key and one.token == token), None)
        if known is None:
            message = "The security token included in the request is invalid."
            raise RefusedError(403, "UnrecognizedClientException", message)
        if (region, service) != (self.region, "bedrock"):
            raise RefusedError(403, "InvalidSignatureException", "Credential should be scoped to a valid region.")
        moment = datetime.strptime(raw.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(datetime.now(UTC) - moment) > timedelta(minutes=5):
            raise RefusedError(403, "InvalidSignatureException", "Signature expired")
        signed = fields["SignedHeaders"].split(";")
        assert {"host", "x-amz-date"} <= {*signed}
        again = AWSRequest(raw.method, f"http://{raw.headers['Host']}{raw.raw_path}", data=body)
        for name in signed:
            again.headers[name] = raw.headers[name]
        again.context["timestamp"] = raw.headers["X-Amz-Date"]
        signer = SigV4Auth(known, service, region)
        canonical = signer.canonical_request(again)
        expected = signer.signature(signer.string_to_sign(again, canonical), again)
        if fields["Signature"] != expected:
            message = f"The Canonical String for this request should have been '{canonical}'"
            raise RefusedError(403, "InvalidSignatureException", message)


def _check_messages(body: Mapping[str, Any]) -> None:
    """What Bedrock refuses in Anthropic's Messages that Anthropic itself wants."""
    if body.get("anthropic_version") != "bedrock-2023-05-31":
        raise RefusedError(400, "ValidationException", "anthropic_version: Field required")
    for name in ("model", "stream"):
        if name in body:
            raise RefusedError(400, "ValidationException", f"{name}: Extra inputs are not permitted")


TITAN_V1, TITAN_V2 = "amazon.titan-embed-text-v1", "amazon.titan-embed-text-v2:0"
COHERE_V3, COHERE_V4 = "cohere.embed-multilingual-v3", "eu.cohere.embed-v4:0"
_TYPES = ("search_document", "search_query", "classification", "clustering")


def _check_embeddings(model: str, body: Mapping[str, Any]) -> None:
    """What the models' own schemas refuse: unknown keys, and values that they don't have."""
    known = {
        TITAN_V1: {"inputText"},
        TITAN_V2: {"inputText", "dimensions", "normalize", "embeddingTypes"},
        COHERE_V3: {"texts", "images", "input_type", "truncate", "embedding_types"},
        COHERE_V4: {"texts", "images", "inputs", "input_type", "truncate", "embedding_types", "output_dimension"},
    }[model]
    if unknown := sorted(body.keys() - known):
        text = f"Malformed input request: extraneous key [{unknown[0]}] is not permitted, please reformat your input."
        raise RefusedError(400, "ValidationException", text)
    is_right = (
        isinstance(body.get("inputText"), str) and body.get("dimensions", 256) in (256, 512, 1024)
        if "inputText" in known
        else 1 <= len(body["texts"]) <= 96 and body.get("input_type") in _TYPES
    )
    if not is_right:
        raise RefusedError(400, "ValidationException", "Malformed input request, please reformat your input.")


def embedded(request: Request) -> Reply:
    """Embeds a text as its length."""
    texts = [request.body["inputText"]] if "inputText" in request.body else request.body["texts"]
    length = request.body.get("dimensions") or request.body.get("output_dimension") or 3
    vectors = [[float(len(text)), *[0.5] * (length - 1)] for text in texts]
    if "inputText" not in request.body:
        return {"id": "x", "texts": texts, "response_type": "embeddings_by_type", "embeddings": {"float": vectors}}
    by_type = {"embeddingsByType": {"float": vectors[0]}} if request.model == TITAN_V2 else {}
    return {"embedding": vectors[0], "inputTextTokenCount": len(texts[0]), **by_type}


@asynccontextmanager
async def bedrock(replies: list[Reply] | Callable[[Request], Reply], **more: Any) -> AsyncGenerator[Bedrock]:
    """Runs the double."""
    double = Bedrock(replies, **more)
    runner = web.ServerRunner(web.Server(double.answer), shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        double.origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield double
    finally:
        await runner.cleanup()


def said(*content: dict[str, Any], stop: str = "end_turn", usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A whole answer of Converse."""
    counted = {"inputTokens": 20, "outputTokens": 9, "totalTokens": 29, **(usage or {})}
    message = {"role": "assistant", "content": list(content)}
    return {"output": {"message": message}, "stopReason": stop, "usage": counted, "metrics": {"latencyMs": 7}}


THOUGHT = {"reasoningContent": {"reasoningText": {"text": "A ship; look it up.", "signature": "c2lnbmVk"}}}
USE = {"toolUse": {"toolUseId": "tooluse_1", "name": "find_ship", "input": {"name": "ferry"}}}
CACHED = {"cacheReadInputTokens": 1000, "cacheWriteInputTokens": 200}
CALLS = said(THOUGHT, USE, stop="tool_use", usage=CACHED)
SAYS = said({"text": "The ferry is at sea."}, usage=CACHED)


def _fields_of_model(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body.get("additionalModelRequestFields") or {}


def ship_reply(request: Request) -> Reply:
    """Thinks and calls the tool if there is one, and says where the ferry is once it has the result."""
    if "premier" in request.model:
        message = "You don't have access to the model with the specified model ID."
        return RefusedError(403, "AccessDeniedException", message)
    if "embed" in request.model:
        return embedded(request)
    body = request.body
    if request.operation.startswith("Converse"):
        has_result = any("toolResult" in block for block in body["messages"][-1]["content"])
        if has_result:
            thought, *_ = body["messages"][-2]["content"]
            if thought != THOUGHT and ("reasoningContent" in thought or "thinking" in _fields_of_model(body)):
                message = "messages.1.content.0: Expected `thinking`, as it was written"
                return RefusedError(400, "ValidationException", message)
        answer = CALLS if body.get("toolConfig") and not has_result else SAYS
        return converse_frames(stream_of(answer)) if request.operation == "ConverseStream" else answer
    last = body["messages"][-1]["content"]
    has_result = not isinstance(last, str) and any(block["type"] == "tool_result" for block in last)
    content: list[dict[str, Any]] = [{"type": "text", "text": "The ferry is at sea."}]
    if body.get("tools") and not has_result:
        content = [
            {"type": "thinking", "thinking": "A ship; look it up.", "signature": "c2lnbmVk"},
            {"type": "tool_use", "id": "toolu_bdrk_1", "name": "find_ship", "input": {"name": "ferry"}},
        ]
    message = {
        "id": "msg_bdrk_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5-20250929",
        "content": content,
        "stop_reason": "tool_use" if len(content) == 2 else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "output_tokens": 9,
            "cache_read_input_tokens": 1000,
            "cache_creation_input_tokens": 200,
        },
    }
    return message if request.operation == "InvokeModel" else invoke_frames(message_events(message))


def message_events(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as Anthropic streams it."""
    empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
    parts: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    ]
    for index, block in enumerate(message["content"]):
        deltas: dict[str, list[dict[str, Any]]] = {
            "thinking": [
                {"type": "thinking_delta", "thinking": block.get("thinking")},
                {"type": "signature_delta", "signature": block.get("signature")},
            ],
            "text": [{"type": "text_delta", "text": block.get("text")}],
            "tool_use": [{"type": "input_json_delta", "partial_json": json.dumps(block.get("input"))}],
        }
        start = {**block, **empty[block["type"]]}
        parts.append({"type": "content_block_start", "index": index, "content_block": start})
        parts += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas[block["type"]]]
        parts.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    parts.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}})
    return [*parts, {"type": "message_stop"}]
