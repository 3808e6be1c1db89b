"""One word, one thing: no public class name in two modules, and the field's terms instead of words of our own."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
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

IN_PROSE = {
    r"told|tells?|telling": "reported, logged, notified, sent, published or returned; for `tell apart`: distinguish",
    r"usual": "baseline, standard, default or normal",
    r"anew": "again, rebuilt or recreated",
    r"by hand": "by an operator, manually",
    r"doors?": "the HTTP API, the API client",
    r"books": "the counters and the record, reconciliation",
    r"bookkeeper": "reconciler",
    r"(?<!dead )(?<!dead-)letters?": "dead letter",
    r"in work": "in progress",
    r"at once": "immediately, in parallel, in one go or simultaneously",
    r"besides?": "next to, in addition to, apart from",
    r"(?:some|any|no|every)body|whoever": "a person, callers, operators, anyone",
    r"in force": "effective",
    r"stands|stood": "is, are, means; `stalls` of a process",
}
_ANY_IN_PROSE = re.compile(rf"(?<![\w-])(?:{'|'.join(IN_PROSE)})(?![\w-])", re.IGNORECASE)
_IN_PROSE = tuple((re.compile(rf"(?<![\w-])(?:{word})(?![\w-])", re.IGNORECASE), say) for word, say in IN_PROSE.items())
_OF_THE_ALPHABET = re.compile(
    r"(Latin|lower-case|small|one|of the) letter|letters,? (and )?digits|letter of the", re.IGNORECASE
)
"""Where `letter` is one of the alphabet."""


_PUBLIC_CLASS = re.compile(r"^(?:class (?!_)(\w+)|([A-Z]\w*[a-z]\w*)(?:: TypeAlias)? = (?!TypeVar))", re.MULTILINE)
"""Classes and aliases of types; a type variable may be named like others."""

_QUESTION = re.compile(r"(?:What|Whether|How|That|Who|Whose|Which|Where|Why)\b")


def modules() -> Iterator[tuple[str, str]]:
    """Each module of ours: its path and its text."""
    for folder in ("libs", "services"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()


def names_given(text: str) -> Iterator[str]:
    """The names that a module gives: of classes, functions, arguments, variables and attributes."""
    if not words(text):  # as it is with most, which need not be parsed
        return
    for node in ast.walk(ast.parse(text)):
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
    """The words of a name, or of many in a text, that are not the field's."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return set(_FORBIDDEN.findall(snake))


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines that people read of a file, if it has any such word: of Python its comments and strings."""
    text = path.read_text()
    if not _ANY_IN_PROSE.search(text):  # as it is with most, which need not be taken apart
        return
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def private_words(line: str) -> Iterator[str]:
    """The words of a line of prose that are not the field's, with what to say instead."""
    for word, say in _IN_PROSE:
        for found in word.finditer(line):
            if "letter" in found[0].lower() and _OF_THE_ALPHABET.search(line):
                continue
            yield f"{found[0]!r}: say {say}"


def test_the_words_of_a_name_are_found() -> None:
    assert words("was_told") == words("Told") == words("notToldYet") == {"told"}
    assert words("isolated_by_hand") == {"by_hand"}
    assert words("dead_letter_id") == words("DeadLetter") == words("doorway") == words("letterhead") == set()


def test_no_public_class_name_is_in_two_modules() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in modules():
        for name, alias in _PUBLIC_CLASS.findall(text):
            places[name or alias].append(path)
    assert {"Alert", "KeyScope"} <= places.keys()
    doubles = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not doubles


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes, functions and attributes, each with its line."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    yield statement.lineno, docstring
                case _:
                    pass


def test_a_docstring_begins_with_its_subject() -> None:
    found = [
        f"{path}:{line}: {docstring.splitlines()[0]}"
        for path, text in modules()
        for line, docstring in docstrings(text)
        if _QUESTION.match(docstring)
    ]
    assert not found, "\n".join(found)


def test_names_are_the_fields_terms() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in modules():
        for name in (*names_given(text), *Path(path).with_suffix("").parts):
            found[path] |= {f"{name}: say {INSTEAD[word]}" for word in words(name)}
    assert not any(found.values()), {path: names for path, names in found.items() if names}


def test_private_words_in_prose_are_found() -> None:
    for line in ("People are told of it.", "made anew", "the HTTP door", "a letter", "set by hand", "12 in work"):
        assert list(private_words(line)), line
    for line in ("a dead letter", "dead-letters", "letters and digits", "it is reported", "bookkeeping", "indoors"):
        assert not list(private_words(line)), line


def test_prose_is_in_the_fields_terms() -> None:
    """Docstrings, comments, messages, help texts, pages and documents. The changelog names what was renamed."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for folder in ("libs", "services"):
        files += [
            file for kind in ("py", "lua", "html", "js", "yaml", "sql") for file in (ROOT / folder).rglob(f"*.{kind}")
        ]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {word}"
        for file in files
        for number, line in prose_of(file)
        for word in private_words(line)
    ]
    assert not found, "\n".join(found)
