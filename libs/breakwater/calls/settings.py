"""The settings of calls: retries, caching, and the form of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.kernel.json_values import closed_schema
from breakwater.kernel.types import Message

if TYPE_CHECKING:
    from breakwater.kernel.schema_check import SchemaCheck

RetryableKind = Literal["client", "quota", "rate_limit", "transient", "server", "timeout", "network", "worker_lost"]

BY_NATURE: tuple[int | str, ...] = ("rate_limit", "transient", "server", "timeout", "network", "worker_lost")
"""The kinds of failures that are retried by default, unless the provider says not to repeat the call."""

PAYMENT_REQUIRED = "PaymentRequired"
"""The name in `on` for a 402, whose error class is the same as that of any exhausted quota."""

RECOVERED_FROM: frozenset[ErrorKind] = frozenset({"logic", "context_overflow", "orphan_tool_calls"})
"""Kinds of failures that a retry would only repeat: the request must change first."""

_RECOVERED_FROM_CLASSES = frozenset({"ContextOverflow", "OrphanToolCalls"})

_CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")


class KindPolicy(Message):
    """Retries of failures of one kind. Settings that are left out are those of all kinds."""

    max: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Retries after failures of this kind on one model, counted separately.",
    )
    backoff: Literal["constant", "exponential"] | None = None
    base_s: float | None = Field(default=None, ge=0, le=3600)
    max_delay_s: float | None = Field(default=None, ge=0, le=3600)


class RetryPolicy(Message):
    """Attempts on one model, and the delays between them."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts on one model, including the first.")
    backoff: Literal["constant", "exponential"] = "exponential"
    base_s: float = Field(default=0.5, ge=0, le=3600, description="First delay; jitter of up to half of it is added.")
    max_delay_s: float = Field(
        default=5.0, ge=0, le=3600, description="Ceiling of an exponential delay, before jitter."
    )
    on: tuple[int | str, ...] = Field(
        default=BY_NATURE,
        description="Failures to retry, and no others: kinds (timeout, client), status codes (404) or error classes "
        "(NotFoundError). To retry some in addition to the default ones, list both.",
    )
    per_kind: dict[RetryableKind, KindPolicy] = Field(
        default_factory=dict, description="Other settings for one kind of failure: `rate_limit: {max: 5, base_s: 60}`."
    )

    @field_validator("on")
    @classmethod
    def _names_what_can_be_retried(cls, on: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for name in on:
            _check_retryable(name)
        return on

    @model_validator(mode="before")
    @classmethod
    def _on_as_yaml_reads_it(cls, data: Any) -> Any:
        # YAML 1.1 reads a bare `on` as true, also as a key.
        if isinstance(data, dict) and True in data and "on" not in data:
            fields = cast(dict[Any, Any], data)
            return {"on" if key is True else key: value for key, value in fields.items()}
        return cast(Any, data)

    @model_validator(mode="after")
    def _ceiling_above_base(self) -> Self:
        if self.backoff == "exponential" and self.max_delay_s < self.base_s:
            raise ValueError("max_delay_s must not be below base_s; set both")
        for kind in self.per_kind:
            merged = self.for_kind(kind)
            if merged.backoff == "exponential" and merged.max_delay_s < merged.base_s:
                raise ValueError(f"per_kind.{kind}: max_delay_s must not be below base_s; set both")
        return self

    def for_kind(self, kind: ErrorKind) -> RetryPolicy:
        """Returns the policy with the delays of a kind of failure.

        A kind's own base raises the ceiling that is set for all kinds: `rate_limit: {base_s: 60}` means 60 s.
        """
        override = self._own(kind)
        if override is None:
            return self
        base_s = self.base_s if override.base_s is None else override.base_s
        max_delay_s = self.max_delay_s if override.max_delay_s is None else override.max_delay_s
        if override.base_s is not None and override.max_delay_s is None:
            max_delay_s = max(max_delay_s, base_s)
        update = {"backoff": override.backoff or self.backoff, "base_s": base_s, "max_delay_s": max_delay_s}
        return self.model_copy(update=update)

    def max_retries(self, kind: ErrorKind) -> int | None:
        """Returns the retries that a kind of failure has for itself; None if it shares `max_attempts` with others."""
        override = self._own(kind)
        return None if override is None else override.max

    def _own(self, kind: ErrorKind) -> KindPolicy | None:
        return self.per_kind.get(kind)  # pyright: ignore[reportArgumentType]  other kinds have no entry


class RetryBudgetRules(Message):
    """The limit on the whole fleet's retries of a model, so that retries do not amplify an outage."""

    ratio: float = Field(default=0.2, ge=0, le=10, description="Retries per first attempt, within the window.")
    floor: int = Field(default=10, ge=0, description="Retries within the window that are always allowed.")
    window_s: int = Field(default=60, ge=1, le=3600)


def _check_retryable(name: int | str) -> None:
    """Raises ValueError if `on` may not contain a name."""
    if isinstance(name, int):
        if not 400 <= name <= 599:
            raise ValueError(f"{name} is not the status code of an error (400 to 599)")
        return
    if name in RECOVERED_FROM or name.removesuffix("Error") in _RECOVERED_FROM_CLASSES:
        raise ValueError(
            f"{name} can't be retried, as the same call would fail again; it has a recovery of its own "
            "(output.max_corrections, on_context_overflow, and pruning of orphaned tool calls)"
        )
    if name in get_args(RetryableKind):
        return
    if name in get_args(ErrorKind):
        raise ValueError(f"{name} can't be retried: no call was made")
    if not _CLASS_NAME.fullmatch(name):
        kinds = ", ".join(get_args(RetryableKind))
        hint = "; write a status code without quotes" if name.strip().isdecimal() else ""
        raise ValueError(
            f"{name[:100]!r} is no status code (404), no kind ({kinds}) and no error class (NotFoundError){hint}"
        )


def built_in_schemas() -> Mapping[str, dict[str, JsonValue]]:
    """Returns the built-in schemas by name. `strict` leaves a task's data and an action's arguments open."""
    return json.loads(Path(__file__).with_name("output_schemas.json").read_text(encoding="utf-8"))


class OutputRules(Message):
    """Rules for the form of answers.

    Answers may be raw JSON, or JSON in a fenced block. With `strict`, they must contain nothing else, and objects must
    have no properties that the schema does not name; otherwise the first JSON value in the text counts.
    """

    schema_: str | dict[str, JsonValue] = Field(
        alias="schema",
        description="A JSON schema, or the name of a built-in one: task_result, task_report, agent_decision.",
    )
    strict: bool = False
    native: bool = Field(default=True, description="Have providers enforce the schema, if they can.")
    max_corrections: int = Field(
        default=2, ge=0, le=10, description="How often an invalid answer is sent back to the model with its errors."
    )

    @field_validator("schema_")
    @classmethod
    def _usable(cls, schema: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
        schema_check_of(schema_of(schema))
        return schema

    @field_validator("strict")
    @classmethod
    def _closable(cls, strict: bool, info: ValidationInfo) -> bool:
        # If the schema is missing here, its own validation has failed and reports the mistake.
        if strict and "schema_" in info.data:
            closed_schema(schema_of(info.data["schema_"]))
        return strict


def schema_check_of(schema: dict[str, JsonValue]) -> SchemaCheck:
    """Returns the check of a schema. Raises ValueError if the schema is invalid."""
    from breakwater.kernel.schema_check import SchemaCheck  # a third of a second to import

    return SchemaCheck(schema)


def schema_of(setting: str | dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the schema that is written out in a setting, or named there. Raises ValueError for an unknown name."""
    if not isinstance(setting, str):
        return setting
    built_in = built_in_schemas()
    if setting not in built_in:
        raise ValueError(
            f"{setting[:100]!r} is not a ready schema; name one of {', '.join(sorted(built_in))}, or write one"
        )
    return built_in[setting]


class CacheRules(Message):
    """Caching of answers to identical jobs of the same key, program or tenant. Errors are never cached."""

    ttl_s: int = Field(ge=1, le=30 * 86_400, description="How long an answer is cached.")
    share_concurrent: bool = Field(
        default=False, description="Concurrent identical jobs wait for the first one's answer and share it."
    )
