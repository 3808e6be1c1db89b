"""Regular expressions that users write, and names of fields in any spelling."""

from __future__ import annotations

import re
from typing import Any, cast

import re2

Pattern = re.Pattern[bytes]
"""A pattern of RE2, whose wrapper has the interface of `re`, and no types."""

SEPARATORS = b"-_. "
"""The bytes that separate words in a name."""


def squash_name(name: str) -> bytes:
    """Returns the common form of a name's spellings: `apiKey`, `Api-Key` and `API_KEY` are all `apikey`."""
    return name.lower().encode(errors="surrogatepass").translate(None, SEPARATORS)


def re2_options() -> re2.Options:
    """Returns the options of all patterns."""
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # only the whole match is asked for, which RE2's automata find fastest
    return options


MAX_PROGRAM = 2_000
"""The largest user pattern, in RE2's instructions.

When RE2 must simulate them, as for `(a|b)*a(a|b){250}c`, whose automaton would not fit into memory, the time is
proportional to their number.
"""

_PROBES_FOR_NOTHING = (b"", b"\x00", b"\x00\x00", b"\x00 \x00\n\x00", b"\x00a\x00", b"0", b"aa", b"_ _", b"\n\n")

_LARGE = "lower its {{counts}}, or use + and * in their place"

_REFUSALS = {
    r"invalid perl operator: (\(\?[=!<].*)": "looks around, with {1}, which RE2 can't; match the surroundings, too, or "
    "mark an edge by \\b",
    r"invalid escape sequence: \\[1-9]|.*\(\?P": "refers back to a group, which RE2 can't; write out what is repeated",
    r"invalid escape sequence: \\Z": "has \\Z, which is \\z in RE2",
    r".*(?:too large|repetition size).*": "is too large ({0}); " + _LARGE,
    ".*": "is not a regular expression of RE2's syntax: {0}",
}
"""RE2's error messages, and the problems in our words."""


def compile_user_pattern(pattern: str) -> tuple[Pattern, Pattern]:
    """Compiles a user's pattern, for single texts and for many texts that are joined by line breaks.

    Raises:
        ValueError: RE2 refuses the pattern, it is too large, or it matches the empty text; the message says what to do.
    """
    # In joined texts, the edge of a text is that of a line. Additional matches there are checked on the single text.
    in_lines = "(?m)" + re.sub(r"(?s)\\(.)", lambda escape: {"A": "^", "z": "$"}.get(escape[1], escape[0]), pattern)
    try:
        alone, together = (cast(Pattern, re2.compile(form.encode(), re2_options())) for form in (pattern, in_lines))
    except UnicodeEncodeError as error:
        raise ValueError(f"{pattern!r} is not a regular expression: it has half of a character") from error
    except re2.error as error:
        re2_message = cast(bytes, error.args[0]).decode(errors="replace")
        candidates = ((re.fullmatch(words, re2_message, re.DOTALL), refusal) for words, refusal in _REFUSALS.items())
        match, refusal = next((match, refusal) for match, refusal in candidates if match is not None)
        raise ValueError(f"{pattern!r} {refusal.format(match[0], *match.groups())}") from error
    if program_size(alone) > MAX_PROGRAM:
        raise ValueError(f"{pattern!r} is too large; {_LARGE.format()}")
    if re.search(r"\(\?[a-zA-Z]*-[a-zA-Z]*m", pattern):
        raise ValueError(f"{pattern!r} switches the flag m off, which it is anyway; leave that out")
    if any(match.start() == match.end() for probe in _PROBES_FOR_NOTHING for match in alone.finditer(probe)):
        raise ValueError(f"{pattern!r} also matches where there is nothing to hide; write + for *, and leave out ?")
    return alone, together


def program_size(pattern: Pattern) -> int:
    """Returns the number of a pattern's instructions."""
    return cast(Any, pattern).programsize
