"""Comments on silent streams, on a clock that is set and timers that fire early."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest

from breakwater.dialects.api import stored_responses, streams
from breakwater.dialects.api.chat import ChatEvents
from breakwater.identity import event_stream

EARLY_S = 0.001


class _SetClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


class _Skipping(selectors.DefaultSelector):
    """Waits for nothing: the time that it was to wait is over at once."""

    def __init__(self, clock: _SetClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        self._clock.now += max((timeout or 0.0) - EARLY_S * 0.9, 0.0)
        return super().select(0)


class _EarlyLoop(asyncio.SelectorEventLoop):
    """Fires timers up to a millisecond early, as uvloop does."""

    def __init__(self, clock: _SetClock) -> None:
        super().__init__(_Skipping(clock))
        self._clock_resolution = EARLY_S
        self.time = clock.monotonic  # type: ignore[method-assign]


class _Quiet:
    """An encoder of chunks that its client does not see."""

    keep_alive: ClassVar[bytes] = b": quiet\n\n"

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        del chunks
        return b""

    def end(self, result: dict[str, Any] | None, **_: Any) -> bytes:
        return b"end %b" % repr(result).encode()


def _sent_at(
    monkeypatch: pytest.MonkeyPatch, encoder: streams.Encoder, chunks_at: Iterable[float], ends_at: float
) -> list[tuple[float, bytes]]:
    """What a stream sends, with the seconds since its beginning, where chunks and the result come at set times."""
    clock = _SetClock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    sent = list[tuple[float, bytes]]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((clock.now - 1_000.0, message["body"]))

    async def run() -> None:
        inbox, loop = streams.ChunkInbox(), asyncio.get_running_loop()
        chunk = b'{"number": %d, "chunks": [{"choices": [{"index": 0, "delta": {"content": "x"}}]}]}'
        inbox.put(chunk % 1)  # with which the stream begins
        for number, at in enumerate(chunks_at, 2):
            loop.call_later(at, inbox.put, chunk % number)

        async def decide() -> bytes | None:
            await asyncio.sleep(ends_at)
            return b'{"status": "failed"}'

        async def ended(whole: bool, stuck: bool) -> None:
            assert (whole, stuck) == (True, False)

        stream = streams.EncodedStream(
            inbox, asyncio.create_task(decide()), headers={}, encoder=encoder, error=lambda _: b"{}", close=ended
        )
        await stream({}, None, send)  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=lambda: _EarlyLoop(clock)) as runner:
        runner.run(run())
    return sent


def test_a_comment_is_sent_for_every_15_seconds_of_silence(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    cases = [
        ("nothing comes for 30 s", (), 30.5, [15, 30]),
        ("nothing comes for 45 s", (), 45.5, [15, 30, 45]),
        ("a chunk begins another silence", (10.0,), 41.0, [25, 40]),
        ("chunks come often enough", (10.0, 20.0, 30.0), 40.0, []),
    ]
    for name, chunks_at, ends_at, expected in cases:
        with subtests.test(name):
            encoder = ChatEvents("j1", "m", with_usage=False)
            sent = _sent_at(monkeypatch, encoder, chunks_at, ends_at)
            comments = [at for at, body in sent if body == encoder.keep_alive]
            assert comments == pytest.approx(expected, abs=0.02)


def test_chunks_without_an_event_leave_a_stream_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _sent_at(monkeypatch, _Quiet(), [float(second) for second in range(1, 40)], 40.0)
    assert [at for at, body in sent if body == _Quiet.keep_alive] == pytest.approx([15, 30], abs=0.05)


def test_the_log_of_a_response_is_looked_into_when_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _SetClock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)

    async def send(_: Any) -> None: ...

    async def run() -> list[float]:
        follower = object.__new__(stored_responses._ResponseFollower)
        follower._queue, sender = stored_responses._ChunkQueue(), event_stream.Sender(send)
        await sender.send(b"begun")
        due_at, waited_until = clock.now + stored_responses.LOOK_S, list[float]()
        clock.now += 0.5  # what was read takes a moment to be sent
        while clock.now < due_at - EARLY_S:
            follower._queue.changed.clear()
            await follower._wait(sender, due_at)
            waited_until.append(clock.now - due_at)
        return waited_until

    with asyncio.Runner(loop_factory=lambda: _EarlyLoop(clock)) as runner:
        assert runner.run(run())[-1] == pytest.approx(0.0, abs=0.01)


def test_a_comment_is_due_when_its_timer_may_have_fired(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, silence = _SetClock(), event_stream.StreamSilence()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    assert silence.comment_due_s() == 0.0, "the stream has not begun"
    silence.end()
    assert silence.comment_due_s() == event_stream.KEEP_ALIVE_S
    clock.now += event_stream.KEEP_ALIVE_S - 2 * event_stream.EARLY_S
    assert silence.comment_due_s() == pytest.approx(2 * event_stream.EARLY_S)
    clock.now += event_stream.EARLY_S * 1.1
    assert silence.comment_due_s() == 0.0
