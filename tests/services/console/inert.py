"""Checks that HTML can do nothing: no script, no style, nothing loaded, no link but to where it says."""

from html.parser import HTMLParser

ALLOWED: "dict[str, set[str]]" = {
    "a": {"href", "rel"},
    "div": {"class", "tabindex", "role", "aria-label"},
    "pre": {"tabindex"},
    "span": {"class"},
    "ol": {"start"},
    "th": {"class"},
    "td": {"class"},
}
"""Attributes that Markdown may have, by tag."""
PLAIN = {
    "p", "br", "h4", "h5", "h6", "ul", "li", "blockquote", "code", "em", "strong", "s", "hr", "table", "thead", "tbody",
    "tr",
}  # fmt: skip
SCHEMES = ("http://", "https://", "mailto:")


class Reader(HTMLParser):
    """What a browser would make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: "list[tuple[str, str | None]]") -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def check_markdown(html: str) -> Reader:
    """Of a text alone: nothing but what is allowed."""
    reader = read(html)
    for tag, attributes in reader.tags:
        assert tag in PLAIN or tag in ALLOWED, tag
        assert attributes.keys() <= ALLOWED.get(tag, set()), (tag, attributes)
        if tag == "a":
            assert attributes["href"].startswith(SCHEMES), attributes
            assert attributes["rel"] == "noopener noreferrer nofollow"
    return reader


def check_page(html: str) -> Reader:
    """Of a whole page: no script but ours, nothing inline, nothing from elsewhere, no link that runs."""
    reader = read(html)
    for tag, attributes in reader.tags:
        assert tag not in {"iframe", "object", "embed", "style", "base", "video", "audio", "source"}, tag
        assert not any(name.startswith("on") or name in {"style", "srcdoc", "srcset"} for name in attributes), (
            attributes
        )
        if "src" in attributes:
            assert attributes["src"].startswith("/static/"), attributes
        if "href" in attributes and tag != "link":
            assert attributes["href"].startswith(("/", "#", "?", *SCHEMES)), attributes
            assert not attributes["href"].startswith("//"), attributes
    return reader
