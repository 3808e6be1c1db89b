"""Ids that the plane generates: version 7 UUIDs, which sort by the millisecond of their creation."""

from __future__ import annotations

import os
import time

ENTROPY_BYTES = 10


def new_id() -> str:
    """Generates an id that no other process generates."""
    return id_at(time.time_ns() // 1_000_000, os.urandom(ENTROPY_BYTES))


def id_at(epoch_ms: int, entropy: bytes) -> str:
    """Returns the id of a time.

    Args:
        epoch_ms: milliseconds since the epoch, the first 48 bits.
        entropy: `ENTROPY_BYTES` random bytes, of which 74 bits are used.
    """
    random = int.from_bytes(entropy, "big")
    value = (epoch_ms & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76 | (random >> 62 & 0xFFF) << 64
    value |= 0b10 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
