"""Messages about messages: dead letters."""

from __future__ import annotations

from pydantic import Field

from breakwater.kernel.types import Count, Encrypted, Event, Timestamp


class DeadLetter(Event):
    """A message that could not be handled, kept unchanged so that it can be inspected and replayed."""

    holds_texts = True

    reason: str
    agent: str | None = None
    error: str
    stream: str
    subject: str
    sequence: Count
    headers: dict[str, str] = Field(default_factory=dict)
    payload_base64: str = Field(default="", description="The original bytes; empty if `omitted_bytes` is set.")
    omitted_bytes: Count | None = Field(
        default=None,
        description="Size of an original that is too large to keep, or that the stream DLQ refused.",
    )
    omitted_sha256: str | None = Field(default=None, description="SHA-256 of that original, in hex.")
    encrypted: Encrypted = None
    withheld: bool = Field(
        default=False, description="True if the original must not be shown, because its agent keeps no prompts."
    )
    execution_id: str | None = None
    job_id: str | None = Field(default=None, description="Id of its job, as the caller chose it.")
    at: Timestamp
