"""Dead letters in the HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from breakwater.jobs.contract.execution import Status
from breakwater.kernel.http.contract import ActionRequest, Moment, PageLimit, ReasonText
from breakwater.kernel.types import NO_CONTROLS, Count, Event, Identifier, Message, Timestamp

MAX_DEAD_LETTERS = 1_000
"""The most dead letters that one request lists, replays or dismisses, so that it is answered within seconds."""

DeadLetterKind = Literal["job", "alert", "event"]

DeadLetterState = Literal["open", "dismissed", "all"]

ReplayStatus = Literal["accepted"] | Status

Number = Annotated[int, Field(strict=True)]
"""A sequence number; in JSON, neither `true` nor `"1"` is one."""

ReasonFilter = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=NO_CONTROLS)] | None,
    Field(description="Filter by reason: error, timeout, invalid, …"),
]

AgentFilter = Annotated[
    Identifier | None, Field(description="Filter by agent; `unknown` selects dead letters whose agent is not known.")
]

Since = Annotated[
    Moment | None,
    Field(description="Earliest time in RFC 3339; default: seven days ago."),
]


class DeadLetterQuery(Message):
    """A filter of dead letters."""

    reason: ReasonFilter = None
    agent: AgentFilter = None
    execution_id: Identifier | None = Field(default=None, description="Filter by execution, or by the id of its job.")
    since: Since = None
    state: DeadLetterState = Field(
        default="open", description="`open` for those that were not dismissed, `dismissed`, or `all`."
    )
    limit: PageLimit = 100


class ListedDeadLetter(Event):
    """A dead letter, as it is listed."""

    dead_letter_id: Count = Field(description="Sequence number in the stream DLQ.")
    kind: DeadLetterKind = Field(description="Kind of the original message, by its stream.")
    reason: str = Field(description="Reason code why it was given up.")
    agent: str | None = Field(description="Null if unknown, or if it belongs to no agent.")
    execution_id: str | None
    job_id: str | None = Field(default=None, description="Id of its job, as the caller chose it.")
    error: str = Field(description="Reason why it was given up, in words; redacted.")
    at: Timestamp = Field(description="When it was given up.")
    replayable: bool = Field(description="True if it can be replayed.")
    why_not: str | None = Field(default=None, description="Why it can't be replayed, and what to do instead.")
    replayed_as: Identifier | None = Field(default=None, description="Execution id of its replay, if it was replayed.")
    replay_status: ReplayStatus | None = Field(
        default=None,
        description="Status of its replay: `accepted` until it has ended. Null if there was none, or if "
        "its record has expired.",
    )
    dismissed_by: str | None = Field(default=None, description="The operator who dismissed it.")
    dismissed_at: Timestamp | None = None


class DeadLetterDetails(ListedDeadLetter):
    """One dead letter, with its original message if it may be shown."""

    stream: str = Field(description="Stream of the original message.")
    subject: str
    sequence: Count
    headers: dict[str, JsonValue] = Field(description="Headers of the original message; redacted.")
    payload: JsonValue = Field(
        description="The original message, redacted, as JSON, or as text if it is not JSON or was "
        "truncated. Null if it is withheld."
    )
    payload_withheld: bool = Field(
        default=False,
        description="True if the original is not shown, because its agent keeps no prompts or was "
        "removed from the config. A replay still uses it.",
    )
    payload_omitted: bool = Field(
        default=False, description="True if the original was too large to keep, so it can't be replayed."
    )
    payload_sha256: str | None = Field(default=None, description="SHA-256, in hex, of an original that was not kept.")
    payload_bytes: Count = Field(description="Size of the original in bytes.")
    payload_cut: bool = Field(description="True if `payload` is only the beginning of the original, as text.")
    replayed_by: str | None = Field(default=None, description="The operator who replayed it.")
    replayed_at: Timestamp | None = None
    dismissed_why: str | None = Field(default=None, description="Why it was dismissed; redacted.")


class DeadLetterCount(Event):
    """The number of dead letters of a reason and an agent."""

    reason: str
    agent: str = Field(description="`unknown` if the agent is not known.")
    count: Count


class DeadLetterList(Event):
    """Dead letters, the latest first."""

    dead_letters: tuple[ListedDeadLetter, ...]
    more: bool = Field(description="True if there are more results than the limit.")
    counts: tuple[DeadLetterCount, ...] = Field(
        description="Counts over all dead letters of the `state`, regardless of the other filters; largest first."
    )


class DeadLetterSelection(ActionRequest):
    """Dead letters: by their ids, or all open ones with a reason, of an agent, or of any kind."""

    dead_letters: (
        Annotated[tuple[Annotated[Number, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_DEAD_LETTERS)] | None
    ) = Field(default=None, description="Ids of dead letters; excludes all other filters.", examples=[[17]])
    reason: ReasonFilter = None
    agent: AgentFilter = None
    all: bool = Field(default=False, description="Selects every reason and agent.")
    since: Since = None
    after: Number = Field(
        default=0, ge=0, description="Start after this one: `continue_after` of the previous response."
    )
    up_to: Number | None = Field(default=None, ge=0, description="End with this one: `up_to` of the previous response.")
    why: ReasonText | None = Field(default=None, description="For the record; redacted.")

    @property
    def stated_reason(self) -> str | None:
        """The reason as the person wrote it; `reason` is a filter here."""
        return self.why

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        chosen = self.reason is not None or self.agent is not None or self.all
        if self.dead_letters is not None and (chosen or self.since or self.after or self.up_to is not None):
            raise ValueError("dead_letters already selects by id; leave out reason, agent, all, since, after and up_to")
        if self.dead_letters is None and not chosen:
            raise ValueError("select dead letters by dead_letters, reason, agent, or all")
        if self.after and self.up_to is None:
            # A replay that fails again is another dead letter: without an end, they would be replayed for ever.
            raise ValueError("after needs up_to, which comes in the same response as continue_after")
        return self


class ReplayDeadLettersRequest(DeadLetterSelection):
    """The dead letters to replay: by their ids, or all open ones with a reason, of an agent, or of any kind."""


class DismissDeadLettersRequest(DeadLetterSelection):
    """The dead letters to dismiss: by their ids, or all open ones with a reason, of an agent, or of any kind."""


class ReplayedDeadLetter(Event):
    """A dead letter whose job runs again."""

    dead_letter_id: Count
    execution_id: Identifier = Field(description="Id of the new execution; its `metadata.replay_of` names the old one.")


class SkippedDeadLetter(Event):
    """A dead letter that was left as it was."""

    dead_letter_id: Count
    why: str


class DeadLetterReplays(Event):
    """The result of a request to replay dead letters."""

    replayed: tuple[ReplayedDeadLetter, ...] = Field(description="Dead letters whose jobs this request has queued.")
    already: Count = Field(description="Skipped, because they were replayed before.")
    skipped: tuple[SkippedDeadLetter, ...]
    continue_after: Count | None = Field(
        default=None, description="Pass this as `after` to continue. Null if there are no more."
    )
    up_to: Count | None = Field(
        default=None,
        description="Send it together with `continue_after`, so that jobs that fail again are not replayed in a loop.",
    )


class DeadLetterDismissals(Event):
    """The result of a request to dismiss dead letters."""

    dismissed: tuple[Count, ...] = Field(description="Dead letters that this request has dismissed.")
    already: Count = Field(description="Skipped, because they were dismissed before.")
    skipped: tuple[SkippedDeadLetter, ...]
    continue_after: Count | None = Field(
        default=None, description="Pass this as `after` to continue. Null if there are no more."
    )
    up_to: Count | None = Field(default=None, description="Send it together with `continue_after`.")


class DismissalNote(Event):
    """The record of a dismissal, kept with its dead letter."""

    dead_letter_id: Count
    by: str
    why: str | None = Field(default=None, description="Redacted.")
    at: Timestamp


class ReplayNote(Event):
    """The record of a replay, kept with its dead letter."""

    dead_letter_id: Count
    execution_id: Identifier = Field(description="Id of the new execution.")
    agent: Identifier
    by: str
    why: str | None = Field(default=None, description="Redacted.")
    at: Timestamp
