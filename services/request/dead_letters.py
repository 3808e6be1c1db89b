"""`/api/v1/dlq`: what was given up, for people; and running such jobs again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Connection, Found, Lookup
from breakwater.bus.newest import newest
from breakwater.bus.scan import scan
from breakwater.contracts.api import (
    MOST_DEAD_LETTERS,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    ReplayDeadLettersRequest,
)
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import ms_from_time, time_from_ms
from breakwater.contracts.validation import FieldError
from breakwater.policy.redact import Redactor
from services.request.by_hand import asked, not_read
from services.request.letter_views import DeadLetterViews, Judged
from services.request.letters import ALL_DEAD_LETTERS, Kept, counted, filter_for, read_dead_letter
from services.request.parsing import read_query
from services.request.problems import Problem
from services.request.replays import By, Outcome, Replays, not_all

SHOWN_DAYS = 7
MOST_DIGITS = 19
"""Of a dead letter's number, which is below 2**63."""

AT_ONCE = 64
AT_ONCE_BYTES = 8 * 1024 * 1024
"""How many dead letters are replayed at the same time; memory holds their jobs."""

REPLAY_S = 5.0
"""After so long, a request to replay many is answered with what is done, and where to go on."""

_JSON = "application/json"


def utc_now() -> datetime:
    """In whole milliseconds, as times are on the wire."""
    return time_from_ms(ms_from_time(datetime.now(UTC)))


class DeadLetterRoutes:
    """Dead letters, for people."""

    def __init__(
        self, connection: Connection, replays: Replays, redactor: Redactor, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._connection = connection
        self._lookup = Lookup(connection)
        self._replays = replays
        self._views = DeadLetterViews(replays, redactor, now)
        self._redactor = redactor
        self._now = now

    async def show(self, request: Request) -> Response:
        """GET: 200 with the latest dead letters."""
        wanted = read_query(request, DeadLetterQuery)

        def of_it(found: Found) -> Judged | None:
            judged = self._views.judged(found)
            if judged is None or wanted.execution_id in (None, judged.kept.dead_letter.execution_id):
                return judged
            return None

        try:
            counts = await self._lookup.counts(Stream.DLQ, ALL_DEAD_LETTERS)
            # One more than is shown tells whether there are more.
            latest = await newest(
                self._connection,
                Stream.DLQ,
                filter_for(wanted.reason, wanted.agent),
                most=wanted.limit + 1,
                since=self._since(wanted.since),
                read=of_it,
            )
            dead_letters = await self._views.listed(latest[: wanted.limit])
        except BusError as error:
            raise not_read(error) from error
        answer = DeadLetterList(dead_letters=dead_letters, more=len(latest) > wanted.limit, counts=counted(counts))
        return Response(answer.json_bytes(), media_type=_JSON)

    async def show_one(self, request: Request) -> Response:
        """GET of one: 200 with what may be seen of it."""
        number: str = request.path_params["dead_letter_id"]
        try:
            is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
            kept = await self._dead_letter(int(number)) if is_number else None
            if kept is None:
                hint = "`breakwater dlq list` lists them; each is kept for 30 days"
                message = f"there is no dead letter {number[:40]!r}; {hint}"
                raise Problem(404, "unknown_dead_letter", message, [FieldError(path="dead_letter_id", message=hint)])
            shown = await self._views.shown(kept)
        except BusError as error:
            raise not_read(error) from error
        return Response(shown.json_bytes(), media_type=_JSON)

    async def replay(self, request: Request) -> Response:
        """POST: 200 once what is meant is queued again."""
        who = await asked(request, ReplayDeadLettersRequest, self._redactor)
        who = dataclasses.replace(who, why=self._redactor.text(who.form.why or ""))
        by, outcome = By(who.by, who.why, self._now()), Outcome()
        continue_after: int | None = None
        up_to: int | None = None
        try:
            if who.form.dead_letters is not None:
                await self._replay_named(who.form.dead_letters, by, outcome)
            else:
                up_to = await self._end(who.form)
                continue_after = await self._replay_many(who.form, up_to, by, outcome)
        except (BusError, Problem) as error:
            raise not_all(error, outcome) from error
        finally:
            told = {"already": outcome.already, "skipped": len(outcome.skipped)}
            who.log("dead_letters_replayed", replayed=len(outcome.replayed), **told)
        answer = DeadLetterReplays(
            replayed=tuple(outcome.replayed),
            already=outcome.already,
            skipped=tuple(sorted(outcome.skipped, key=lambda one: one.dead_letter_id)),
            continue_after=continue_after,
            up_to=None if continue_after is None else up_to,
        )
        return Response(answer.json_bytes(), media_type=_JSON)

    async def _replay_named(self, numbers: Sequence[int], by: By, outcome: Outcome) -> None:
        waiting = _Waiting()
        for number in dict.fromkeys(numbers):
            kept = await self._dead_letter(number)
            if kept is None:
                outcome.skip(number, "there is no such dead letter")
            elif waiting.add(kept):
                await self._replays.replay(waiting.taken(), by, outcome)
        await self._replays.replay(waiting.taken(), by, outcome)

    async def _replay_many(self, wanted: ReplayDeadLettersRequest, up_to: int, by: By, outcome: Outcome) -> int | None:
        """Replays the next dead letters that are meant, and returns behind which one to go on."""
        subject_filter = filter_for(wanted.reason, wanted.agent)
        start = wanted.after + 1 if wanted.after else self._since(wanted.since)
        begun, waiting, looked_at, last = time.monotonic(), _Waiting(), 0, wanted.after
        continue_after: int | None = None
        async with aclosing(scan(self._connection, Stream.DLQ, subject_filter, start=start, up_to=up_to)) as stored:
            async for found in stored:
                if looked_at == MOST_DEAD_LETTERS or (looked_at and time.monotonic() - begun > REPLAY_S):
                    continue_after = last
                    break
                looked_at, last = looked_at + 1, found.sequence
                if (kept := read_dead_letter(found)) is None:
                    outcome.skip(found.sequence, "this dead letter can't be read")
                elif waiting.add(kept):
                    await self._replays.replay(waiting.taken(), by, outcome)
        await self._replays.replay(waiting.taken(), by, outcome)
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
        return None if found is None or found.sequence != number else read_dead_letter(found)

    def _since(self, given: datetime | None) -> datetime:
        return given or self._now() - timedelta(days=SHOWN_DAYS)


class _Waiting:
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
