"""Limits on the calls of an agent or a model. Breakers are for outages, these for haste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from breakwater.kernel.types import Message

LimitPeriod = Literal["minute", "hour", "day"]
WINDOW_MS = 60_000
"""Requests and tokens are counted in the minute that ends now, or in the hour or the day."""
MINUTES: Mapping[LimitPeriod, int] = {"minute": 1, "hour": 60, "day": 1440}

HELD = "ModelHeldError"
"""The class of a call that is not made as the model is held."""

MAX_HELD_S = 10.0
"""Time that a job waits in all for a model that is held, where it has another."""

LONG_HOLD_S = 30.0
"""Of a longer hold, another caller's call is made all the same, one in so much time: the limit may be one caller's."""

_SPREAD = 0.1


def waits_for_hold(wait_s: float) -> bool:
    """True if a job that has another model waits for one that is held; else it calls the other immediately."""
    return wait_s <= MAX_HELD_S


def after_hold_s(rest_s: float, jitter: float) -> float:
    """Seconds after which a job that waits for the end of a hold asks again: not all at the same moment.

    Args:
        rest_s: until it ends.
        jitter: a random number in [0, 1).
    """
    return rest_s * (1 + _SPREAD * jitter)


class RateLimit(Message):
    """Limits across the whole fleet. At least one must be set."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=10_000_000)
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000_000,
        description="Input and output tokens; a call counts with its worst case until its usage is known.",
    )
    concurrent_calls: int | None = Field(
        default=None, ge=1, le=100_000, description="Calls in flight at the same time."
    )
    requests: int | None = Field(
        default=None, ge=1, le=10_000_000, description="Requests in the last hour or 24 hours, as `per` says."
    )
    tokens: int | None = Field(
        default=None, ge=1, le=10_000_000_000, description="Tokens in the last hour or 24 hours, as `per` says."
    )
    per: Literal["hour", "day"] | None = None
    count_cached: bool = Field(
        default=True,
        description="Whether input that the provider read from its prompt cache counts towards limits on tokens. "
        "Anthropic's own limits don't count it.",
    )
    on_exceeded: Literal["wait", "fail"] = Field(
        default="wait",
        description="wait: the job waits, and survives restarts; fail: the next model is tried immediately.",
    )

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if (self.requests, self.tokens) != (None, None) and self.per is None:
            raise ValueError("requests and tokens need `per: hour` or `per: day`; for a minute, requests_per_minute")
        if self.per is not None and (self.requests, self.tokens) == (None, None):
            raise ValueError("per needs requests or tokens")
        if not self.periods:
            text = "set requests_per_minute, tokens_per_minute, concurrent_calls, or requests or tokens with per"
            raise ValueError(f"{text}, or `rate_limit: off`")
        return self

    @property
    def periods(self) -> tuple[LimitPeriod, ...]:
        """Periods that something is limited in; concurrent calls are counted with the minute."""
        of_minute = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_calls)
        return (*(() if of_minute == (None, None, None) else ("minute",)), *(() if self.per is None else (self.per,)))

    def most(self, period: LimitPeriod) -> tuple[int | None, int | None, int | None]:
        """The limits on requests, tokens and concurrent calls."""
        if period == "minute":
            return self.requests_per_minute, self.tokens_per_minute, self.concurrent_calls
        return self.requests, self.tokens, None
