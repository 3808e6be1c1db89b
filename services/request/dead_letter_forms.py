"""What people send to see dead letters, and to have them replayed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints, model_validator

from breakwater.contracts.types import Identifier, Message
from services.request.forms import Why

MOST_DEAD_LETTERS = 1_000
"""How many dead letters one request lists, or looks at to replay them: it is answered within seconds."""

Reason = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time of the years 1 to 9999 in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
Number = Annotated[int, Field(strict=True)]
"""In JSON, `true` and `"1"` are none."""

SINCE = "Only what was given up from then on: a time in RFC 3339. By default the last seven days."
REASON = "Only those of this reason: error, timeout, invalid, …"
EXECUTION = "Only those of this execution."
AGENT = "Only those of this agent; `unknown` are those of which it can't be told."


class DeadLetterQuery(Message):
    """Which dead letters."""

    reason: Reason | None = Field(default=None, description=REASON)
    agent: Identifier | None = Field(default=None, description=AGENT)
    execution_id: Identifier | None = Field(default=None, description=EXECUTION)
    since: Moment | None = Field(default=None, description=SINCE)
    limit: int = Field(default=100, ge=1, le=MOST_DEAD_LETTERS, description="At most so many, the latest.")


class ReplayDeadLettersRequest(Message):
    """Which dead letters shall be replayed: some by their numbers, or all of a reason, of an agent, or at all."""

    dead_letters: (
        Annotated[tuple[Annotated[Number, Field(ge=1)], ...], Field(min_length=1, max_length=MOST_DEAD_LETTERS)] | None
    ) = Field(default=None, description="Their numbers. Nothing else says which ones are meant then.", examples=[[17]])
    reason: Reason | None = Field(default=None, description=REASON)
    agent: Identifier | None = Field(default=None, description=AGENT)
    all: bool = Field(default=False, description="Of every reason and agent, where neither is named.")
    since: Moment | None = Field(default=None, description=SINCE)
    after: Number = Field(
        default=0, ge=0, description="Only those behind this one: `continue_after` of the last answer."
    )
    up_to: Number | None = Field(default=None, ge=0, description="None behind this one: `up_to` of the last answer.")
    why: Why | None = Field(default=None, description="For the record; redacted.")

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
            raise ValueError("after needs up_to, which stands in the same answer as continue_after")
        return self
