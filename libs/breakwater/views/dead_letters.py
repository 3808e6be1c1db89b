"""Dead letters: messages that could not be handled."""

from __future__ import annotations

from breakwater.contracts.dead_letters import DeadLetterDetails, ListedDeadLetter
from breakwater.views.columns import Cell, Column, clock, tone_of


def replay_state(one: ListedDeadLetter) -> Cell:
    """The status of its replay; without one, `possible` or `no`."""
    if one.replayed_as is not None:
        return "done" if one.replay_status is None else (one.replay_status, tone_of(one.replay_status))
    return "possible" if one.replayable else "no"


COLUMNS: tuple[Column[ListedDeadLetter], ...] = (
    Column("dead letter", lambda one: one.dead_letter_id, "number"),
    Column("given up", lambda one: one.at, "time", name="time"),
    Column("of", lambda one: one.kind, name="kind", drop=3, page=False),
    Column("reason", lambda one: one.reason, "words"),
    Column("agent", lambda one: one.agent, "agent", drop=1),
    Column("execution", lambda one: one.execution_id, "execution", drop=2),
    Column("replay", lambda one: one.replayed_as, words=replay_state, name="replayed_as"),
    Column("replay_status", lambda one: one.replay_status, terminal=False, page=False),
    Column("error", lambda one: one.error, below=True),
)


def _replayed_by(one: DeadLetterDetails) -> str:
    at = "" if one.replayed_at is None else f" at {clock(one.replayed_at)}"
    return f"{one.replayed_by}{at}" if one.replayed_by else ""


FACTS: tuple[Column[DeadLetterDetails], ...] = (
    Column("of", lambda one: f"{one.kind}: {one.subject}, {one.sequence:,} of {one.stream}"),
    Column("agent", lambda one: one.agent),
    Column("execution", lambda one: one.execution_id),
    Column("given up", lambda one: one.at, "time"),
    Column("error", lambda one: one.error),
    Column("replay", replay_state),
    Column("replayed as", lambda one: one.replayed_as),
    Column("replayed by", _replayed_by),
    Column("why not", lambda one: None if one.replayed_as else one.why_not),
)
