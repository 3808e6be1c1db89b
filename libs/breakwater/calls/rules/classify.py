"""Classifies failed calls: their kind, whether a retry can help, and whether the breaker counts them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from breakwater.calls.rules.delays import latest_reset_s, retry_after_s
from breakwater.calls.rules.user_message import user_message
from breakwater.dialects.rules.context_overflow import overflow_summary
from breakwater.dialects.rules.params import KNOWN_PARAMS
from breakwater.dialects.rules.provider_state import STATE_ERRORS, UNREADABLE, state_error
from breakwater.dialects.rules.provider_words import known_or_hash, known_place
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, ErrorInfo
from breakwater.kernel.formats import words
from breakwater.kernel.immutable import immutable

MAX_LENGTH = 500
"""The most characters of a normal form."""

MAX_END = 16_000
"""The number of characters that are read from each end of a longer text.

Most languages put the error before its stack and Python puts it after, so both ends count. The middle is taken for
stack frames, and a cause in it, as Java writes them, is ignored.
"""

_LONG_LINE = 1_000

# `(?>(?:…)*)` is `(?:…)*+`, which Python before 3.11.5 matches wrongly if a part of it can go back (gh-106052).
_REST_OF_FRAME = re.compile(r"(?>(?:(?![ \t|]*+(?:file \"|at ))[ \t|].*+\n?+)*)")
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

# Punctuation that ends a sentence or encloses a URL is not part of the URL.
_OF_QUERY = r"(?>(?:[^\s\"'<>()`.,:;!]++|[.,:;!]++(?=[^\s\"'<>()`.,:;!]))*)"
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

# 1.998 counts as one number, so that waits of 2 s and of 1.998 s look the same; so do lists, versions and IPv4
# addresses.
_NUMBER = re.compile(r"\d++(?:[.,]\d++)*+")
_DURATION = re.compile(r"(?<![\w-])(?:N(?:[mnuµ]s|[smhd]))++(?!\w)")
_LONG_WORD = re.compile(r"(?<![a-zA-Z])[a-zN]{16,}+(?![A-Z])")


def error_identity(text: str) -> str:
    """Returns the identity of an error: the first 8 hex digits of the MD5 digest of its normal form.

    Args:
        text: the text of the provider or program, of any length.
    """
    # Halves of surrogate pairs come out of JSON and have no UTF-8.
    data = normalise(text).encode("utf-8", "surrogatepass")
    return hashlib.md5(data, usedforsecurity=False).hexdigest()[:8]


def normalise(text: str) -> str:
    """Returns an error's text without its variable parts, in lower case, with single blanks, at most 500 characters.

    These tokens, in capitals, replace variable parts:

    - `STACK`: stack frames of Python, JavaScript, Java, .NET, Go, Ruby and PHP, any number in a row. Where a
      trace has its line breaks as escapes, as JSON within JSON has, these are read.
    - `HEX`: hexadecimal numbers, UUIDs, hashes, addresses, and the random part of ids: `req_011CSHoE…` is `req_HEX`.
    - `N`: numbers, with decimals and separators, and durations with their units: `1.998s`, `860ms` and `6m0s`.

    Queries and fragments of URLs are removed; hosts and paths stay. Only both ends of a text longer than 32 000
    characters are read, in whole lines if it has lines.

    Args:
        text: the text of the provider or program. It must not be a normal form, whose tokens would be lowered.
    """
    text = text.replace("\r\n", "\n")
    if _ESCAPED_LINES.search(text):
        text = _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text)
    text = _both_ends(text.lower())
    for frame in _FRAMES:
        text = frame.sub("STACK", text)
    text = " ".join(text.split())
    text = _ADJACENT_FRAMES.sub("STACK", text)
    # A removed query leaves a blank on either side.
    text = " ".join(_QUERY_OF_PATH.sub("", _URL.sub(r"\1", text)).split())
    # Letters and digits must alternate: a long number with a unit, or a long name with a number, is not hexadecimal.
    text = _HEX_WORD.sub(lambda word: "HEX" if _MIXED.search(word[0]) else word[0], _HEX.sub("HEX", text))
    text = _DURATION.sub("N", _NUMBER.sub("N", text))
    text = _LONG_WORD.sub(_long_word, text)
    return text[:MAX_LENGTH].strip()


def _both_ends(text: str) -> str:
    if len(text) <= 2 * MAX_END:
        return text
    # Half a frame is not recognised, so the head ends with a line, unless the last line is longer than any frame.
    cut = text.rfind("\n", MAX_END - _LONG_LINE, MAX_END)
    if _PLACE_IN_GO.match(text, cut + 1):
        cut = text.rfind("\n", MAX_END - _LONG_LINE, cut)
    head = text[: cut if cut >= 0 else MAX_END]
    # A text of one line has its error in front. The tail may begin within a frame, whose other lines are indented.
    _, _, tail = text[-MAX_END:].partition("\n")
    return f"{head}\nSTACK\n{_REST_OF_FRAME.sub('', tail, count=1)}"


def _long_word(word: re.Match[str]) -> str:
    # By now each number is written N. Names contain few numbers, except at the end, and seldom have an id's prefix.
    prefixed = word.string[word.start() - 1 : word.start()] in ("_", "-")
    numbers = word[0].rstrip("N").count("N")
    return "HEX" if numbers >= (1 if prefixed else 3) else word[0]


_OVERFLOW_CODES = words(
    """
    context_length_exceeded exceed_context_size_error model_context_window_exceeded model_max_prompt_tokens_exceeded
    tokens_limit_reached 1261
    """
)
"""Codes of OpenAI, Azure, Groq, Cerebras and vLLM, llama.cpp, GitHub, and Zhipu."""
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
            r"too many (input )?tokens|tokens exceeds? the model'?s max",  # Cohere
            r"total token count[^.]{0,40} exceeds the limit",
            r"exceed max message tokens",  # ByteDance
            r"exceeds? the (available )?context|but the configured context size",  # llama.cpp
            r"input (\([^)]{0,40}\) )?is too large to process",  # llama.cpp's embeddings
            r"`inputs`( tokens \+ `max_new_tokens`)? must (be|have)",  # Text Generation Inference
        )
    ),
    re.I,
)
_CONTEXT = re.compile(r"context[_ -]?(length|window|size|limit)", re.I)
_TOO_MUCH = re.compile(
    r"exceed|maximum|too (long|large|many|big)|longer than|larger than|overflow|reduce the length", re.I
)
"""Words that must accompany the context window: a text that only names it may be about a parameter."""
_OF_OUTPUT = re.compile(r"max_(completion_)?tokens\W+must be", re.I)
"""Groq compares a model's output limit with its window."""

_SENT = r"(?:inputs?|prompts?|messages|conversation|history|sequence|text|tokens?)"
_MEASURE = r"(?:length|size|limit|window|count|tokens?)"
_OVER = (
    r"(?:exceed\w*|(?:is|are|was) over|above|beyond|too (?:long|large|big)|(?:longer|larger|greater|bigger|more) than)"
)
_WIDE_OVERFLOW = re.compile(
    rf"\b{_SENT}\b[^.;]{{0,80}}\b{_OVER}\b[^.;]{{0,60}}"
    rf"\b(?:(?:input|prompt|sequence|token|message|model)(?:'?s)?[ _-](?:\w+[ _-]){{0,2}}{_MEASURE}|tokens)\b"
    rf"|\btokens in (?:the |your )?{_SENT}\b[^.;]{{0,40}}\b{_OVER}\b"
    rf"|\bexceed\w*[^.;]{{0,40}}\b(?:input|prompt|sequence)[ _-](?:\w+ )?{_MEASURE}\b"
    rf"|\b(?:input|prompt|context|sequence|conversation) (?:length|tokens?)\b[^.;]{{0,40}}\b{_OVER}\b"
    r"|(?:输入|上下文)[^。;]{0,20}(?:超过|超出|过长)|超[过出][^。;]{0,12}上下文"
    r"|\btoken limit exceeded|\bprompt exceeds\b",
    re.I,
)
"""The grammar of wordings that are not known yet: what was sent, that it exceeds something, and what that is."""
_OTHER_LIMITS = re.compile(
    r"max_(?:completion_|output_|new_)?tokens|maximum tokens you requested|(?:output|completion|thinking|reasoning)[ _]"
    r"tokens|budget|\b(?:image|audio|video|file|page|pdf|document|metadata|logit_bias)s?\b|"
    r"per (?:second|minute|hour|day)",
    re.I,
)
"""Other things that may be too long or too many, and that a shorter conversation does not reduce."""
_BEFORE = 40
"""The number of characters before an overflow's words that may name such a thing."""

_Q = r"['`\"\u2018\u2019\u201c\u201d]?"
_ORPHANS = re.compile(
    "|".join(
        (
            # OpenAI, and with other quotes most compatible APIs: Azure, DeepSeek, Groq, Together, Alibaba
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
"""OpenAI's rate limit for a request with more tokens than a whole minute allows: waiting does not help."""

_NOT_IN_PLAN = re.compile(r"extra usage[^.]{0,40}long context|long context[^.]{0,60}not (yet )?available", re.I)
"""Anthropic's words for a conversation that is longer than the account's plan allows: waiting does not help."""
_MAY_BE_OF_PLAN = frozenset({400, 402, 403, 429})

_FILTERED = frozenset({"content_filter", "content_policy_violation"})
"""Codes of Azure and OpenAI for a prompt that their filters refuse."""

_MALFORMED = re.compile(r"tool_use_failed|output_parse_failed|json_validate_failed", re.I)
_MALFORMED_WORDS = re.compile(r"'failed_generation'|model produced invalid", re.I)
"""Groq's and Bedrock's words for an answer that they withhold because it is malformed."""

_THROTTLED = re.compile(r"throttl|rate_?limit|too_?many_?requests|limit_(requests|burst|tokens)", re.I)
_THROTTLED_WORDS = re.compile(
    r"too many (concurrent |parallel )?requests|\bthrottl(ed|ing)\b|rate[ -]?limit(ed| (is |was |has been )?"
    r"(exceeded|reached|hit))|(exceed\w*|reached|hit)( \w+['’]?s?){0,5} rate[ -]limit|"
    r"wait (a \w+ )?before (trying|retry|sending|making)|\bslow down\b|"
    r"requests? (rate|frequency) (is )?too|请求过于频繁|速率限制|并发数过高|访问量过大",
    re.I,
)
"""Words of a rate limit, which outweigh the error's type and status."""

_SPENT = words(
    """
    insufficient_quota billing_not_active billing_hard_limit_reached billing_error usage_limit_reached
    exceeded_current_quota_error 1113 1304 1308 1310 arrearage allocationquota.freetieronly accountoverdueerror
    insufficient_balance insufficient_balance_error insufficient_user_quota insufficient_credits quota_exceeded
    quotaexceeded quota_exhausted budget_exceeded servicequotaexceededexception
    """
)
"""Codes and types of OpenAI, Anthropic, Moonshot, Zhipu (the account, then limits of its plans), Alibaba, ByteDance,
MiniMax, gateways and LiteLLM."""
_LIMIT = r"(usage|spend(ing)?|billing|budget|credit|plan|daily|weekly|monthly|weekly/monthly)"
_CAP = r"(limits?|cap|quota|allowance)"
_SPENT_WORDS = re.compile(
    "|".join(
        (
            r"\b(insufficient|not enough) (account |user |remaining |paid )?(balance|credits?|funds|quota)",
            r"\b(balance|credits?|funds|quota) (is|are|has been) "
            r"(too low|insufficient|not enough|exhausted|depleted|used up)",
            r"\bno (credits?|balance|quota|funds) (left|remaining)|\brequires? more credits",
            r"\b(out of|used( up)? all( of)?( your| its| the)?( available| remaining| included)?)( \w+){0,2} "
            r"(credits?|funds|quota|usage)\b",
            rf"\b{_LIMIT}( \w+)? {_CAP}( \w+){{0,4}} (reached|exceeded|exhausted)",
            rf"\b(reached|reaching|exceeded|exhausted|hit)( [\w-]+){{0,4}} {_LIMIT}( \w+)? {_CAP}",
            r"\bexhausted( \w+){0,3} (quota|credits?|balance)|\b(usage|quota|credits?|balance)[ _-]exhausted\b",
            r"\bbudget has been exceeded! current cost|\bkey limit exceeded\b",
            r"\bin arrears\b|\barrearage\b|\bplease (recharge|top up)\b|\bpurchase (more )?credits\b",
            r"\bfree (tier|quota|trial)\b[^.]{0,40}\b(exhausted|used up|expired)",
            r"余额不足|欠费|额度不足|额度已用|请充值",
        )
    ),
    re.I,
)
_SPENT_OR_LIMITED = re.compile(r"exceeded (your )?current quota", re.I)
"""Words that OpenAI uses for an account without credit, and Gemini for any limit, but then with a wait."""

_LONG_WINDOW = re.compile(
    r"(?<![a-z])(?:per|a|/)[ _-]?(?:day|week|month)(?![a-z])|\b(?:daily|weekly|monthly)\b|"
    r"(?:Per|By)(?:Day|Week|Month)|_daily|\b[TR]PD\b|per 86400s|\blimit: 0\b",
    re.I,
)
_SHORT_WINDOW = re.compile(
    r"(?<![a-z])(?:per|a|/)[ _-]?(?:sec(?:ond)?|min(?:ute)?)(?![a-z])|(?:Per|By)(?:Second|Minute)", re.I
)

QUOTA_RESET_S = 3_600.0
"""The wait from which on a limit counts as a spent quota, which calls do not wait for."""

_NEVER_UNSUPPORTED = frozenset({"model", "messages", "stream"})
ADDED = re.compile(
    r"\b(?:max_(?:completion_)?tokens|stream_options|response[ _]format|output_config|reasoning_effort)\b", re.I
)
"""Parameters that the plane itself adds to requests, or whose name it translates for the provider."""
_REFUSED = re.compile(
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|extra (fields|inputs)|"
    r"unavailable|deprecated|instead|extra_forbidden|cannot both|not both|mutually exclusive|only the default|"
    r"may only be|extraneous|cannot find field",
    re.I,
)
INSTEAD = re.compile(r"\b(?:use|requires?|in favou?r of|replaced (?:by|with))\b\W*\w+", re.I)


def is_context_overflow(code: str | None, type_: str | None, text: str) -> bool:
    """Returns True if an error says that the conversation did not fit into the model's context window."""
    if code in _OVERFLOW_CODES or type_ in _OVERFLOW_CODES:
        return True
    if _OVERFLOW.search(text):
        return True
    if _CONTEXT.search(text) and _TOO_MUCH.search(text):
        return not _OF_OUTPUT.search(text)
    wide = _WIDE_OVERFLOW.search(text)
    return wide is not None and not _OTHER_LIMITS.search(text, max(0, wide.start() - _BEFORE), wide.end())


def has_orphan_tool_calls(text: str) -> bool:
    """Returns True if an error says that a tool call had no result, or a result no call."""
    return bool(_ORPHANS.search(text))


def refused_parameter(code: str | None, param: str | None, text: str) -> str | None:
    """Returns the parameter that an error calls unknown; None if it names none, or refuses only the value.

    Without `param`, the text is searched for the parameters of `ADDED`.
    """
    if param is None:
        # The text may also name the parameter to use instead.
        mention = ADDED.search(INSTEAD.sub("", text))
        param = None if mention is None else mention[0].lower().replace(" ", "_")
    param = None if param is None else param.partition(".")[0]
    # Only the plane sets stream_options, so it can always leave them out.
    is_known_param = param is not None and param in KNOWN_PARAMS and param not in _NEVER_UNSUPPORTED
    return param if param == "stream_options" or (is_known_param and _REFUSED.search(f"{code} {text}")) else None


def says_unsupported(text: str) -> bool:
    """Returns True if an error says that a parameter is unknown, or not allowed together with another one."""
    return _REFUSED.search(text) is not None


def status_in_words(code: str | None, type_: str | None, text: str) -> int | None:
    """Returns the HTTP status that an error's words imply, if it has none or a generic one; None if they imply none."""
    names = _names(code, type_)
    if names & _SPENT or _SPENT_WORDS.search(text):
        return 402
    if _THROTTLED.search(" ".join(names)) or _THROTTLED_WORDS.search(text):
        return 429
    return 400 if is_context_overflow(code, type_, text) or has_orphan_tool_calls(text) else None


def _names(code: str | None, type_: str | None) -> frozenset[str]:
    return frozenset(name.lower() for name in (code, type_) if name is not None)


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """An error that the provider answered with.

    Attributes:
        status: the HTTP status.
        message: the message in the body, or else the body's beginning.
        code: the error's code in the body.
        type: the error's type in the body.
        headers: the response's headers, with names in lower case.
        retry_delay_s: the wait that the body names.
        param: the name of the request's field at fault.
        limits: the names of the limits that were reached, if the body has them.
        resets_at: the time at which a limit is reset, if the body has it.
    """

    status: int
    message: str
    code: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    retry_delay_s: float | None = None
    param: str | None = None
    limits: tuple[str, ...] = ()
    resets_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TransportFailure:
    """A call without an HTTP answer.

    Attributes:
        kind: what the network did.
        class_name: the class of the error.
        message: the problem, in our words.
        wait_s: the seconds until another call can have another end; None if that is not known.
    """

    kind: Literal["timeout", "network"]
    class_name: str
    message: str
    wait_s: float | None = None


Flaw = Literal["broken", "other_kind", "embeddings"]


@dataclass(frozen=True, slots=True)
class BrokenAnswer:
    """An unusable 2xx: it is no JSON, truncated, without choices, or an error in disguise.

    Attributes:
        message: the problem, in our words.
        status: the answer's HTTP status.
        storable: False if the answer is too large or too deeply nested. The same model would give it again.
        flaw: the reason why it is unusable: it is broken, an answer to another API (a chat in place of embeddings), or
            complete with embeddings that can't be read.
    """

    message: str
    status: int = 200
    storable: bool = True
    flaw: Flaw = "broken"


@dataclass(frozen=True, slots=True)
class EmptyAnswer:
    """A valid answer without a text, a tool call or anything else; `finish_reason` decides what it means."""

    finish_reason: str | None
    message: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """A failure that a program or a callable reported.

    Attributes:
        class_name: the error's class, such as BackendFailureError, or that of the exception that a callable raised.
        message: the error's message.
        status: the program's code, if it is like an HTTP status.
        kind: the kind of the failure. `client` is never retried and says nothing about the program's health.
    """

    class_name: str
    message: str
    status: int | None
    kind: Literal["client", "server", "timeout", "network"]


@dataclass(frozen=True, slots=True)
class NotSent:
    """A request that can't be translated for the model's provider, so that no call was made.

    Attributes:
        message: the reason, for the caller.
        param: the field at fault.
    """

    message: str
    param: str


CallFailure = HttpFailure | TransportFailure | BrokenAnswer | EmptyAnswer | ProgramFailure | NotSent


@immutable()
class Classification:
    """The meaning of a failure for the job and for the breaker."""

    kind: ErrorKind
    class_name: str
    message: str
    status_code: int | None
    retryable: bool
    counts_for_breaker: bool
    retry_after_s: float | None = None
    param: str | None = None

    def error_info(self, provider_text: str | None = None, names: Collection[str] = ()) -> ErrorInfo:
        """Returns the error as records contain it.

        Args:
            provider_text: the provider's redacted text, if it may be kept; its harmless parts are for the caller, too.
            names: names that such a part may contain in addition to plain words.
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
            else user_message(self.kind, self.class_name, self.status_code, provider_text, names),
        )


NOT_SENT = "UnsupportedRequestError"
"""The class of `NotSent`."""

WRONG_KIND = "WrongAnswerKindError"
"""The class of an answer to another API than the request's."""
BROKEN_EMBEDDINGS = "BrokenEmbeddingsError"
"""The class of a complete answer whose embeddings can't be read."""

NOT_KEPT = "what the provider said is not kept for this agent"

WORKER_LOST = Classification(
    "worker_lost",
    "WorkerLostError",
    "the worker was lost while the call was in flight",
    None,
    retryable=True,
    counts_for_breaker=False,
)
"""The outcome of a call whose worker died before it could record it."""

UNFAMILIAR = "BadRequestError"
"""The class of a 400 whose text is not recognised."""
UNSUPPORTED = "UnsupportedParameterError"
"""The class of a request that was refused for a parameter of `ADDED`."""
MALFORMED = "InvalidOutputError"
"""The class of a malformed answer."""

_CLIENT_CLASSES = {
    400: UNFAMILIAR,
    401: "UnauthorizedError",
    403: "ForbiddenError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
}
REFUSED_REQUEST_CLASSES = frozenset({NOT_SENT, UNSUPPORTED, "ClientError", *STATE_ERRORS, *_CLIENT_CLASSES.values()})
"""The classes of requests that a provider refuses, as they are written or at all."""
_TRANSIENT_CLASSES = {
    408: "RequestTimeoutError",
    409: "ConflictError",
    425: "TooEarlyError",
    499: "ClientClosedRequestError",
}
_SERVER_CLASSES = {
    500: "ServerError",
    502: "ServiceUnavailableError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    529: "OverloadedError",
}
RETRYABLE_CLASSES = frozenset(
    {UNSUPPORTED, *STATE_ERRORS, *_CLIENT_CLASSES.values(), *_SERVER_CLASSES.values(), *_TRANSIENT_CLASSES.values()}
) | words(
    """
    ClientError ContentFilteredError OutputLimitError QuotaExceededError RateLimitError WorkerLostError
    UnsupportedRequestError WrongAnswerKindError BrokenEmbeddingsError
    AnswerTooLargeError BrokenAnswerError EmptyAnswerError StreamStalledError TruncatedAnswerError
    ClientConnectionError ClientConnectorError ClientOSError ConnectionRefusedError ConnectionResetError CredentialError
    DnsError HostUnreachableError IoError ServerDisconnectedError TimeoutError TlsError
    ActionNotSupportedError BackendFailureError InvalidRequestError
    """
)
"""All error classes that `retry.on` may name. Python callables have further ones: the exceptions that they raise."""

_MAY_BE_OF_THE_CONVERSATION = frozenset({400, 413, 422})
_MAY_BE_OF_THE_API = frozenset({400, 403, 404, 405, 422, 500})

_OTHER_API = re.compile(
    r"(?:does|do)(?:n'?t| not) support (?:the )?(?:chat|embeddings?|(?:text )?(?:completions?|generat\w+)|pooling)\b|"
    r"not allowed to generate embeddings|is not an? (?:chat|embeddings?|generative) model|"
    r"is an? (?:chat|embeddings?) model and not supported|start it with `?--embeddings?|"
    r"(?:image|audio|video) input is not supported",
    re.I,
)
"""Words of OpenAI, vLLM, Ollama and llama.cpp for a model that does not have the request's API, or takes no images."""
_UNREADABLE_REQUEST = re.compile(r"^failed to parse (?:messages|tools|tool call arguments)\b", re.I)
"""llama.cpp's words, under status 500, for a request that it would never read."""

_KEY_OR_MODEL_OF_CODE = {
    "invalid_api_key": 401,
    "api_key_invalid": 401,
    "expiredtokenexception": 401,
    "incompletesignature": 401,
    "incompletesignatureexception": 401,
    "invalidclienttokenid": 401,
    "invalidsignatureexception": 401,
    "missingauthenticationtoken": 401,
    "missingauthenticationtokenexception": 401,
    "unrecognizedclientexception": 401,
    "model_not_found": 404,
    "model_not_available": 404,
    "invalid_model": 404,
}
_BAD_KEY = re.compile(
    r"api key (?:is )?(?:not valid|invalid|expired)|make sure your api key is valid|bearer token (?:has|is) (?:expired"
    r"|invalid)",
    re.I,
)
"""Gemini's and Bedrock's words."""
_NO_MODEL = re.compile(r"model identifier is invalid|on-demand throughput isn.t supported", re.I)
"""Bedrock's words for a model that its region doesn't have, or not by this id."""

_OF_MODEL: Mapping[str, tuple[ErrorKind, str]] = {
    "modelerrorexception": ("server", "ServerError"),
    "modelnotreadyexception": ("transient", "ServiceUnavailableError"),
    "modelstreamerrorexception": ("server", "ServerError"),
    "modeltimeoutexception": ("transient", "RequestTimeoutError"),
}
"""Bedrock's exceptions whose statuses (424, 429, 424, 408) say less than they do."""


def classification_of(attempt: Attempt, now: datetime) -> Classification:
    """Classifies a recorded failure, as of now."""
    error = attempt.error
    if error is None:
        # The attempt succeeded, but the worker died before it stored the result, and the answer is lost.
        return WORKER_LOST
    waited_s = (now - attempt.completed_at).total_seconds()
    return Classification(
        error.kind,
        error.class_,
        error.message,
        error.status_code,
        error.retryable,
        counts_for_breaker=False,
        retry_after_s=None if error.retry_after_s is None else max(0.0, error.retry_after_s - waited_s),
        param=error.param,
    )


def classify(failure: CallFailure, now: datetime) -> Classification:
    """Classifies a failure of a call.

    Args:
        failure: the failure that the provider's module reported.
        now: the current time, to read delays that are stated as a moment.
    """
    match failure:
        case TransportFailure(kind, name, message, wait_s):
            return Classification(
                kind, name, message, None, retryable=True, counts_for_breaker=True, retry_after_s=wait_s
            )
        case BrokenAnswer(message, status, storable=False):
            kind = "client"
            name = "AnswerTooLargeError"
            again = False
        case BrokenAnswer(message, status, flaw="other_kind"):
            kind = "client"
            name = WRONG_KIND
            again = False
        case BrokenAnswer(message, status, flaw="embeddings"):
            # The model's chats may be fine, which have the same breaker.
            return Classification(
                "server", BROKEN_EMBEDDINGS, message, status, retryable=True, counts_for_breaker=False
            )
        case BrokenAnswer(message, status):
            kind = "server"
            name = "BrokenAnswerError"
            again = True
        case EmptyAnswer("content_filter", message, status):
            kind = "client"
            name = "ContentFilteredError"
            again = False
        case EmptyAnswer("length", message, status):
            # The model has spent its whole output limit on thinking, and would again.
            kind = "client"
            name = "OutputLimitError"
            again = False
        case EmptyAnswer(_, message, status):
            kind = "server"
            name = "EmptyAnswerError"
            again = True
        case ProgramFailure(name, message, status, kind):
            again = kind != "client"
        case NotSent(message, param):
            return Classification(
                "client", NOT_SENT, message, 400, retryable=False, counts_for_breaker=False, param=param
            )
        case HttpFailure():
            return _classify_status(failure, now)
    return Classification(kind, name, message, status, retryable=again, counts_for_breaker=again)


NO_CREDENTIAL = "CredentialError"
"""The class of a call that was not made, as there is no credential for it."""

_OF_DEPLOYMENT_CLASSES = frozenset({_CLIENT_CLASSES[status] for status in (401, 403, 404)})
_OF_DEPLOYMENT_STATUSES = frozenset({401, 403, 404, 405, 407, 410})


def is_of_deployment(class_name: str, status_code: int | None) -> bool:
    """Returns True if a client error is not the request's: a key, an account or a model that the provider refuses."""
    return class_name in _OF_DEPLOYMENT_CLASSES or status_code in _OF_DEPLOYMENT_STATUSES


def is_of_key(verdict: Classification) -> bool:
    """Returns True if a provider refused the key, whatever the status: Gemini sends 400, and Bedrock 403."""
    return verdict.status_code == 401 or verdict.class_name == _CLIENT_CLASSES[401]


def follows_request(error: ErrorInfo) -> bool:
    """Returns True if a failure follows from its request: malformed, too long, filtered, or unreadable for its kind.

    Such a failure says nothing about other requests to the model, unlike a refused key or a model that is gone.
    """
    if error.kind in {"logic", "context_overflow", "orphan_tool_calls"}:
        return True
    if error.class_ in {NOT_SENT, WRONG_KIND, BROKEN_EMBEDDINGS}:
        return True
    return error.kind == "client" and not is_of_deployment(error.class_, error.status_code)


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def without_text(verdict: Classification, failure: CallFailure) -> Classification:
    """Returns a verdict without the provider's text.

    Class and status stay, and so do a known code, a known place at fault, and the figures of a context overflow.
    """
    class_name = verdict.class_name if _NAME.fullmatch(verdict.class_name) else "ProviderError"
    status = "" if verdict.status_code is None else f", HTTP {verdict.status_code}"
    code = failure.code if isinstance(failure, HttpFailure) else None
    figures = overflow_summary(verdict.message) if verdict.kind == "context_overflow" else None
    code_text = f", code {known_or_hash(code)}" if code else ""
    message = f"{class_name}{status}{code_text}{f': {figures}' if figures else ''}; {NOT_KEPT}"
    param = None if verdict.param is None else known_place(verdict.param)
    return replace(verdict, class_name=class_name, message=message, param=param)


def _classify_status(failure: HttpFailure, now: datetime) -> Classification:
    verdict = _by_status(failure, now)
    match failure.headers.get("x-should-retry", "").strip().lower():
        case "false":
            return replace(verdict, retryable=False)
        case "true" if verdict.kind == "client":
            return replace(verdict, kind="transient", retryable=True, counts_for_breaker=True)
        case _:
            return verdict


def _by_status(failure: HttpFailure, now: datetime) -> Classification:
    status = failure.status
    message = failure.message

    def fails(kind: ErrorKind, class_name: str, *, after_s: float | None = None) -> Classification:
        again = kind in {"rate_limit", "transient", "server"}
        param = failure.param if kind == "client" else None
        counted = again and kind != "rate_limit"
        return Classification(kind, class_name, message, status, again, counted, after_s, param)

    wait_s = retry_after_s(failure.headers, now, failure.retry_delay_s)
    reset_s = None if failure.resets_at is None else max(0.0, (failure.resets_at - now).total_seconds())
    throttled = status == 429 or (
        status in {400, 403}
        and bool(_THROTTLED.search(f"{failure.code} {failure.type}") or _THROTTLED_WORDS.search(message))
    )
    for name in _names(failure.code, failure.type) & _OF_MODEL.keys():
        return fails(*_OF_MODEL[name], after_s=wait_s)
    if (throttled and _NEVER_FITS.search(message)) or (status in _MAY_BE_OF_PLAN and _NOT_IN_PLAN.search(message)):
        return fails("context_overflow", "ContextOverflowError")
    stated_waits = (reset_s, latest_reset_s(failure.headers, now), wait_s)
    waits_s = [wait for wait in stated_waits if wait is not None]
    if _is_spent(failure, max(waits_s, default=0.0), throttled=throttled):
        quota_reset_s = max((wait for wait in waits_s if wait >= QUOTA_RESET_S), default=None)
        return fails("quota", "QuotaExceededError", after_s=quota_reset_s if reset_s is None else reset_s)
    if throttled:
        return fails("rate_limit", "RateLimitError", after_s=reset_s if wait_s is None else wait_s)
    if status == 501 or (status in _MAY_BE_OF_THE_API and _OTHER_API.search(message)):
        return fails("client", NOT_SENT)
    if status == 500 and (failure.code in _OVERFLOW_CODES or _OVERFLOW.search(message)):
        return fails("context_overflow", "ContextOverflowError")  # Ollama's runners, gateways
    if status == 500 and _UNREADABLE_REQUEST.search(message):
        return fails("client", UNFAMILIAR)
    if 500 <= status <= 599:
        return fails("server", _SERVER_CLASSES.get(status, "ServerError"), after_s=wait_s)
    if status in _TRANSIENT_CLASSES:
        return fails("transient", _TRANSIENT_CLASSES[status], after_s=wait_s)
    if status in _MAY_BE_OF_THE_CONVERSATION:
        if is_context_overflow(failure.code, failure.type, message):
            return fails("context_overflow", "ContextOverflowError")
        if status != 413 and has_orphan_tool_calls(message):
            return fails("orphan_tool_calls", "OrphanToolCallsError")
        if (of_state := state_error(failure.code, failure.param, message)) is not None:
            return replace(fails("client", of_state[0]), param=of_state[1])
        if failure.code in _FILTERED:
            return fails("client", "ContentFilteredError")
        if _MALFORMED.search(f"{failure.code} {failure.type}") or _MALFORMED_WORDS.search(message):
            return fails("logic", MALFORMED)
        if (refused := refused_parameter(failure.code, failure.param, message)) is not None:
            return replace(fails("client", UNSUPPORTED), param=refused)
    meant_status = _status_of_key_or_model(failure)
    if meant_status == 401 or (meant_status is not None and status in _MAY_BE_OF_THE_CONVERSATION):
        return fails("client", _CLIENT_CLASSES[meant_status])
    of_state = state_error(failure.code, failure.param, message) if status == 404 else None
    if of_state is not None and of_state[0] == UNREADABLE:
        return fails("client", UNREADABLE)  # OpenAI's answer to an item of reasoning that it has not stored
    # An unknown status counts as the caller's mistake: repeating a call that was not understood does not help.
    return fails("client", _CLIENT_CLASSES.get(status, "ClientError"))


def _status_of_key_or_model(failure: HttpFailure) -> int | None:
    """Returns the status that a refused key or an unknown model would have; None if the failure is neither's."""
    if _BAD_KEY.search(failure.message):
        return 401
    named = _KEY_OR_MODEL_OF_CODE.get((failure.code or "").lower())
    return 404 if named is None and _NO_MODEL.search(failure.message) else named


def _is_spent(failure: HttpFailure, latest_s: float, *, throttled: bool) -> bool:
    """Returns True if an account or a quota is exhausted for long. Structured details outweigh the error's text."""
    message = failure.message
    if failure.status == 402 or _names(failure.code, failure.type) & _SPENT:
        return True
    if throttled and failure.limits:
        return any(_LONG_WINDOW.search(name) for name in failure.limits)
    if _SPENT_WORDS.search(f"{failure.code} {message}"):
        return True
    if not throttled:
        return bool(_SPENT_OR_LIMITED.search(message))
    return (
        latest_s >= QUOTA_RESET_S
        or (_LONG_WINDOW.search(message) is not None and not _SHORT_WINDOW.search(message))
        or (_SPENT_OR_LIMITED.search(message) is not None and not latest_s)
    )
