"""The writing of values on the pages, and the templates' filters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import orjson
from markupsafe import Markup, escape

from breakwater.kernel import formats
from breakwater.kernel.columns import elapsed, humanize, rough_duration, short_id, tone_of
from breakwater.kernel.formats import percent, quantity
from breakwater.kernel.types import format_time


def money(nano: int | None) -> Markup:
    """Writes an amount, with the exact figure as a tooltip."""
    return Markup('<span class="money" title="{}">{}</span>').format(formats.exact_money(nano), formats.money(nano))


def count(number: int | None) -> str:
    """Writes a number: `12,345`; `–` for None."""
    return "–" if number is None else f"{number:,}"


def utc(moment: datetime) -> str:
    """Writes a time in UTC: `2026-11-21 10:00:03 UTC`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(moment: datetime | None, now: datetime | None = None) -> Markup:
    """Writes how far a time is away, with the time itself as a tooltip; `–` for None."""
    if moment is None:
        return Markup("–")
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    distance = rough_duration(abs(seconds))
    text = f"{distance} ago" if seconds >= 0 else f"in {distance}"
    return time(moment, "now" if abs(seconds) < 1 else text)


def clock(moment: datetime | None) -> Markup:
    """Writes the time of day in UTC, with the date unless it is today; `–` for None."""
    if moment is None:
        return Markup("–")
    at = moment.astimezone(UTC)
    today = at.date() == datetime.now(UTC).date()
    return time(moment, at.strftime("%H:%M:%S" if today else "%b %d %H:%M:%S"))


def time(moment: datetime, text: str) -> Markup:
    """Writes a time as an element that programs and screen readers understand."""
    return Markup('<time datetime="{}" title="{}">{}</time>').format(format_time(moment), utc(moment), text)


def local(moment: datetime) -> str:
    """Writes a time in UTC for a field of a form: `2026-11-21T10:00`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M")


def duration(ms: float | None) -> str:
    """Writes a duration: `850 ms`, `1.2 s`; `–` for None."""
    return formats.duration(ms) or "–"


def segment(text: str) -> str:
    """Quotes a name as a segment of a path."""
    return quote(text, safe="")


def pretty(value: Any) -> str:
    """Writes a value as indented JSON, and a text as it is. Escapes control characters."""
    return formats.visible(value) if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """Writes a value, also a text, as indented JSON. Escapes control characters."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONEncodeError:
        text = json.dumps(value, ensure_ascii=False, indent=2)  # numbers beyond 64 bits are JSON, too
    return formats.visible(text)


def size(number: int) -> str:
    """Writes a number of bytes in its largest unit: `850 bytes`, `12 KB`, `3.4 MB`."""
    if number < 1_000:
        return quantity(number, "byte")
    return f"{number / 1_000:.0f} KB" if number < 1_000_000 else f"{number / 1_000_000:.1f} MB"


def code(text: str) -> Markup:
    """Writes a message, with its `commands` as code."""
    parts = str(escape(text)).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)))  # noqa: S704  escaped above


_WASTE_CAUSES = {
    "retry": "failed, then retried",
    "redeployment": "failed, then called elsewhere",
    "fallback": "failed, then fell back",
    "self_correction": "self-correction",
    "worker_lost": "the worker died during the call",
    "failed": "the job failed",
    "cancelled": "the job was cancelled",
}


def waste_cause(cause: str) -> str:
    """Describes the cause of waste."""
    return _WASTE_CAUSES.get(cause, humanize(cause))


_COST_BASES = {
    "billed": "billed: the usage that providers reported, at their prices",
    "estimated": ("estimated: at least one call reported no usage, or usage that is implausible or has no price"),
    "unknown": "partly unknown: at least one call has no known price or usage",
    "none": "no call was made",
}


def cost_basis(basis: str) -> str:
    """Describes the basis of a cost."""
    return _COST_BASES.get(basis, humanize(basis))


_FINISH_REASONS = {
    "stop": "stop: the model ended its answer",
    "length": "length: truncated by the output limit",
    "tool_calls": "tool calls: the model asks for tools",
    "content_filter": "content filter: withheld by the provider",
}


def finish_reason(reason: str) -> str:
    """Describes why a model stopped."""
    return _FINISH_REASONS.get(reason, reason)


_OUTCOME_COLOURS = {
    "success": "good",
    "error": "bad",
    "worker_lost": "bad",
    "short_circuited": "warn",
    "cancelled": "warn",
}


def outcome_colour(outcome: str) -> str:
    """The colour of an attempt in charts."""
    return _OUTCOME_COLOURS.get(outcome, "plain")


def refused_by(kind: str, by: str | None, *, called: bool) -> str:
    """Names the limit, breaker or guard that refused calls."""
    if called:
        return "the provider's rate limit"
    match kind:
        case "rate_limit":
            return f"the rate limit of {by.replace(':', ' ', 1)}" if by else "a rate limit"
        case "budget_exceeded":
            return f"the limit {by}" if by else "a limit"
        case "breaker_open":
            return "an open breaker"
        case "retry_budget":
            return "the retry budget"
        case "guard_tripped":
            return "a task's guard"
        case _:
            return humanize(kind) or "the plane"


_FUNCTIONS = (
    ago, clock, code, cost_basis, count, quantity, duration, finish_reason, local, money,
    outcome_colour, percent, pretty, refused_by, rough_duration, segment, utc,
    waste_cause,
)  # fmt: skip
FILTERS: Mapping[str, Callable[..., object]] = {
    "exact": formats.exact_money,
    "elapsed": elapsed,
    "humanize": humanize,
    "short_id": short_id,
    "tone": tone_of,
    **{function.__name__: function for function in _FUNCTIONS},
}
