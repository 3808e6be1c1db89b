"""Limits on how much an agent or a model may be asked, beside its breakers: an outage is one thing, haste another."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from breakwater.contracts.types import Message

WINDOW_MS = 60_000
"""Requests and tokens are counted in the minute that ends now."""


class RateLimit(Message):
    """Limits across the whole fleet. At least one must be set."""

    requests_per_minute: int | None = Field(default=None, ge=1, le=10_000_000)
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000_000,
        description="Input and output tokens; a call counts with its worst case until its usage is known.",
    )
    concurrent_calls: int | None = Field(default=None, ge=1, le=100_000, description="Calls in flight at once.")
    on_exceeded: Literal["wait", "fail"] = Field(
        default="wait",
        description="wait: the job waits, and survives restarts; fail: the next model is tried at once.",
    )

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.requests_per_minute is None and self.tokens_per_minute is None and self.concurrent_calls is None:
            raise ValueError("set requests_per_minute, tokens_per_minute or concurrent_calls, or `rate_limit: off`")
        return self
