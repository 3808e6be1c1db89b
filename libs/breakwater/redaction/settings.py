"""The section `redaction` of the config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from breakwater.kernel.types import Message
from breakwater.redaction.patterns import compile_user_pattern, squash_name

OptionalForm = Literal["iban", "phone"]


class RedactionRules(Message):
    """Rules of what to hide. The built-in names and forms of secrets always apply unless `built_in` is off."""

    built_in: bool = True
    fields: tuple[str, ...] = Field(
        default=(), description="Names of JSON fields, in any spelling (apiKey, API_KEY), whose values are replaced."
    )
    patterns: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions in RE2's syntax; what they match in a text is replaced. (?i) ignores case.",
    )
    forms: tuple[OptionalForm, ...] = Field(
        default=(),
        description="Further forms to replace in any text: iban (with right check digits), and phone, which also takes "
        "some other numbers for phone numbers.",
    )
    placeholder: str = Field(default="[REDACTED]", min_length=1, max_length=100)
    max_value_length: int = Field(default=20_000, ge=16, description="Longer texts are truncated, with an ellipsis.")

    @field_validator("fields")
    @classmethod
    def _names(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        for name in fields:
            if not squash_name(name) or not name.isprintable() or "*" in name:
                raise ValueError(f"{name!r} is no name of a field; names have no wildcards (`patterns` are for values)")
        return fields

    @field_validator("patterns")
    @classmethod
    def _compilable(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            compile_user_pattern(pattern)
        return patterns


DEFAULT_REDACTION = RedactionRules()
