"""Markdown of agents and models as HTML that can do nothing: no HTML of theirs, no images, links only to other hosts.

What a text says must be on the page, also where its author would hide it: destinations of links are named, definitions
of links stay text, and what Markdown would take too long for, or would leave out as nested too deep, is no Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

MAX_CHARACTERS = 20_000
"""Of a text. A longer one is read as it is."""
MAX_BRACKETS = 300
MAX_CELLS = 2_000
MAX_TOKENS = 10_000
"""Parsing takes time in the square of the first two: at these limits, a fifth of a second at most."""
_NESTING = 20
_SCHEMES = ("http", "https", "mailto")


def markdown(text: str) -> Markup | None:
    """A text as HTML; None where it is to be shown as it is.

    Args:
        text: made `visible`.
    """
    if len(text) > MAX_CHARACTERS or text.count("[") > MAX_BRACKETS or _cells(text) > MAX_CELLS:
        return None
    tokens = _PARSER.parse(text)
    # What is nested deeper is left out of the tokens, without a word.
    if len(tokens) > MAX_TOKENS or any(token.level >= _NESTING - 1 for token in tokens):
        return None
    return Markup(_PARSER.renderer.render(tokens, _PARSER.options, {}))  # noqa: S704  this module's own markup


def _cells(text: str) -> int:
    """Of the tables in a text, at most: rows are filled up to the width of the first."""
    lines = [line.count("|") for line in text.split("\n") if "|" in line]
    return max(lines, default=0) * len(lines)


def _heading_open(tokens: Sequence[Token], at: int) -> str:
    return f"<h{_below(tokens[at])}>"


def _heading_close(tokens: Sequence[Token], at: int) -> str:
    return f"</h{_below(tokens[at])}>\n"


def _table_open(_tokens: Sequence[Token], _at: int) -> str:
    return '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>\n'


def _table_close(_tokens: Sequence[Token], _at: int) -> str:
    return "</table></div>\n"


def _cell_open(tokens: Sequence[Token], at: int) -> str:
    # The library has alignment in a style attribute, which the page's policy refuses.
    token = tokens[at]
    return f'<{token.tag} class="right">' if "right" in str(token.attrs.get("style", "")) else f"<{token.tag}>"


def _code(tokens: Sequence[Token], at: int) -> str:
    language = tokens[at].info.strip()
    name = f'<span class="language">{escape(language)}</span>' if language else ""
    return f'{name}<pre tabindex="0"><code>{escape(tokens[at].content)}</code></pre>\n'


def _link_open(tokens: Sequence[Token], at: int) -> str:
    return f'<a href="{escape(tokens[at].attrs["href"])}" rel="noopener noreferrer nofollow">'


def _link_close(tokens: Sequence[Token], at: int) -> str:
    opened = next(index for index in range(at, -1, -1) if tokens[index].type == "link_open")
    address = str(tokens[opened].attrs["href"])
    said = "".join(token.content for token in tokens[opened:at])
    host = urlsplit(address).hostname or address.removeprefix("mailto:")
    return "</a>" if said in (address, host) else f'</a> <span class="faint small">({escape(host)})</span>'


def _image(tokens: Sequence[Token], at: int) -> str:
    token = tokens[at]
    name, address = (f": {text}" if text else "" for text in (token.content, str(token.attrs["src"])))
    return f'<span class="media">image{escape(name)}, not loaded{escape(address[:200])}</span>'


def _below(token: Token) -> int:
    """The level of a heading: below those of the page."""
    return min(int(token.tag[1:]) + 3, 6)


def _may_be_linked(address: str) -> bool:
    """Whether a link is one: not into the console, which the reader is signed in to, nor to scripts."""
    try:
        found = urlsplit(address.strip())
    except ValueError:
        return False
    return found.scheme in _SCHEMES and (bool(found.hostname) or found.scheme == "mailto")


class _Parser(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802  the library's name
        return _may_be_linked(url)


def _parser() -> MarkdownIt:
    parser = _Parser("js-default", {"html": False, "breaks": True, "maxNesting": _NESTING})
    parser.disable("reference")
    for name, write in _WRITTEN.items():
        parser.add_render_rule(name, _as_rule(write))
    return parser


def _as_rule(write: _Write) -> Callable[..., str]:
    """As the library calls it: also with its renderer, its options and the environment, which nothing here needs."""

    def rule(_renderer: object, tokens: Sequence[Token], at: int, *_: object) -> str:
        return write(tokens, at)

    return rule


_Write = Callable[[Sequence[Token], int], str]
_WRITTEN: Mapping[str, _Write] = {
    "heading_open": _heading_open,
    "heading_close": _heading_close,
    "table_open": _table_open,
    "table_close": _table_close,
    "th_open": _cell_open,
    "td_open": _cell_open,
    "fence": _code,
    "code_block": _code,
    "link_open": _link_open,
    "link_close": _link_close,
    "image": _image,
}
"""What is not written as the library does it, by the kind of the token."""
_PARSER = _parser()
