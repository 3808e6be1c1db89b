"""An engine error as ClickHouse writes it, and the HTTP status its server answers with.

Source of the status table: ClickHouse's `exceptionCodeToHTTPStatus`. READONLY and ACCESS_DENIED are the
deviations: 403 here (a server says 500), since asking for what is not allowed is the caller's mistake and no fault of
the engine.
"""

import re
from enum import IntEnum


class Code(IntEnum):
    """The codes of the errors that are raised here and not by the engine."""

    BAD_ARGUMENTS = 36
    NOT_IMPLEMENTED = 48
    UNKNOWN_SETTING = 115
    READONLY = 164
    CANNOT_DECOMPRESS = 271
    TOO_MANY_BYTES = 307
    INTO_OUTFILE_NOT_ALLOWED = 348
    ACCESS_DENIED = 497
    AUTHENTICATION_FAILED = 516
    UNKNOWN_EXCEPTION = 1002


_STATUS_OF_CODES = {
    # text, dates and numbers that do not parse; syntax; wrong types; queries too deep or too big
    400: {6, 25, 26, 27, 38, 41, 53, 62, 72, 117, 137, 167, 168, 271, 457},
    401: {194},
    403: {164, 192, 193, 497, 516},
    # unknown function, identifier, type, storage, table, database, setting, aggregate function, format, engine
    404: {46, 47, 50, 56, 60, 63, 73, 78, 81, 115, 336, 372},
    408: {159},
    411: {381},
    413: {307},
    415: {89},
    501: {48},
    503: {209},
}
_STATUS_OF_CODE = {code: status for status, codes in _STATUS_OF_CODES.items() for code in codes}

_ENGINE_TEXT = re.compile(r"Code: (\d+)\. DB::Exception: .*", re.DOTALL)
_VERSION_TEXT = re.compile(r"\s*\(version [^()]*(?:\([^()]*\))?\)\s*$")


class ClickHouseError(Exception):
    """A statement that failed, with ClickHouse's code and its text without the version.

    Attributes:
        code: ClickHouse's error code, for example 60 for UNKNOWN_TABLE.
        text: `Code: 60. DB::Exception: … (UNKNOWN_TABLE)`.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @classmethod
    def of(cls, code: Code, message: str) -> "ClickHouseError":
        """Make an error of our own, worded as the server words its errors."""
        return cls(code, f"Code: {code}. DB::Exception: {message} ({code.name})")

    @classmethod
    def from_engine(cls, text: str) -> "ClickHouseError":
        """Read what chdb raised; wrappers around the engine's text and the version after it are cut off."""
        found = _ENGINE_TEXT.search(text)
        if found is None:
            return cls.of(Code.UNKNOWN_EXCEPTION, text.strip() or "the engine failed without saying why")
        return cls(int(found.group(1)), _VERSION_TEXT.sub("", found.group(0)))

    @property
    def status(self) -> int:
        """The HTTP status a ClickHouse server gives this code."""
        return _STATUS_OF_CODE.get(self.code, 500)


def unavailable(what: str) -> ClickHouseError:
    """Make the error (HTTP 501) for what ClickHouse's protocol has and this process has not."""
    return ClickHouseError.of(
        Code.NOT_IMPLEMENTED,
        f"The local ClickHouse of Breakwater does not have {what}; use a real ClickHouse server for it",
    )
