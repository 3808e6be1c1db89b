"""Dead letters as people see them, and what comes of replaying them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from breakwater.contracts.execution import Status
from breakwater.contracts.types import Count, Event, Identifier, Timestamp

DeadLetterKind = Literal["job", "alert", "event"]
ReplayStatus = Literal["accepted"] | Status


class ListedDeadLetter(Event):
    """A dead letter, as it is listed."""

    dead_letter_id: Count = Field(description="Its number: the sequence in DLQ.")
    kind: DeadLetterKind = Field(description="What it is of: from the stream that the original was on.")
    reason: str = Field(description="Why it was given up, in a word.")
    agent: str | None = Field(description="None where it can't be told, or where it is of no agent.")
    execution_id: str | None
    error: str = Field(description="Why it was given up, in words; redacted.")
    at: Timestamp
    replayable: bool = Field(description="Whether a replay would run it.")
    why_not: str | None = Field(default=None, description="Why a replay would not, and what to do instead.")
    replayed_as: Identifier | None = Field(
        default=None, description="The execution id of its replay, where it has one."
    )
    replay_status: ReplayStatus | None = Field(
        default=None,
        description="How the replay stands: `accepted` until it is decided. None where there was none, or where its "
        "record has aged out.",
    )


class DeadLetterDetails(ListedDeadLetter):
    """One dead letter, with all that may be shown of it."""

    stream: str = Field(description="Where the original was.")
    subject: str
    sequence: Count
    headers: dict[str, JsonValue] = Field(description="Of the original; redacted.")
    payload: JsonValue = Field(
        description="The original, redacted: JSON; or a text where it is no JSON, or where it is cut."
    )
    payload_bytes: Count = Field(description="How long the original is.")
    payload_cut: bool = Field(description="Whether `payload` is only the beginning, as a text.")
    replayed_by: str | None = Field(default=None, description="Who replayed it.")
    replayed_at: Timestamp | None = None


class DeadLetterCount(Event):
    """How many dead letters are kept."""

    reason: str
    agent: str = Field(description="`unknown` where it can't be told.")
    count: Count


class DeadLetterList(Event):
    """Dead letters, the latest first."""

    dead_letters: tuple[ListedDeadLetter, ...]
    more: bool = Field(description="Whether there are more since then than were asked for.")
    counts: tuple[DeadLetterCount, ...] = Field(
        description="Of all that are kept, whatever was asked for; the most first."
    )


class ReplayedDeadLetter(Event):
    """A dead letter whose job runs again."""

    dead_letter_id: Count
    execution_id: Identifier = Field(description="Of the new execution; its `metadata.replay_of` names the old one.")


class SkippedDeadLetter(Event):
    """A dead letter that was not replayed."""

    dead_letter_id: Count
    why: str


class DeadLetterReplays(Event):
    """What came of a request to replay."""

    replayed: tuple[ReplayedDeadLetter, ...] = Field(description="Those whose jobs are queued by this request.")
    already: Count = Field(description="Those that were replayed before, and now were left alone.")
    skipped: tuple[SkippedDeadLetter, ...]
    continue_after: Count | None = Field(
        default=None, description="There are more: ask again with this as `after`. None where that was all."
    )
    up_to: Count | None = Field(
        default=None,
        description="Goes with `continue_after`: send it back, too. What fails again becomes a later dead letter, "
        "which is not meant.",
    )


class ReplayNote(Event):
    """Kept beside a dead letter: that it was replayed."""

    dead_letter_id: Count
    execution_id: Identifier = Field(description="Of the new execution.")
    agent: Identifier
    by: str
    why: str | None = Field(default=None, description="Redacted.")
    at: Timestamp
