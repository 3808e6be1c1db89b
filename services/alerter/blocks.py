"""A message as Slack takes it: escaped, and cut to Slack's limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.alerter.wording import Line, Told, Url, plain

SECTION_LENGTH = 3000
"""Characters that a section's text takes, after escaping."""
MOST_BLOCKS = 50
NOTICE_LENGTH = 3000
"""Of the text for notifications and screen readers. Slack takes 40,000 and advises 4,000."""
_TITLE_LENGTH = 1000

_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def slack_message(told: Told) -> dict[str, Any]:
    """The fields of a message that are the same for every way to post it."""
    title = f"*{_rendered(told.title, _TITLE_LENGTH)}*"
    texts = [title, *(text for lines in told.paragraphs for text in _packed(lines))]
    return {
        "text": escaped(plain(told), NOTICE_LENGTH),
        "blocks": [_section(text) for text in texts[:MOST_BLOCKS]],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def escaped(text: str, limit: int) -> str:
    """A text in which Slack reads no mention, link or entity, of at most `limit` characters."""
    whole = "".join(_ESCAPES.get(character, character) for character in text)
    if len(whole) <= limit:
        return whole
    kept: list[str] = []
    length = 1  # for the ellipsis
    for character in text:
        length += len(_ESCAPES.get(character, character))
        if length > limit:
            break
        kept.append(_ESCAPES.get(character, character))
    return f"{''.join(kept)}…" if limit > 0 else ""


def _packed(lines: tuple[Line, ...]) -> Iterator[str]:
    """Lines in as few sections as take them."""
    section = ""
    for line in lines:
        text = _rendered(line, SECTION_LENGTH)
        if section and len(section) + 1 + len(text) > SECTION_LENGTH:
            yield section
            section = text
        else:
            section = f"{section}\n{text}" if section else text
    if section.strip():
        yield section


def _rendered(line: Line, limit: int) -> str:
    text = ""
    for part in line:
        room = limit - len(text)
        text += escaped(part, room) if isinstance(part, str) else _link(part, room)
    return text


def _link(part: Url, room: int) -> str:
    # A bar would end the address, and half an address leads nowhere.
    url = escaped(part.url.replace("|", "%7C"), SECTION_LENGTH)
    if part.text == part.url:
        return f"<{url}>" if len(url) + 2 <= room else ""
    for_text = room - len(url) - 3
    return f"<{url}|{escaped(part.text, for_text)}>" if for_text > 0 else escaped(part.text, room)


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text, "verbatim": True}}
