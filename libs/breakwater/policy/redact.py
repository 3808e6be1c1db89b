"""Takes secrets and personal data out of what is stored or shown. Runs in the worker, before the first publish.

What is hidden: the values of JSON fields with secret names, whatever they are; values that stand behind such names in
texts (`password=…`, `"token": "…"`, `Authorization: …`); and forms of secrets wherever they stand: keys of well-known
services, JSON web tokens, private keys, card numbers, social security numbers, e-mail addresses, users in URLs. JSON in
texts is parsed, and what URLs and JSON escape is looked at unescaped.

What is not: telephone numbers without a field of that name, secrets in prose ("the password is …"), in Base64 or any
other encoding, and of a text that is cut, secrets longer than 16 KiB which only their end gives away.

Everything has a bound, and what is beyond it is hidden. Patterns run on RE2, in time linear in the text. In one
document at most 20,000 places are looked at closely, and 100,000 texts, names, objects and arrays are copied. So the
record of a typical job takes 0.03 ms, and 10 MB made to be slow 0.85 s at most, with the built-in rules on one core of
the build machine (`python -m tests.bench.redaction`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, JsonValue, field_validator

from breakwater.contracts.types import Message
from breakwater.policy.redaction.document import DocumentRedactor
from breakwater.policy.redaction.finders import TooMuchWorkError, Work
from breakwater.policy.redaction.regex import own
from breakwater.policy.redaction.scanner import Scanner, TextRedactor
from breakwater.policy.redaction.values import SecretNames, squashed


class RedactionRules(Message):
    """What to hide. The built-in names and forms of secrets always apply unless `built_in` is off."""

    built_in: bool = True
    fields: tuple[str, ...] = Field(
        default=(), description="Names of JSON fields, in any spelling (apiKey, API_KEY), whose values are replaced."
    )
    patterns: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions in RE2's syntax; what they match in a text is replaced. (?i) ignores case.",
    )
    placeholder: str = Field(default="[REDACTED]", min_length=1, max_length=100)
    max_value_length: int = Field(default=20_000, ge=16, description="Longer texts are cut, with an ellipsis.")

    @field_validator("fields")
    @classmethod
    def _names(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        for name in fields:
            if not squashed(name) or not name.isprintable():
                raise ValueError(f"{name!r} is no name of a field")
        return fields

    @field_validator("patterns")
    @classmethod
    def _compilable(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            own(pattern)
        return patterns


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redaction rules, compiled once. Redacting twice changes nothing more."""

    texts: TextRedactor
    documents: DocumentRedactor

    @classmethod
    def compile(cls, rules: RedactionRules) -> Self:
        """Prepares the rules for use on many values, which takes some milliseconds."""
        scanner = Scanner(
            rules.fields, rules.patterns, built_in_rules=rules.built_in, placeholder=rules.placeholder.encode()
        )
        texts = TextRedactor(scanner, rules.placeholder, rules.max_value_length)
        names = SecretNames(rules.fields, built_in=rules.built_in)
        return cls(texts, DocumentRedactor(texts, names, all_numbers=bool(rules.patterns)))

    def text(self, value: str) -> str:
        """A text without secrets, of at most `max_value_length` characters, a last placeholder and an ellipsis."""
        try:
            return self.texts.redacted(value, Work())
        except TooMuchWorkError:
            return self.texts.placeholder

    def json(self, value: JsonValue) -> JsonValue:
        """A copy without secrets, in its texts, its keys and the JSON that stands in texts.

        Numbers and booleans stay what they are unless their field is secret or a pattern matches them as they are
        written; `null` always stays. Keys that become the same are told apart by a number.
        """
        return self.documents.redacted(value, Work())
