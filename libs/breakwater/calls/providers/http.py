"""Calls over HTTP: one request for each attempt, without redirects and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, cast

import aiohttp
from yarl import URL

from breakwater.calls.providers.base import (
    MAX_ANSWER_BYTES,
    Answer,
    AnswerTimeout,
    AnswerTooLargeError,
    Call,
    CallError,
    Streaming,
    StreamReader,
    UnusableAnswerError,
    Wire,
    WiresOf,
    silence,
)
from breakwater.calls.providers.connection import Certificates, Proxy
from breakwater.calls.providers.credentials import CredentialError
from breakwater.calls.providers.embeddings import MAX_ANSWER_BYTES as MAX_EMBEDDINGS_BYTES
from breakwater.calls.providers.embeddings import EmbeddingsWire
from breakwater.calls.providers.exchange import Connections, Exchange
from breakwater.calls.providers.failures import (
    carries_error,
    error_in_answer,
    filter_words,
    first_of,
    http_failure,
    read_json,
    says_why,
    transport_failure,
)
from breakwater.calls.providers.http_stream import StreamBrokenError, assemble, is_of_events, is_stream, receive
from breakwater.calls.providers.settings import HttpSettings
from breakwater.calls.rules.classify import (
    NO_CREDENTIAL,
    BrokenAnswer,
    CallFailure,
    EmptyAnswer,
    Flaw,
    TransportFailure,
)
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.dialects.rules.tool_names import long_names, shorten_names, with_long_names
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.rules.chat_messages import INTERRUPTED, encode_json, fields
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.immutable import immutable
from breakwater.kernel.json_values import TOO_DEEP
from breakwater.prices.rules.usage import Usage, model_of
from breakwater.redaction.rules.redact import KnownSecrets
from breakwater.redaction.settings import RedactionRules


@immutable()
class _HttpReply:
    status: int
    headers: Mapping[str, str]
    payload: bytes
    is_complete: bool


NOTED_WAIT_S = 0.05
"""The shortest wait for a credential that shortens the time of its call."""


class HttpProvider:
    """Makes calls to a model provider's endpoint.

    Args:
        wires_of: returns the APIs of a model. A call without a native request goes out as a chat.
        settings: the settings, whose key is read now, and whose headers go with every call.
        redaction: the rules with the placeholder that replaces the key in errors.

    Raises:
        ConfigError: the URL or a header can't be used, or the key can't be read.
    """

    def __init__(self, wires_of: WiresOf, settings: HttpSettings, redaction: RedactionRules) -> None:
        self._wires_of = wires_of
        self._placeholder = redaction.placeholder
        self._chat = wires_of("model")["chat"]
        self._origin = _origin_of(self._chat.url("model"))
        self._headers = {"Content-Type": "application/json", **settings.all_headers}
        self._headers_of_key = settings.key_headers
        self._credential = settings.credential()
        self._proxy = Proxy.of(settings)
        self._certificates = None if settings.tls is None else Certificates(settings.tls)
        self._secrets = KnownSecrets([], self._placeholder)
        """Of the latest call: the key, which its answer may not repeat. A provider gets it, and may quote it."""
        self._secrets_version = -1
        self._connections = Connections(self._headers, self._proxy)

    def __repr__(self) -> str:
        return f"HttpProvider({type(self._chat).__name__} at {self._origin})"

    async def perform(self, call: Call) -> Answer:
        """Makes the call once. Raises CallError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        key = await self._key(call.timeout_s)
        if (waited_s := loop.time() - began) > NOTED_WAIT_S:
            call = _begun_ago(call, waited_s)
        version = self._credential.version
        if self._secrets_version != version:
            self._secrets = KnownSecrets([*self._credential.secrets, *self._proxy.secrets], self._placeholder)
            self._secrets_version = version
        secrets = self._secrets  # those of this call, however often the key changes until it ends
        wire = self._wires_of(call.model)["chat" if call.native is None else call.api]
        names = long_names(call.messages, call.params) if call.native is None else {}
        if names:
            messages, params = shorten_names(call.messages, call.params, names)
            call = replace(call, messages=messages, params=params)
            wire = _LongNames(wire, names)
        try:
            if call.streaming is not None:
                answer = await self._stream(wire, call, key, secrets, call.streaming)
            else:
                answer = self._read(wire, call, await self._post(wire, call, key), secrets)
            return _with_long_names(answer, names) if names else answer
        except CallError as error:
            raise CallError(
                _without_secrets(secrets, error.failure),
                maybe_billed=error.maybe_billed,
                usage=error.usage,
                credential=version,
                finish_reason=error.finish_reason,
            ) from error.__cause__

    async def refresh_credential(self, used: int | None) -> bool:
        """Reads the key's source again. Returns True if there is another key than the one used."""
        return await self._credential.refresh(used)

    async def _key(self, timeout_s: float) -> Any:
        """Reads changed certificates, and returns the key, which may have to be fetched first. Raises CallError."""
        if self._certificates is None and self._credential.is_fresh:
            return self._credential.value
        try:
            async with asyncio.timeout(timeout_s):
                if self._certificates is not None:
                    await self._certificates.reload_changed()
                return await self._credential.current()
        except (CredentialError, TimeoutError) as error:
            text = str(error) or f"{self._credential} gives no credential within {timeout_s:g} s"
            wait_s = error.retry_after_s if isinstance(error, CredentialError) else None
            raise CallError(TransportFailure("network", NO_CREDENTIAL, text, wait_s), maybe_billed=False) from error

    async def close(self) -> None:
        """Closes idle connections."""
        await self._credential.close()
        await self._connections.close()

    async def _post(self, wire: Wire, call: Call, key: Any) -> _HttpReply:
        exchange = self._exchange(wire, call, key)
        try:
            async with AnswerTimeout(call.timeout_s), exchange as response:
                if call.on_headers is not None:
                    call.on_headers(response.headers)
                return await _reply(response, _limit(wire))
        except TimeoutError as error:
            failure = TransportFailure("timeout", "TimeoutError", silence(call))
            raise CallError(failure, maybe_billed=exchange.sent) from error
        except (aiohttp.ClientError, OSError) as error:
            # A request that never left this process is not billed: the connection was refused, or TLS failed.
            raise CallError(transport_failure(error), maybe_billed=exchange.sent) from error

    async def _stream(self, wire: Wire, call: Call, key: Any, secrets: KnownSecrets, streaming: Streaming) -> Answer:
        exchange = self._exchange(wire, call, key)
        ends_at = asyncio.get_running_loop().time() + streaming.total_timeout_s
        reader = wire.stream_reader(streaming.answer)
        failure: CallFailure | None = None
        maybe_billed = True
        cause = None
        status = 200
        try:
            async with (
                AnswerTimeout(min(call.timeout_s, streaming.total_timeout_s)) as limit,
                exchange as response,
            ):
                if call.on_headers is not None:
                    call.on_headers(response.headers)
                if not is_stream(response) or not 200 <= response.status <= 299:
                    # This is an error, perhaps as an event, or the whole answer of a server that does not stream.
                    return self._read(wire, call, await _reply(response, MAX_ANSWER_BYTES), secrets)
                status = response.status
                await receive(response, reader, streaming, limit, ends_at, secrets)
        except TimeoutError as error:
            name = "StreamStalledError" if streaming.answer.length else "TimeoutError"
            failure = TransportFailure("timeout", name, silence(call))
            maybe_billed = exchange.sent
            cause = error
        except (aiohttp.ClientError, OSError) as error:
            _release(error)
            failure = transport_failure(error)
            maybe_billed = exchange.sent
            cause = error
        except StreamBrokenError as broken:
            raise self._broken_stream(wire, broken, reader, streaming.answer) from broken
        except UnusableAnswerError as error:
            failure = BrokenAnswer(str(error), status, not isinstance(error, AnswerTooLargeError))
            cause = error
        body = secrets.hide_in(reader.answer())  # a secret may be spread over several pieces
        usage = wire.usage(body)
        # A failure after the end of the answer does not matter.
        if failure is None or reader.whole:
            try:
                return _answer(wire, body, status, usage, secrets)
            except UnusableAnswerError as error:
                failure = error_in_answer(body, status) if says_why(body) else BrokenAnswer(str(error), status)
                cause = error
        raise CallError(failure, maybe_billed=maybe_billed, usage=usage) from cause

    def _exchange(self, wire: Wire, call: Call, key: Any) -> Exchange:
        data = encode_json(wire.body(call))
        target = wire.url(call.model, streamed=call.streaming is not None)
        headers = {"X-Client-Request-Id": call.attempt_id, **self._key_headers(wire, key, target, data)}
        if call.native is not None:
            headers |= {name: self._join_header(name, value) for name, value in call.headers.items()}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        context = None if self._certificates is None else self._certificates.context
        return Exchange(self._connections, target, headers, data, context)

    def _key_headers(self, wire: Wire, key: Any, url: str, data: bytes) -> Mapping[str, str]:
        headers = None if key is None else self._headers_of_key(key, url, data)
        return wire.headers(key) if headers is None else {**wire.headers(None), **headers}

    def _join_header(self, name: str, value: str) -> str:
        """Returns a client's header, appended to the config's header of the same name: both are lists."""
        configured = (
            header_value for header_name, header_value in self._headers.items() if header_name.lower() == name
        )
        return ", ".join((*configured, value))

    def _read(self, wire: Wire, call: Call, reply: _HttpReply, secrets: KnownSecrets) -> Answer:
        status = reply.status
        if not 200 <= status <= 299:
            raise CallError(http_failure(status, reply.payload, reply.headers), maybe_billed=False)
        body = (
            self._assemble(wire, reply, secrets)
            if is_of_events(reply.payload) and not isinstance(wire, EmbeddingsWire)
            else secrets.hide_in_parsed(reply.payload, _parse_body(wire, reply))
        )
        if isinstance(wire, EmbeddingsWire):
            body = wire.with_tokens(body, reply.headers)
        usage = wire.usage(body)
        if carries_error(body):
            raise CallError(error_in_answer(body, status), maybe_billed=self._has_begun(wire, body), usage=usage)
        try:
            return _answer(wire, wire.readable(body, call), status, usage, secrets)
        except UnusableAnswerError as error:
            if says_why(body):
                raise CallError(error_in_answer(body, status), maybe_billed=False, usage=usage) from error
            raise _unusable_answer(error, status, usage, _kind_of_flaw(wire, body)) from error

    def _assemble(self, wire: Wire, reply: _HttpReply, secrets: KnownSecrets) -> dict[str, Any]:
        answer = Assembly()
        reader = wire.stream_reader(answer)
        _check_size(wire, reply)
        try:
            assemble(reply.payload, reader, answer, secrets)
        except StreamBrokenError as broken:
            raise self._broken_stream(wire, broken, reader, answer) from broken
        except UnusableAnswerError as error:
            raise _unusable_answer(error, reply.status, wire.usage(reader.answer())) from error
        return secrets.hide_in(reader.answer())

    def _broken_stream(
        self, wire: Wire, stream_error: StreamBrokenError, reader: StreamReader, answer: Assembly
    ) -> CallError:
        partial_answer = reader.answer()
        has_begun = answer.length > 0 or self._has_begun(wire, partial_answer)
        return CallError(stream_error.failure, maybe_billed=has_begun, usage=wire.usage(partial_answer))

    def _has_begun(self, wire: Wire, body: dict[str, Any]) -> bool:
        """Returns True if a model has written something before it failed, as only then its provider may bill for it."""
        blocks = body.get("content")
        if isinstance(blocks, list):  # Anthropic's blocks, perhaps only thinking
            contents = (
                value for block in cast(list[Any], blocks) for name, value in fields(block).items() if name != "type"
            )
            return any(contents)
        if isinstance(wire, EmbeddingsWire):
            return False
        try:
            return any(choice.output for choice in wire.choices(body))
        except UnusableAnswerError:
            return False


def _begun_ago(call: Call, waited_s: float) -> Call:
    """Returns a call with the rest of its time."""
    streaming = call.streaming
    if streaming is not None:
        streaming = replace(streaming, total_timeout_s=max(0.001, streaming.total_timeout_s - waited_s))
    return replace(call, timeout_s=max(0.001, call.timeout_s - waited_s), streaming=streaming)


def _answer(wire: Wire, body: dict[str, Any], status: int, usage: Usage | None, secrets: KnownSecrets) -> Answer:
    """Returns the answer in a body. Raises UnusableAnswerError, CallError."""
    choices = tuple(wire.choices(body))
    usable = (choice for choice in choices if choice.output is not None and choice.finish_reason not in INTERRUPTED)
    chosen = next(usable, choices[0])
    reason = chosen.finish_reason
    failure: CallFailure | None = None
    if reason in INTERRUPTED:
        failure = _abortion(body, chosen, status)
    elif chosen.output is None:
        reasons = "; ".join((f"finish_reason: {reason or 'none'}", *filter_words(_choice_in(body, chosen))))
        problem = f"the answer has no text and no tool call ({reasons})"
        failure = EmptyAnswer(reason, problem, status)
    if failure is not None:
        raise CallError(failure, maybe_billed=True, usage=usage, finish_reason=reason)
    all_choices = choices if len(choices) > 1 else ()
    output = chosen.output
    if isinstance(output, str):
        # The text may be joined from several blocks, each with a part of a secret.
        output = secrets.hide(output)
    return Answer(output, usage or Usage(None, None, model=model_of(body)), None, body, reason, all_choices)


def _release(error: BaseException) -> None:
    """Frees the received part of an answer: aiohttp keeps its error, whose traceback keeps the frames that read it."""
    error.__traceback__ = None


def _limit(wire: Wire) -> int:
    """Returns the size limit of an answer's body."""
    return MAX_EMBEDDINGS_BYTES if isinstance(wire, EmbeddingsWire) else MAX_ANSWER_BYTES


async def _reply(response: Exchange, limit: int) -> _HttpReply:
    """Reads a response with its body, up to one byte more than the limit, or until the connection breaks."""
    payload = bytearray()
    is_complete = True
    try:
        while len(payload) <= limit and not response.content.at_eof():
            payload += await response.content.read(limit + 1 - len(payload))
    except (aiohttp.ClientError, ConnectionError) as error:
        _release(error)
        # The status has arrived, and matters more than the connection that broke afterwards.
        is_complete = False
    return _HttpReply(response.status, response.headers, bytes(payload), is_complete)


def _check_size(wire: Wire, reply: _HttpReply) -> None:
    """Checks the size of an answer. Raises CallError: it is over the limit."""
    if len(reply.payload) > (limit := _limit(wire)):
        raise _broken_answer(reply.status, f"the answer is over {limit} bytes", storable=False)


def _parse_body(wire: Wire, reply: _HttpReply) -> dict[str, Any]:
    status = reply.status
    payload = reply.payload
    if not reply.is_complete:
        raise _broken_answer(status, f"the answer was truncated after {len(payload)} bytes")
    _check_size(wire, reply)
    if not payload.strip():
        raise _broken_answer(status, "the answer's body is empty")
    try:
        # Vectors are not checked, as that would look at each number; they are small once they are packed.
        body = first_of(read_json(payload, checked=not isinstance(wire, EmbeddingsWire)))
    except ValueError as error:
        raise _broken_answer(status, f"the answer {error}", storable=str(error) != TOO_DEEP) from error
    if not isinstance(body, dict):
        raise _broken_answer(status, "the answer is not a JSON object")
    return cast(dict[str, Any], body)


def _abortion(body: Mapping[str, Any], choice: Choice, status: int) -> CallFailure:
    """Returns the failure of an answer that its provider aborted: the error in the choice, as OpenRouter writes it."""
    reported_choice = _choice_in(body, choice)
    if carries_error({"error": reported_choice.get("error")}):
        return error_in_answer({"error": reported_choice["error"]}, status)
    return BrokenAnswer(f"the provider aborted the answer (finish_reason: {choice.finish_reason})", status)


def _choice_in(body: Mapping[str, Any], choice: Choice) -> Mapping[str, Any]:
    """Returns a choice as the provider reported it; empty if the body has no list of choices."""
    choices = body.get("choices")
    choice_list = cast(list[Any], choices) if isinstance(choices, list) else []
    return fields(choice_list[choice.index]) if choice.index < len(choice_list) else {}


def _broken_answer(
    status: int, text: str, usage: Usage | None = None, flaw: Flaw = "broken", *, storable: bool = True
) -> CallError:
    # A model has run, so its provider may bill for it.
    return CallError(BrokenAnswer(text, status, storable, flaw), maybe_billed=True, usage=usage)


def _unusable_answer(error: UnusableAnswerError, status: int, usage: Usage | None, flaw: Flaw = "broken") -> CallError:
    return _broken_answer(status, str(error), usage, flaw, storable=not isinstance(error, AnswerTooLargeError))


def _kind_of_flaw(wire: Wire, body: Mapping[str, Any]) -> Flaw:
    """Returns why a complete answer is none to the request: it may be one to another API."""
    if isinstance(wire, EmbeddingsWire):
        return "other_kind" if any(body.get(name) for name in ("choices", "content", "output")) else "embeddings"
    data = body.get("data")
    has_embeddings = isinstance(data, list) and any("embedding" in fields(item) for item in cast(list[Any], data)[:1])
    return "other_kind" if has_embeddings else "broken"


class _LongNamesReader:
    """Reads a stream whose chunks have short names of tools."""

    def __init__(self, reader: StreamReader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names
        self.ended = False

    @property
    def whole(self) -> bool:
        """Returns True if the whole answer has arrived."""
        return self._reader.whole

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunks of an event, with the names of the call."""
        chunks = [with_long_names(chunk, self._names) for chunk in self._reader.read(event)]
        self.ended = self._reader.ended
        return chunks

    def answer(self) -> dict[str, Any]:
        """Returns the answer so far."""
        return self._reader.answer()


class _LongNames:
    """An API whose streams have short names of tools. Everything else is that API's."""

    def __init__(self, wire: Wire, names: Mapping[str, str]) -> None:
        self._wire = wire
        self._names = names
        self.url = wire.url
        self.headers = wire.headers
        self.body = wire.body
        self.usage = wire.usage
        self.choices = wire.choices
        self.readable = wire.readable

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Returns a reader of one stream."""
        return _LongNamesReader(self._wire.stream_reader(answer), self._names)


def _with_long_names(answer: Answer, names: Mapping[str, str]) -> Answer:
    """Returns an answer with the names of tools as the call had them."""
    return replace(
        answer,
        output=with_long_names(answer.output, names),
        response=with_long_names(answer.response, names),
        choices=tuple(
            choice.model_copy(update={"output": with_long_names(choice.output, names)}) for choice in answer.choices
        ),
    )


def _without_secrets(secrets: KnownSecrets, failure: CallFailure) -> CallFailure:
    """Returns a failure without secrets: a provider may quote the key when it refuses it."""
    return replace(failure, **{item.name: secrets.hide_in(getattr(failure, item.name)) for item in fields_of(failure)})


def _origin_of(url: str) -> URL:
    try:
        parsed = URL(url, encoded=True)
        return parsed.origin().with_port(parsed.explicit_port)
    except ValueError as error:
        raise ConfigError("base_url is not a valid URL") from error
