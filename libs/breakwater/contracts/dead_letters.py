"""Dead letters in the HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from breakwater.contracts.execution import Status
from breakwater.contracts.http import Limit, Moment, ReasonText
from breakwater.contracts.types import NO_CONTROLS, Count, Event, FullId, Identifier, Message, Timestamp

MAX_DEAD_LETTERS = 1_000
"""The most dead letters that one request lists, or looks at to replay them, so that it is answered within seconds."""

DeadLetterKind = Literal["job", "alert", "event"]

ReplayStatus = Literal["accepted"] | Status

Number = Annotated[int, Field(strict=True)]
"""In JSON, `true` and `"1"` are none."""

ReasonFilter = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=NO_CONTROLS)] | None,
    Field(description="Only those with this reason: error, timeout, invalid, …"),
]

AgentFilter = Annotated[
    Identifier | None, Field(description="Only those of this agent; `unknown` are those of which it is not known.")
]

Since = Annotated[
    Moment | None,
    Field(description="Only what was given up from then on: a time in RFC 3339. By default the last seven days."),
]


class DeadLetterQuery(Message):
    """A filter of dead letters."""

    reason: ReasonFilter = None
    agent: AgentFilter = None
    execution_id: FullId | None = Field(default=None, description="Only those of this execution.")
    since: Since = None
    limit: Limit = 100


class ListedDeadLetter(Event):
    """A dead letter, as it is listed."""

    dead_letter_id: Count = Field(description="Its sequence in DLQ.")
    kind: DeadLetterKind = Field(description="Kind of the original, by the stream that it was on.")
    reason: str = Field(description="The reason why it was given up, in a word.")
    agent: str | None = Field(description="None where it is not known, or where it is of no agent.")
    execution_id: str | None
    error: str = Field(description="The reason why it was given up, in words; redacted.")
    at: Timestamp = Field(description="Time at which it was given up.")
    replayable: bool = Field(description="True if a replay would run it.")
    why_not: str | None = Field(default=None, description="The reason why a replay would not, and what to do instead.")
    replayed_as: FullId | None = Field(default=None, description="The execution id of its replay, where it has one.")
    replay_status: ReplayStatus | None = Field(
        default=None,
        description="The status of its replay: `accepted` until it is decided. None where there was none, or where "
        "its record has aged out.",
    )


class DeadLetterDetails(ListedDeadLetter):
    """One dead letter, with the original message as far as it may be shown."""

    stream: str = Field(description="The stream of the original.")
    subject: str
    sequence: Count
    headers: dict[str, JsonValue] = Field(description="Of the original; redacted.")
    payload: JsonValue = Field(
        description="The original, redacted: JSON; or a text where it is not JSON, or where it is cut. None where it "
        "is withheld."
    )
    payload_withheld: bool = Field(
        default=False,
        description="True if the original is shown to no one, as its agent keeps no prompts or is configured no more. "
        "A replay reads it all the same.",
    )
    payload_omitted: bool = Field(
        default=False, description="True if the original was too large to be kept; then a replay has nothing to run."
    )
    payload_sha256: str | None = Field(default=None, description="Of an original that was not kept, in hex.")
    payload_bytes: Count = Field(description="The length of the original.")
    payload_cut: bool = Field(description="True if `payload` is only the beginning, as a text.")
    replayed_by: str | None = Field(default=None, description="The operator who replayed it.")
    replayed_at: Timestamp | None = None


class DeadLetterCount(Event):
    """The number of dead letters of a reason and an agent."""

    reason: str
    agent: str = Field(description="`unknown` where it is not known.")
    count: Count


class DeadLetterList(Event):
    """Dead letters, the latest first."""

    dead_letters: tuple[ListedDeadLetter, ...]
    more: bool = Field(description="True if there are more since then than the limit.")
    counts: tuple[DeadLetterCount, ...] = Field(
        description="Of all dead letters, whatever was asked for; the largest count first."
    )


class ReplayDeadLettersRequest(Message):
    """The dead letters to replay: some by their ids, or all of a reason, of an agent, or at all."""

    dead_letters: (
        Annotated[tuple[Annotated[Number, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_DEAD_LETTERS)] | None
    ) = Field(default=None, description="Their ids; excludes all other filters.", examples=[[17]])
    reason: ReasonFilter = None
    agent: AgentFilter = None
    all: bool = Field(default=False, description="Of every reason and agent, where neither is named.")
    since: Since = None
    after: Number = Field(
        default=0, ge=0, description="Only those after this one: `continue_after` of the last response."
    )
    up_to: Number | None = Field(default=None, ge=0, description="None after this one: `up_to` of the last response.")
    why: ReasonText | None = Field(default=None, description="For the record; redacted.")

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        chosen = self.reason is not None or self.agent is not None or self.all
        if self.dead_letters is not None and (chosen or self.since or self.after or self.up_to is not None):
            raise ValueError(
                "dead_letters says which ones are meant; leave out reason, agent, all, since, after and up_to"
            )
        if self.dead_letters is None and not chosen:
            raise ValueError("say which ones: dead_letters, or a reason, an agent, or all")
        if self.after and self.up_to is None:
            # A replay that fails again is another dead letter: without an end, they would be replayed for ever.
            raise ValueError("after needs up_to, which is in the same response as continue_after")
        return self


class ReplayedDeadLetter(Event):
    """A dead letter whose job runs again."""

    dead_letter_id: Count
    execution_id: FullId = Field(description="Of the new execution; its `metadata.replay_of` names the old one.")


class SkippedDeadLetter(Event):
    """A dead letter that was not replayed."""

    dead_letter_id: Count
    why: str


class DeadLetterReplays(Event):
    """The result of a request to replay dead letters."""

    replayed: tuple[ReplayedDeadLetter, ...] = Field(description="Those whose jobs this request has queued.")
    already: Count = Field(description="Those that were replayed before, and were left alone now.")
    skipped: tuple[SkippedDeadLetter, ...]
    continue_after: Count | None = Field(
        default=None, description="There are more: ask again with this as `after`. None where that was all."
    )
    up_to: Count | None = Field(
        default=None,
        description="Send it back together with `continue_after`. What fails again becomes a later dead letter, and "
        "is not meant.",
    )
