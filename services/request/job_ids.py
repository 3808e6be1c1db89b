"""Ids for jobs that come without one."""

from __future__ import annotations

ENTROPY_BYTES = 10


def uuid7(epoch_ms: int, entropy: bytes) -> str:
    """A version 7 UUID: ids of later milliseconds sort later, which keeps what is stored by id close together.

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
