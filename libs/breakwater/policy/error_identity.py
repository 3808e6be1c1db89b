"""The identity of an error: texts that differ only in what varies from call to call are the same error.

Source: seed 002, "Error Hashing and Deduplication". Its steps are done in another order here, because its own example
needs it. Lower case comes first: last, it would lower the tokens too, and they are told from the text by being upper
case. Frames and hex come before digits, which are parts of both. On top of the seed, this takes out ids, query strings
and the length of a wait, without which the same error of a model provider would hardly ever come twice.

Every pattern takes time linear in the text, as providers and programs write it: quantifiers are possessive, bounded, or
stop where the next attempt begins; and an attempt begins at a line's or a word's edge.
"""

from __future__ import annotations

import hashlib
import re

MAX_LENGTH = 500
"""Characters of a normal form."""

MAX_END = 16_000
"""Characters that are read from each end of a longer text.

Most languages put the error before its stack, Python puts it after, so both ends count. The middle is taken for stack:
a cause that stands there, as Java has them, says nothing.
"""

_LONG_LINE = 1_000

_REST_OF_FRAME = re.compile(r"(?:(?![ \t|]*+(?:file \"|at ))[ \t|].*+\n?+)*+")
_PLACE_IN_GO = re.compile(r"[ \t]++\S+\.(?:go|s):\d")
_ESCAPED_LINES = re.compile(r"\\n(?:[ ]{2}|\\t)")
_ESCAPE = re.compile(r"\\([nrt\"'\\])")
_ESCAPED = {"n": "\n", "r": "\n", "t": "\t"}

_UNLOCATED = r"<anonymous>|native|native\ method|unknown\ source|index\ \d+"
_FRAMES = tuple(
    re.compile(pattern, re.MULTILINE | re.VERBOSE)
    for pattern in (
        # Python: the frame's own line and the source that is indented further; `|` is the gutter of exception groups.
        r"""^(?P<indent>[ \t|]*+)file\ "[^"\n]*+",\ line\ \d+.*+(?:\n(?P=indent)[ \t|].*+)*+""",
        r"""\bfile\ "[^"\n]{0,500}",\ line\ \d+,\ in\ [^\s]++""",
        r"""\+\ exception\ group\ traceback\ \(most\ recent\ call\ last\):""",
        r"""traceback\ \(most\ recent\ call\ last\):""",
        r"""^[ \t|]*+\[previous\ line\ repeated\ \d+\ more\ times?\]""",
        # JavaScript, Java, .NET: a line that ends with a place in a file or has arguments; `{` opens Node's properties,
        # `~[…]` is the jar. The first line is no frame as a whole: a message may follow there.
        rf"""(?<=\n)[ \t|]*+at[ \t]
             [^\n]*(?: :(?:line\ )?\d+\)* | \((?:{_UNLOCATED})\) | [^\s(]\([^()\n]*+\) )
             (?:\ \{{|\ ~?\[[^\]\n]{{0,200}}\])?[ \t\r]*$""",
        # The same within a line, where the place must show: "at noon (in UTC)" and "at 10:42:15" are no frames.
        rf"""\bat\s++(?:(?:async|new)\s++)*+[^\s()]++(?:\s\[as\s[^\]\s]++\])?+\s*+
             \((?: [^()\n]*:\d+ | {_UNLOCATED} )\)""",
        r"""\bat\s++(?:async\s++)?+(?=[^\s()]*?(?:[/\\>]|\.[a-z]))[^\s()]+:\d+:\d+\b""",
        r"""^[ \t]*+\.\.\.\ \d+\ (?:more|common\ frames\ omitted)\b""",
        # Go: a function with the indented place after it.
        r"""^goroutine\ \d+\ .*:[ \t\r]*$""",
        r"""^(?:created\ by\ .*+|[^\s(]++(?:\(.*+)?+)\n[ \t]++\S+\.(?:go|s):\d+.*+""",
        # Ruby: `file:line:in 'method'`, the oldest call with a number before it.
        r"""(?<!\S)(?:\d++:\s++)?+(?:from\s++)?+\S+:\d+:in\s[`'][^`'\n]*+'""",
        # PHP, gdb.
        r"""^\#\d++\ .*+""",
    )
)
_ADJACENT_FRAMES = re.compile(r"STACK(?:[ ,;|]*+STACK)++")

# What ends a sentence or is around an address is no part of it.
_OF_QUERY = r"(?:[^\s\"'<>()`.,:;!]++|[.,:;!]++(?=[^\s\"'<>()`.,:;!]))*+"
_URL = re.compile(rf"(://[^\s\"'<>()`?#]*+)(?:[?#]{_OF_QUERY})?+")
_QUERY_OF_PATH = re.compile(rf"\?[\w.%\[\]-]{{1,100}}={_OF_QUERY}")

_HEX = re.compile(
    r"""\b0x[0-9a-f]++
      | (?<![a-z0-9])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![a-z0-9])
      | (?<=[a-z0-9;]@)[0-9a-f]{6,8}(?![a-z0-9]|\.[a-z])   # the identity hash of a Java object
    """,
    re.VERBOSE,
)
_HEX_WORD = re.compile(r"(?<![a-z0-9])[0-9a-f]{8,}+(?![a-z0-9])")
_MIXED = re.compile(r"[0-9][a-f]++[0-9]|[a-f][0-9]++[a-f]")

# One number, so that a wait of 2 s and one of 1.998 s are the same; so are lists, versions and IPv4 addresses.
_NUMBER = re.compile(r"\d++(?:[.,]\d++)*+")
_DURATION = re.compile(r"(?<![\w-])(?:N(?:[mnuµ]s|[smhd]))++(?!\w)")
_LONG_WORD = re.compile(r"(?<![a-zA-Z])[a-zN]{16,}+(?![A-Z])")


def error_identity(text: str) -> str:
    """The 8 hex digits by which an error is counted: the start of the MD5 of its normal form.

    Args:
        text: what the provider or the program said, of any length.
    """
    # Halves of surrogate pairs come out of JSON and have no UTF-8.
    data = normalised(text).encode("utf-8", "surrogatepass")
    return hashlib.md5(data, usedforsecurity=False).hexdigest()[:8]


def normalised(text: str) -> str:
    """An error's text without what varies: lower case but for the tokens, single blanks, at most 500 characters.

    - `STACK`: stack frames of Python, JavaScript, Java, .NET, Go, Ruby and PHP, any number in a row. Where a
      trace has its line breaks as escapes, as JSON within JSON has, these are read.
    - `HEX`: hexadecimal numbers, UUIDs, hashes, addresses, and the random part of ids: `req_011CSHoE…` is `req_HEX`.
    - `N`: numbers, with decimals and separators, and durations with their units: `1.998s`, `860ms` and `6m0s`.

    Queries and fragments of URLs are left out; hosts and paths stay. Of a text longer than 32 000 characters, both ends
    are read, as whole lines where it has lines.

    Args:
        text: what the provider or the program said. Not a normal form, whose tokens would be lowered.
    """
    text = text.replace("\r\n", "\n")
    if _ESCAPED_LINES.search(text):
        text = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text)
    text = _both_ends(text.lower())
    for frame in _FRAMES:
        text = frame.sub("STACK", text)
    text = " ".join(text.split())
    text = _ADJACENT_FRAMES.sub("STACK", text)
    text = _QUERY_OF_PATH.sub("", _URL.sub(r"\1", text))
    text = _HEX_WORD.sub(_hex_word, _HEX.sub("HEX", text))
    text = _DURATION.sub("N", _NUMBER.sub("N", text))
    text = _LONG_WORD.sub(_long_word, text)
    return text[:MAX_LENGTH].strip()


def _both_ends(text: str) -> str:
    if len(text) <= 2 * MAX_END:
        return text
    # Half of a frame is none: the head ends with a line, but where that would cost more than a frame is long.
    cut = text.rfind("\n", MAX_END - _LONG_LINE, MAX_END)
    if _PLACE_IN_GO.match(text, cut + 1):
        cut = text.rfind("\n", MAX_END - _LONG_LINE, cut)
    head = text[: cut if cut >= 0 else MAX_END]
    # A text of one line has its error in front. The tail may begin within a frame, whose other lines are indented.
    _, _, tail = text[-MAX_END:].partition("\n")
    return f"{head}\nSTACK\n{_REST_OF_FRAME.sub('', tail, count=1)}"


def _hex_word(found: re.Match[str]) -> str:
    # Letters and digits must alternate, or a number with a unit, or a name with a number, would be hex once it is long.
    return "HEX" if _MIXED.search(found[0]) else found[0]


def _long_word(found: re.Match[str]) -> str:
    # Numbers are one letter by now, so their lengths decide nothing. Names have numbers too, but few but for the one
    # at the end, and seldom a prefix as ids have.
    prefixed = found.string[found.start() - 1 : found.start()] in ("_", "-")
    numbers = found[0].rstrip("N").count("N")
    return "HEX" if numbers >= (1 if prefixed else 3) else found[0]
