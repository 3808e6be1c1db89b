"""Classifies failed calls: their kind, whether trying again can help, and whether the breaker counts them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from breakwater.calls.rules.context_overflow import overflow_summary
from breakwater.calls.rules.delays import latest_reset_s, retry_after_s
from breakwater.calls.rules.params import KNOWN_PARAMS
from breakwater.calls.rules.provider_words import known_or_hash, known_place
from breakwater.calls.rules.user_message import user_message
from breakwater.dialects.rules.provider_state import STATE_ERRORS, UNREADABLE, state_error
from breakwater.jobs.contract.execution import ErrorInfo, ErrorKind
from breakwater.kernel.formats import words

MAX_LENGTH = 500
"""Characters of a normal form."""

MAX_END = 16_000
"""Characters that are read from each end of a longer text.

Most languages put the error before its stack, Python puts it after, so both ends count. The middle is taken for stack:
a cause in it, as Java has them, says nothing.
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
    # A query by itself leaves a blank on either side.
    text = " ".join(_QUERY_OF_PATH.sub("", _URL.sub(r"\1", text)).split())
    # Letters and digits must alternate, or a number with a unit, or a name with a number, would be hex once it is long.
    text = _HEX_WORD.sub(lambda found: "HEX" if _MIXED.search(found[0]) else found[0], _HEX.sub("HEX", text))
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


def _long_word(found: re.Match[str]) -> str:
    # Numbers are one letter by now, so their lengths decide nothing. Names have numbers too, but few but for the one
    # at the end, and seldom a prefix as ids have.
    prefixed = found.string[found.start() - 1 : found.start()] in ("_", "-")
    numbers = found[0].rstrip("N").count("N")
    return "HEX" if numbers >= (1 if prefixed else 3) else found[0]


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
            r"`inputs`( tokens \+ `max_new_tokens`)? must (be|have)",  # Text ConfigVersion Inference
        )
    ),
    re.I,
)
_CONTEXT = re.compile(r"context[_ -]?(length|window|size|limit)", re.I)
_TOO_MUCH = re.compile(
    r"exceed|maximum|too (long|large|many|big)|longer than|larger than|overflow|reduce the length", re.I
)
"""A text that only names the context window may be about a parameter of that name."""
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
"""Grammar of words that are not known yet: what was sent, that it is more, and than what."""
_OTHER_LIMITS = re.compile(
    r"max_(?:completion_|output_|new_)?tokens|maximum tokens you requested|(?:output|completion|thinking|reasoning)[ _]"
    r"tokens|budget|\b(?:image|audio|video|file|page|pdf|document|metadata|logit_bias)s?\b|"
    r"per (?:second|minute|hour|day)",
    re.I,
)
"""Other things that may be too long or too many, of which a shorter conversation has no less."""
_BEFORE = 40
"""Characters before an overflow's words that say what it is of."""

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

_NOT_IN_PLAN = re.compile(r"extra usage[^.]{0,40}long context|long context[^.]{0,60}not (yet )?available", re.I)
"""Anthropic's words for a conversation that is longer than the account's plan allows: no wait would make it fit."""
_MAY_BE_OF_PLAN = frozenset({400, 402, 403, 429})

_FILTERED = frozenset({"content_filter", "content_policy_violation"})
"""Codes of Azure and OpenAI for a prompt that their filters refuse."""

_MALFORMED = re.compile(r"tool_use_failed|output_parse_failed|json_validate_failed", re.I)
_MALFORMED_WORDS = re.compile(r"'failed_generation'|model produced invalid", re.I)
"""Groq's and Bedrock's words for an answer that they do not pass on, as it has not the form that it should have."""

_THROTTLED = re.compile(r"throttl|rate_?limit|too_?many_?requests|limit_(requests|burst|tokens)", re.I)
_THROTTLED_WORDS = re.compile(
    r"too many (concurrent |parallel )?requests|\bthrottl(ed|ing)\b|rate[ -]?limit(ed| (is |was |has been )?"
    r"(exceeded|reached|hit))|(exceed\w*|reached|hit)( \w+['’]?s?){0,5} rate[ -]limit|"
    r"wait (a \w+ )?before (trying|retry|sending|making)|\bslow down\b|"
    r"requests? (rate|frequency) (is )?too|请求过于频繁|速率限制|并发数过高|访问量过大",
    re.I,
)
"""A rate limit, whatever its type and its status say."""

_SPENT = words(
    """
    insufficient_quota billing_not_active billing_hard_limit_reached billing_error usage_limit_reached
    exceeded_current_quota_error 1113 1304 1308 1310 arrearage allocationquota.freetieronly accountoverdueerror
    insufficient_balance insufficient_balance_error insufficient_user_quota insufficient_credits quota_exceeded
    quotaexceeded quota_exhausted budget_exceeded
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
"""OpenAI says so of an account without credit, and Gemini of any limit: then with a wait."""

_LONG_WINDOW = re.compile(
    r"(?<![a-z])(?:per|a|/)[ _-]?(?:day|week|month)(?![a-z])|\b(?:daily|weekly|monthly)\b|"
    r"(?:Per|By)(?:Day|Week|Month)|_daily|\b[TR]PD\b|per 86400s|\blimit: 0\b",
    re.I,
)
_SHORT_WINDOW = re.compile(
    r"(?<![a-z])(?:per|a|/)[ _-]?(?:sec(?:ond)?|min(?:ute)?)(?![a-z])|(?:Per|By)(?:Second|Minute)", re.I
)

FAR_S = 3_600.0
"""A limit that is reset later than this is no rate limit: it is not waited for."""

_NEVER_UNSUPPORTED = frozenset({"model", "messages", "stream"})
ADDED = re.compile(
    r"\b(?:max_(?:completion_)?tokens|stream_options|response[ _]format|output_config|reasoning_effort)\b", re.I
)
"""Parameters that the plane itself gives a request, or names as a model's maker does."""
_REFUSED = re.compile(
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|extra (fields|inputs)|"
    r"unavailable|deprecated|instead|extra_forbidden|cannot both|not both|mutually exclusive|only the default|"
    r"may only be|extraneous|cannot find field",
    re.I,
)
INSTEAD = re.compile(r"\b(?:use|requires?|in favou?r of|replaced (?:by|with))\b\W*\w+", re.I)


def is_context_overflow(code: str | None, type_: str | None, text: str) -> bool:
    """True if the conversation did not fit into the model's context window."""
    if code in _OVERFLOW_CODES or type_ in _OVERFLOW_CODES:
        return True
    if _OVERFLOW.search(text):
        return True
    if _CONTEXT.search(text) and _TOO_MUCH.search(text):
        return not _OF_OUTPUT.search(text)
    wide = _WIDE_OVERFLOW.search(text)
    return wide is not None and not _OTHER_LIMITS.search(text, max(0, wide.start() - _BEFORE), wide.end())


def has_orphan_tool_calls(text: str) -> bool:
    """True if a tool call had no result, or a result no call."""
    return bool(_ORPHANS.search(text))


def refused_parameter(code: str | None, param: str | None, text: str) -> str | None:
    """The parameter that a model does not know, or of `ADDED` the one in its words; not one whose value it refuses."""
    if param is None:
        # It names another one, too, that is to be used instead.
        found = ADDED.search(INSTEAD.sub("", text))
        param = None if found is None else found[0].lower().replace(" ", "_")
    param = None if param is None else param.partition(".")[0]
    # The options of streams are the plane's alone, so whatever is wrong with them is mended so.
    known = param is not None and param in KNOWN_PARAMS and param not in _NEVER_UNSUPPORTED
    return param if param == "stream_options" or (known and _REFUSED.search(f"{code} {text}")) else None


def says_unsupported(text: str) -> bool:
    """True if a model does not know a parameter, or not next to another one."""
    return _REFUSED.search(text) is not None


def status_in_words(code: str | None, type_: str | None, text: str) -> int | None:
    """The HTTP status of an error that does not say which it is, or only that a request was not taken."""
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
    limits: tuple[str, ...] = ()
    """The names of the limits that were reached, where the body has them."""
    resets_at: datetime | None = None
    """Time at which a limit is reset, as the body says."""


@dataclass(frozen=True, slots=True)
class TransportFailure:
    """No HTTP answer came."""

    kind: Literal["timeout", "network"]
    class_name: str
    message: str


@dataclass(frozen=True, slots=True)
class BrokenAnswer:
    """A 2xx that can't be used: no JSON, cut short, no choices, or an error in disguise.

    Attributes:
        message: what is wrong with it, in words of ours.
        status: of the answer.
        storable: False for one that is too large or nested too deep. The same model would give it again.
    """

    message: str
    status: int = 200
    storable: bool = True


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


@dataclass(frozen=True, slots=True)
class NotSent:
    """A request that can't be said in the words of the model's provider, so that no call was made.

    Attributes:
        message: why, for the caller.
        param: the field at fault.
    """

    message: str
    param: str


CallFailure = HttpFailure | TransportFailure | BrokenAnswer | NothingSaid | ProgramFailure | NotSent


@dataclass(frozen=True, slots=True)
class Classification:
    """Meaning of a failure for the job and for the breaker."""

    kind: ErrorKind
    class_name: str
    message: str
    status_code: int | None
    retryable: bool
    counts_for_breaker: bool
    retry_after_s: float | None = None
    param: str | None = None

    def error_info(self, said: str | None = None, names: Collection[str] = ()) -> ErrorInfo:
        """The verdict as records have it.

        Args:
            said: the provider's own words, redacted, where they may be kept: the harmless ones are for the caller, too.
            names: what these may name in addition to plain words.
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


NOT_SENT = "UnsupportedRequestError"
"""The class of `NotSent`."""

NOT_KEPT = "what the provider said is not kept for this agent"

WORKER_LOST = Classification(
    "worker_lost",
    "WorkerLostError",
    "the worker was lost while the call was in flight",
    None,
    retryable=True,
    counts_for_breaker=False,
)
"""Outcome of a call whose worker died before it could record it."""

UNFAMILIAR = "BadRequestError"
"""The class of a 400 whose words say nothing that is known here."""
UNSUPPORTED = "UnsupportedParameterError"
"""The class of a request that was refused for a parameter of `ADDED`."""
MALFORMED = "InvalidOutputError"
"""The class of an answer without the form that it should have."""

_CLIENT_CLASSES = {
    400: UNFAMILIAR,
    401: "UnauthorizedError",
    403: "ForbiddenError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
}
REFUSED_REQUEST_CLASSES = frozenset({NOT_SENT, UNSUPPORTED, "ClientError", *STATE_ERRORS, *_CLIENT_CLASSES.values()})
"""The classes of requests that a provider does not take as they are written, or not at all."""
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
    AnswerTooLargeError BrokenAnswerError EmptyAnswerError StreamStalledError TruncatedAnswerError
    ClientConnectionError ClientConnectorError ClientOSError ConnectionRefusedError ConnectionResetError DnsError
    HostUnreachableError IoError ServerDisconnectedError TimeoutError TlsError
    ActionNotSupportedError BackendFailureError InvalidRequestError
    """
)
"""All classes of errors after which a call may be repeated: of calls, answers, the network and programs.

Callables have others: they name what they raise.
"""

_MAY_BE_OF_THE_CONVERSATION = frozenset({400, 413, 422})


def classify(failure: CallFailure, now: datetime) -> Classification:
    """Decides what a failure means. The table of design section 5, row by row.

    Args:
        failure: what the provider room reported.
        now: to read delays that are given as a moment.
    """
    match failure:
        case TransportFailure(kind, name, message):
            status = None
            again = True
        case BrokenAnswer(message, status, storable=False):
            kind = "client"
            name = "AnswerTooLargeError"
            again = False
        case BrokenAnswer(message, status):
            kind = "server"
            name = "BrokenAnswerError"
            again = True
        case NothingSaid("content_filter", message, status):
            kind = "client"
            name = "ContentFilteredError"
            again = False
        case NothingSaid("length", message, status):
            # The model has thought until its limit, and would again.
            kind = "client"
            name = "OutputLimitError"
            again = False
        case NothingSaid(_, message, status):
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


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def without_text(verdict: Classification, failure: CallFailure) -> Classification:
    """The same without the provider's words: class, status, and of its code and the place at fault what is known.

    Of a context overflow, its figures are kept, too.
    """
    class_name = verdict.class_name if _NAME.fullmatch(verdict.class_name) else "ProviderError"
    status = "" if verdict.status_code is None else f", HTTP {verdict.status_code}"
    code = failure.code if isinstance(failure, HttpFailure) else None
    figures = overflow_summary(verdict.message) if verdict.kind == "context_overflow" else None
    named = f", code {known_or_hash(code)}" if code else ""
    message = f"{class_name}{status}{named}{f': {figures}' if figures else ''}; {NOT_KEPT}"
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
    if (throttled and _NEVER_FITS.search(message)) or (status in _MAY_BE_OF_PLAN and _NOT_IN_PLAN.search(message)):
        return fails("context_overflow", "ContextOverflowError")
    known = [given for given in (reset_s, latest_reset_s(failure.headers, now), wait_s) if given is not None]
    if _is_spent(failure, max(known, default=0.0), throttled=throttled):
        far_s = max((given for given in known if given >= FAR_S), default=None)
        return fails("quota", "QuotaExceededError", after_s=far_s if reset_s is None else reset_s)
    if throttled:
        return fails("rate_limit", "RateLimitError", after_s=reset_s if wait_s is None else wait_s)
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
    of_state = state_error(failure.code, failure.param, message) if status == 404 else None
    if of_state is not None and of_state[0] == UNREADABLE:
        return fails("client", UNREADABLE)  # OpenAI's words for an item of reasoning that it has not kept
    # An unknown status is handled as the caller's mistake: repeating what is not understood does not help.
    return fails("client", _CLIENT_CLASSES.get(status, "ClientError"))


def _is_spent(failure: HttpFailure, latest_s: float, *, throttled: bool) -> bool:
    """True if an account or a quota is used up for long. What details say counts before words do."""
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
        latest_s >= FAR_S
        or (_LONG_WINDOW.search(message) is not None and not _SHORT_WINDOW.search(message))
        or (_SPENT_OR_LIMITED.search(message) is not None and not latest_s)
    )
