"""Columns of dead letters: messages that could not be handled."""

from __future__ import annotations

from breakwater.jobs.contract.dead_letters import DeadLetterDetails, ListedDeadLetter
from breakwater.kernel.columns import Cell, Column, clock, tone_of


def replay_state(dead_letter: ListedDeadLetter) -> Cell:
    """The status of a dead letter's replay; before any replay, `possible` or `no`."""
    if dead_letter.replayed_as is not None:
        return (
            "done"
            if dead_letter.replay_status is None
            else (dead_letter.replay_status, tone_of(dead_letter.replay_status))
        )
    return "possible" if dead_letter.replayable else "no"


COLUMNS: tuple[Column[ListedDeadLetter], ...] = (
    Column("dead letter", lambda dead_letter: dead_letter.dead_letter_id, "number"),
    Column("given up", lambda dead_letter: dead_letter.at, "time", name="time"),
    Column("of", lambda dead_letter: dead_letter.kind, name="kind", drop=3, page=False),
    Column("reason", lambda dead_letter: dead_letter.reason, "words"),
    Column("agent", lambda dead_letter: dead_letter.agent, "agent", drop=1),
    Column(
        "execution",
        lambda dead_letter: dead_letter.execution_id,
        "execution",
        display=lambda dead_letter: dead_letter.job_id or dead_letter.execution_id or "",
        drop=2,
        shortens=True,
    ),
    Column("replay", lambda dead_letter: dead_letter.replayed_as, display=replay_state, name="replayed_as"),
    Column("replay_status", lambda dead_letter: dead_letter.replay_status, terminal=False, page=False),
    Column("error", lambda dead_letter: dead_letter.error, below=True),
)


def _replayed_by(dead_letter: DeadLetterDetails) -> str:
    at = "" if dead_letter.replayed_at is None else f" at {clock(dead_letter.replayed_at)}"
    return f"{dead_letter.replayed_by}{at}" if dead_letter.replayed_by else ""


def _dismissed_by(dead_letter: DeadLetterDetails) -> str | None:
    if dead_letter.dismissed_by is None:
        return None
    at = "" if dead_letter.dismissed_at is None else f" at {clock(dead_letter.dismissed_at)}"
    return f"{dead_letter.dismissed_by}{at}{f': {dead_letter.dismissed_why}' if dead_letter.dismissed_why else ''}"


FACTS: tuple[Column[DeadLetterDetails], ...] = (
    Column(
        "of",
        lambda dead_letter: (
            f"{dead_letter.kind}: {dead_letter.subject}, {dead_letter.sequence:,} of {dead_letter.stream}"
        ),
    ),
    Column("agent", lambda dead_letter: dead_letter.agent),
    Column("execution", lambda dead_letter: dead_letter.execution_id),
    Column("job", lambda dead_letter: None if dead_letter.job_id == dead_letter.execution_id else dead_letter.job_id),
    Column("given up", lambda dead_letter: dead_letter.at, "time"),
    Column("error", lambda dead_letter: dead_letter.error),
    Column("replay", replay_state),
    Column("replayed as", lambda dead_letter: dead_letter.replayed_as),
    Column("replayed by", _replayed_by),
    Column("why not", lambda dead_letter: None if dead_letter.replayed_as else dead_letter.why_not),
    Column("dismissed by", _dismissed_by),
)
