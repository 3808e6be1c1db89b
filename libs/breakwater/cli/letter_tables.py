"""How dead letters are shown to people, and what came of replaying them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from breakwater.cli import formats, output

if TYPE_CHECKING:
    from breakwater.contracts.api import DeadLetterCount, DeadLetterDetails, DeadLetterReplays, ListedDeadLetter

MOST_NUMBERS = 10
"""How many dead letters are named that have something in common."""

MOST_COUNTS = 5


def show(dead_letters: list[ListedDeadLetter], now: datetime, *, empty: str) -> None:
    """Prints dead letters, one a row."""
    output.table(
        [
            output.Column("dead letter", right=True),
            output.Column("given up"),
            output.Column("of", drop=3),
            output.Column("reason"),
            output.Column("agent", drop=1),
            output.Column("execution", drop=2),
            output.Column("replay"),
            output.Column("error", below=True),
        ],
        [
            (
                str(one.dead_letter_id),
                formats.clock(one.at, now),
                one.kind,
                one.reason,
                one.agent or "",
                one.execution_id or "",
                _replay(one),
                one.error,
            )
            for one in dead_letters
        ],
        empty=empty,
    )


def tell_counts(counts: list[DeadLetterCount]) -> None:
    """Notes how many dead letters are kept, the most first."""
    if not counts:
        return
    named = [f"{one.count:,} {one.reason} of {one.agent}" for one in counts[:MOST_COUNTS]]
    rest = sum(one.count for one in counts[MOST_COUNTS:])
    named += [f"{rest:,} others"] if rest else []
    output.note(f"(kept for 30 days: {', '.join(named)})")


def nothing(counts: list[DeadLetterCount], reason: str | None, agent: str | None, since: str | None) -> str:
    """What to say when no dead letter was found; names the known ones where the reason or the agent is unknown."""
    unknown = [
        f"no dead letter {has} {asked!r}, only {_most(counts, name)}"
        for name, has, asked in (("reason", "has the reason", reason), ("agent", "is of agent", agent))
        if asked is not None and counts and all(getattr(one, name) != asked for one in counts)
    ]
    chosen = " of those you asked for" if reason or agent else ""
    said = f"nothing{chosen} was given up {f'since {since}' if since else 'within 7 days'}"
    return "; ".join([said, *unknown])


def show_one(one: DeadLetterDetails, now: datetime) -> None:
    """Prints all that may be seen of a dead letter."""
    replayed_at = "" if one.replayed_at is None else f" at {formats.clock(one.replayed_at, now)}"
    facts: list[tuple[str, output.Cell]] = [
        ("of", f"{one.kind}: {one.subject}, {one.sequence:,} of {one.stream}"),
        ("agent", one.agent or ""),
        ("execution", one.execution_id or ""),
        ("given up", formats.clock(one.at, now)),
        ("error", one.error),
        ("replay", _replay(one)),
        ("replayed as", one.replayed_as or ""),
        ("replayed by", f"{one.replayed_by}{replayed_at}" if one.replayed_by else ""),
        ("why not", "" if one.replayed_as else one.why_not or ""),
        *(("header", f"{name}: {value}") for name, value in one.headers.items()),
    ]
    output.styled((f"dead letter {one.dead_letter_id}", "bold"), f"  {one.reason}")
    for name, value in facts:
        if output.text_of(value):
            output.styled((f"  {name:<14}", "dim"), value)
    output.write("")
    payload = one.payload
    output.write(_safe(payload) if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, indent=2))
    if one.payload_cut:
        output.note(f"(only the beginning: the original has {one.payload_bytes:,} bytes)")


def tell(told: DeadLetterReplays) -> None:
    """Prints what came of replaying dead letters."""
    output.write(f"{formats.counted(len(told.replayed), 'job')} queued again")
    for one in told.replayed[:MOST_NUMBERS]:
        output.write(f"  dead letter {one.dead_letter_id} as {one.execution_id}")
    if len(told.replayed) > MOST_NUMBERS:
        output.write(f"  and {len(told.replayed) - MOST_NUMBERS:,} more; --json names all of them")
    if told.already:
        output.note(f"{formats.counted(told.already, 'dead letter')} had been replayed before")
    alike: dict[str, list[int]] = {}
    for skipped in told.skipped:
        # What differs from dead letter to dead letter only by its own number is one reason.
        alike.setdefault(skipped.why.replace(f" --dead-letter {skipped.dead_letter_id}`", "`"), []).append(
            skipped.dead_letter_id
        )
    for why, dead_letters in alike.items():
        output.note(f"skipped {_numbers(dead_letters)}: {why}", "yellow")


def _replay(one: ListedDeadLetter) -> output.Cell:
    if one.replayed_as is not None:
        return "done" if one.replay_status is None else output.state(one.replay_status)
    return "possible" if one.replayable else "no"


def _most(counts: list[DeadLetterCount], name: str) -> str:
    """The reasons or the agents that dead letters have, the most first."""
    names = list(dict.fromkeys(str(getattr(one, name)) for one in counts))
    more = f" and {len(names) - MOST_NUMBERS:,} more" if len(names) > MOST_NUMBERS else ""
    return f"{', '.join(names[:MOST_NUMBERS])}{more}"


def _numbers(dead_letters: list[int]) -> str:
    named = ", ".join(str(dead_letter_id) for dead_letter_id in dead_letters[:MOST_NUMBERS])
    more = f" and {len(dead_letters) - MOST_NUMBERS:,} more" if len(dead_letters) > MOST_NUMBERS else ""
    return f"dead letter{'' if len(dead_letters) == 1 else 's'} {named}{more}"


def _safe(text: str) -> str:
    """A text of unknown origin, so that it does nothing to a terminal but stand there."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)
