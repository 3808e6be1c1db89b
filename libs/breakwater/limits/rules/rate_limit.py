"""Limits on the rate of calls of an agent, a model or a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from breakwater.kernel.types import Message

LimitPeriod = Literal["minute", "hour", "day"]
WINDOW_MS = 60_000
"""The rolling window of limits per minute; those per hour and day are multiples of it (`MINUTES`)."""
MINUTES: Mapping[LimitPeriod, int] = {"minute": 1, "hour": 60, "day": 1440}

HELD = "ModelHeldError"
"""The error class of a call that is refused because its model is held."""


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
        """The periods with a limit; concurrent calls are counted with the minute."""
        of_minute = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_calls)
        return (*(() if of_minute == (None, None, None) else ("minute",)), *(() if self.per is None else (self.per,)))

    def most(self, period: LimitPeriod) -> tuple[int | None, int | None, int | None]:
        """Return the limits on requests, tokens and concurrent calls in a period."""
        if period == "minute":
            return self.requests_per_minute, self.tokens_per_minute, self.concurrent_calls
        return self.requests, self.tokens, None
