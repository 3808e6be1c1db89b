"""Lines of an answer that are put together from chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from breakwater.records.api.query import LineBuffer

LINES = st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=12)


@given(LINES, st.integers(0, 14) | st.none(), st.data())
def test_any_chunks_give_whole_lines_up_to_the_limit_and_say_if_there_are_more(
    lines: list[bytes], limit: int | None, data: st.DataObject
) -> None:
    whole = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    buffer = LineBuffer(limit)
    pieces = [buffer.add(whole[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = lines[:limit]
    assert b"".join(pieces) == b"".join(expected)
    assert all(not piece or piece.endswith(b"\n") for piece in pieces)
    assert (buffer.count, buffer.cut) == (len(expected), len(lines) > len(expected))
