"""`/api/v1/alerts`, as to its channels: a test message, and what did not arrive, to be tried again."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter, deque
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from breakwater.bus.ask import ask
from breakwater.bus.errors import AlreadyDecided, BusError, NobodyListens
from breakwater.bus.lookup import Connection, Found, Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.scan import scan
from breakwater.contracts import subjects
from breakwater.contracts.alerts import ChannelTest
from breakwater.contracts.api import (
    AlertReplays,
    ChannelRequest,
    ReplayAlertsRequest,
    UndeliveredAlert,
    UndeliveredList,
    UndeliveredQuery,
)
from breakwater.contracts.events import DeadLetter
from breakwater.contracts.subjects import Header, Stream
from breakwater.contracts.types import Event
from breakwater.contracts.validation import FieldError
from breakwater.policy.redact import Redactor
from services.request.by_hand import asked, not_done, not_read
from services.request.parsing import read_query, suggestion
from services.request.problems import Problem, unavailable

TEST_TIMEOUT_S = 20.0
MOST_DEAD_LETTERS = 1_000
"""How many dead letters one request to replay looks at: it is answered within seconds, however many there are."""

DEAD_LETTERS = "bw.dlq.undeliverable.>"

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A dead letter of an alert that did not reach a channel."""

    sequence: int
    channel: str
    dead_letter: DeadLetter


class ChannelRoutes:
    """The channels by which people are told, for people."""

    def __init__(
        self, channels: Collection[str], connection: Connection, publisher: Publisher, redactor: Redactor
    ) -> None:
        self._channels = channels
        self._connection = connection
        self._lookup = Lookup(connection)
        self._publisher = publisher
        self._redactor = redactor

    async def test(self, request: Request) -> Response:
        """POST: 200 with what came of a test message, whether it arrived or not."""
        who = await asked(request, ChannelRequest, self._redactor)
        channel = who.form.channel
        self._check(channel)
        try:
            answer = await ask(self._connection, subjects.channel_test(channel), b"", TEST_TIMEOUT_S)
        except NobodyListens as error:
            message = "no alerter is at work, so nobody could send it; `breakwater doctor` tells which services are"
            raise unavailable("no_alerter", message) from error
        except BusError as error:
            raise unavailable("unavailable", f"whether it was sent is not known: {error}") from error
        tested = ChannelTest.model_validate_json(answer)
        who.log("channel_tested", channel=channel, delivered=tested.delivered)
        return Response(tested.json_bytes(), media_type=_JSON)

    async def undelivered(self, request: Request) -> Response:
        """GET: 200 with the alerts that were given up, the latest first."""
        wanted = read_query(request, UndeliveredQuery)
        # Only the last ones are kept, and of each what is shown: the dead letters themselves may be large, and many.
        latest: deque[UndeliveredAlert] = deque(maxlen=wanted.limit + 1)
        try:
            async with aclosing(self._dead_letters()) as dead_letters:
                async for one in dead_letters:
                    if wanted.channel in (None, one.channel):
                        latest.append(_shown(one))
            listed = list(latest)[-wanted.limit :]
            replayed = await asyncio.gather(*(self._is_replayed(one) for one in listed))
        except BusError as error:
            raise not_read(error) from error
        shown = [one.model_copy(update={"replayed": done}) for one, done in zip(listed, replayed, strict=True)]
        answer = UndeliveredList(undelivered=tuple(reversed(shown)), more=len(latest) > wanted.limit)
        return Response(answer.json_bytes(), media_type=_JSON)

    async def replay(self, request: Request) -> Response:
        """POST: 200 once they are put where the channels try them again."""
        who = await asked(request, ReplayAlertsRequest, self._redactor)
        if who.form.channel is not None:
            self._check(who.form.channel)
        try:
            told = await (self._replay_all(who.form) if who.form.dead_letter_id is None else self._replay_one(who.form))
        except BusError as error:
            raise not_done(error) from error
        who.log("alerts_replayed", replayed=told.replayed, channels=told.channels)
        return Response(told.json_bytes(), media_type=_JSON)

    async def _replay_one(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        number = wanted.dead_letter_id or 0
        found = await self._lookup.next(Stream.DLQ, DEAD_LETTERS, number)
        one = None if found is None or found.sequence != number else _dead_letter(found)
        if one is None or wanted.channel not in (None, one.channel):
            hint = "`breakwater alerts undelivered` lists them"
            message = (
                f"there is no dead letter {number} of an alert{f' for {wanted.channel}' if wanted.channel else ''}"
            )
            raise Problem(
                404, "unknown_dead_letter", f"{message}; {hint}", [FieldError(path="dead_letter_id", message=hint)]
            )
        self._check(one.channel)
        await self._put(one, again=True)
        return AlertReplays(replayed=1, already=0, skipped=0, channels={one.channel: 1})

    async def _replay_all(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        looked_at, already, skipped, last = 0, 0, 0, wanted.after
        replayed: Counter[str] = Counter()
        continue_after: int | None = None
        async with aclosing(self._dead_letters(start=wanted.after + 1)) as dead_letters:
            async for one in dead_letters:
                if wanted.channel not in (None, one.channel):
                    continue
                if looked_at == MOST_DEAD_LETTERS:
                    continue_after = last
                    break
                looked_at, last = looked_at + 1, one.sequence
                if one.channel not in self._channels:
                    skipped += 1
                elif await self._put(one, again=False):
                    replayed[one.channel] += 1
                else:
                    already += 1
        return AlertReplays(
            replayed=replayed.total(),
            already=already,
            skipped=skipped,
            channels=dict(replayed),
            continue_after=continue_after,
        )

    async def _put(self, one: Undelivered, *, again: bool) -> bool:
        """Has its channel try it again.

        Returns:
            Whether it does; False where that was asked for before, and `again` is not given.
        """
        headers = {Header.CHANNEL.value: one.channel}
        if not again:
            # The stream itself refuses a second one, however many people ask for it at once.
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
        payload = base64.b64decode(one.dead_letter.payload_base64)
        try:
            await self._publisher.raw(subjects.alert_again(one.channel, one.sequence), payload, headers)
        except AlreadyDecided:
            return False
        return True

    async def _dead_letters(self, start: int = 1) -> AsyncGenerator[Undelivered]:
        async with aclosing(scan(self._connection, Stream.DLQ, DEAD_LETTERS, start=start)) as stored:
            async for found in stored:
                if (one := _dead_letter(found)) is not None:
                    yield one

    async def _is_replayed(self, one: UndeliveredAlert) -> bool:
        return (
            await self._lookup.last(Stream.ALERTER, subjects.alert_again(one.channel, one.dead_letter_id)) is not None
        )

    def _check(self, channel: str) -> None:
        if channel not in self._channels:
            if self._channels:
                hint = suggestion(channel, self._channels).removeprefix("; ")
                known = f"known are {', '.join(sorted(self._channels))}"
                hint = hint if hint == known else f"{hint} {known}"
            else:
                hint = "the config has none: alerts.channels"
            message = f"there is no channel {channel!r}; {hint}"
            raise Problem(404, "unknown_channel", message, [FieldError(path="channel", message=hint)])


class _Kept(Event):
    """What of an alert or a digest is shown, where it did not arrive."""

    alert_id: str | None = None
    digest_id: str | None = None
    title: str | None = None
    counts: dict[str, int] | None = None


def _dead_letter(found: Found) -> Undelivered | None:
    """None where it is no alert that a channel gave up."""
    try:
        dead_letter = DeadLetter.model_validate_json(found.data)
    except ValidationError:
        structlog.get_logger().error("dead_letter_unreadable", sequence=found.sequence)
        return None
    channel = dead_letter.headers.get(Header.CHANNEL.value)
    return None if channel is None else Undelivered(found.sequence, channel, dead_letter)


def _shown(one: Undelivered) -> UndeliveredAlert:
    try:
        kept = _Kept.model_validate_json(base64.b64decode(one.dead_letter.payload_base64))
    except ValidationError:
        kept = _Kept()
    title = kept.title
    if kept.digest_id is not None and kept.counts is not None:
        incidents = sum(kept.counts.values())
        title = f"a digest of {incidents} incident{'' if incidents == 1 else 's'}"
    return UndeliveredAlert(
        dead_letter_id=one.sequence,
        channel=one.channel,
        alert_id=kept.digest_id or kept.alert_id,
        title=title,
        error=one.dead_letter.error,
        at=one.dead_letter.at,
        replayed=False,
    )
