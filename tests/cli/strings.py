"""Prints every string that people read: help texts, messages, labels and texts of pages: `python -m tests.cli.strings`.

Each is printed with its file and line; {…} replaces a value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.syntax import nodes_of

_WORDS = re.compile(r"[A-Za-z]{2,}[^\n]* \S*[a-z]{2,}|[a-z]{2,} \{…\}|[A-Z][a-z]{2,}")
_CODE = re.compile(
    r"\(\?|\\[bswdWSD.]|^\s*(?:SELECT|INSERT|CREATE|ALTER|DROP|WITH|FROM|WHERE|GRANT|AND|OR)\b|^[\w.-]+/[\w.+-]+$"
    r"|^[A-Z]\w*(?:Error|Handler|Middleware)$|^[A-Z][A-Za-z]+(?:-[A-Z]\w+)+$|^[A-Z][a-z]+[A-Z]\w*$"
    r"|\{\w+:[A-Z]\w+|\bU?Int\d|\bFloat64|^(?:String|Bool|Decimal|Array|Map|Nullable|Replicated)\b|LowCardinality|DB::"
    r"|DateTime64|\bredis\.call|^-- "
)
"""Patterns, SQL and its types, names of classes and of headers, content types."""
_COMMAND = re.compile(r"typer\.|\w+Option\b|: Api\b|\.command\(")
"""Arguments and decorators of a command of the command line."""
_SHOWN_ATTRIBUTES = {"title", "aria-label", "placeholder", "alt", "data-confirm", "value"}
_IGNORED_CALLS = {"compile", "getattr", "cast", "TypeVar", "Literal", "NewType", "import_module", "assert_never"}


class ShownString(NamedTuple):
    """A string that people read, and where it is written."""

    path: str
    line: int
    text: str
    """One line; `{…}` in place of a value."""


def strings() -> list[ShownString]:
    """All of them, by file and line."""
    found: list[ShownString] = []
    for name in ("breakwater", "services"):
        spec = find_spec("breakwater.services" if name == "services" else name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*")):
            read = {".py": _of_python, ".html": _of_template}.get(path.suffix)
            if read is not None:
                shown = f"{name}/{path.relative_to(folder).as_posix()}"
                found += [ShownString(shown, line, text) for line, text in read(path.read_text(encoding="utf-8"))]
    return found


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    lines = source.splitlines()
    nodes = nodes_of(source)
    ignored = set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.body:
                if not _is_help(node, lines):
                    _ignore_docstring(node.body, ignored)
                for before, after in zip(node.body, node.body[1:], strict=False):
                    if isinstance(before, ast.Assign | ast.AnnAssign):  # an attribute's docstring
                        _ignore_docstring([after], ignored)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _IGNORED_CALLS:
                ignored.update(ast.walk(node))
            case ast.JoinedStr():
                ignored.update(part for part in ast.walk(node) if isinstance(part, ast.Constant))
            case ast.Subscript(value=ast.Name(id="Literal")) | ast.Subscript(slice=ast.Constant()):
                ignored.update(ast.walk(node.slice))
            case _:
                pass
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in ignored:
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "{…}" for one in node.values)
        else:
            continue
        if _WORDS.search(text) and not _CODE.search(text):
            yield node.lineno, " ".join(text.split())


def _is_help(node: ast.AST, lines: list[str]) -> bool:
    """True for a command of the command line, whose docstring is its help."""
    if not isinstance(node, ast.FunctionDef):
        return False
    begins = min(part.lineno for part in (node, *node.decorator_list))
    return bool(_COMMAND.search("\n".join(lines[begins - 1 : node.body[0].lineno - 1])))


def _ignore_docstring(body: list[ast.stmt], ignored: set[ast.AST]) -> None:
    match body[0]:
        case ast.Expr(value=ast.Constant() as docstring):
            ignored.add(docstring)
        case _:
            pass


class _Page(HTMLParser):
    """The texts of a template, and the attributes that people see."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        for name, value in attrs:
            if value and name in _SHOWN_ATTRIBUTES:
                self.handle_data(value)

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if self.get_starttag_text() not in {"<script>", "<style>"} and re.search(r"[A-Za-z]{2,}", text):
            self.found.append((self.getpos()[0], text))


def _of_template(source: str) -> Iterator[tuple[int, str]]:
    # Line breaks stay, so that lines are numbered as in the file.
    def blank(found: re.Match[str], by: str = "") -> str:
        return by + "\n" * found[0].count("\n")

    source = re.sub(r"\{#.*?#\}|\{%.*?%\}", blank, source, flags=re.DOTALL)
    page = _Page()
    page.feed(re.sub(r"\{\{.*?\}\}", lambda found: blank(found, "{…}"), source, flags=re.DOTALL))
    yield from page.found


def print_all(shown_strings: Iterable[ShownString]) -> None:
    """Prints strings with their files and lines."""
    for shown in shown_strings:
        print(f"{shown.path}:{shown.line}: {shown.text}")


if __name__ == "__main__":
    print_all(strings())
