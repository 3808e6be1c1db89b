"""`/api/v1/dlq`: dead letters as people may see them, and running their jobs again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Connection, Found, Lookup, newest, scan
from breakwater.contracts.dead_letters import (
    MAX_DEAD_LETTERS,
    DeadLetterDetails,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    ListedDeadLetter,
    ReplayDeadLettersRequest,
)
from breakwater.contracts.events import ReplayNote
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import Message
from breakwater.contracts.validation import FieldError
from breakwater.policy.redact import Redactor
from services.request.alerts import utc_now
from services.request.dead_letters import (
    ALL_DEAD_LETTERS,
    SUCCEEDED,
    By,
    Kept,
    Outcome,
    Replays,
    counted,
    filter_for,
    not_all,
    read_dead_letter,
)
from services.request.problems import Problem
from services.request.routing import ApiRequest

SHOWN_DAYS = 7
MAX_DIGITS = 19
"""Of a dead letter's number, which is below 2**63."""

AT_ONCE = 64
AT_ONCE_BYTES = 8 * 1024 * 1024
"""How many dead letters are replayed at the same time; memory holds their jobs."""

REPLAY_S = 5.0
"""After so long, a request to replay many is answered with what is done, and where to go on."""

MAX_PAYLOAD = 64 * 1024
"""How much of a dead letter's payload is shown, in bytes."""


class DeadLetterRoutes:
    """Dead letters, for people."""

    def __init__(
        self, connection: Connection, replays: Replays, redactor: Redactor, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._connection = connection
        self._lookup = Lookup(connection)
        self._replays = replays
        self._views = DeadLetterViews(replays, redactor, now)
        self._now = now

    async def show(self, asked: ApiRequest[DeadLetterQuery]) -> DeadLetterList:
        """The latest ones that match."""
        wanted = asked.form

        def of_it(found: Found) -> Judged | None:
            judged = self._views.judged(found)
            if judged is None or wanted.execution_id in (None, judged.kept.dead_letter.execution_id):
                return judged
            return None

        counts = await self._lookup.counts(Stream.DLQ, ALL_DEAD_LETTERS)
        # One more than is shown, to know whether there are more.
        latest = await newest(
            self._connection,
            Stream.DLQ,
            filter_for(wanted.reason, wanted.agent),
            most=wanted.limit + 1,
            since=self._since(wanted.since),
            read=of_it,
        )
        dead_letters = await self._views.listed(latest[: wanted.limit])
        return DeadLetterList(dead_letters=dead_letters, more=len(latest) > wanted.limit, counts=counted(counts))

    async def show_one(self, asked: ApiRequest[Message]) -> DeadLetterDetails:
        """One, with what may be shown of the original."""
        number = asked.path["dead_letter_id"]
        is_number = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
        kept = await self._dead_letter(int(number)) if is_number else None
        if kept is None:
            hint = "`breakwater dlq list` lists them; each is kept for 30 days"
            message = f"there is no dead letter {number[:40]!r}; {hint}"
            raise Problem(404, "unknown_dead_letter", message, [FieldError(path="dead_letter_id", message=hint)])
        return await self._views.details(kept)

    async def replay(self, asked: ApiRequest[ReplayDeadLettersRequest]) -> DeadLetterReplays:
        """Queues again the jobs that are meant."""
        form, by, outcome = asked.form, By(asked.by, asked.why, self._now()), Outcome()
        continue_after: int | None = None
        up_to: int | None = None
        try:
            if form.dead_letters is not None:
                await self._replay_named(form.dead_letters, by, outcome)
            else:
                up_to = await self._end(form)
                continue_after = await self._replay_many(form, up_to, by, outcome)
        except (BusError, Problem) as error:
            raise not_all(error, outcome) from error
        finally:
            counts = {"already": outcome.already, "skipped": len(outcome.skipped)}
            asked.log("dead_letters_replayed", replayed=len(outcome.replayed), **counts)
        return DeadLetterReplays(
            replayed=tuple(outcome.replayed),
            already=outcome.already,
            skipped=tuple(sorted(outcome.skipped, key=lambda one: one.dead_letter_id)),
            continue_after=continue_after,
            up_to=None if continue_after is None else up_to,
        )

    async def _replay_named(self, numbers: Sequence[int], by: By, outcome: Outcome) -> None:
        batch = _Batch()
        for number in dict.fromkeys(numbers):
            kept = await self._dead_letter(number)
            if kept is None:
                outcome.skip(number, "there is no such dead letter")
            elif batch.add(kept):
                await self._replays.replay(batch.taken(), by, outcome)
        await self._replays.replay(batch.taken(), by, outcome)

    async def _replay_many(self, wanted: ReplayDeadLettersRequest, up_to: int, by: By, outcome: Outcome) -> int | None:
        """Replays the next dead letters that are meant, and returns behind which one to go on."""
        subject_filter = filter_for(wanted.reason, wanted.agent)
        start = wanted.after + 1 if wanted.after else self._since(wanted.since)
        begun, batch, looked_at, last = time.monotonic(), _Batch(), 0, wanted.after
        continue_after: int | None = None
        async with aclosing(scan(self._connection, Stream.DLQ, subject_filter, start=start, up_to=up_to)) as stored:
            async for found in stored:
                if looked_at == MAX_DEAD_LETTERS or (looked_at and time.monotonic() - begun > REPLAY_S):
                    continue_after = last
                    break
                looked_at, last = looked_at + 1, found.sequence
                if (kept := read_dead_letter(found, self._replays.cipher)) is None:
                    outcome.skip(found.sequence, "this dead letter can't be read")
                elif batch.add(kept):
                    await self._replays.replay(batch.taken(), by, outcome)
        await self._replays.replay(batch.taken(), by, outcome)
        return continue_after

    async def _end(self, wanted: ReplayDeadLettersRequest) -> int:
        """The last dead letter that is meant: replays that fail again are behind it."""
        if wanted.up_to is not None:
            return wanted.up_to
        last = await self._lookup.last(Stream.DLQ, filter_for(wanted.reason, wanted.agent))
        return 0 if last is None else last.sequence

    async def _dead_letter(self, number: int) -> Kept | None:
        if not 0 < number < 2**63:
            return None
        found = await self._lookup.next(Stream.DLQ, ALL_DEAD_LETTERS, number)
        return None if found is None or found.sequence != number else read_dead_letter(found, self._replays.cipher)

    def _since(self, given: datetime | None) -> datetime:
        return given or self._now() - timedelta(days=SHOWN_DAYS)


class _Batch:
    """Dead letters that are to be replayed together."""

    def __init__(self) -> None:
        self._dead_letters: list[Kept] = []
        self._bytes = 0

    def add(self, kept: Kept) -> bool:
        """Takes one more, and says whether that is enough."""
        self._dead_letters.append(kept)
        self._bytes += len(kept.payload)
        return len(self._dead_letters) >= AT_ONCE or self._bytes >= AT_ONCE_BYTES

    def taken(self) -> list[Kept]:
        """All of them; none is left."""
        dead_letters, self._dead_letters, self._bytes = self._dead_letters, [], 0
        return dead_letters


@dataclass(frozen=True, slots=True)
class Judged:
    """A dead letter, and whether its job could run; without its payload."""

    kept: Kept
    why_not: str | None


class DeadLetterViews:
    """Makes what people see of dead letters."""

    def __init__(self, replays: Replays, redactor: Redactor, now: Callable[[], datetime]) -> None:
        self._replays = replays
        self._redactor = redactor
        self._now = now

    def judged(self, found: Found) -> Judged | None:
        """What is kept of a dead letter to list it; None where it can't be read."""
        kept = read_dead_letter(found, self._replays.cipher)
        if kept is None:
            return None
        why_not = self._replays.why_not(kept)
        # The payload, and what it was read from: there may be hundreds of dead letters, of megabytes each.
        light = kept.dead_letter.model_copy(update={"payload_base64": "", "headers": {}})
        return Judged(dataclasses.replace(kept, dead_letter=light, payload=b""), why_not)

    async def _described(self, judged: Sequence[Judged]) -> tuple[tuple[ListedDeadLetter, ...], dict[int, ReplayNote]]:
        """The dead letters with what is known of their jobs and of their replays."""
        jobs = [one.kept for one in judged if one.kept.kind == "job"]
        notes = await self._replays.notes([kept.number for kept in jobs])
        executions = {note.execution_id: note.agent for note in notes.values()}
        for kept in jobs:
            if kept.dead_letter.execution_id and kept.dead_letter.agent and kept.number not in notes:
                executions[kept.dead_letter.execution_id] = kept.dead_letter.agent
        ended, now = await self._replays.ended(executions), self._now()
        listed: list[ListedDeadLetter] = []
        for one in judged:
            kept, note, why_not = one.kept, notes.get(one.kept.number), one.why_not
            if note is not None:
                why_not = f"it was replayed before, as {note.execution_id}"
            elif why_not is None and ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                why_not = SUCCEEDED
            listed.append(
                ListedDeadLetter(
                    dead_letter_id=kept.number,
                    kind=kept.kind,
                    reason=kept.dead_letter.reason,
                    agent=kept.dead_letter.agent,
                    execution_id=kept.dead_letter.execution_id,
                    error=self._redactor.text(kept.dead_letter.error),
                    at=kept.dead_letter.at,
                    replayable=why_not is None,
                    why_not=why_not,
                    replayed_as=None if note is None else note.execution_id,
                    replay_status=None if note is None else self._replays.status(note, ended, now),
                )
            )
        return tuple(listed), notes

    async def listed(self, judged: Sequence[Judged]) -> tuple[ListedDeadLetter, ...]:
        """Dead letters with what is known of their jobs and of their replays. Raises BusError."""
        dead_letters, _ = await self._described(judged)
        return dead_letters

    async def details(self, kept: Kept) -> DeadLetterDetails:
        """All that may be seen of a dead letter. Raises BusError."""
        [listed], notes = await self._described([Judged(kept, self._replays.why_not(kept))])
        note = notes.get(kept.number)
        withheld = self._replays.is_withheld(kept)
        hidden = withheld or kept.undecryptable is not None
        omitted = kept.dead_letter.omitted_bytes
        payload, cut = (None, False) if hidden or omitted is not None else self._visible(kept.payload)
        headers = self._redactor.json(dict(kept.dead_letter.headers))
        return DeadLetterDetails.model_validate(
            {
                **listed.model_dump(),
                "stream": kept.dead_letter.stream,
                "subject": kept.dead_letter.subject,
                "sequence": kept.dead_letter.sequence,
                "headers": headers,
                "payload": payload,
                "payload_withheld": withheld,
                "payload_omitted": omitted is not None,
                "payload_sha256": kept.dead_letter.omitted_sha256,
                "payload_bytes": len(kept.payload) if omitted is None else omitted,
                "payload_cut": cut,
                "replayed_by": None if note is None else note.by,
                "replayed_at": None if note is None else note.at,
            }
        )

    def _visible(self, payload: bytes) -> tuple[JsonValue, bool]:
        """What may be seen of a payload, and whether that is only its beginning."""
        try:
            document: JsonValue = self._redactor.json(from_json(payload, allow_inf_nan=False))
            written = to_json(document)
        except ValueError:
            text = payload.decode("utf-8", "replace")
            beginning, cut = _beginning(self._redactor.text(text).encode())
            return beginning, cut or len(text) > self._redactor.max_length
        return (document, False) if len(written) <= MAX_PAYLOAD else (_beginning(written)[0], True)


def _beginning(text: bytes) -> tuple[str, bool]:
    return text[:MAX_PAYLOAD].decode("utf-8", "ignore"), len(text) > MAX_PAYLOAD
