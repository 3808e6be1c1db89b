"""Translates errors of providers and of the network to the terms of `calls.rules.classify`."""

from __future__ import annotations

import errno
import html
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, timedelta, timezone
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

from breakwater.calls.providers.server_sent import EventReader, EventTooLargeError
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, TransportFailure, status_in_words
from breakwater.calls.rules.delays import duration_s, moment_in, spoken_delay_s
from breakwater.jobs.rules.chat_messages import fields
from breakwater.kernel.json_values import MAX_DEPTH, TOO_DEEP, is_too_deep
from breakwater.kernel.surrogates import EventJoiner, read_whole, whole_json
from breakwater.redaction.rules.redact import cut

MAX_ERROR_TEXT = 16_000
"""The most characters of an error's text. Records cut it further, once it is redacted."""
_MAX_PAGE_TEXT = 300
_MAX_PAGE = 4_000
_MAX_CODE = 200
_SHORT = 2 * MAX_DEPTH
"""Bytes of JSON that are too few to be nested too deep."""

_STATUS_BY_NAME = {
    name: status
    for status, names in {
        400: "invalid_request_error INVALID_ARGUMENT FAILED_PRECONDITION context_length_exceeded ValidationException "
        "ServiceQuotaExceededException",
        401: "authentication_error UNAUTHENTICATED invalid_api_key",
        402: "billing_error",
        403: "permission_error PERMISSION_DENIED AccessDeniedException ExpiredTokenException "
        "UnrecognizedClientException",
        404: "not_found_error NOT_FOUND model_not_found ResourceNotFoundException",
        408: "ModelTimeoutException",
        413: "request_too_large",
        424: "ModelErrorException ModelStreamErrorException",
        429: "rate_limit_error RESOURCE_EXHAUSTED rate_limit_exceeded insufficient_quota ThrottlingException "
        "ModelNotReadyException",
        500: "api_error INTERNAL InternalServerException",
        503: "UNAVAILABLE ServiceUnavailableException",
        504: "timeout_error DEADLINE_EXCEEDED",
        529: "overloaded_error",
    }.items()
    for name in names.split()
}
"""Statuses by Anthropic's types, Gemini's statuses, OpenAI's codes and Bedrock's exceptions.

OpenAI's types are too broad: `server_error` says only that there was an error.
"""
_ADVICE: Mapping[str, Sequence[tuple[re.Pattern[str], str]]] = {
    "AccessDeniedException": (
        (
            re.compile(r"access to the model|model access", re.I),
            "the account has no access to this model in this region: ask for it in Bedrock's console",
        ),
        (
            re.compile(r"not authorized to perform", re.I),
            "allow the role this action for the model, and for an inference profile also for the model in each of its "
            "regions",
        ),
    ),
    "ValidationException": (
        (
            re.compile(r"model identifier is invalid", re.I),
            "the model may not exist in this region, or only by an inference profile, such as `us.` before its id",
        ),
        (
            re.compile(r"on-demand throughput", re.I),
            "use the id of an inference profile: `us.`, `eu.`, `apac.` or `global.` before that of the model",
        ),
    ),
}
"""Advice on errors of Bedrock's, by its exception and the error's words."""
_NO_ERROR = frozenset({"none", "0", "200", "ok", "success"})
_BEIJING = timezone(timedelta(hours=8))

# HTTP


def http_failure(status: int, payload: bytes, headers: Mapping[str, str]) -> HttpFailure:
    """Reads a response that is not a 2xx.

    It understands the error bodies of OpenAI, Anthropic, Gemini and compatible APIs. Of an HTML page it takes the
    title, of a stream the first event with an error, and of any other body the text.

    Args:
        status: the HTTP status.
        payload: the body, as far as it has arrived.
        headers: the headers, with names in any case.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    error = _error_of(_parse(payload))
    if error is None:
        with suppress(EventTooLargeError):
            error = next((_error_of(_parse(data)) for _, data in EventReader().feed(payload + b"\n\n")), None)
    aws_code = lowered.get("x-amzn-errortype", "").partition(":")[0].rpartition("#")[2]
    if aws_code:
        error = {**(error or {}), "code": aws_code}
    if error is None:
        text = _plain_text(payload)
        return HttpFailure(
            status,
            text or f"HTTP {status} without a text",
            headers=lowered,
            retry_delay_s=spoken_delay_s(text),
            resets_at=moment_in(text),
        )
    return _failure(status, error, lowered, f"HTTP {status} without a text")


def _failure(status: int, error: dict[str, Any], headers: Mapping[str, str], default_message: str) -> HttpFailure:
    message = _text(error.get("message")) or default_message
    code = _name(error, "code")
    message = _with_advice(code or _name(error, "type") or "", message)
    limits = dict.fromkeys(name for name in _limits(error.get("details")) if name)
    if isinstance(source := fields(error.get("metadata")).get("limit_source"), str):
        limits[source] = None
    # OpenRouter adds the error that it got from the provider.
    if isinstance(raw := fields(error.get("metadata")).get("raw"), str) and raw:
        upstream = _error_of(_parse(raw.encode(errors="replace"))) or {"message": raw}
        message = f"{message}: {_text(upstream.get('message'))}"
    # llama.cpp's message about a conversation that is too long does not always have the figures.
    prompt_tokens = error.get("n_prompt_tokens")
    window = error.get("n_ctx")
    if isinstance(prompt_tokens, int) and isinstance(window, int) and str(prompt_tokens) not in message:
        message = f"{message} ({prompt_tokens} tokens > {window})"
    zone = _BEIJING if (code or "").startswith("13") else UTC  # Zhipu names times in its own time zone
    reset = next((error[name] for name in ("resets_at", "reset_at", "resetTime") if error.get(name)), None)
    # FastAPI's location counts only if it is a path in the request, and not a sentence.
    param = _name(error, "param") or _location(error.get("message")) or ""
    return HttpFailure(
        status,
        message,
        code,
        _name(error, "type") or _name(error, "status"),  # Gemini's word
        {**headers, **_upstream_headers(error)},
        _delay_s(error, message),
        param if _PLACE.fullmatch(param) else None,
        tuple(limits),
        moment_in(reset if isinstance(reset, int | float) else f"until {reset}" if reset else message, zone),
    )


def _with_advice(code: str, message: str) -> str:
    advice = next((advice for words, advice in _ADVICE.get(code, ()) if words.search(message)), None)
    return message if advice is None else f"{message} ({advice})"


def carries_error(body: Mapping[str, Any]) -> bool:
    """Returns True if the body of a 2xx, or an event in it, is an error."""
    error = body.get("error")
    has_answer = any(body.get(name) for name in ("choices", "content", "output"))
    # Some gateways put an error with empty fields next to an answer.
    if error and not (has_answer and isinstance(error, dict) and not any(cast(dict[str, Any], error).values())):
        return True
    if "response" in body and any(fields(fields(body["response"]).get("error")).values()):
        return True
    if body.get("type") in ("error", "response.failed") or body.get("object") in ("error", "Error"):
        return True
    if has_answer:
        return False
    # MiniMax, and gateways that wrap responses, have an error at the top level.
    message = _first(body, "message", "msg", "error_msg", "error_message")
    failed = str(body.get("code", body.get("error_code"))).lower() not in _NO_ERROR and isinstance(message, str)
    return failed or bool(fields(body.get("base_resp")).get("status_code"))


def says_why(body: dict[str, Any]) -> bool:
    """Returns True if the body of a 2xx without an answer has an error message, in whatever shape."""
    return bool(_text((_error_of(body) or {}).get("message")))


def error_in_answer(body: dict[str, Any], answer_status: int = 200) -> HttpFailure | BrokenAnswer:
    """Returns the error in the body of a 2xx.

    If the body says which status the error has, the failure has that status: gateways send 200 before they know of the
    error. Otherwise the answer counts as broken.

    Args:
        body: the body of the response.
        answer_status: the HTTP status of the response.
    """
    error = _error_of(body) or {}
    failure = _failure(answer_status, error, {}, "an error without a text")
    status = _status(error)
    if status is None:
        status = status_in_words(failure.code, failure.type, failure.message)
    if status is None:
        return BrokenAnswer(f"a {answer_status} with an error in its body: {failure.message}", answer_status)
    return replace(failure, status=status)


def filter_words(choice: Mapping[str, Any]) -> list[str]:
    """Returns why a provider filtered a choice: its word for the end, what its filters found, and its own text."""
    results = fields(choice.get("content_filter_results"))
    found_by = {name: fields(result) for name, result in results.items()}
    hits = [
        f"{name.replace('_', ' ')} ({result['severity']})" if result.get("severity") else name.replace("_", " ")
        for name, result in found_by.items()
        if result.get("filtered") is True or result.get("severity") in ("medium", "high")
    ]
    reasons = (choice.get("native_finish_reason"), ", ".join(hits), _text(choice.get("finish_message")))
    return [reason for reason in reasons if isinstance(reason, str) and reason]


def read_json(payload: bytes, *, checked: bool = True, joiner: EventJoiner | None = None) -> Any:
    """Parses JSON, also with a byte-order mark, as programs on Windows write it, and in UTF-16.

    Args:
        payload: the body, or an event of a stream.
        checked: refuse a document that is nested too deep to be passed on.
        joiner: joins halves of surrogate pairs between the events of a stream.

    Raises:
        ValueError: it is not JSON, or nested too deep. The message does not quote it.
    """
    try:
        document = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        document = _read_odd(payload, error, joiner)
    # Most events are short, and counting is quick.
    if (
        checked
        and len(payload) > _SHORT
        and payload.count(b"{") + payload.count(b"[") > MAX_DEPTH
        and is_too_deep(document)
    ):
        raise ValueError(TOO_DEEP)
    return document


def _read_odd(payload: bytes, refusal: orjson.JSONDecodeError, joiner: EventJoiner | None) -> Any:
    encoding = json.detect_encoding(payload)
    try:
        if encoding != "utf-8":
            return read_whole(orjson.loads, payload.decode(encoding, "surrogatepass").encode(errors="surrogatepass"))
        if (repaired := whole_json(payload)) is not None:
            document = orjson.loads(repaired)
            return document if joiner is None else joiner.read(payload)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:
        if encoding != "utf-8":
            raise ValueError("is not JSON") from error
    raise ValueError(f"is not JSON from character {refusal.pos} on") from refusal


def first_of(document: Any) -> Any:
    """Returns a document, or the first item of a list, into which Gemini wraps an error."""
    return cast(list[Any], document)[0] if isinstance(document, list) and document else document


def _parse(payload: bytes) -> Any:
    try:
        return read_json(payload)
    except ValueError:
        return None


def _error_of(body: Any) -> dict[str, Any] | None:
    """Returns the object with the error's message, code and type; None if there is none.

    OpenAI, Anthropic and Gemini nest it under `error`, and Gemini's stream puts that into a list. Ollama has a text
    there. vLLM, Mistral, Azure's gateway and FastAPI have it at the top level.
    """
    body = first_of(body)
    if not isinstance(body, dict):
        return None
    event = cast(dict[str, Any], body)
    response = fields(event.get("response"))
    # An event of a response has the error inside of the response, or next to it.
    places = [response, fields(response.get("status_details")), fields(event.get("status_details")), event]
    errors = [error for place in places if (error := _error_at(place)) is not None]
    return next((error for error in errors if _text(error["message"])), errors[0] if errors else None)


def _error_at(place: Mapping[str, Any], depth: int = 3) -> dict[str, Any] | None:
    """Returns the error under `error`, or at the top level of an object."""
    nested = place.get("error")
    if isinstance(nested, dict):
        error = cast(dict[str, Any], nested)
        message = _first(error, "message", "msg", "detail") or _first(place, *_MESSAGES)
        if message is None and depth and (inner := _error_at(error, depth - 1)) is not None:
            return inner
        return {**error, "message": message or _first(error, "type", "code", "status")}
    if base := fields(place.get("base_resp")):
        return {"code": base.get("status_code"), "message": base.get("status_msg")}
    message = nested if isinstance(nested, str) and nested else _first(place, *_MESSAGES)
    if message is None and place.get("object") != "error":
        return None
    return {"code": _first(place, "statusCode", "error_code"), **place, "message": message}


_MESSAGES = ("message", "Message", "msg", "error_msg", "error_message", "detail", "errors")


def _upstream_headers(error: Mapping[str, Any]) -> dict[str, str]:
    """Returns the provider's headers, which OpenRouter puts into the body."""
    headers = fields(fields(error.get("metadata")).get("headers"))
    return {name.lower(): value for name, value in headers.items() if isinstance(value, str)}


def _limits(details: Any) -> Iterator[str]:
    """Yields the names of the limits in Google's details."""
    for detail in map(fields, cast(list[Any], details) if isinstance(details, list) else ()):
        violations = detail.get("violations")
        for violation in map(fields, cast(list[Any], violations) if isinstance(violations, list) else ()):
            yield str(violation.get("quotaId") or "")
        yield str(fields(detail.get("metadata")).get("quota_limit") or "")


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name)), None)


def _text(value: Any, depth: int = 4) -> str:
    """Returns the text of a message that may be nested, as in FastAPI's list of errors."""
    if isinstance(value, str):
        return cut(value.strip(), MAX_ERROR_TEXT)
    if isinstance(value, bool) or value is None or depth == 0:
        return ""
    if isinstance(value, list):
        texts = (_text(part, depth - 1) for part in cast(list[Any], value)[:20])
        return cut("; ".join(text for text in texts if text), MAX_ERROR_TEXT)
    if isinstance(value, dict):
        return _text(_first(cast(dict[str, Any], value), "message", "msg", "detail", "error"), depth - 1)
    return str(value)


def _name(error: Mapping[str, Any], field: str) -> str | None:
    value = error.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return cut(str(value), _MAX_CODE) or None


def _location(message: Any) -> str:
    """Returns the location of FastAPI's first error, below the body."""
    if isinstance(message, dict):
        message = fields(message).get("detail")
    first = fields(cast(list[Any], message)[0]) if isinstance(message, list) and message else {}
    place = first.get("loc")
    return ".".join(str(part) for part in cast(list[Any], place) if part != "body") if isinstance(place, list) else ""


def _status(error: Mapping[str, Any]) -> int | None:
    """Returns the HTTP status that an error means. Its code takes precedence over its type, which is broader."""
    names = [name for field in ("code", "status", "type") if (name := _name(error, field)) is not None]
    for name in names:
        if re.fullmatch(r"[45][0-9][0-9]", name):
            return int(name)
    return next((_STATUS_BY_NAME[name] for name in names if name in _STATUS_BY_NAME), None)


def _delay_s(error: Mapping[str, Any], message: str) -> float | None:
    """Returns the wait in Gemini's RetryInfo, or in the message."""
    if isinstance(seconds := error.get("resets_in_seconds"), int | float):
        return duration_s(str(seconds))
    details = error.get("details")
    for detail in cast(list[Any], details) if isinstance(details, list) else []:
        named = cast(dict[str, Any], detail).get("retryDelay") if isinstance(detail, dict) else None
        delay = duration_s(named) if isinstance(named, str) else None
        if delay is not None:
            return delay
    return spoken_delay_s(message)


_PLACE = re.compile(r"[A-Za-z_][\w.\[\]-]{0,99}")
_MARKUP = re.compile(r"<(!doctype|!--|\?xml|html|head|body|title|h1|center|error)", re.I)
_TITLE = re.compile(r"<title\b[^<>]*>([^<]*)<", re.I)
_UNSEEN = re.compile(r"<(script|style)\b[^<>]*>.*?</\1\s*>|<!--.*?-->", re.I | re.S)
_TAG = re.compile(r"<[^<>]*>")


def _plain_text(payload: bytes) -> str:
    text = cut(payload.decode(errors="replace").strip(), MAX_ERROR_TEXT)
    if not _MARKUP.match(text):
        return text
    title = _TITLE.search(text[:_MAX_PAGE])
    words = html.unescape(title[1]).split() if title else []
    if not words:
        words = html.unescape(_TAG.sub(" ", _UNSEEN.sub(" ", cut(text, _MAX_PAGE)))).split()
    return cut(" ".join(words), _MAX_PAGE_TEXT)


# The network

_CLASS_BY_ERRNO = {
    errno.ECONNREFUSED: "ConnectionRefusedError",
    errno.ECONNRESET: "ConnectionResetError",
    errno.ECONNABORTED: "ConnectionResetError",
    errno.EPIPE: "ConnectionResetError",
    errno.EHOSTUNREACH: "HostUnreachableError",
    errno.ENETUNREACH: "HostUnreachableError",
}

_WORDS = {
    "ConnectionRefusedError": "the provider's server refused the connection: it is not running, or not at this address",
    "ConnectionResetError": "the connection to the provider was lost; the request may be sent again",
    "HostUnreachableError": "there is no route to the provider's server: check the network",
    "DnsError": "the host name of the provider can't be resolved: check base_url, or the region in it, and DNS",
    "TlsError": ("no TLS connection to the provider could be made: check whether base_url should begin with https"),
    "ServerDisconnectedError": "the provider closed the connection without a response; the request may be sent again",
    "ClientResponseError": "the provider's response is not HTTP: check base_url",
    "TruncatedAnswerError": "the connection was lost in the middle of the answer; the request may be sent again",
}
_CERTIFICATES = {
    9: "is not valid yet: check the clock",
    10: "has expired",
    18: "is self-signed: add it to the trusted certificates of the system",
    19: "is signed by an authority that the system does not trust",
    20: "is signed by an authority that the system does not trust",
    62: "is for another host than base_url names",
}
"""Problems of certificates, by OpenSSL's numbers."""


_AT = {
    "ConnectionRefusedError": "connection refused at {}",
    "HostUnreachableError": "no route to {}",
    "DnsError": "the host name {} cannot be resolved",
    "TimeoutError": "no answer in time from {}",
}


def unreachable_at(failure: TransportFailure, url: str) -> str:
    """Describes a failed connection for the person who chose the URL: `connection refused at 127.0.0.1:11998`."""
    address = urlsplit(url).netloc.rpartition("@")[2]
    return _AT.get(failure.class_name, f"{failure.message}, at {{}}").format(address)


def transport_failure(error: BaseException) -> TransportFailure:
    """Translates an error of the connection to a timeout, or a failure of the network that is named by its cause.

    Args:
        error: an error of the operating system or of aiohttp, whose errors are recognized by name, without importing
            it.
    """
    name = type(error).__name__
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    number = getattr(cause, "errno", None)
    if isinstance(cause, TimeoutError) or number == errno.ETIMEDOUT:
        return TransportFailure("timeout", "TimeoutError", "the provider's server did not answer in time")
    class_name = _class_of(name, cause)
    text = _WORDS.get(class_name, "the connection to the provider failed")
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = f"the provider's certificate {_CERTIFICATES.get(getattr(cause, 'verify_code', 0), 'is not valid')}"
    elif any(parent.__name__ == "InvalidURL" for parent in type(error).__mro__):
        text = "the provider's URL is not valid"
    code = "" if class_name in {"DnsError", "TlsError"} else errno.errorcode.get(number or 0, "")
    return TransportFailure("network", class_name, f"{text} ({code})" if code else text)


def _class_of(name: str, cause: BaseException) -> str:
    # These two come first, as their error numbers are not those of the operating system.
    if isinstance(cause, ssl.SSLError) or name in {"ClientConnectorCertificateError", "ServerFingerprintMismatch"}:
        return "TlsError"
    if isinstance(cause, socket.gaierror | socket.herror) or name == "ClientConnectorDNSError":
        return "DnsError"
    if isinstance(cause, ConnectionRefusedError):
        return "ConnectionRefusedError"
    if isinstance(cause, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        return "ConnectionResetError"
    class_name = _CLASS_BY_ERRNO.get(getattr(cause, "errno", None) or 0)
    if class_name is not None:
        return class_name
    if name == "ClientPayloadError":
        return "TruncatedAnswerError"
    return name if name.endswith("Error") else f"{name}Error"
