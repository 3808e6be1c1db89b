"""Renders Markdown of agents and models as harmless HTML: without their HTML or images, with links to other hosts only.

Authors must not be able to hide a part of a text. So destinations of links are named, definitions of links stay text,
and a text that would take too long, or is nested too deep for the library, is not rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

MAX_CHARACTERS = 20_000
"""Maximum length of a text that is rendered."""
MAX_BRACKETS = 300
MAX_CELLS = 2_000
MAX_TOKENS = 10_000
"""The time of parsing grows with the square of brackets and cells; within these limits it is a fifth of a second."""
_NESTING = 20
_SCHEMES = ("http", "https", "mailto")


def markdown(text: str) -> Markup | None:
    """Renders a text, which must be `visible`, as HTML; None if it exceeds a limit and is shown as plain text."""
    if len(text) > MAX_CHARACTERS or text.count("[") > MAX_BRACKETS or _cells(text) > MAX_CELLS:
        return None
    tokens = _PARSER.parse(text)
    # The library silently omits what is nested deeper.
    if len(tokens) > MAX_TOKENS or any(token.level >= _NESTING - 1 for token in tokens):
        return None
    return Markup(_PARSER.renderer.render(tokens, _PARSER.options, {}))  # noqa: S704  this module's own markup


def _cells(text: str) -> int:
    """An upper bound of the cells of a text's tables, whose rows are filled up to the width of the first row."""
    lines = [line.count("|") for line in text.split("\n") if "|" in line]
    return max(lines, default=0) * len(lines)


def _cell_open(token: Token) -> str:
    # The library writes the alignment in a style attribute, which the page's security policy refuses.
    return f'<{token.tag} class="right">' if "right" in str(token.attrs.get("style", "")) else f"<{token.tag}>"


def _code(token: Token) -> str:
    language = token.info.strip()
    name = f'<span class="language">{escape(language)}</span>' if language else ""
    return f'{name}<pre tabindex="0"><code>{escape(token.content)}</code></pre>\n'


def _image(token: Token) -> str:
    name, address = (f": {text}" if text else "" for text in (token.content, str(token.attrs["src"])))
    return f'<span class="media">image{escape(name)}, not loaded{escape(address[:200])}</span>'


def _link_close(_renderer: object, tokens: Sequence[Token], closing: int, *_: object) -> str:
    opening = next(index for index in range(closing, -1, -1) if tokens[index].type == "link_open")
    address = str(tokens[opening].attrs["href"])
    link_text = "".join(token.content for token in tokens[opening:closing])
    host = urlsplit(address).hostname or address.removeprefix("mailto:")
    return "</a>" if link_text in (address, host) else f'</a> <span class="faint small">({escape(host)})</span>'


def _level(token: Token) -> int:
    """The level of a heading: below those of the page."""
    return min(int(token.tag[1:]) + 3, 6)


_RENDERERS: Mapping[str, Callable[[Token], str]] = {
    "heading_open": lambda token: f"<h{_level(token)}>",
    "heading_close": lambda token: f"</h{_level(token)}>\n",
    "table_open": lambda _: '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>\n',
    "table_close": lambda _: "</table></div>\n",
    "th_open": _cell_open,
    "td_open": _cell_open,
    "fence": _code,
    "code_block": _code,
    "link_open": lambda token: f'<a href="{escape(token.attrs["href"])}" rel="noopener noreferrer nofollow">',
    "image": _image,
}
"""Renderers that replace those of the library, by the type of token."""


def _rule(write: Callable[[Token], str]) -> Callable[..., str]:
    def rule(_renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
        return write(tokens[index])

    return rule


class _Parser(MarkdownIt):
    def __init__(self) -> None:
        super().__init__("js-default", {"html": False, "breaks": True, "maxNesting": _NESTING})
        self.disable("reference")
        for name, write in _RENDERERS.items():
            self.add_render_rule(name, _rule(write))
        self.add_render_rule("link_close", _link_close)

    def validateLink(self, url: str) -> bool:  # noqa: N802  the library's name
        """Refuses scripts, and links into the console, where the reader is signed in."""
        try:
            parts = urlsplit(url.strip())
        except ValueError:
            return False
        return parts.scheme in _SCHEMES and (bool(parts.hostname) or parts.scheme == "mailto")


_PARSER = _Parser()
