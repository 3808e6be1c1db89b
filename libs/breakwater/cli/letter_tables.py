"""How dead letters are shown to people, and what came of replaying them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from breakwater.cli import formats, output

if TYPE_CHECKING:
    from breakwater.contracts.dead_letters import Letter, LetterCount, LettersReplayed, ShownLetter

MOST_NUMBERS = 10
"""How many letters are named that have something in common."""

MOST_COUNTS = 5


def show(letters: list[Letter], now: datetime, *, empty: str) -> None:
    """Prints letters, one a row."""
    output.table(
        [
            output.Column("letter", right=True),
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
                str(one.letter),
                formats.clock(one.at, now),
                one.kind,
                one.reason,
                one.agent or "",
                one.execution_id or "",
                _replay(one),
                one.error,
            )
            for one in letters
        ],
        empty=empty,
    )


def tell_counts(counts: list[LetterCount]) -> None:
    """Notes how many letters are kept, the most first."""
    if not counts:
        return
    named = [f"{one.count:,} {one.reason} of {one.agent}" for one in counts[:MOST_COUNTS]]
    rest = sum(one.count for one in counts[MOST_COUNTS:])
    named += [f"{rest:,} others"] if rest else []
    output.note(f"(kept for 30 days: {', '.join(named)})")


def nothing(counts: list[LetterCount], reason: str | None, agent: str | None, since: str | None) -> str:
    """What to say where no letter was found; a reason or an agent that no letter has is told with those that are."""
    unknown = [
        f"no letter {has} {asked!r}, only {_most(counts, name)}"
        for name, has, asked in (("reason", "has the reason", reason), ("agent", "is of agent", agent))
        if asked is not None and counts and all(getattr(one, name) != asked for one in counts)
    ]
    chosen = " of those you asked for" if reason or agent else ""
    said = f"nothing{chosen} was given up {f'since {since}' if since else 'within 7 days'}"
    return "; ".join([said, *unknown])


def show_one(one: ShownLetter, now: datetime) -> None:
    """Prints all that may be seen of a letter."""
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
    output.styled((f"letter {one.letter}", "bold"), f"  {one.reason}")
    for name, value in facts:
        if output.text_of(value):
            output.styled((f"  {name:<14}", "dim"), value)
    output.write("")
    payload = one.payload
    output.write(_safe(payload) if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, indent=2))
    if one.payload_cut:
        output.note(f"(only the beginning: the original has {one.payload_bytes:,} bytes)")


def tell(told: LettersReplayed) -> None:
    """Prints what came of replaying letters."""
    output.write(f"{formats.counted(len(told.replayed), 'job')} queued again")
    for one in told.replayed[:MOST_NUMBERS]:
        output.write(f"  letter {one.letter} as {one.execution_id}")
    if len(told.replayed) > MOST_NUMBERS:
        output.write(f"  and {len(told.replayed) - MOST_NUMBERS:,} more; --json names all of them")
    if told.already:
        output.note(f"{formats.counted(told.already, 'letter')} had been replayed before")
    alike: dict[str, list[int]] = {}
    for skipped in told.skipped:
        # What differs from letter to letter only by its own number is one reason.
        alike.setdefault(skipped.why.replace(f" --letter {skipped.letter}`", "`"), []).append(skipped.letter)
    for why, letters in alike.items():
        output.note(f"skipped {_numbers(letters)}: {why}", "yellow")


def _replay(one: Letter) -> output.Cell:
    if one.replayed_as is not None:
        return "done" if one.replay_status is None else output.state(one.replay_status)
    return "possible" if one.replayable else "no"


def _most(counts: list[LetterCount], name: str) -> str:
    """The reasons or the agents that letters have, the most first."""
    names = list(dict.fromkeys(str(getattr(one, name)) for one in counts))
    more = f" and {len(names) - MOST_NUMBERS:,} more" if len(names) > MOST_NUMBERS else ""
    return f"{', '.join(names[:MOST_NUMBERS])}{more}"


def _numbers(letters: list[int]) -> str:
    named = ", ".join(str(letter) for letter in letters[:MOST_NUMBERS])
    more = f" and {len(letters) - MOST_NUMBERS:,} more" if len(letters) > MOST_NUMBERS else ""
    return f"letter{'' if len(letters) == 1 else 's'} {named}{more}"


def _safe(text: str) -> str:
    """A text of unknown origin, so that it does nothing to a terminal but stand there."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)
