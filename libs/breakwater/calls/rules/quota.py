"""The rest of the limits of a deployment: its provider's, by the headers of answers, and our own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from math import inf
from typing import NamedTuple

from breakwater.calls.rules.delays import duration_s, number_in, until_rfc3339

DEFAULT_RESET_S = 60.0
"""When a limit is taken to be reset if no header says so: most are per minute."""

LOW_HEADROOM = 0.1
"""With less left of one of its limits, a deployment is called after the others, even for a session that it has."""

USED_UP = 0.01
"""With less left of one of them, it is spared by all workers."""


class Quota(NamedTuple):
    """The rest of one limit.

    Attributes:
        counts_tokens: True for a limit on tokens, False for one on requests.
        remaining: what is left.
        limit: all that there is; None if no header says it.
        reset_s: the seconds until there is all again.
    """

    counts_tokens: bool
    remaining: float
    limit: float | None
    reset_s: float


class Room(NamedTuple):
    """The room that some limits leave.

    Attributes:
        share: the least share that is left of one, from 0 to 1.
        tokens: the tokens that fit all of them; infinite where none counts tokens.
        requests: the same of requests.
    """

    share: float = 1.0
    tokens: float = inf
    requests: float = inf


ALL = Room()
"""The room where no limit is known."""


def room_in(quotas: Iterable[Quota], age_s: float, calls: int = 0, used_tokens: int = 0) -> Room:
    """Returns what is left of some limits.

    Limits fill up evenly until they are full. One of unknown size is known no more when it is.

    Args:
        quotas: the limits.
        age_s: the seconds since they were read.
        calls: those that have begun since.
        used_tokens: the most tokens that these can use.
    """
    least = 1.0
    tokens = requests = inf
    for counts_tokens, remaining, limit, reset_s in quotas:
        room = remaining
        if age_s >= reset_s:
            room = inf if limit is None else max(remaining, limit)
        elif limit is not None and limit > remaining:
            room += (limit - remaining) * age_s / reset_s
        if counts_tokens:
            room -= used_tokens
            tokens = min(tokens, room)
        else:
            room -= calls
            requests = min(requests, room)
        share = room / limit if limit else float(room > 0)
        least = min(least, max(0.0, share))
    return Room(least, tokens, requests)


def used_up_s(quotas: Iterable[Quota]) -> float:
    """Returns the seconds until there is some room again in limits that are all but used up; 0 if none is."""
    longest = 0.0
    for _, remaining, limit, reset_s in quotas:
        if not limit:
            longest = max(longest, 0.0 if remaining else reset_s)
        elif remaining < USED_UP * limit:
            longest = max(longest, reset_s * (LOW_HEADROOM * limit - remaining) / (limit - remaining))
    return longest


_OPENAI = tuple(
    (unit, f"x-ratelimit-remaining-{unit}", f"x-ratelimit-limit-{unit}", f"x-ratelimit-reset-{unit}", False)
    for unit in ("requests", "tokens")
)
_ANTHROPIC = tuple(
    (unit, f"{name}-remaining", f"{name}-limit", f"{name}-reset", True)
    for unit in ("requests", "tokens", "input-tokens", "output-tokens")
    for name in (f"anthropic-ratelimit-{unit}",)
)
_HEADERS = (*_OPENAI, *_ANTHROPIC)
"""Of each limit: what it counts, the headers of its rest, all of it and its reset, and True if that is a moment."""


# Each answer states them, and mostly the same ones.
_limit_in = lru_cache(256)(number_in)
_duration_s = lru_cache(1024)(duration_s)


def quotas(headers: Mapping[str, str], now: datetime) -> tuple[Quota, ...]:
    """Returns what is left of each limit that the headers state, as OpenAI and Anthropic write them.

    Args:
        headers: the answer's headers, by lower-case names.
        now: the current time, for resets that are a moment.
    """
    stated: list[Quota] = []
    for unit, remaining_name, limit_name, reset_name, is_moment in _HEADERS:
        text = headers.get(remaining_name)
        remaining = None if text is None else number_in(text)
        if remaining is None:
            continue
        limit = _limit_in(headers.get(limit_name, ""))
        reset = headers.get(reset_name, "")
        reset_s = until_rfc3339(reset, now) if is_moment else _duration_s(reset)
        reset_s = DEFAULT_RESET_S if reset_s is None else max(reset_s, 0.001)
        stated.append(Quota(unit != "requests", remaining, limit, reset_s))
    return tuple(stated)
