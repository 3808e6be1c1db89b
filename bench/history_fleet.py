"""The plane that the generated history is of: its agents, models and tenants, how busy they are, and what fails."""

from __future__ import annotations

import random
from dataclasses import dataclass

from breakwater.calls.rules.classify import Classification
from breakwater.calls.rules.user_message import user_message
from breakwater.jobs.contract.error_kinds import ErrorKind

ErrorCells = tuple[object, ...]
"""Kind, class, message, status, retryable, hash, user message: as the tables have them."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    provider: str
    input_nano: int | None
    """Nano-dollars a token; None where the model has no price."""
    output_nano: int | None
    first_token_ms: int
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    chain: tuple[Model, ...]
    share: float
    """Of all executions."""
    failing: float
    """How many of its calls fail on an ordinary day."""
    input_tokens: int
    output_tokens: int
    max_attempts: int = 3
    keeps_prompts: bool = True
    at_night: bool = False
    daily_cap: float | None = None
    """How many times its average spend of a day its budget is."""
    hard: bool = False
    streams: bool = False


GPT_4O = Model("gpt-4o", "openai", 2_500, 10_000, 450, 11.0)
GPT_4O_MINI = Model("gpt-4o-mini", "openai", 150, 600, 300, 7.0)
SONNET = Model("claude-sonnet-4.5", "anthropic", 3_000, 15_000, 600, 13.0)
HAIKU = Model("claude-haiku-4.5", "anthropic", 1_000, 5_000, 280, 6.0)
LLAMA = Model("house/llama-3.1-8b", "house", 20, 20, 120, 18.0)
QWEN = Model("house/qwen-2.5-32b", "house", None, None, 200, 32.0)
MODELS = (GPT_4O, GPT_4O_MINI, SONNET, HAIKU, LLAMA, QWEN)
PROVIDERS = ("openai", "anthropic", "house")

AGENTS = (
    Agent("content-writer", (GPT_4O, GPT_4O_MINI), 0.11, 0.49, 620, 480, daily_cap=1.05, hard=True),
    Agent(
        "support-triage",
        (GPT_4O_MINI, LLAMA),
        0.24,
        0.55,
        410,
        130,
        max_attempts=2,
        keeps_prompts=False,
        daily_cap=1.2,
        streams=True,
    ),
    Agent("nightly-digest", (GPT_4O_MINI, HAIKU), 0.05, 0.62, 2_900, 700, max_attempts=5, at_night=True),
    Agent("invoice-reader", (HAIKU, GPT_4O_MINI), 0.10, 0.64, 1_400, 210, max_attempts=4),
    Agent("code-reviewer", (SONNET, GPT_4O), 0.07, 0.53, 3_600, 650, daily_cap=1.1, streams=True),
    Agent("translator", (GPT_4O_MINI, HAIKU), 0.12, 0.52, 500, 510),
    Agent("lead-scorer", (LLAMA, GPT_4O_MINI), 0.09, 0.6, 350, 60),
    Agent("contract-checker", (SONNET, GPT_4O, GPT_4O_MINI), 0.03, 0.68, 5_200, 900, daily_cap=0.95, hard=True),
    Agent("meeting-notes", (HAIKU, SONNET), 0.05, 0.59, 4_100, 620),
    Agent("product-tagger", (LLAMA, QWEN), 0.09, 0.7, 260, 45, max_attempts=4),
    Agent("release-notes", (GPT_4O, SONNET), 0.02, 0.56, 1_900, 400),
    Agent("data-explorer", (QWEN, GPT_4O), 0.03, 0.72, 1_200, 350, max_attempts=4),
)

TENANTS = (
    *("acme", "globex", "initech", "umbrella", "stark", "wayne", "hooli", "soylent", "tyrell", "cyberdyne"),
    *("wonka", "aperture", "massive", "oscorp", "vandelay", "dunder", "pied-piper", "bluth", "sterling", "prestige"),
    *("gringotts", "monarch", "nakatomi", "weyland", "zorg", "virtucon", "octan", "duff", "krusty", "gekko"),
)
TENANT_WEIGHTS = tuple(1 / (place + 2) for place in range(len(TENANTS)))

BY_WEEKDAY = (1.0, 1.06, 1.08, 1.04, 0.92, 0.38, 0.33)
BY_HOUR = (
    *(0.16, 0.12, 0.10, 0.10, 0.12, 0.18, 0.34, 0.62, 0.95, 1.22, 1.34, 1.36),
    *(1.12, 1.20, 1.38, 1.36, 1.24, 1.02, 0.78, 0.58, 0.46, 0.38, 0.30, 0.22),
)
NIGHT = frozenset({0, 1, 2, 3, 4})


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that goes wrong with calls, in some wordings of the same error."""

    kind: ErrorKind
    weight: float
    in_attempt: tuple[ErrorCells, ...]
    at_end: tuple[ErrorCells, ...]
    """The same where the execution ends with it: a person may read it then."""


def failure(
    rng: random.Random, kind: ErrorKind, class_name: str, status: int | None, again: bool, text: str, weight: float
) -> Failure:
    """Some wordings of an error; `#` in its text stands for a number."""
    reported = [
        Classification(
            kind, class_name, _numbered(rng, text), status, retryable=again, counts_for_breaker=again
        ).error_info()
        for _ in range(8)
    ]
    cells = tuple((e.kind, e.class_, e.message, e.status_code, e.retryable, e.hash, e.user_message) for e in reported)
    read = user_message(kind, class_name, status)
    return Failure(kind, weight, cells, tuple((*one[:6], read) for one in cells))


def ordinary_failures(rng: random.Random) -> dict[str, tuple[Failure, ...]]:
    """What fails on an ordinary day, by provider."""
    return {
        provider: (
            failure(rng, "rate_limit", "RateLimitError", 429, True, limit, 3.0),
            failure(rng, "server", "ServerError", 500, True, broken, 1.6),
            failure(rng, "server", "ServiceUnavailableError", 503, True, f"{provider}: overloaded, retry later", 1.1),
            failure(rng, "timeout", "ReadTimeout", None, True, "no answer within # s", 1.3),
            failure(rng, "network", "ConnectError", None, True, f"connection to {host} was reset by peer", 0.5),
            failure(rng, "logic", "OutputInvalidError", None, True, "$.lines[#].amount: 'n/a' is not a number", 1.0),
            failure(rng, "logic", "OutputNotJsonError", None, True, "expected JSON; found text at character #", 0.9),
            failure(rng, "context_overflow", "ContextOverflowError", 400, False, _TOO_LONG, 0.3),
            failure(rng, "orphan_tool_calls", "OrphanToolCallsError", 400, False, _ORPHANS, 0.15),
            failure(rng, "client", "UnauthorizedError", 401, False, "Incorrect API key provided: [REDACTED]", 0.12),
            failure(rng, "client", "BadRequestError", 400, False, "invalid value for 'temperature': #", 0.1),
            failure(rng, "worker_lost", "WorkerLostError", None, True, _LOST, 0.12),
        )
        for provider, host, limit, broken in _WORDINGS
    }


def outage_failures(rng: random.Random) -> tuple[Failure, ...]:
    """What fails while a provider is down."""
    return (
        failure(rng, "server", "ServiceUnavailableError", 503, True, "upstream connect error (reset #)", 5.0),
        failure(rng, "server", "ServiceUnavailableError", 502, True, "Bad Gateway", 2.0),
        failure(rng, "timeout", "ConnectTimeout", None, True, "no connection within # s", 2.0),
    )


_WORDINGS = (
    (
        "openai",
        "api.openai.com",
        "Rate limit reached: Limit #, Used #. Please try again in #ms.",
        "The server had an error",
    ),
    ("anthropic", "api.anthropic.com", "This request would exceed your limit of # tokens per minute", "Internal error"),
    ("house", "127.0.0.1", "queue is full: # requests are waiting", "CUDA error: out of memory on device #"),
)
_TOO_LONG = "maximum context length is # tokens; your messages resulted in # tokens"
_ORPHANS = "messages.#: tool_use ids were found without tool_result blocks"
_LOST = "the worker was lost while the call was in flight"


def _numbered(rng: random.Random, text: str) -> str:
    parts = text.split("#")
    return parts[0] + "".join(f"{rng.randint(2, 30_000)}{part}" for part in parts[1:])


VOCABULARY = """
    please order customer invoice delivery number the a of to and for with was not when which we they answer ticket
    product update version account payment refund address shipping delay week month report table column value total
    amount price offer contract clause paragraph meeting decision owner deadline project release feature problem
    error request response service team manager review summary details question reason result change option language
    text short clear friendly formal list item quantity discount tax currency euro dollar date time signature page
    section Berlin London Madrid Tokyo Lyon Porto Monday Tuesday Friday January April August winter spring green
    blue heavy light open closed pending shipped returned broken missing late early urgent normal internal external
    public draft
""".split()  # noqa: SIM905  a word a line would be a hundred lines
