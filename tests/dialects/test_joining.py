"""The join of an answer with its continuation: nothing lost, nothing doubled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from breakwater.dialects.rules.chat_chunks import MIN_OVERLAP, Join
from tests.tables import each_row

WHOLE = "The ferry leaves at nine. It arrives at ten, if the sea is calm. Take a coat."


def joined(said: str, *pieces: str) -> str:
    join = Join(said)
    return said + "".join(join.feed(piece) for piece in pieces) + join.end()


@each_row("cut", range(len(WHOLE)))
@each_row("size", [1, 3, 1000])
def test_a_continuation_may_begin_anywhere_before_the_cut(cut: int, size: int) -> None:
    for begin in {0, *range(cut - MIN_OVERLAP + 1), cut}:
        rest = WHOLE[begin:]
        pieces = [rest[at : at + size] for at in range(0, len(rest), size)]
        assert joined(WHOLE[:cut], *pieces) == WHOLE


def test_what_only_begins_like_something_said_is_new() -> None:
    assert joined("The ferry leaves. ", "The ferry", " arrives.") == "The ferry leaves. The ferry arrives."
    assert joined("The ferry leaves. ", "The ferry") == "The ferry leaves. The ferry"
    assert joined("one\n\n", "\n\ntwo") == "one\n\n\n\ntwo"


def test_a_piece_is_passed_on_as_soon_as_it_is_new() -> None:
    join = Join("The ferry leaves at nine. ")
    assert [join.feed(piece) for piece in ("It ", "arrives", " at nine")] == ["It ", "arrives", " at nine"]


@given(st.text("ab ", min_size=1), st.lists(st.text("cd ", min_size=1)))
def test_other_words_are_never_lost(said: str, pieces: list[str]) -> None:
    assert joined(f"{said}.", *pieces) == f"{said}.{''.join(pieces)}"
