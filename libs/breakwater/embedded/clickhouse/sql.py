"""What a request's text asks for: rows, an insert with its data, or anything else.

The engine parses SQL; this only finds the few words that decide how a statement is driven: where an INSERT's data
begins, and where a SELECT's FORMAT stands, so that the way out (`INTO OUTFILE`) can be put in front of it.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from breakwater.embedded.clickhouse.errors import ClickHouseError, Code

_TOKEN = re.compile(
    rb"""
      (?P<skip>  \s+ | --[^\n]* | \#[ !][^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<word>  [A-Za-z_][A-Za-z0-9_$]* )
    | (?P<other> '(?:[^'\\]|\\.|'')*'? | "(?:[^"\\]|\\.|"")*"? | `(?:[^`\\]|\\.|``)*`?
               | \$(?P<tag>[A-Za-z0-9_]*)\$.*?\$(?P=tag)\$ | [0-9][A-Za-z0-9_]* | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_DATA_START = re.compile(rb"[ \t]*(?:\r?\n)?")
_LITERAL = rb"(?:'(?:[^'\\]|\\.)*'|[\w.+-]+)"
_SETTINGS = re.compile(rb"\s+SETTINGS\s+\w+\s*=\s*%b(?:\s*,\s*\w+\s*=\s*%b)*" % (_LITERAL, _LITERAL), re.IGNORECASE)

_GIVES_ROWS = {b"SELECT", b"WITH", b"FROM", b"SHOW", b"DESCRIBE", b"DESC", b"EXISTS", b"EXPLAIN", b"CHECK"}


@dataclass(frozen=True, slots=True)
class ResultQuery:
    """A statement with a result: the text before its FORMAT clause, the format's name, the text after it."""

    before: bytes
    format: str | None
    after: bytes


@dataclass(frozen=True, slots=True)
class Insert:
    """An INSERT whose data comes with the request.

    Attributes:
        target: the statement without its settings, FORMAT or VALUES.
        settings: its SETTINGS clause, or nothing.
        format: the input format, `Values` for VALUES.
        data_at: where in the text the data begins.
    """

    target: bytes
    settings: bytes
    format: str
    data_at: int


@dataclass(frozen=True, slots=True)
class Command:
    """Anything else, with its leading keyword in upper case."""

    text: bytes
    keyword: bytes


Statement = ResultQuery | Insert | Command


@dataclass(frozen=True, slots=True)
class _Token:
    word: bytes  # upper case; empty for what is not a word
    text: bytes
    start: int
    end: int
    depth: int


def _tokens(sql: bytes) -> Iterator[_Token]:
    depth = 0
    for found in _TOKEN.finditer(sql):
        if found.lastgroup == "skip":
            continue
        text = found.group()
        if text in (b")", b"]", b"}"):
            depth -= 1
        word = text.upper() if found.group("word") is not None else b""
        yield _Token(word, text, found.start(), found.end(), depth)
        if text in (b"(", b"[", b"{"):
            depth += 1


def read_insert(sql: bytes) -> Insert | None:
    """Find the INSERT that a text begins with, even when the rest of it has not arrived.

    Args:
        sql: the text so far.

    Returns:
        The insert, or None: another statement, an INSERT … SELECT, or its FORMAT is not in sight yet.

    Raises:
        ClickHouseError: the data would come from a file of the server.
    """
    tokens = _tokens(sql)
    first = next(tokens, None)
    if first is None or first.word != b"INSERT":
        return None
    before, settings_at = first, 0
    for token in tokens:
        if token.depth == 0:
            if token.word == b"SETTINGS" and before.word not in (b"INTO", b"TABLE") and before.text != b".":
                settings_at = token.start
            if token.word in (b"SELECT", b"WITH"):
                return None
            if token.word == b"INFILE" and before.word == b"FROM":
                raise ClickHouseError.of(
                    Code.UNKNOWN_TYPE_OF_QUERY, "FROM INFILE reads a file of the client, not over HTTP"
                )
            if token.word == b"VALUES" and before.word not in (b"INTO", b"TABLE"):
                ends = settings_at or token.start
                return Insert(sql[first.start : ends], sql[ends : token.start], "Values", token.end)
            if before.word == b"FORMAT" and token.word:
                ends = settings_at or before.start
                return _with_format(sql, sql[first.start : ends], sql[ends : before.start], token)
        before = token
    return None


def _with_format(sql: bytes, target: bytes, settings: bytes, name: _Token) -> Insert:
    after = _SETTINGS.match(sql, name.end)
    end = name.end
    if after is not None:  # allowed on either side of FORMAT
        settings, end = after.group(), after.end()
    start = _DATA_START.match(sql, end)
    return Insert(target, settings, name.text.decode(), start.end() if start is not None else end)


def read_statement(sql: bytes) -> Statement:
    """Say how a complete text has to be driven.

    Args:
        sql: the whole text of a request.

    Returns:
        ResultQuery, Insert or Command.

    Raises:
        ClickHouseError: empty, more than one statement, or writing or reading a file of the server.
    """
    insert = read_insert(sql)
    if insert is not None:
        return insert
    tokens = list(_tokens(sql))
    body = _without_end(tokens)
    if not body:
        raise ClickHouseError.of(Code.SYNTAX_ERROR, "Empty query")
    text = sql[: body[-1].end]
    top = [token for token in body if token.depth == 0]
    leading = next((token.word for token in body if token.text != b"("), b"")
    if leading == b"INSERT" and any(a.word == b"INPUT" and b.text == b"(" for a, b in itertools.pairwise(body)):
        raise ClickHouseError.of(
            Code.NOT_IMPLEMENTED, "INSERT … SELECT FROM input() is not available here: insert into the table itself"
        )
    if leading == b"WITH" and any(token.word == b"INSERT" for token in top):
        leading = b"INSERT"
    if leading not in _GIVES_ROWS:
        return Command(text, leading)
    if any(a.word == b"INTO" and b.word == b"OUTFILE" for a, b in itertools.pairwise(top)):
        raise ClickHouseError.of(Code.INTO_OUTFILE_NOT_ALLOWED, "INTO OUTFILE is not allowed")
    for index in range(len(top) - 2, 0, -1):
        clause, name = top[index], top[index + 1]
        ends = index + 2 == len(top) or top[index + 2].word == b"SETTINGS"
        if clause.word == b"FORMAT" and name.word and ends:
            return ResultQuery(sql[: clause.start], name.text.decode(), text[name.end :])
    return ResultQuery(text, None, b"")


def _without_end(tokens: list[_Token]) -> list[_Token]:
    for index, token in enumerate(tokens):
        if token.text == b";":
            if any(later.text != b";" for later in tokens[index:]):
                raise ClickHouseError.of(
                    Code.SYNTAX_ERROR,
                    f"Syntax error (Multi-statements are not allowed): failed at position {token.start + 1}"
                    " (end of query): ;",
                )
            return tokens[:index]
    return tokens
