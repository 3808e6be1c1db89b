"""`breakwater dlq`: lists and shows dead letters, replays jobs, and dismisses what needs no replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from breakwater.client.commands import Api, DefaultListGroup, api_command
from breakwater.jobs.contract.dead_letters import (
    DeadLetterCount,
    DeadLetterDetails,
    DeadLetterDismissals,
    DeadLetterList,
    DeadLetterReplays,
    SkippedDeadLetter,
)
from breakwater.jobs.views.dead_letters import COLUMNS, FACTS
from breakwater.kernel.columns import Column
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error
from breakwater.kernel.formats import quantity, visible
from breakwater.kernel.types import format_time

MAX_NUMBERS = 10
"""Maximum number of dead letters, reasons or agents that a line names."""

MAX_COUNTS = 5

_HELP = """List dead letters, show one, replay jobs, and dismiss. Without a command it lists the latest.

A dead letter is a message that could not be handled: a job that failed or is invalid, an alert that was not delivered,
an event that could not be stored. The stream DLQ keeps it for 30 days.
"""

app = typer.Typer(cls=DefaultListGroup, help=_HELP)

ReasonsOption = Annotated[
    str | None,
    typer.Option("--reason", metavar="NAME", help="Filter by reason: error, timeout, invalid, …"),
]
AgentOption = Annotated[
    str | None,
    typer.Option("--agent", metavar="NAME", help="Filter by agent, or `unknown`."),
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", metavar="AGO", help="Dead letters since: 10m, 2h, 30d, or a time. [default: 7d]"),
]
NumbersArgument = Annotated[
    list[int] | None,
    typer.Argument(metavar="DEAD_LETTER", min=1, help="Numbers of dead letters, as `breakwater dlq` lists them."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Select every reason and agent.")]
WhyOption = Annotated[str | None, typer.Option("--why", metavar="TEXT", help="Why you do it, for the record.")]


@app.command(name="list")
@api_command
def list_(
    api: Api,
    reason: ReasonsOption = None,
    agent: AgentOption = None,
    since: SinceOption = None,
    dismissed: Annotated[bool, typer.Option("--dismissed", help="List those that were dismissed instead.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1_000, help="Maximum number of rows, latest first.")
    ] = 100,
) -> None:
    """List dead letters, latest first; dismissed ones only with --dismissed.

    The column `replay` shows whether the job can be replayed (`possible`, or `no`: `show` says why), or the status of
    its replay (`accepted`, `succeeded`, `dead_lettered`; `done` if its record has expired).

    For example:

        breakwater dlq list --reason error --since 2h

        breakwater dlq list --json | jq '.dead_letters[] | select(.replayable) | .dead_letter_id'
    """

    def show(dead_letter_list: DeadLetterList) -> None:
        output.table(
            COLUMNS,
            dead_letter_list.dead_letters,
            empty=_none_listed(dead_letter_list.counts, reason, agent, since, "dismissed" if dismissed else "given up"),
        )
        api.note_more(dead_letter_list, limit)
        _note_counts(dead_letter_list.counts, "dismissed" if dismissed else "kept for 30 days")

    state = "dismissed" if dismissed else None
    result = api.get(DeadLetterList, "dlq", reason=reason, agent=agent, since=_since(since), state=state, limit=limit)
    api.show_result(result, show)


@app.command()
@api_command
def show(
    api: Api,
    dead_letter_id: Annotated[
        int, typer.Argument(metavar="DEAD_LETTER", help="Number of the dead letter, as `breakwater dlq` lists it.")
    ],
) -> None:
    """Show one dead letter: its reason, the original message, redacted, and whether it can be replayed.

    For example:

        breakwater dlq show 17

        breakwater dlq show 17 --json | jq .payload
    """
    api.show_result(api.get(DeadLetterDetails, f"dlq/{dead_letter_id}"), _show_details)


@app.command()
@api_command
def replay(
    api: Api,
    dead_letters: NumbersArgument = None,
    reason: ReasonsOption = None,
    agent: AgentOption = None,
    everything: AllOption = False,
    since: SinceOption = None,
    why: WhyOption = None,
) -> None:
    """Replay dead-lettered jobs, each once: the named ones, or all of a reason, of an agent, or --all.

    A replay is a new execution of the same job. `metadata.replay_of` in its record names the old one. Jobs that were
    replayed before are skipped, so repeating the command is safe; a job that fails again is a new dead letter. Jobs
    that can't be replayed are skipped, with the reason; dismissed ones have to be named. Exits with code 1 if none
    could be replayed.

    For example:

        breakwater dlq replay 17 18

        breakwater dlq replay --reason error --agent content-writer --since 2h --why "the provider is back"

        breakwater dlq replay --all --since 30d
    """
    total = _replay(api, _selection(dead_letters, reason, agent, everything, since, why))
    api.show_result((total.model_dump(exclude={"continue_after", "up_to"}), total), _show_replays)
    if total.skipped and not total.replayed and not total.already:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
@api_command
def dismiss(
    api: Api,
    dead_letters: NumbersArgument = None,
    reason: ReasonsOption = None,
    agent: AgentOption = None,
    everything: AllOption = False,
    since: SinceOption = None,
    why: WhyOption = None,
) -> None:
    """Dismiss dead letters that need no replay: the named ones, or all of a reason, of an agent, or --all.

    They leave lists and counts. `breakwater dlq list --dismissed` finds them until they expire, and `breakwater dlq
    replay` can still run one that is named. Dismissing one again changes nothing. Exits with code 1 if none of them
    exists.

    For example:

        breakwater dlq dismiss 17 18 --why "the customer has sent it again"

        breakwater dlq dismiss --reason invalid --since 2h
    """
    total = DeadLetterDismissals(dismissed=(), already=0, skipped=())
    body = _selection(dead_letters, reason, agent, everything, since, why)
    for part in api.act_in_parts(DeadLetterDismissals, "dlq/dismiss", body, see="breakwater dlq list"):
        total = DeadLetterDismissals(
            dismissed=(*total.dismissed, *part.dismissed),
            already=total.already + part.already,
            skipped=(*total.skipped, *part.skipped),
        )
    api.show_result((total.model_dump(exclude={"continue_after", "up_to"}), total), _show_dismissals)
    if total.skipped and not total.dismissed and not total.already:
        raise typer.Exit(ExitCode.FAILED)


def _selection(
    dead_letters: list[int] | None,
    reason: str | None,
    agent: str | None,
    everything: bool,
    since: str | None,
    why: str | None,
) -> dict[str, Any]:
    """Builds the request for the chosen dead letters. Raises CliError if they are not chosen in one way."""
    has_filter = reason is not None or agent is not None or everything
    if dead_letters and (has_filter or since is not None):
        remedy = "Not both. To record why you do it, use --why."
        raise usage_error("name dead letters, or select them by --reason, --agent, --all and --since", remedy)
    if not dead_letters and not has_filter:
        raise usage_error(
            "no dead letters were selected",
            "Name them, or select by --reason, --agent or --all; `breakwater dlq` lists them.",
        )
    return {
        "dead_letters": list(dict.fromkeys(dead_letters or ())) or None,
        "reason": reason,
        "agent": agent,
        "all": everything or None,
        "since": _since(since),
        "why": why,
    }


def _since(since: str | None) -> str | None:
    return None if since is None else format_time(formats.since(since, datetime.now(UTC)))


def _replay(api: Api, body: dict[str, Any]) -> DeadLetterReplays:
    """Replays part by part, with notes of the progress; returns the results of all parts together."""
    total = DeadLetterReplays(replayed=(), already=0, skipped=())
    try:
        for part in api.act_in_parts(DeadLetterReplays, "dlq/replay", body, see="breakwater dlq list"):
            total = DeadLetterReplays(
                replayed=(*total.replayed, *part.replayed),
                already=total.already + part.already,
                skipped=(*total.skipped, *part.skipped),
            )
            if part.continue_after is not None and not api.as_json:
                output.note(f"{_progress(total)}; going on")
    except CliError as error:
        if total.replayed:
            error.remedy = f"{error.remedy} Until then: {_progress(total)}. None of them is replayed twice.".strip()
        raise
    return total


def _progress(replays: DeadLetterReplays) -> str:
    return f"{len(replays.replayed):,} replayed, {replays.already:,} before, {len(replays.skipped):,} skipped"


def _note_counts(counts: Sequence[DeadLetterCount], state: str) -> None:
    """Notes how many dead letters there are, by reason and agent; the largest counts come first."""
    if not counts:
        return
    parts = [f"{count.count:,} {count.reason} of {count.agent}" for count in counts[:MAX_COUNTS]]
    other_count = sum(count.count for count in counts[MAX_COUNTS:])
    parts += [f"{other_count:,} others"] if other_count else []
    output.note(f"({state}: {', '.join(parts)})")


def _none_listed(
    counts: Sequence[DeadLetterCount], reason: str | None, agent: str | None, since: str | None, fate: str
) -> str:
    """A note for an empty list. If the filters name an unknown reason or agent, it lists the known ones."""
    unknown = [
        f"no dead letter {phrase} {value!r}, only {_values(counts, name)}"
        for name, phrase, value in (("reason", "has the reason", reason), ("agent", "is of agent", agent))
        if value is not None and counts and all(getattr(count, name) != value for count in counts)
    ]
    filtered = " of those you asked for" if reason or agent else ""
    nothing_listed = f"nothing{filtered} was {fate} {f'since {since}' if since else 'within 7 days'}"
    return "; ".join([nothing_listed, *unknown])


def _show_details(dead_letter: DeadLetterDetails) -> None:
    """Prints a dead letter with its headers and its payload, if they may be seen."""
    output.facts([(f"dead letter {dead_letter.dead_letter_id}", "bold"), f"  {dead_letter.reason}"], FACTS, dead_letter)
    for name, value in dead_letter.headers.items():
        output.facts((), [Column("header", str)], f"{name}: {value}")
    output.write("")
    if dead_letter.payload_withheld:
        output.note("(the original is withheld: the agent keeps no prompts, or was removed from the config)")
        return
    if dead_letter.payload_omitted:
        output.note(
            f"(not kept: the original has {dead_letter.payload_bytes:,} bytes, SHA-256 {dead_letter.payload_sha256})"
        )
        return
    payload = dead_letter.payload
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, indent=2)
    output.write(visible(text))
    if dead_letter.payload_cut:
        output.note(f"(only the beginning: the original has {dead_letter.payload_bytes:,} bytes)")


def _show_replays(replays: DeadLetterReplays) -> None:
    """Prints the result of a replay."""
    output.write(f"{quantity(len(replays.replayed), 'job')} queued again")
    for replay in replays.replayed[:MAX_NUMBERS]:
        output.write(f"  dead letter {replay.dead_letter_id} as {replay.execution_id}")
    if len(replays.replayed) > MAX_NUMBERS:
        output.write(f"  and {len(replays.replayed) - MAX_NUMBERS:,} more; --json lists all of them")
    if replays.already:
        output.note(f"{quantity(replays.already, 'dead letter')} had been replayed before")
    _note_skipped(replays.skipped)


def _show_dismissals(dismissals: DeadLetterDismissals) -> None:
    """Prints the result of a dismissal."""
    output.write(f"{quantity(len(dismissals.dismissed), 'dead letter')} dismissed")
    if dismissals.already:
        output.note(f"{quantity(dismissals.already, 'dead letter')} had been dismissed before")
    _note_skipped(dismissals.skipped)


def _note_skipped(skipped_dead_letters: Sequence[SkippedDeadLetter]) -> None:
    """Notes which dead letters were skipped, by the reason."""
    numbers_by_reason: dict[str, list[int]] = {}
    for skipped in skipped_dead_letters:
        # Reasons that differ only in the dead letter's own number count as one.
        reason = skipped.why.replace(f" --dead-letter {skipped.dead_letter_id}`", "`")
        numbers_by_reason.setdefault(reason, []).append(skipped.dead_letter_id)
    for reason, dead_letters in numbers_by_reason.items():
        plural = "s" if len(dead_letters) > 1 else ""
        output.note(f"skipped dead letter{plural} {_first_items(dead_letters)}: {reason}", "yellow")


def _values(counts: Sequence[DeadLetterCount], name: str) -> str:
    """Lists the reasons or agents of dead letters, the most frequent first."""
    return _first_items(list(dict.fromkeys(str(getattr(count, name)) for count in counts)))


def _first_items(items: Sequence[object]) -> str:
    suffix = f" and {len(items) - MAX_NUMBERS:,} more" if len(items) > MAX_NUMBERS else ""
    return ", ".join(map(str, items[:MAX_NUMBERS])) + suffix
