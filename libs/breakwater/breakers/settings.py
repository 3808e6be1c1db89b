"""The settings of breakers, and the presets of breakers and guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from breakwater.breakers.contract import BreakerScope, CountedUnit
from breakwater.kernel.types import Message, Off

MAX_KEPT = 1000
"""The number of newest outcomes that are remembered one by one; no rule can need more."""

Preset = Literal[
    "feature",
    "tdd-red-green",
    "refactor",
    "incident-response",
    "migration-safety",
    "scientific-method",
    "debug",
    "review",
    "docs",
]

_STANDARD = {"consecutive_failures": 3, "same_error": 5}

PRESETS: Mapping[str, Mapping[str, int]] = {
    "feature": _STANDARD,
    # Tests that are red before they are green look like failures; the same error over and over is one.
    "tdd-red-green": {"consecutive_failures": 5, "same_error": 3},
    "refactor": {"consecutive_failures": 2, "same_error": 3},
    "incident-response": {"consecutive_failures": 2, "same_error": 2},
    "migration-safety": {"consecutive_failures": 1, "same_error": 2},
    # Many approaches are tried, and most of them fail.
    "scientific-method": {"consecutive_failures": 8, "same_error": 10},
    **dict.fromkeys(("debug", "review", "docs"), _STANDARD),
}
"""Presets of breakers and of guards."""

GUARD_PRESETS: Mapping[str, Mapping[str, int]] = {**PRESETS, "agent-run": {"max_iterations": 100}}
"""Presets of guards, including the one for agents that call their model in a loop."""


def with_preset(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with those of the preset that they name, which explicit settings override."""
    preset = rules.get("preset")
    return {**(GUARD_PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **rules}


def take_preset(data: Any) -> Any:
    """Applies the `preset` of a settings model before Pydantic validates its fields."""
    return with_preset(cast(dict[str, Any], data)) if isinstance(data, dict) else data


class BreakerProbe(Message):
    """A job of the plane's own that tries a half-open breaker to which no call comes."""

    every_s: float = Field(default=60.0, ge=10, le=86_400, description="The least time between two such jobs.")
    prompt: str = Field(default="ping", min_length=1, max_length=1000, description="What the model is asked.")
    max_tokens: int = Field(default=1, ge=1, le=1000, description="Maximum number of output tokens of the answer.")


class BreakerRules(Message):
    """Rules that open a breaker, and its cool-down. At least one rule must be set; each can be `off`."""

    preset: Preset | None = Field(default=None, description="A named set of rules; settings next to it override it.")
    scope: BreakerScope = Field(
        default="agent_model",
        description=(
            "Failures that count together: of this agent on a model, of all agents on a model, "
            "or of all agents on a provider."
        ),
    )
    count: CountedUnit = Field(
        default="jobs",
        description="What consecutive_failures and same_error count: jobs, each once and by how it ended on the model, "
        "or attempts. errors and failure_rate always count attempts.",
    )
    errors: Annotated[int | None, Off] = Field(
        default=None, ge=1, le=MAX_KEPT, description="Opens at this many failed attempts within `within_s`."
    )
    within_s: float = Field(
        default=60.0, gt=0, le=86_400, description="The rolling window of errors, same_error and failure_rate."
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=MAX_KEPT, description="Opens once this many jobs in a row have failed."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5,
        ge=1,
        le=MAX_KEPT,
        description="Opens once this many jobs have ended with the same error within `within_s`, even with successes "
        "in between.",
    )
    failure_rate: Annotated[float | None, Off] = Field(
        default=None, gt=0, le=1, description="Opens if this share of the attempts within `within_s` failed."
    )
    minimum_calls: int = Field(default=10, ge=1, le=1_000_000, description="Attempts needed to judge the failure rate.")
    cooldown_s: float = Field(
        default=60.0, gt=0, le=86_400, description="Time that calls are refused before a probe is admitted."
    )
    cooldown_growth: float = Field(
        default=1.0, ge=1, le=10, description="Factor by which each failed probe extends the next cool-down."
    )
    max_cooldown_s: float = Field(default=3600.0, gt=0, le=86_400, description="The longest cool-down.")
    cooldown_jitter: float = Field(
        default=0.0, ge=0, le=1, description="Up to this share of the cool-down is added to it at random."
    )
    probe: BreakerProbe | None = Field(
        default=None,
        description="Tries the half-open breaker with a job of its own if no call comes. Default: it waits for a call.",
    )

    _take_preset = model_validator(mode="before")(take_preset)

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if not any((self.errors, self.consecutive_failures, self.same_error, self.failure_rate)):
            raise ValueError(
                "set errors, consecutive_failures, same_error or failure_rate, "
                "or switch the breaker off with `breaker: off`"
            )
        if self.cooldown_growth > 1 and self.max_cooldown_s < self.cooldown_s:
            raise ValueError("max_cooldown_s must not be less than cooldown_s, or the cool-down can't grow")
        return self


class ShadowRules(Message):
    """Rules that are tried beside an agent's own: what they would have done is recorded, and they refuse nothing."""

    breaker: BreakerRules = Field(description="The rules of a second breaker, with all of its settings but `probe`.")

    @field_validator("breaker")
    @classmethod
    def _makes_no_calls(cls, rules: BreakerRules) -> BreakerRules:
        if rules.probe is not None:
            raise ValueError("probe is not for a shadow, which makes no calls; remove it")
        return rules
