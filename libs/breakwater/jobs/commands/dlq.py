"""`breakwater dlq`: what was given up, why, and running such jobs again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from breakwater.client.commands import Api, DefaultListGroup, api_command
from breakwater.jobs.contract.dead_letters import DeadLetterCount, DeadLetterDetails, DeadLetterList, DeadLetterReplays
from breakwater.jobs.views.dead_letters import COLUMNS, FACTS
from breakwater.kernel.columns import Column
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error
from breakwater.kernel.formats import counted, visible
from breakwater.kernel.types import format_time

MAX_NUMBERS = 10
"""Dead letters that are named of those that have something in common."""

MAX_COUNTS = 5

_HELP = """List dead letters, show one, and replay jobs. Without a command it lists the latest.

A dead letter keeps a message that could not be handled for 30 days: a job that failed or is invalid, an alert that was
not delivered, an event that could not be stored.
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


@app.command(name="list")
@api_command
def list_(
    api: Api,
    reason: ReasonsOption = None,
    agent: AgentOption = None,
    since: SinceOption = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1_000, help="Maximum number of rows, latest first.")
    ] = 100,
) -> None:
    """List dead letters, latest first.

    The column `replay` shows whether the job can be replayed (`possible`, or `no`: `show` says why), or the status of
    its replay (`accepted`, `succeeded`, `dead_lettered`; `done` if its record has expired).

    For example:

        breakwater dlq list --reason error --since 2h

        breakwater dlq list --json | jq '.dead_letters[] | select(.replayable) | .dead_letter_id'
    """

    def show(listed: DeadLetterList) -> None:
        output.table(COLUMNS, listed.dead_letters, empty=_nothing(listed.counts, reason, agent, since))
        api.note_more(listed, limit)
        _note_counts(listed.counts)

    found = api.get(DeadLetterList, "dlq", reason=reason, agent=agent, since=_since(since), limit=limit)
    api.show_result(found, show)


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
    dead_letters: Annotated[
        list[int] | None,
        typer.Argument(metavar="DEAD_LETTER", min=1, help="Numbers of dead letters, as `breakwater dlq` lists them."),
    ] = None,
    reason: ReasonsOption = None,
    agent: AgentOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Select every reason and agent.")] = False,
    since: SinceOption = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="Reason; it is recorded with the replay.")
    ] = None,
) -> None:
    """Replay dead-lettered jobs, each once: the named ones, or all of a reason, of an agent, or --all.

    A replay is a new execution of the same job. `metadata.replay_of` in its record names the old one. Jobs that were
    replayed before are skipped, so repeating the command is safe; a job that fails again is a new dead letter. Jobs
    that can't be replayed are skipped, with the reason. Exits with code 1 if none could be replayed.

    For example:

        breakwater dlq replay 17 18

        breakwater dlq replay --reason error --agent content-writer --since 2h --why "the provider is back"

        breakwater dlq replay --all --since 30d
    """
    chosen = reason is not None or agent is not None or everything
    if dead_letters and (chosen or since is not None):
        raise usage_error("name dead letters, or select them by --reason, --agent, --all and --since", "Not both.")
    if not dead_letters and not chosen:
        raise usage_error(
            "no dead letters were selected",
            "Name them, or select by --reason, --agent or --all; `breakwater dlq` lists them.",
        )
    body = {
        "dead_letters": list(dict.fromkeys(dead_letters or ())) or None,
        "reason": reason,
        "agent": agent,
        "all": everything or None,
        "since": _since(since),
        "why": why,
    }
    whole = _replay(api, body)
    api.show_result((whole.model_dump(exclude={"continue_after", "up_to"}), whole), _show_replays)
    if whole.skipped and not whole.replayed and not whole.already:
        raise typer.Exit(ExitCode.FAILED)


def _since(since: str | None) -> str | None:
    return None if since is None else format_time(formats.since(since, datetime.now(UTC)))


def _replay(api: Api, body: dict[str, Any]) -> DeadLetterReplays:
    """Replays part by part, with a note of the progress; returns the results of all parts together."""
    whole = DeadLetterReplays(replayed=(), already=0, skipped=())
    try:
        for part in api.act_in_parts(DeadLetterReplays, "dlq/replay", body, see="breakwater dlq list"):
            whole = DeadLetterReplays(
                replayed=(*whole.replayed, *part.replayed),
                already=whole.already + part.already,
                skipped=(*whole.skipped, *part.skipped),
            )
            if part.continue_after is not None and not api.as_json:
                output.note(f"{_so_far(whole)}; going on")
    except CliError as error:
        if whole.replayed:
            error.remedy = f"{error.remedy} Until then: {_so_far(whole)}. None of them is replayed twice.".strip()
        raise
    return whole


def _so_far(replays: DeadLetterReplays) -> str:
    return f"{len(replays.replayed):,} replayed, {replays.already:,} before, {len(replays.skipped):,} skipped"


def _note_counts(counts: Sequence[DeadLetterCount]) -> None:
    """Prints the numbers of dead letters that are kept, the most first."""
    if not counts:
        return
    named = [f"{one.count:,} {one.reason} of {one.agent}" for one in counts[:MAX_COUNTS]]
    rest = sum(one.count for one in counts[MAX_COUNTS:])
    named += [f"{rest:,} others"] if rest else []
    output.note(f"(kept for 30 days: {', '.join(named)})")


def _nothing(counts: Sequence[DeadLetterCount], reason: str | None, agent: str | None, since: str | None) -> str:
    """Note for a list without dead letters; it names the known reasons or agents if another was asked for."""
    unknown = [
        f"no dead letter {has} {asked!r}, only {_most(counts, name)}"
        for name, has, asked in (("reason", "has the reason", reason), ("agent", "is of agent", agent))
        if asked is not None and counts and all(getattr(one, name) != asked for one in counts)
    ]
    chosen = " of those you asked for" if reason or agent else ""
    said = f"nothing{chosen} was given up {f'since {since}' if since else 'within 7 days'}"
    return "; ".join([said, *unknown])


def _show_details(one: DeadLetterDetails) -> None:
    """Prints all that may be seen of a dead letter."""
    output.facts([(f"dead letter {one.dead_letter_id}", "bold"), f"  {one.reason}"], FACTS, one)
    for name, value in one.headers.items():
        output.facts((), [Column("header", str)], f"{name}: {value}")
    output.write("")
    if one.payload_withheld:
        output.note("(the original is withheld: the agent keeps no prompts, or was removed from the config)")
        return
    if one.payload_omitted:
        output.note(f"(not kept: the original has {one.payload_bytes:,} bytes, SHA-256 {one.payload_sha256})")
        return
    payload = one.payload
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False, indent=2)
    output.write(visible(text))
    if one.payload_cut:
        output.note(f"(only the beginning: the original has {one.payload_bytes:,} bytes)")


def _show_replays(replays: DeadLetterReplays) -> None:
    """Prints the result of a replay."""
    output.write(f"{counted(len(replays.replayed), 'job')} queued again")
    for one in replays.replayed[:MAX_NUMBERS]:
        output.write(f"  dead letter {one.dead_letter_id} as {one.execution_id}")
    if len(replays.replayed) > MAX_NUMBERS:
        output.write(f"  and {len(replays.replayed) - MAX_NUMBERS:,} more; --json lists all of them")
    if replays.already:
        output.note(f"{counted(replays.already, 'dead letter')} had been replayed before")
    alike: dict[str, list[int]] = {}
    for skipped in replays.skipped:
        # What differs from dead letter to dead letter only by its own number is one reason.
        alike.setdefault(skipped.why.replace(f" --dead-letter {skipped.dead_letter_id}`", "`"), []).append(
            skipped.dead_letter_id
        )
    for why, dead_letters in alike.items():
        plural = "s" if len(dead_letters) > 1 else ""
        output.note(f"skipped dead letter{plural} {_few(dead_letters)}: {why}", "yellow")


def _most(counts: Sequence[DeadLetterCount], name: str) -> str:
    """The reasons or the agents that dead letters have, the most first."""
    return _few(list(dict.fromkeys(str(getattr(one, name)) for one in counts)))


def _few(all_: Sequence[object]) -> str:
    more = f" and {len(all_) - MAX_NUMBERS:,} more" if len(all_) > MAX_NUMBERS else ""
    return ", ".join(map(str, all_[:MAX_NUMBERS])) + more
