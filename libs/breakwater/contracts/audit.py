"""The audit log: what people did, each action under one id."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from breakwater.contracts.types import Event, Identifier, Timestamp

ActorKind = Literal["key", "person", "link"]
"""Who acts: the holder of an API key, somebody who signed in, or somebody with a signed link in an alert."""

AuditOutcome = Literal["begun", "done", "refused", "failed"]
"""`begun` stays where nobody knows how the action ended, as its process crashed."""


class AuditEvent(Event):
    """A person's action.

    Published as `begun` before anything is done, and again with the outcome and the same `audit_id`.
    """

    audit_id: str = Field(description="Unique for the action.")
    action: Identifier = Field(description="The operation's id in the HTTP API, such as `raise_cap`.")
    outcome: AuditOutcome
    by: str = Field(description="The name of the person, or of the API key.")
    actor: ActorKind
    actor_id: str | None = Field(
        default=None, description="The id of the API key; of a person the provider's `sub`; none of a link."
    )
    details: dict[str, JsonValue] = Field(default_factory=dict, description="What was asked for, redacted.")
    reason: str | None = Field(default=None, description="As it was given, redacted.")
    error: str | None = Field(default=None, description="The error code of the HTTP API, if it was not done.")
    at: Timestamp = Field(description="When it was begun.")
