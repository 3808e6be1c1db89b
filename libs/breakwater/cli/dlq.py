"""`breakwater dlq`: what was given up, why, and running such jobs again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from breakwater.cli import by_hand, formats, letter_tables, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, ExitCode, wrong_usage
from breakwater.cli.given import sendable
from breakwater.cli.groups import ListsByItself
from breakwater.cli.plane import ApiKeyOption, DataOption, Door, JsonOption, Plane, UrlOption

if TYPE_CHECKING:
    from breakwater.contracts.api import DeadLetterReplays

DEAD_LETTERS_AT_ONCE = 100
"""How many dead letters that are named go into one request: so that there is progress to show."""

_HELP = """See what was given up, look at it, and run such jobs again. Without a command it lists the latest.

A dead letter keeps a message that could not be handled, whole, for 30 days: a job that failed for good or is none,
an alert that did not arrive, an event that could not be stored.

For example:

    breakwater dlq

    breakwater dlq show 17

    breakwater dlq replay 17 18

    breakwater dlq replay --reason error --agent content-writer
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)

ReasonOption = Annotated[
    str | None,
    typer.Option("--reason", metavar="NAME", help="Only those of this reason: error, timeout, invalid, …"),
]
AgentOption = Annotated[
    str | None, typer.Option("--agent", metavar="NAME", help="Only those of this agent; `unknown`: where none is told.")
]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="AGO", help="Given up since: 10m, 2h, 30d, a time. [default: 7d]")
]


@app.command(name="list")
def list_(
    reason: ReasonOption = None,
    agent: AgentOption = None,
    since: SinceOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="At most so many, the latest.")] = 100,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what was given up, the latest first.

    The column `replay` says whether the job can run again (`possible`, or `no`: `show` says why), or the status of its
    replay (`accepted`, `succeeded`, `dead_lettered`; `done` where its record has aged out).

    For example:

        breakwater dlq list --reason error --since 2h

        breakwater dlq list --json | jq '.letters[] | select(.replayable) | .letter'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import DeadLetterCount, ListedDeadLetter

    now = datetime.now(UTC)
    begin = _since(since, now)
    wanted = {"reason": reason, "agent": agent, "since": begin, "limit": limit}
    given = {name: value for name, value in wanted.items() if value is not None}
    for name, value in given.items():
        sendable(f"--{name}", value)
    document = run(api.get(Plane(data).door(url, api_key), f"dlq?{urlencode(given)}"))
    answer = api.read(dict[str, Any], document)
    dead_letters, more = (
        api.read(list[ListedDeadLetter], answer.get("dead_letters")),
        api.read(bool, answer.get("more")),
    )
    counts = api.read(list[DeadLetterCount], answer.get("counts"))
    if as_json:
        output.json_document(document)
        return
    letter_tables.show(dead_letters, now, empty=letter_tables.nothing(counts, reason, agent, since))
    if more:
        output.note(f"(there are more than these {limit:,}; see --limit)")
    letter_tables.tell_counts(counts)


@app.command()
def show(
    dead_letter_id: Annotated[
        int, typer.Argument(metavar="DEAD_LETTER", help="Its number, as `breakwater dlq` lists it.")
    ],
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: why it was given up, the original message, redacted, and whether it can run again.

    For example:

        breakwater dlq show 17

        breakwater dlq show 17 --json | jq .payload
    """
    from breakwater.cli import api
    from breakwater.contracts.api import DeadLetterDetails

    document = run(api.get(Plane(data).door(url, api_key), f"dlq/{dead_letter_id}"))
    shown = api.read(DeadLetterDetails, document)
    if as_json:
        output.json_document(document)
        return
    letter_tables.show_one(shown, datetime.now(UTC))


@app.command()
def replay(
    dead_letters: Annotated[
        list[int] | None,
        typer.Argument(metavar="DEAD_LETTER", min=1, help="Their numbers, as `breakwater dlq` lists them."),
    ] = None,
    reason: ReasonOption = None,
    agent: AgentOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every reason and agent, where none is named.")] = False,
    since: SinceOption = None,
    why: Annotated[str | None, typer.Option("--why", metavar="TEXT", help="Why; it is kept with the replay.")] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run jobs again that were given up, each once: those that are named, or all of a reason, of an agent, or --all.

    A replay is a new execution of the same job. `metadata.replay_of` in its record names the old one. What was replayed
    before is left alone, so asking again does no harm; what fails again is a new dead letter. What can't run is
    skipped, with the reason. Exits with code 1 when none could run.

    For example:

        breakwater dlq replay 17 18

        breakwater dlq replay --reason error --agent content-writer --since 2h --why "the provider is back"

        breakwater dlq replay --all --since 30d
    """
    chosen = reason is not None or agent is not None or everything
    if dead_letters and (chosen or since is not None):
        raise wrong_usage("name dead letters, or choose them by --reason, --agent, --all and --since", "Not both.")
    if not dead_letters and not chosen:
        raise wrong_usage(
            "which dead letters is not said",
            "Name them, or choose by --reason, --agent or --all; `breakwater dlq` lists them.",
        )
    door = Plane(data).door(url, api_key)
    if dead_letters:
        parts = _named(door, list(dict.fromkeys(dead_letters)), why)
    else:
        begin = _since(since, datetime.now(UTC))
        choice = {"reason": reason, "agent": agent, "all": everything or None, "since": begin, "why": why}
        parts = _chosen(door, choice)
    told = _whole(parts, quiet=as_json)
    if as_json:
        output.json_document(told.model_dump(exclude={"continue_after", "up_to"}))
    else:
        letter_tables.tell(told)
    if told.skipped and not told.replayed and not told.already:
        raise typer.Exit(ExitCode.FAILED)


def _since(since: str | None, now: datetime) -> str | None:
    from breakwater.contracts.types import format_time

    return None if since is None else format_time(formats.since(since, now))


def _named(door: Door, dead_letters: list[int], why: str | None) -> Iterator[tuple[DeadLetterReplays, bool]]:
    for start in range(0, len(dead_letters), DEAD_LETTERS_AT_ONCE):
        part = dead_letters[start : start + DEAD_LETTERS_AT_ONCE]
        yield _asked(door, {"dead_letters": part, "why": why}), start + DEAD_LETTERS_AT_ONCE < len(dead_letters)


def _chosen(door: Door, choice: dict[str, Any]) -> Iterator[tuple[DeadLetterReplays, bool]]:
    after: int | None = None
    up_to: int | None = None
    while True:
        told = _asked(door, {**choice, "after": after, "up_to": up_to})
        after, up_to = told.continue_after, told.up_to
        yield told, after is not None
        if after is None:
            return


def _asked(door: Door, body: dict[str, Any]) -> DeadLetterReplays:
    from breakwater.cli import api
    from breakwater.contracts.api import DeadLetterReplays

    document = by_hand.act(
        door, "dlq/replay", body, see="breakwater dlq list", unknown="`breakwater dlq list` lists them."
    )
    return api.read(DeadLetterReplays, document)


def _whole(parts: Iterator[tuple[DeadLetterReplays, bool]], *, quiet: bool) -> DeadLetterReplays:
    """What came of all requests together; says how far it is after each but the last."""
    from breakwater.contracts.api import DeadLetterReplays

    whole = DeadLetterReplays(replayed=(), already=0, skipped=())
    try:
        for told, more in parts:
            whole = DeadLetterReplays(
                replayed=(*whole.replayed, *told.replayed),
                already=whole.already + told.already,
                skipped=(*whole.skipped, *told.skipped),
            )
            if more and not quiet:
                output.note(f"{_so_far(whole)}; going on")
    except CliError as error:
        if whole.replayed:
            error.remedy = f"{error.remedy} Until then: {_so_far(whole)}. None of them is replayed twice.".strip()
        raise
    return whole


def _so_far(told: DeadLetterReplays) -> str:
    return f"{len(told.replayed):,} replayed, {told.already:,} before, {len(told.skipped):,} skipped"
