"""When a breaker is to open, as a person sets it: rules, presets, and whose breaker it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from breakwater.contracts.events import BreakerScope
from breakwater.contracts.subjects import encode_token
from breakwater.contracts.types import Message, Off

ALL = "*"
"""Stands for the agent in the name of a breaker that all agents share."""

MAX_KEPT = 1000
"""Outcomes that are remembered one by one, the newest; no rule can ask for more."""

Preset = Literal["feature", "tdd-red-green", "refactor", "incident-response", "migration-safety"]

PRESETS: Mapping[str, Mapping[str, int]] = {
    "feature": {"consecutive_failures": 3, "same_error": 5},
    # Red and green in turn look like failures; the same error over and over does not belong there.
    "tdd-red-green": {"consecutive_failures": 5, "same_error": 3},
    "refactor": {"consecutive_failures": 2, "same_error": 3},
    "incident-response": {"consecutive_failures": 2, "same_error": 2},
    "migration-safety": {"consecutive_failures": 1, "same_error": 2},
}


def with_preset(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as written, with those of the preset they name where they say nothing themselves."""
    preset = rules.get("preset")
    return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **rules}


class BreakerRules(Message):
    """When to open, and for how long. At least one rule must be set; each can be switched off with `off`."""

    preset: Preset | None = Field(default=None, description="A set of rules by name; what is set beside it wins.")
    scope: BreakerScope = Field(
        default="agent_model",
        description="Whose failures count together: this agent's on a model, all agents' on a model, or all agents' on "
        "a provider.",
    )
    errors: Annotated[int | None, Off] = Field(
        default=None, ge=1, le=MAX_KEPT, description="Open at this many failures within `within_s`."
    )
    within_s: float = Field(
        default=60.0, gt=0, le=86_400, description="The rolling window of errors, same_error and failure_rate."
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=MAX_KEPT, description="Open at this many in a row."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5,
        ge=1,
        le=MAX_KEPT,
        description="Open when the same error came this often within `within_s`, successes in between or not.",
    )
    failure_rate: Annotated[float | None, Off] = Field(
        default=None, gt=0, le=1, description="Open when this share of the calls within `within_s` has failed."
    )
    minimum_calls: int = Field(default=10, ge=1, le=1_000_000, description="Calls that a failure rate needs.")
    cooldown_s: float = Field(default=60.0, gt=0, le=86_400, description="How long calls are refused before a probe.")
    cooldown_growth: float = Field(
        default=1.0, ge=1, le=10, description="Each probe that fails multiplies the next cool-down by this."
    )
    max_cooldown_s: float = Field(default=3600.0, gt=0, le=86_400, description="Where that ends.")
    cooldown_jitter: float = Field(
        default=0.0, ge=0, le=1, description="Up to this share of the cool-down is added to it at random."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, data: Any) -> Any:
        return with_preset(cast(dict[str, Any], data)) if isinstance(data, dict) else data

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


@dataclass(frozen=True, slots=True)
class BreakerKey:
    """Whose breaker. One that agents share has the agent `*`; one of a whole provider the model `<provider>/*`."""

    agent: str
    model: str

    @classmethod
    def of(cls, scope: BreakerScope, agent: str, model: str, provider: str) -> BreakerKey:
        """The breaker that a call belongs to."""
        match scope:
            case "agent_model":
                return cls(agent, model)
            case "model":
                return cls(ALL, model)
            case "provider":
                return cls(ALL, f"{provider}/{ALL}")

    @property
    def name(self) -> str:
        """The breaker's name: `<agent>/<model>`, each encoded as a subject token."""
        return f"{encode_token(self.agent)}/{encode_token(self.model)}"
