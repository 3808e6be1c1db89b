"""Reads what a document shows: code blocks, code in a line, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
ADRS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (
    README,
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "attacks.md",
    ROOT / "docs" / "adr" / "README.md",
    *ADRS,
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block, and the line of the document where it begins."""

    language: str
    text: str
    line: int


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 1) for found in _FENCE.finditer(text)]


def prose(document: Path) -> str:
    """The document without its code blocks."""
    return _FENCE.sub("", document.read_text())


def inline_code(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


def all_code(document: Path) -> list[str]:
    """Every line of code that the document shows, in blocks and in its text."""
    return [line for block in blocks(document) for line in block.text.splitlines()] + inline_code(document)


def links(document: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))


def headings(document: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)


def section(document: Path, heading: str) -> str:
    """The text under a heading of the second level, in one line, so that line breaks do not matter."""
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{document.name} has no section {heading!r}"
    return " ".join(found[1].split())


def rows(document: Path, heading: str) -> list[tuple[str, ...]]:
    """The rows of all tables that begin with a header cell of that text."""
    found: list[tuple[str, ...]] = []
    inside = False
    for line in prose(document).splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else ()
        if not cells:
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside and not _is_ruler(cells):
            found.append(cells)
    return found


def _is_ruler(cells: Iterable[str]) -> bool:
    return all(set(cell) <= set("-:") for cell in cells)
