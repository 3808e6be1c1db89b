"""The two places where a file's name is put into a client's statement: for an INSERT's data, and for a result.

The engine parses SQL: a statement is taken as its `formatQuery` writes it, without comments, and each clause on a line
of its own. Only where the data behind an INSERT begins is found here, as data is no SQL.
"""

import re
from dataclasses import dataclass

from breakwater.embedded.clickhouse.errors import ClickHouseError, Code, unavailable

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
_ROWS = frozenset({"CHECK", "DESCRIBE", "EXISTS", "EXPLAIN", "SELECT", "SHOW", "WITH"})
_MAKES_A_SESSION = re.compile(r"SET|USE|CREATE TEMPORARY")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, and where it names the file that the engine writes its result to, or reads its data from.

    Attributes:
        keyword: its first word.
        before: its text up to the file's name.
        after: the text after that; nothing where there is no file.
        format: of the file.
    """

    keyword: str
    before: str
    after: str
    format: str

    @property
    def has_result(self) -> bool:
        """Whether it gives rows, though perhaps none."""
        return self.keyword in _ROWS

    def text(self, file: str) -> str:
        """Write it with the literal of its file."""
        return f"{self.before}{file}{self.after}" if self.after else self.before


def find_data(text: bytes) -> int:
    """Say where the data begins in a text that is an INSERT with its data; 0 for any other."""
    found = _INSERT.match(text)
    return found.end() if found is not None else 0


def read_statement(canonical: str, default_format: str, *, in_session: bool, has_data: bool) -> Statement:
    """Read a statement.

    Args:
        canonical: the statement, without data, as the engine's `formatQuery` writes it.
        default_format: where it names none.
        in_session: what it sets is meant for later requests, too.
        has_data: there is data for it.

    Raises:
        ClickHouseError: NOT_IMPLEMENTED, INTO_OUTFILE_NOT_ALLOWED.
    """
    first = re.search(r"[A-Z]+", canonical)
    keyword = first[0] if first is not None else ""
    if keyword == "KILL":
        raise unavailable("KILL QUERY")
    if in_session and _MAKES_A_SESSION.match(canonical):
        raise unavailable("a session")
    if "\nINTO OUTFILE " in canonical:
        raise ClickHouseError.of(Code.INTO_OUTFILE_NOT_ALLOWED, "INTO OUTFILE is not allowed")
    clause = _FORMAT.search(canonical)
    if clause is not None and clause["gap"] == " " and "INSERT INTO " not in canonical:
        clause = None  # ORDER BY format ASC
    if keyword in _ROWS:
        text, name, after = canonical, default_format, ""
        if clause is not None:
            text, name, after = canonical[: clause.start("gap")], clause["name"], clause["after"] or ""
        return Statement(keyword, f"{text}\nINTO OUTFILE ", f" APPEND\nFORMAT {name}{after}", name)
    if keyword == "INSERT" and clause is not None:
        if has_data:
            return Statement(keyword, f"{canonical[: clause.start()]}\nFROM INFILE ", clause[0], clause["name"])
        if "SELECT" not in canonical:
            raise unavailable("this form of INSERT (INSERT INTO table (columns) FORMAT name is one that it has)")
    return Statement(keyword, canonical, "", default_format)
