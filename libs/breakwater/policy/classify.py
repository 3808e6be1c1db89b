"""What a failed call means: its kind, whether trying again can help, and whether the breaker counts it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from breakwater.contracts.execution import ErrorInfo, ErrorKind
from breakwater.policy.delays import retry_after_s
from breakwater.policy.user_message import user_message

MAX_LENGTH = 500
"""Characters of a normal form."""

MAX_END = 16_000
"""Characters that are read from each end of a longer text.

Most languages put the error before its stack, Python puts it after, so both ends count. The middle is taken for stack:
a cause that stands there, as Java has them, says nothing.
"""

_LONG_LINE = 1_000

_REST_OF_FRAME = re.compile(r"(?:(?![ \t|]*+(?:file \"|at ))[ \t|].*+\n?+)*+")
_PLACE_IN_GO = re.compile(r"[ \t]++\S+\.(?:go|s):\d")
_ESCAPED_LINES = re.compile(r"\\n(?:[ ]{2}|\\t)")
_ESCAPE = re.compile(r"\\([nrt\"'\\])")
_ESCAPED = {"n": "\n", "r": "\n", "t": "\t"}

_UNLOCATED = r"<anonymous>|native|native\ method|unknown\ source|index\ \d+"
_FRAMES = tuple(
    re.compile(pattern, re.MULTILINE | re.VERBOSE)
    for pattern in (
        # Python: the frame's own line and the source that is indented further; `|` is the gutter of exception groups.
        r"""^(?P<indent>[ \t|]*+)file\ "[^"\n]*+",\ line\ \d+.*+(?:\n(?P=indent)[ \t|].*+)*+""",
        r"""\bfile\ "[^"\n]{0,500}",\ line\ \d+,\ in\ [^\s]++""",
        r"""\+\ exception\ group\ traceback\ \(most\ recent\ call\ last\):""",
        r"""traceback\ \(most\ recent\ call\ last\):""",
        r"""^[ \t|]*+\[previous\ line\ repeated\ \d+\ more\ times?\]""",
        # JavaScript, Java, .NET: a line that ends with a place in a file or has arguments; `{` opens Node's properties,
        # `~[…]` is the jar. The first line is no frame as a whole: a message may follow there.
        rf"""(?<=\n)[ \t|]*+at[ \t]
             [^\n]*(?: :(?:line\ )?\d+\)* | \((?:{_UNLOCATED})\) | [^\s(]\([^()\n]*+\) )
             (?:\ \{{|\ ~?\[[^\]\n]{{0,200}}\])?[ \t\r]*$""",
        # The same within a line, where the place must show: "at noon (in UTC)" and "at 10:42:15" are no frames.
        rf"""\bat\s++(?:(?:async|new)\s++)*+[^\s()]++(?:\s\[as\s[^\]\s]++\])?+\s*+
             \((?: [^()\n]*:\d+ | {_UNLOCATED} )\)""",
        r"""\bat\s++(?:async\s++)?+(?=[^\s()]*?(?:[/\\>]|\.[a-z]))[^\s()]+:\d+:\d+\b""",
        r"""^[ \t]*+\.\.\.\ \d+\ (?:more|common\ frames\ omitted)\b""",
        # Go: a function with the indented place after it.
        r"""^goroutine\ \d+\ .*:[ \t\r]*$""",
        r"""^(?:created\ by\ .*+|[^\s(]++(?:\(.*+)?+)\n[ \t]++\S+\.(?:go|s):\d+.*+""",
        # Ruby: `file:line:in 'method'`, the oldest call with a number before it.
        r"""(?<!\S)(?:\d++:\s++)?+(?:from\s++)?+\S+:\d+:in\s[`'][^`'\n]*+'""",
        # PHP, gdb.
        r"""^\#\d++\ .*+""",
    )
)
_ADJACENT_FRAMES = re.compile(r"STACK(?:[ ,;|]*+STACK)++")

# What ends a sentence or is around an address is no part of it.
_OF_QUERY = r"(?:[^\s\"'<>()`.,:;!]++|[.,:;!]++(?=[^\s\"'<>()`.,:;!]))*+"
_URL = re.compile(rf"(://[^\s\"'<>()`?#]*+)(?:[?#]{_OF_QUERY})?+")
_QUERY_OF_PATH = re.compile(rf"\?[\w.%\[\]-]{{1,100}}={_OF_QUERY}")

_HEX = re.compile(
    r"""\b0x[0-9a-f]++
      | (?<![a-z0-9])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![a-z0-9])
      | (?<=[a-z0-9;]@)[0-9a-f]{6,8}(?![a-z0-9]|\.[a-z])   # the identity hash of a Java object
    """,
    re.VERBOSE,
)
_HEX_WORD = re.compile(r"(?<![a-z0-9])[0-9a-f]{8,}+(?![a-z0-9])")
_MIXED = re.compile(r"[0-9][a-f]++[0-9]|[a-f][0-9]++[a-f]")

# One number, so that a wait of 2 s and one of 1.998 s are the same; so are lists, versions and IPv4 addresses.
_NUMBER = re.compile(r"\d++(?:[.,]\d++)*+")
_DURATION = re.compile(r"(?<![\w-])(?:N(?:[mnuµ]s|[smhd]))++(?!\w)")
_LONG_WORD = re.compile(r"(?<![a-zA-Z])[a-zN]{16,}+(?![A-Z])")


def error_identity(text: str) -> str:
    """The 8 hex digits by which an error is counted: the start of the MD5 of its normal form.

    Args:
        text: what the provider or the program said, of any length.
    """
    # Halves of surrogate pairs come out of JSON and have no UTF-8.
    data = normalised(text).encode("utf-8", "surrogatepass")
    return hashlib.md5(data, usedforsecurity=False).hexdigest()[:8]


def normalised(text: str) -> str:
    """An error's text without what varies: lower case but for the tokens, single blanks, at most 500 characters.

    - `STACK`: stack frames of Python, JavaScript, Java, .NET, Go, Ruby and PHP, any number in a row. Where a
      trace has its line breaks as escapes, as JSON within JSON has, these are read.
    - `HEX`: hexadecimal numbers, UUIDs, hashes, addresses, and the random part of ids: `req_011CSHoE…` is `req_HEX`.
    - `N`: numbers, with decimals and separators, and durations with their units: `1.998s`, `860ms` and `6m0s`.

    Queries and fragments of URLs are left out; hosts and paths stay. Of a text longer than 32 000 characters, both ends
    are read, as whole lines where it has lines.

    Args:
        text: what the provider or the program said. Not a normal form, whose tokens would be lowered.
    """
    text = text.replace("\r\n", "\n")
    if _ESCAPED_LINES.search(text):
        text = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text)
    text = _both_ends(text.lower())
    for frame in _FRAMES:
        text = frame.sub("STACK", text)
    text = " ".join(text.split())
    text = _ADJACENT_FRAMES.sub("STACK", text)
    # A query that stands alone leaves a blank on either side.
    text = " ".join(_QUERY_OF_PATH.sub("", _URL.sub(r"\1", text)).split())
    text = _HEX_WORD.sub(_hex_word, _HEX.sub("HEX", text))
    text = _DURATION.sub("N", _NUMBER.sub("N", text))
    text = _LONG_WORD.sub(_long_word, text)
    return text[:MAX_LENGTH].strip()


def _both_ends(text: str) -> str:
    if len(text) <= 2 * MAX_END:
        return text
    # Half of a frame is none: the head ends with a line, but where that would cost more than a frame is long.
    cut = text.rfind("\n", MAX_END - _LONG_LINE, MAX_END)
    if _PLACE_IN_GO.match(text, cut + 1):
        cut = text.rfind("\n", MAX_END - _LONG_LINE, cut)
    head = text[: cut if cut >= 0 else MAX_END]
    # A text of one line has its error in front. The tail may begin within a frame, whose other lines are indented.
    _, _, tail = text[-MAX_END:].partition("\n")
    return f"{head}\nSTACK\n{_REST_OF_FRAME.sub('', tail, count=1)}"


def _hex_word(found: re.Match[str]) -> str:
    # Letters and digits must alternate, or a number with a unit, or a name with a number, would be hex once it is long.
    return "HEX" if _MIXED.search(found[0]) else found[0]


def _long_word(found: re.Match[str]) -> str:
    # Numbers are one letter by now, so their lengths decide nothing. Names have numbers too, but few but for the one
    # at the end, and seldom a prefix as ids have.
    prefixed = found.string[found.start() - 1 : found.start()] in ("_", "-")
    numbers = found[0].rstrip("N").count("N")
    return "HEX" if numbers >= (1 if prefixed else 3) else found[0]


_OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, Azure, Groq, Cerebras, vLLM
        "exceed_context_size_error",  # llama.cpp
        "model_context_window_exceeded",
        "tokens_limit_reached",  # GitHub
    }
)
_OVERFLOW = re.compile(
    "|".join(
        (
            r"prompt (is )?too long",  # Anthropic, Fireworks, Ollama
            r"input is too long|input tokens exceed",  # Bedrock, OpenAI
            r"prompt \([^)]{0,40}\) is too long",  # vLLM
            r"input token count[^.]{0,40}exceeds",  # Gemini
            r"longer than the maximum model length|exceeds? the max_model_len",  # vLLM
            r"maximum prompt length",  # xAI
            r"reduce the length of (the|your) (input|messages|prompt)",  # Groq, Cerebras, DeepSeek
            r"request too large for model",  # Groq: more than a minute's tokens, so that it never fits
            r"prompt token count of \d+ exceeds",  # GitHub
            r"exceeded model token limit",  # Moonshot
            r"range of input length should be",  # Alibaba
            r"tokens to keep from the initial prompt is greater",  # LM Studio
            r"too many (input )?tokens",  # Cohere
            r"exceeds? the (available )?context",  # llama.cpp
            r"`inputs`( tokens \+ `max_new_tokens`)? must (be|have)",  # Text Generation Inference
        )
    ),
    re.I,
)
_CONTEXT = re.compile(r"context[_ -]?(length|window|size|limit)", re.I)
_TOO_MUCH = re.compile(
    r"exceed|maximum|too (long|large|many|big)|longer than|larger than|overflow|reduce the length", re.I
)
"""A text that only names the context window may be about a parameter of that name."""

_Q = r"['`\"\u2018\u2019\u201c\u201d]?"
_ORPHANS = re.compile(
    "|".join(
        (
            # OpenAI, and with one quote or another most that are compatible: Azure, DeepSeek, Groq, Together, Alibaba
            rf"{_Q}tool_calls{_Q} must be followed by tool messages|insufficient tool messages following",
            rf"role {_Q}tool{_Q} must be a response to a prece+ding message with {_Q}tool_calls",
            rf"{_Q}tool_call_id{_Q} of [^ ]{{1,80}} not found in {_Q}tool_calls|duplicate value for {_Q}tool_call_id",
            r"no tool (output found for function call|call found for function call output)",  # OpenAI's Responses
            r"`?tool_use`? ids were found without `?tool_result`? blocks",  # Anthropic
            r"unexpected `?tool_use_id`? found in `?tool_result`? blocks",
            r"`?tool_result`? block must have a corresponding `?tool_use`? block",
            r"function response (parts|turn)[^.]{0,80}function call (parts|turn)",  # Gemini
            r"function call (parts|turn)[^.]{0,80}function response (parts|turn)",
            r"not the same number of function calls and responses",  # Mistral, also in vLLM
            r"unexpected tool call id [^ ]{1,80} in tool results|unexpected role 'tool' after role",
            r"expected toolresult blocks at|toolresult blocks at [^ ]{1,40} exceeds the number of tooluse",  # Bedrock
        )
    ),
    re.I,
)

_NEVER_FITS = re.compile(r"request too large for .{1,200}\btokens per min", re.I)
"""OpenAI's rate limit for a request that is over a whole minute's tokens: it says no other minute would do."""

_FILTERED = frozenset({"content_filter", "content_policy_violation"})
"""Codes of Azure and OpenAI for a prompt that their filters refuse."""

_EMPTY_ACCOUNT = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})


def is_context_overflow(code: str | None, type_: str | None, text: str) -> bool:
    """Whether the conversation did not fit into the model's context window."""
    if code in _OVERFLOW_CODES or type_ in _OVERFLOW_CODES:
        return True
    return bool(_OVERFLOW.search(text) or (_CONTEXT.search(text) and _TOO_MUCH.search(text)))


def has_orphan_tool_calls(text: str) -> bool:
    """Whether a tool call had no result, or a result no call."""
    return bool(_ORPHANS.search(text))


def is_empty_account(code: str | None, type_: str | None) -> bool:
    """Whether the account is out of credit, which OpenAI answers with the status of a rate limit."""
    return code in _EMPTY_ACCOUNT or type_ in _EMPTY_ACCOUNT


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """The provider answered with an error. `message`, `code` and `type` come from its body where it has them."""

    status: int
    message: str
    code: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names in lower case."""
    retry_delay_s: float | None = None
    """The wait that the body names."""
    param: str | None = None
    """The field of the request at fault, by its name alone."""


@dataclass(frozen=True, slots=True)
class TransportFailure:
    """No HTTP answer came."""

    kind: Literal["timeout", "network"]
    class_name: str
    message: str


@dataclass(frozen=True, slots=True)
class BrokenAnswer:
    """A 2xx that can't be used: no JSON, cut short, no choices, or an error in disguise."""

    message: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class NothingSaid:
    """A valid answer without a text, a tool call, or anything else; its meaning depends on why the model stopped."""

    finish_reason: str | None
    message: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """A program or a callable failed, or said that it could not answer. It names what happened itself.

    Attributes:
        class_name: such as BackendFailureError, or the class of the exception that a callable raised.
        message: what it said.
        status: the code that it answered with, where that is like an HTTP status.
        kind: `client` is never tried again and says nothing of the program's health; the others do.
    """

    class_name: str
    message: str
    status: int | None
    kind: Literal["client", "server", "timeout", "network"]


Failure = HttpFailure | TransportFailure | BrokenAnswer | NothingSaid | ProgramFailure


@dataclass(frozen=True, slots=True)
class Classification:
    """What a failure means for the job and for the breaker."""

    kind: ErrorKind
    class_name: str
    message: str
    status_code: int | None
    retryable: bool
    counts_for_breaker: bool
    retry_after_s: float | None = None
    param: str | None = None

    def error_info(self, said: str | None = None, names: Collection[str] = ()) -> ErrorInfo:
        """The verdict as it stands in records.

        Args:
            said: the provider's own words, redacted, where they may be kept: the harmless ones are for the caller, too.
            names: what these may name besides plain words.
        """
        return ErrorInfo(
            kind=self.kind,
            class_=self.class_name,
            message=self.message,
            status_code=self.status_code,
            retryable=self.retryable,
            retry_after_s=self.retry_after_s,
            param=self.param,
            hash=error_identity(f"{self.class_name}: {self.message}"),
            user_message=None
            if self.retryable
            else user_message(self.kind, self.class_name, self.status_code, said, names),
        )


NOT_KEPT = "what the provider said is not kept for this agent"

WORKER_LOST = Classification(
    "worker_lost",
    "WorkerLostError",
    "the worker was lost while the call was in flight",
    None,
    retryable=True,
    counts_for_breaker=False,
)
"""What a call came to whose worker died before it could record it."""

UNFAMILIAR = "BadRequestError"
"""The class of a 400 whose words say nothing that is known here."""

_CLIENT_CLASSES = {
    400: UNFAMILIAR,
    401: "UnauthorizedError",
    402: "PaymentRequiredError",
    403: "ForbiddenError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
}
_SERVER_CLASSES = {
    500: "ServerError",
    502: "ServiceUnavailableError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    529: "OverloadedError",
}
RETRYABLE_CLASSES = frozenset(
    {
        *_CLIENT_CLASSES.values(),
        *_SERVER_CLASSES.values(),
        "ClientError",
        "ContentFilteredError",
        "OutputLimitError",
        "QuotaExceededError",
        "RateLimitError",
        "WorkerLostError",
        # Answers.
        "AnswerTooLargeError",
        "BrokenAnswerError",
        "EmptyAnswerError",
        "StreamStalledError",
        "TruncatedAnswerError",
        # The network.
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientOSError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DnsError",
        "HostUnreachableError",
        "IoError",
        "ServerDisconnectedError",
        "TimeoutError",
        "TlsError",
        # Programs.
        "ActionNotSupportedError",
        "BackendFailureError",
        "InvalidRequestError",
    }
)
"""All classes of errors after which a call may be repeated. Callables have others: they name what they raise."""

_MAY_BE_OF_THE_CONVERSATION = frozenset({400, 413, 422})


def classify(failure: Failure, now: datetime) -> Classification:
    """Decides what a failure means. The table of design section 5, row by row.

    Args:
        failure: what the provider room reported.
        now: to read delays that are given as a moment.
    """
    match failure:
        case TransportFailure(kind, class_name, message):
            return Classification(kind, class_name, message, None, retryable=True, counts_for_breaker=True)
        case BrokenAnswer(message, status):
            return Classification(
                "server", "BrokenAnswerError", message, status, retryable=True, counts_for_breaker=True
            )
        case NothingSaid("content_filter", message, status):
            return Classification("client", "ContentFilteredError", message, status, False, False)
        case NothingSaid("length", message, status):
            # The model has thought until its limit, and would again.
            return Classification("client", "OutputLimitError", message, status, False, False)
        case NothingSaid(_, message, status):
            return Classification(
                "server", "EmptyAnswerError", message, status, retryable=True, counts_for_breaker=True
            )
        case ProgramFailure(class_name, message, status, kind):
            again = kind != "client"
            return Classification(kind, class_name, message, status, retryable=again, counts_for_breaker=again)
        case HttpFailure():
            return _classify_status(failure, now)


_CODE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def without_text(verdict: Classification, failure: Failure) -> Classification:
    """The same without the provider's words: class, status and code, where these are no words themselves."""
    class_name = verdict.class_name if _CODE.fullmatch(verdict.class_name) else "ProviderError"
    status = "" if verdict.status_code is None else f", HTTP {verdict.status_code}"
    code = failure.code if isinstance(failure, HttpFailure) and _CODE.fullmatch(failure.code or "") else None
    message = f"{class_name}{status}{'' if code is None else f', code {code}'}; {NOT_KEPT}"
    return replace(verdict, class_name=class_name, message=message)


def _classify_status(failure: HttpFailure, now: datetime) -> Classification:
    status, message = failure.status, failure.message
    if status == 429 and is_empty_account(failure.code, failure.type):
        # No limit that resets: the account has no credit, and repeating the call only delays the next model.
        return Classification("client", "QuotaExceededError", message, status, False, False)
    if status == 429 and _NEVER_FITS.search(message):
        return Classification("context_overflow", "ContextOverflowError", message, status, False, False)
    if status == 429 or 500 <= status <= 599:
        wait = retry_after_s(failure.headers, now, failure.retry_delay_s)
        if status == 429:
            return Classification("rate_limit", "RateLimitError", message, status, True, True, wait)
        return Classification("server", _SERVER_CLASSES.get(status, "ServerError"), message, status, True, True, wait)
    if status in _MAY_BE_OF_THE_CONVERSATION:
        if is_context_overflow(failure.code, failure.type, message):
            return Classification("context_overflow", "ContextOverflowError", message, status, False, False)
        if status != 413 and has_orphan_tool_calls(message):
            return Classification("orphan_tool_calls", "OrphanToolCallsError", message, status, False, False)
        if failure.code in _FILTERED:
            return Classification("client", "ContentFilteredError", message, status, False, False)
    # An unknown status is handled as the caller's mistake: repeating what nobody understands helps nobody.
    class_name = _CLIENT_CLASSES.get(status, "ClientError")
    return Classification("client", class_name, message, status, False, False, param=failure.param)
