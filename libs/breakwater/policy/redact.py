"""Takes secrets and personal data out of what is stored or shown. Runs in the worker, before the first publish."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from pydantic import Field, JsonValue, field_validator

from breakwater.contracts.types import Message

BUILT_IN_FIELDS = (
    "password", "passwd", "secret", "client_secret", "token", "access_token", "refresh_token", "api_key", "apikey",
    "authorization", "credential", "credentials", "private_key", "auth",
)  # fmt: skip
BUILT_IN_PATTERNS = (
    r"\bsk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic and their kin
    r"\bAIza[0-9A-Za-z_-]{35}",  # Google
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bgh[pousr]_[A-Za-z0-9]{36,}",  # GitHub
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",  # JSON web tokens
    r"\bBearer\s+[A-Za-z0-9._~+/-]{16,}=*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----",
)


class RedactionRules(Message):
    """What to hide. The built-in names and patterns of secrets always apply unless `built_in` is off."""

    built_in: bool = True
    fields: tuple[str, ...] = Field(default=(), description="JSON keys, in any case, whose values are replaced.")
    patterns: tuple[str, ...] = Field(
        default=(), description="Regular expressions; what they match in a text is replaced."
    )
    placeholder: str = "[REDACTED]"
    max_value_length: int = Field(default=20_000, ge=16, description="Longer texts are cut, with an ellipsis.")

    @field_validator("patterns")
    @classmethod
    def _compilable(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return patterns


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redaction rules, compiled once."""

    fields: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    placeholder: str
    max_value_length: int

    @classmethod
    def compile(cls, rules: RedactionRules) -> Redactor:
        """Prepares the rules for use on many values."""
        fields = (*BUILT_IN_FIELDS, *rules.fields) if rules.built_in else rules.fields
        patterns = (*BUILT_IN_PATTERNS, *rules.patterns) if rules.built_in else rules.patterns
        return cls(
            frozenset(name.lower() for name in fields),
            tuple(re.compile(pattern) for pattern in patterns),
            rules.placeholder,
            rules.max_value_length,
        )

    def text(self, value: str) -> str:
        """Replaces what the patterns match, then cuts what is too long."""
        for pattern in self.patterns:
            value = pattern.sub(self.placeholder, value)
        return value if len(value) <= self.max_value_length else value[: self.max_value_length] + "…"

    def _field(self, key: str, value: JsonValue) -> JsonValue:
        return self.placeholder if key.lower() in self.fields and value is not None else self.json(value)

    def _maybe_json(self, value: str) -> str:
        """A text that is JSON itself, as the arguments of a tool call are, has its fields redacted, too."""
        if value.lstrip()[:1] in {"{", "["}:
            try:
                inner: JsonValue = json.loads(value)
            except (ValueError, RecursionError):
                return self.text(value)
            if (redacted := self.json(inner)) != inner:
                return self.text(json.dumps(redacted, ensure_ascii=False))
        return self.text(value)

    def json(self, value: JsonValue) -> JsonValue:
        """A redacted copy. Numbers stay, as they are rarely secrets, unless their key says otherwise."""
        match value:
            case str():
                return self._maybe_json(value)
            case dict():
                return {
                    self.text(key): self.placeholder
                    if key.lower() in self.fields and item is not None
                    else self.json(item)
                    for key, item in value.items()
                }
            case list():
                return [self.json(item) for item in value]
            case _:
                return value
