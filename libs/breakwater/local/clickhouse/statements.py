"""Statements of ClickHouse's SQL, as far as they are read outside the engine, and the errors of those that fail.

The engine parses SQL: a statement is read as its `formatQuery` writes it, without comments and with each clause on a
line of its own. This module finds where the data of an INSERT begins, which is not SQL, and where a statement takes the
name of a file: for the data of an INSERT, or for a result.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

from breakwater.kernel.errors import BreakwaterError


class ErrorCode(IntEnum):
    """Codes of ClickHouse's errors that are raised here and not by the engine."""

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


# Source: ClickHouse's `exceptionCodeToHTTPStatus`. READONLY and ACCESS_DENIED are 403 here and 500 there: asking for
# what is not allowed is the caller's mistake.
_CODES_OF_STATUS = {
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
_ENGINE_TEXT = re.compile(r"Code: (\d+)\. DB::Exception: .*", re.DOTALL)
_VERSION_TEXT = re.compile(r"\s*\(version [^()]*(?:\([^()]*\))?\)\s*$")


class ClickHouseError(BreakwaterError):
    """A statement that failed.

    Attributes:
        code: ClickHouse's error code, such as 60 for UNKNOWN_TABLE.
        text: `Code: 60. DB::Exception: … (UNKNOWN_TABLE)`, without the version.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    @classmethod
    def of(cls, code: ErrorCode, message: str) -> "ClickHouseError":
        """Makes an error that is worded as the server words its errors."""
        return cls(code, f"Code: {code}. DB::Exception: {message} ({code.name})")

    @classmethod
    def unavailable(cls, feature: str) -> "ClickHouseError":
        """Makes the error (HTTP 501) for a feature of ClickHouse that this process does not have."""
        return cls.of(
            ErrorCode.NOT_IMPLEMENTED,
            f"Breakwater's local ClickHouse does not support {feature}; use a real ClickHouse server for it",
        )

    @classmethod
    def from_engine(cls, text: str) -> "ClickHouseError":
        """Reads the text of chdb's exception, without what it wraps around the engine's own."""
        match = _ENGINE_TEXT.search(text)
        if match is None:
            return cls.of(ErrorCode.UNKNOWN_EXCEPTION, text.strip() or "the engine failed without giving a reason")
        return cls(int(match[1]), _VERSION_TEXT.sub("", match[0]))

    @property
    def status(self) -> int:
        """HTTP status of this code."""
        return next((status for status, codes in _CODES_OF_STATUS.items() if self.code in codes), 500)


_QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`)"""
_COLUMNS = rf"""\((?:{_QUOTED}|[^()'"`]|\((?:{_QUOTED}|[^()'"`])*+\))*+\)"""  # or the arguments of a function
_GAP = r"(?:\s|--[^\n]*\n|/\*.*?\*/)"
_WORD = r"(?!(?<!\.)(?:SELECT|WITH|FROM|FORMAT|VALUES)\b)\w++"
_INSERT = re.compile(
    rf"""{_GAP}*+ INSERT\b (?:{_GAP}|{_WORD}|{_QUOTED}|{_COLUMNS}|\{{[^{{}}]*\}}|[.,=+-])*+
    (?: VALUES\b | FORMAT\s+\w++[ \t]*(?:\r?\n)? )""".encode(),
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_FORMAT = re.compile(
    r"(?P<settings>\nSETTINGS [^\n]*)?(?P<gap>[\n ])FORMAT `?(?P<name>\w+)`?(?P<after>\nSETTINGS [^\n]*)?\Z"
)
_WITH_ROWS = frozenset({"CHECK", "DESCRIBE", "EXISTS", "EXPLAIN", "SELECT", "SHOW", "WITH"})
_MAKES_A_SESSION = re.compile(r"SET|USE|CREATE TEMPORARY")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, and the place in it for the file that its result is written to, or its data read from.

    Attributes:
        keyword: its first word.
        before: its text up to the file's name.
        after: the text after that; empty where there is no file.
        format: of the file.
    """

    keyword: str
    before: str
    after: str
    format: str

    @property
    def has_result(self) -> bool:
        """Returns True if it returns rows, even if there are none."""
        return self.keyword in _WITH_ROWS

    def text(self, file: str) -> str:
        """Returns its text with the literal of the file."""
        return f"{self.before}{file}{self.after}" if self.after else self.before


def find_data(text: bytes) -> int:
    """Returns where the data begins in an INSERT with data; 0 for any other text."""
    insert = _INSERT.match(text)
    return insert.end() if insert is not None else 0


def read_statement(canonical: str, default_format: str, *, in_session: bool, has_data: bool) -> Statement:
    """Reads a statement.

    Args:
        canonical: the statement, without data, as the engine's `formatQuery` writes it.
        default_format: used where the statement names none.
        in_session: the request names a session, so settings are meant for later requests, too.
        has_data: data follows the statement.

    Raises:
        ClickHouseError: NOT_IMPLEMENTED, INTO_OUTFILE_NOT_ALLOWED.
    """
    first = re.search(r"[A-Z]+", canonical)
    keyword = first[0] if first is not None else ""
    if keyword == "KILL":
        raise ClickHouseError.unavailable("KILL QUERY")
    if in_session and _MAKES_A_SESSION.match(canonical):
        raise ClickHouseError.unavailable("a session")
    if "\nINTO OUTFILE " in canonical:
        raise ClickHouseError.of(ErrorCode.INTO_OUTFILE_NOT_ALLOWED, "INTO OUTFILE is not allowed")
    clause = _FORMAT.search(canonical)
    if clause is not None and clause["gap"] == " " and "INSERT INTO " not in canonical:
        clause = None  # ORDER BY format ASC
    if keyword in _WITH_ROWS:
        if clause is None:
            return Statement(
                keyword, f"{canonical}\nINTO OUTFILE ", f" APPEND\nFORMAT {default_format}", default_format
            )
        text = canonical[: clause.start("gap")]
        format_clause = f" APPEND\nFORMAT {clause['name']}{clause['after'] or ''}"
        return Statement(keyword, f"{text}\nINTO OUTFILE ", format_clause, clause["name"])
    if keyword == "INSERT" and clause is not None:
        if has_data:
            return Statement(keyword, f"{canonical[: clause.start()]}\nFROM INFILE ", clause[0], clause["name"])
        if "SELECT" not in canonical:
            raise ClickHouseError.unavailable(
                "this form of INSERT (INSERT INTO table (columns) FORMAT name is one that it has)"
            )
    return Statement(keyword, canonical, "", default_format)
