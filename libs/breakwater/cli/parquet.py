"""Looking into the end of a Parquet file: whether it is whole, and how many rows it says that it has."""

from __future__ import annotations

import io
from typing import BinaryIO

_MARK = b"PAR1"
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_ROWS_FIELD = 3
"""Of the footer, which is a struct in Thrift's compact protocol: 1 the version, 2 the schema, 3 the number of rows."""


def rows_in(file: BinaryIO) -> int | None:
    """How many rows a file has; None where it is no whole Parquet file."""
    size = file.seek(0, io.SEEK_END)
    if size < len(_MARK) + 8:
        return None
    file.seek(0)
    if file.read(len(_MARK)) != _MARK:
        return None
    file.seek(size - 8)
    length, mark = int.from_bytes(file.read(4), "little"), file.read(4)
    if mark != _MARK or length > size - 8 - len(_MARK):
        return None
    file.seek(size - 8 - length)
    try:
        return _rows(_Compact(file.read(length)))
    except (IndexError, ValueError):
        return None


def _rows(footer: _Compact) -> int | None:
    field = 0
    while header := footer.byte():
        # Fields that are far apart have their whole number behind the header.
        field = field + (header >> 4) if header >> 4 else footer.integer()
        if field == _ROWS_FIELD:
            return footer.integer()
        footer.skip(header & 0x0F)
    return None


class _Compact:
    """Reads Thrift's compact protocol. Raises IndexError at the end of what there is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def integer(self) -> int:
        """A signed one, in zigzag."""
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def skip(self, kind: int) -> None:
        """Passes over a value that stands in a field."""
        if kind in _BOOLEANS:  # in the field's header
            return
        if kind in _INTEGERS:
            self._varint()
        elif kind in (_BYTE, _DOUBLE):
            self._at += 1 if kind == _BYTE else 8
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in _LISTS:
            header = self.byte()
            count = header >> 4 if header >> 4 < 0x0F else self._varint()
            self._skip_items(header & 0x0F, count)
        elif kind == _MAP:
            if count := self._varint():
                kinds = self.byte()
                for _ in range(count):
                    self._skip_items(kinds >> 4, 1)
                    self._skip_items(kinds & 0x0F, 1)
        elif kind == _STRUCT:
            while header := self.byte():
                if not header >> 4:
                    self.integer()
                self.skip(header & 0x0F)
        else:
            raise ValueError(f"Thrift has no type {kind}")

    def _skip_items(self, kind: int, count: int) -> None:
        if kind in _BOOLEANS:  # a byte each, where no header has them
            self._at += count
            return
        for _ in range(count):
            self.skip(kind)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            part = self.byte()
            value |= (part & 0x7F) << shift
            if part < 0x80:
                return value
            shift += 7
