"""`/api/v1/alerts`, as to channels: test messages, and undelivered alerts, to be sent again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from datetime import UTC, datetime

from pydantic import ValidationError

from breakwater.bus.core import ask
from breakwater.bus.errors import AlreadyDecided, BusError, NobodyListens
from breakwater.bus.lookup import Connection, Found, Lookup, newest, scan
from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.alerts import (
    AlertReplays,
    ChannelRequest,
    ChannelTest,
    ReplayAlertsRequest,
    UndeliveredAlert,
    UndeliveredList,
    UndeliveredQuery,
)
from breakwater.contracts.subjects import Header, Stream
from breakwater.contracts.types import Event
from breakwater.contracts.validation import FieldError
from services.request.dead_letters import Kept, read_dead_letter
from services.request.parsing import suggestion
from services.request.problems import Problem, unavailable
from services.request.routing import ApiRequest

TEST_TIMEOUT_S = 20.0
MAX_DEAD_LETTERS = 1_000
"""How many dead letters one request to replay looks at: it is answered within seconds, however many there are."""

DEAD_LETTERS = "bw.dlq.undeliverable.>"
EVER = datetime(1970, 1, 1, tzinfo=UTC)


class ChannelRoutes:
    """The channels by which people are notified."""

    def __init__(self, channels: Collection[str], connection: Connection, publisher: Publisher) -> None:
        self._channels = channels
        self._connection = connection
        self._lookup = Lookup(connection)
        self._publisher = publisher

    async def test(self, asked: ApiRequest[ChannelRequest]) -> ChannelTest:
        """Has an alerter send a test message; the result says whether it arrived."""
        channel = asked.form.channel
        self._check(channel)
        try:
            answer = await ask(self._connection, subjects.channel_test(channel), b"", TEST_TIMEOUT_S)
        except NobodyListens as error:
            message = "no alerter is running, so nothing can be sent; `breakwater doctor` shows which services are"
            raise unavailable("no_alerter", message) from error
        except BusError as error:
            raise unavailable("unavailable", f"whether it was sent is not known: {error}") from error
        tested = ChannelTest.model_validate_json(answer)
        asked.log("channel_tested", channel=channel, delivered=tested.delivered)
        return tested

    async def undelivered(self, asked: ApiRequest[UndeliveredQuery]) -> UndeliveredList:
        """The alerts that were given up, the latest first."""
        wanted = asked.form

        def shown(found: Found) -> UndeliveredAlert | None:
            kept = read_dead_letter(found)
            if kept is None or kept.channel is None or wanted.channel not in (None, kept.channel):
                return None
            return _shown(kept.channel, kept)

        latest = await newest(self._connection, Stream.DLQ, DEAD_LETTERS, most=wanted.limit + 1, since=EVER, read=shown)
        listed = latest[: wanted.limit]
        replayed = await asyncio.gather(*(self._is_replayed(one) for one in listed))
        undelivered = (one.model_copy(update={"replayed": done}) for one, done in zip(listed, replayed, strict=True))
        return UndeliveredList(undelivered=tuple(undelivered), more=len(latest) > wanted.limit)

    async def replay(self, asked: ApiRequest[ReplayAlertsRequest]) -> AlertReplays:
        """Puts them where the channels send them again."""
        form = asked.form
        if form.channel is not None:
            self._check(form.channel)
        replays = await (self._replay_all(form) if form.dead_letter_id is None else self._replay_one(form))
        asked.log("alerts_replayed", replayed=replays.replayed, channels=replays.channels)
        return replays

    async def _replay_one(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        number = wanted.dead_letter_id or 0
        found = await self._lookup.next(Stream.DLQ, DEAD_LETTERS, number)
        kept = None if found is None or found.sequence != number else read_dead_letter(found)
        if kept is None or kept.channel is None or wanted.channel not in (None, kept.channel):
            hint = "`breakwater alerts undelivered` lists them"
            message = (
                f"there is no dead letter {number} of an alert{f' for {wanted.channel}' if wanted.channel else ''}"
            )
            raise Problem(
                404, "unknown_dead_letter", f"{message}; {hint}", [FieldError(path="dead_letter_id", message=hint)]
            )
        self._check(kept.channel)
        if kept.dead_letter.omitted_bytes is not None:
            raise Problem(
                409, "not_kept", f"the alert of dead letter {number} was too large to be kept: see its incident"
            )
        await self._put(kept.channel, kept, again=True)
        return AlertReplays(replayed=1, already=0, skipped=0, channels={kept.channel: 1})

    async def _replay_all(self, wanted: ReplayAlertsRequest) -> AlertReplays:
        looked_at, already, skipped, last = 0, 0, 0, wanted.after
        replayed: Counter[str] = Counter()
        continue_after: int | None = None
        async with aclosing(self._undelivered(start=wanted.after + 1)) as dead_letters:
            async for channel, kept in dead_letters:
                if wanted.channel not in (None, channel):
                    continue
                if looked_at == MAX_DEAD_LETTERS:
                    continue_after = last
                    break
                looked_at, last = looked_at + 1, kept.number
                if channel not in self._channels or kept.dead_letter.omitted_bytes is not None:
                    skipped += 1
                elif await self._put(channel, kept, again=False):
                    replayed[channel] += 1
                else:
                    already += 1
        return AlertReplays(
            replayed=replayed.total(),
            already=already,
            skipped=skipped,
            channels=dict(replayed),
            continue_after=continue_after,
        )

    async def _put(self, channel: str, kept: Kept, *, again: bool) -> bool:
        """Has its channel try it again.

        Returns:
            Whether it does; False where that was asked for before, and `again` is not given.
        """
        headers = {Header.CHANNEL.value: channel}
        if not again:
            # The stream itself refuses a second one, however many requests come at once.
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = "0"
        try:
            await self._publisher.raw(subjects.alert_replay(channel, kept.number), kept.payload, headers)
        except AlreadyDecided:
            return False
        return True

    async def _undelivered(self, start: int) -> AsyncGenerator[tuple[str, Kept]]:
        async with aclosing(scan(self._connection, Stream.DLQ, DEAD_LETTERS, start=start)) as stored:
            async for found in stored:
                if (kept := read_dead_letter(found)) is not None and kept.channel is not None:
                    yield kept.channel, kept

    async def _is_replayed(self, one: UndeliveredAlert) -> bool:
        return (
            await self._lookup.last(Stream.ALERTER, subjects.alert_replay(one.channel, one.dead_letter_id)) is not None
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


class _Message(Event):
    """What of an alert or a digest is shown, where it did not arrive."""

    alert_id: str | None = None
    digest_id: str | None = None
    title: str | None = None
    counts: dict[str, int] | None = None


def _shown(channel: str, dead_letter: Kept) -> UndeliveredAlert:
    try:
        kept = _Message.model_validate_json(dead_letter.payload)
    except ValidationError:
        kept = _Message()
    title = kept.title
    if kept.digest_id is not None and kept.counts is not None:
        incidents = sum(kept.counts.values())
        title = f"a digest of {incidents} incident{'' if incidents == 1 else 's'}"
    return UndeliveredAlert(
        dead_letter_id=dead_letter.number,
        channel=channel,
        alert_id=kept.digest_id or kept.alert_id,
        title=title,
        error=dead_letter.dead_letter.error,
        at=dead_letter.dead_letter.at,
        replayed=False,
    )
