"""Events and lines that come in pieces: cut anywhere they are the same, and tiny pieces of a large one cost no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.calls.providers.event_stream import EventStreamReader
from breakwater.calls.providers.process import _DeltaLines  # pyright: ignore[reportPrivateUsage]
from breakwater.calls.providers.server_sent import EventReader

pytest.importorskip("botocore", reason="`make install` brings it")

from tests.bedrock import frame

LARGE = 1_000_000
EVENTS = b"\xef\xbb\xbf: hi\r\ndata: 1\r\n\r\nevent: a\rdata: 2\rdata: 3\r\rdata: \xef\xbb\xbf4\n\nevent: b\n\ndata: 5"
READ = [(b"", b"1"), (b"a", b"2\n3"), (b"", b"\xef\xbb\xbf4"), (b"", b"5")]


def pieces(body: bytes, size: int) -> Iterable[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


@given(st.lists(st.integers(0, 7), max_size=60))
def test_server_sent_events_are_read_however_they_are_cut(sizes: list[int]) -> None:
    reader = EventReader()
    body = EVENTS
    events = list[tuple[bytes, bytes]]()
    for size in sizes:
        events += reader.feed(body[:size])
        body = body[size:]
    events += [*reader.feed(body), *reader.end()]
    assert events == READ


@pytest.mark.parametrize(
    ("reader", "body"),
    [
        (EventReader, b"data: %s\n\n" % (b"x" * LARGE)),
        (EventReader, b"data: xxxxxxxx\n" * (LARGE // 15) + b"\n"),
        (EventStreamReader, frame("contentBlockDelta", b" " * LARGE)),
    ],
)
def test_an_event_in_tiny_pieces_costs_no_more_than_its_bytes(reader: Callable[[], Any], body: bytes) -> None:
    reading = reader()
    began = time.thread_time()
    events = [event for piece in pieces(body, 64) for event in reading.feed(piece)]
    assert time.thread_time() - began < 1, "each piece copied all those before it"
    assert len(events) == 1


def test_a_line_of_a_program_in_tiny_pieces_costs_no_more_than_its_bytes() -> None:
    lines = _DeltaLines()
    began = time.thread_time()
    for piece in pieces(b'{"delta": "%s"}\n' % (b"x" * LARGE), 64):
        lines.take(piece)
    assert time.thread_time() - began < 1
    assert "".join(lines.pieces.texts) == "x" * LARGE
