"""The settings of what may be called by money and rates: limits, guards of tasks, rate limits, and tags of costs."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from breakwater.breakers.settings import Preset, take_preset
from breakwater.kernel.types import Message, Name, Off, UsdAmount, ZoneName
from breakwater.limits.contract import Enforcement, LimitSettings, Window


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
        amounts = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_calls, self.per)
        if amounts == (None, None, None, None):
            text = "set requests_per_minute, tokens_per_minute, concurrent_calls, or requests or tokens with per"
            raise ValueError(f"{text}, or `rate_limit: off`")
        return self


OTHERS = "*"
"""The key, among the config's tenants, whose limits apply to each tenant that the config does not name."""


OnExceeded = Literal["cheaper_model", "fail"]


class Caps(Message):
    """The limits of one scope. Without limits the spend is only tracked."""

    daily_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar day.")
    monthly_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar month.")
    enforcement: Enforcement = Field(
        default="soft",
        description="none: track, and alert at `soft_at_percent` if that is set; soft: alert at the thresholds; "
        "hard: also refuse calls that could exceed the limit.",
    )
    soft_at_percent: tuple[int, ...] = Field(
        default=(50, 80, 100), description="Thresholds that raise an alert. A hard limit raises one at 100, too."
    )
    on_exceeded: OnExceeded = Field(
        default="cheaper_model",
        description="If a hard limit has no room for a call: try the next model of the chain, or end the job.",
    )

    @field_validator("soft_at_percent")
    @classmethod
    def _percentages(cls, percents: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 1 <= percent <= 100 for percent in percents):
            raise ValueError("thresholds are percentages from 1 to 100")
        return tuple(sorted(set(percents)))

    @property
    def is_hard(self) -> bool:
        """Returns True if a limit refuses calls."""
        return self.enforcement == "hard" and (self.daily_usd, self.monthly_usd) != (None, None)

    @property
    def thresholds(self) -> frozenset[int]:
        """The percentages that raise an alert. Without enforcement, only explicitly configured ones do."""
        if self.enforcement == "none" and "soft_at_percent" not in self.model_fields_set:
            return frozenset()
        return frozenset((*self.soft_at_percent, 100) if self.enforcement == "hard" else self.soft_at_percent)

    def limit(self, window: Window) -> int | None:
        """Returns the limit of a window in nano-dollars; None if there is none."""
        return self.daily_usd if window == "daily" else self.monthly_usd


class ConfidenceRules(Message):
    """Confidence that answers report about themselves, as `agent_decision` does."""

    field: str = Field(
        default="confidence", min_length=1, description="The field of the answer, a JSON object, that contains it."
    )
    answers: int = Field(default=3, ge=2, le=100, description="How many in a row.")
    floor: float | None = Field(default=None, ge=0, le=1, description="Trip when all of them are below this.")
    falling: bool = Field(default=True, description="Trip when each of them is below the one before.")

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if self.floor is None and not self.falling:
            raise ValueError("set floor, or falling: true, or `confidence: off`")
        return self


class GuardRules(Message):
    """Limits of one task. Each rule can be `off`."""

    preset: Literal[Preset, "agent-run"] | None = Field(
        default=None,
        description="A named set of rules; settings next to it override it. `agent-run`, for agents that call their "
        "model in a loop, allows 100 iterations; the others set consecutive_failures and same_error.",
    )
    max_iterations: Annotated[int | None, Off] = Field(default=10, ge=1, le=1_000_000, description="Jobs of one task.")
    max_tokens: Annotated[int | None, Off] = Field(
        default=200_000, ge=1, le=10_000_000_000, description="Input and output, over all its calls."
    )
    max_cost_usd: Annotated[UsdAmount | None, Off] = Field(
        default=10_000_000_000,
        description="Over all its calls, including the worst case of the next; $10 by default.",
        json_schema_extra={"default": "10"},
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=1000, description="Failed jobs in a row."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5, ge=1, le=1000, description="Jobs that failed with the same error, even with successes in between."
    )
    confidence: Annotated[ConfidenceRules | None, Off] = None
    rate_limit: Annotated[RateLimit | None, Off] = Field(
        default=None, description="Limits on the rate of the task's calls, over all its jobs; it never stops the task."
    )

    _take_preset = model_validator(mode="before")(take_preset)

    def for_embeddings(self) -> Self:
        """Returns the rules for a job that embeds, which is no step of a loop and has no conversation's tokens."""
        return self.model_copy(update=dict.fromkeys(("max_iterations", "max_tokens", "confidence")))

    @field_validator("rate_limit")
    @classmethod
    def _within_the_life_of_a_task(cls, limit: RateLimit | None) -> RateLimit | None:
        # Each task has its own counters, which would stay in Redis for a day.
        if limit is not None and limit.per == "day":
            raise ValueError("must be per minute or per hour, as each task is counted by itself")
        return limit

    @field_validator("max_cost_usd")
    @classmethod
    def _something(cls, cap: int | None) -> int | None:
        if cap == 0:
            raise ValueError("must be more than 0, as nothing would be left for the first call; `off` means no limit")
        return cap


MAX_LIMITS = 1_000
"""The most limits in a config."""


class BudgetSettings(Message):
    """Limits over all agents, and the calendar of every budget."""

    timezone: ZoneName = Field(
        default="UTC", description="The time zone in which days and longer periods begin, such as `Europe/Berlin`."
    )
    total: Caps = Field(default=Caps(), alias="global")
    compare_every_s: float = Field(
        default=600,
        ge=10,
        le=86_400,
        description="The interval at which the counters are reconciled with recorded spend.",
    )
    tenants: dict[Name, Caps] = Field(
        default_factory=dict, description="Limits per tenant; `*` applies to each tenant that is not listed."
    )
    limits: tuple[LimitSettings, ...] = Field(
        default=(), max_length=MAX_LIMITS, description="Limits of any other scope, or by week or quarter."
    )

    @property
    def zone(self) -> ZoneInfo:
        """The calendar's time zone."""
        return ZoneInfo(self.timezone)
