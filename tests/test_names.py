"""One word, one thing: no public class name in two modules, and the field's terms instead of words of our own."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTEAD = {
    "attendance": "heartbeat",
    "attended": "alive",
    "bookkeeper": "reconciler",
    "books": "reconciliation",
    "by_hand": "operator_actions, isolated, ...",
    "door": "api_client, http_api",
    "gone": "disabled, deleted, missing, ...",
    "holding": "reservation",
    "holdings": "reservations",
    "letter": "dead_letter; an event, transition or response",
    "letters": "dead_letters",
    "patience": "outage, retry_while_unavailable",
    "posts": "sent_messages",
    "tell": "publish, notify, announce, report",
    "tells": "publishes, notifies, announces, reports",
    "told": "published, notified, announced, reported, event, transition, response, result",
    "usual": "baseline",
}
_FORBIDDEN = re.compile(rf"(?<![a-z])(?<!dead_)({'|'.join(INSTEAD)})(?![a-z])")


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """Each module of ours by its path, parsed."""
    files = (file for folder in ("libs", "services") for file in sorted((ROOT / folder).rglob("*.py")))
    return tuple((str(file.relative_to(ROOT)), ast.parse(file.read_text())) for file in files)


def names_given(tree: ast.Module) -> Iterator[str]:
    """The names that a module gives: of classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case _:
                pass


def words(name: str) -> set[str]:
    """The words of a name that are not the field's."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return set(_FORBIDDEN.findall(snake))


def test_the_words_of_a_name_are_found() -> None:
    assert words("was_told") == words("Told") == words("notToldYet") == {"told"}
    assert words("isolated_by_hand") == {"by_hand"}
    assert words("dead_letter_id") == words("DeadLetter") == words("doorway") == words("letterhead") == set()


def test_no_public_class_name_is_in_two_modules() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    doubles = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not doubles


def test_names_are_the_fields_terms() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees():
        for name in (*names_given(tree), *Path(path).with_suffix("").parts):
            found[path] |= {f"{name}: say {INSTEAD[word]}" for word in words(name)}
    assert not any(found.values()), {path: names for path, names in found.items() if names}
