"""Ids made here."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.ids import ENTROPY_BYTES, id_at

TIMES = st.integers(0, 2**48 - 1)
ENTROPY = st.binary(min_size=ENTROPY_BYTES, max_size=ENTROPY_BYTES)


@given(TIMES, ENTROPY)
def test_it_is_a_version_7_uuid_with_the_time_in_front(epoch_ms: int, entropy: bytes) -> None:
    made = uuid.UUID(id_at(epoch_ms, entropy))
    assert str(made) == id_at(epoch_ms, entropy)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == epoch_ms


@given(TIMES.filter(bool), ENTROPY, ENTROPY)
def test_a_later_one_sorts_later(epoch_ms: int, one: bytes, other: bytes) -> None:
    assert id_at(epoch_ms - 1, one) < id_at(epoch_ms, other)


@given(ENTROPY, ENTROPY)
def test_it_keeps_74_bits_of_the_entropy(one: bytes, other: bytes) -> None:
    kept = [int.from_bytes(entropy, "big") & (2**74 - 1) for entropy in (one, other)]
    assert (id_at(1, one) == id_at(1, other)) == (kept[0] == kept[1])
