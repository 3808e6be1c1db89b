"""Checks the names of the code, which say what things are, and that its docstrings begin with their subject."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.syntax import nodes_of

ROOT = Path(__file__).parent.parent

VAGUE = frozenset(
    "each every none one ones other others some rest thing things it its mine this that these those here there what"  # noqa: SIM905
    " which who whose whole most left right given found known kept held own shown seen said asked noted told made done"
    " got had took put gone of".split()
)
"""Words that, as a name, don't say what the value is."""

PARTICIPLES = frozenset(
    "begun built given found held hidden kept known left lost made seen sent shown taken told written".split()  # noqa: SIM905
)
"""Those that a function may be named by and that don't end in -ed."""
NO_PARTICIPLES = frozenset("embed exceed feed need proceed seed speed".split())  # noqa: SIM905

# Percent of all bindings, of all assignments, and of all functions. Never raise a limit.
VAGUE_LIMIT = 0.1
PAIRED_LIMIT = 0.1
PARTICIPLE_LIMIT = 1.0

WORST_FILES = 10

_PUBLIC_CLASS = re.compile(r"^(?:class (?!_)(\w+)|([A-Z]\w*[a-z]\w*)(?:: TypeAlias)? = (?!TypeVar))", re.MULTILINE)
"""Classes and aliases of types; a type variable may be named like others."""

_QUESTION = re.compile(r'^ *"""(?:What|Whether|How|That|Who|Whose|Which|Where|Why)\b.*', re.MULTILINE)
"""The first line of a docstring that begins with a clause instead of a subject or a verb."""


_FIRST_WORD = re.compile(r'^ *(?:async def|def|class) [^"]*?:\n +r?"""([A-Z][a-z]+)\b', re.MULTILINE)
"""The first word of the docstring of a function or a class."""


class Place(NamedTuple):
    """A line of a file, and what is wrong there."""

    path: str
    line: int
    problem: str


def modules() -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each module of the product."""
    for folder in ("libs", "services"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()


def bindings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and name of each variable, loop target and parameter; attributes are not among them."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.lineno, node.arg


def is_vague(name: str) -> bool:
    """Returns True if a name says nothing about its value."""
    return name.strip("_") in VAGUE


def assignments(nodes: list[ast.AST]) -> Iterator[tuple[int, bool]]:
    """Yields the line of each assignment, and True if it assigns a written tuple to a tuple: `a, b = x, y`."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield node.lineno, isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def functions(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and name of each function and method, without properties, which may be participles."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            if not decorators & {"property", "cached_property"}:
                yield node.lineno, node.name


def is_participle(name: str) -> bool:
    """Returns True for a participle: as a function's name, it doesn't say whether that tests, changes or returns."""
    word = name.strip("_")
    return word in PARTICIPLES or (word.endswith("ed") and "_" not in word and word not in NO_PARTICIPLES)


def worst_files(places: list[Place]) -> str:
    """Lists the files with the most problems, and each line of them."""
    by_path: dict[str, list[Place]] = defaultdict(list)
    for place in sorted(places):
        by_path[place.path].append(place)
    worst = Counter({path: len(in_file) for path, in_file in by_path.items()}).most_common(WORST_FILES)
    return "\n".join(f"{place.path}:{place.line}: {place.problem}" for path, _ in worst for place in by_path[path])


def test_names_are_plain_and_assignments_pair_no_values(subtests: pytest.Subtests) -> None:
    names: list[Place] = []
    assigned: list[tuple[Place, bool]] = []
    called: list[Place] = []
    for path, text in modules():
        nodes = nodes_of(text)
        names += (Place(path, line, name) for line, name in bindings(nodes))
        assigned += ((Place(path, line, "a pair"), pairs) for line, pairs in assignments(nodes))
        called += (Place(path, line, name) for line, name in functions(nodes))
    vague = [place for place in names if is_vague(place.problem)]
    paired = [place for place, pairs in assigned if pairs]
    participles = [place for place in called if is_participle(place.problem)]
    with subtests.test("vague names"):
        percent = 100 * len(vague) / len(names)
        assert percent <= VAGUE_LIMIT, (
            f"{len(vague)} of {len(names)} names don't say what their value is: {percent:.2f} %, over the limit of"
            f" {VAGUE_LIMIT} %. Rename those that you added, or some of these:\n{worst_files(vague)}"
        )
    with subtests.test("paired assignments"):
        percent = 100 * len(paired) / len(assigned)
        assert percent <= PAIRED_LIMIT, (
            f"{len(paired)} of {len(assigned)} assignments pair values: {percent:.2f} %, over the limit of"
            f" {PAIRED_LIMIT} %. Split those that you added, or some of these:\n{worst_files(paired)}"
        )
    with subtests.test("participles"):
        percent = 100 * len(participles) / len(called)
        assert percent <= PARTICIPLE_LIMIT, (
            f"{len(participles)} of {len(called)} functions are named by a participle: {percent:.2f} %, over the limit"
            f" of {PARTICIPLE_LIMIT} %. Rename those that you added, or some of these:\n{worst_files(participles)}"
        )


def test_bindings_and_pairs_are_counted() -> None:
    nodes = nodes_of(
        "class Found:\n"
        "    def kept(self, given, *others, found_at=None, **rest):\n"
        "        self.held = one = given\n"
        "        for _left, right in others:\n"
        "            first, last = right, [each for each in right if (seen := each)]\n"
        "        width, height = size()\n"
        "        left, right = right, left\n"
        "        return lambda which: which.said\n"
    )
    names = sorted(name for _, name in bindings(nodes))
    vague = ["_left", "each", "given", "left", "one", "others", "rest", "right", "right", "seen", "which"]
    assert [name for name in names if is_vague(name)] == vague
    assert [name for name in names if not is_vague(name)] == ["first", "found_at", "height", "last", "width"]
    assert sorted(assignments(nodes)) == [(3, False), (5, True), (6, False), (7, True)]


def test_functions_named_by_participles_are_counted() -> None:
    nodes = nodes_of(
        "def _parsed(): ...\n"
        "async def kept(): ...\n"
        "class Queue:\n"
        "    def feed(self): ...\n"
        "    @property\n"
        "    def lapsed(self): ...\n"
        "    def lapsed_attempts(self): ...\n"
    )
    names = {name: is_participle(name) for _, name in functions(nodes)}
    assert names == {"_parsed": True, "kept": True, "feed": False, "lapsed_attempts": False}


def test_the_worst_files_are_listed_with_each_line() -> None:
    problems = [Place(f"{number}.py", line, "one") for number in range(WORST_FILES + 2) for line in range(number)]
    lines = worst_files(problems).splitlines()
    assert lines[0] == "11.py:0: one"
    assert {line.partition(":")[0] for line in lines} == {f"{number}.py" for number in range(2, WORST_FILES + 2)}
    assert len(lines) == sum(range(2, WORST_FILES + 2))


def test_no_public_class_name_is_in_two_modules() -> None:
    paths_of: dict[str, list[str]] = defaultdict(list)
    for path, text in modules():
        for name, alias in _PUBLIC_CLASS.findall(text):
            paths_of[name or alias].append(path)
    assert {"Alert", "KeyScope"} <= paths_of.keys()
    assert not {name: paths for name, paths in paths_of.items() if len(paths) > 1}


def test_a_docstring_begins_with_its_subject() -> None:
    questions = [f"{path}: {line.strip()}" for path, text in modules() for line in _QUESTION.findall(text)]
    assert not questions, "\n".join(questions)


def third_person(verb: str) -> str:
    """Returns the form of a verb after "it"."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("ch", "sh", "s", "x", "o")) else f"{verb}s"


def test_a_docstring_is_in_the_third_person_or_begins_with_an_article() -> None:
    # The docstrings of commands are their help, which is in the imperative.
    paths_of: dict[str, list[str]] = defaultdict(list)
    for path, text in modules():
        for word in _FIRST_WORD.findall(text):
            if "/commands" not in path and "/cli/" not in path and not path.endswith("/command.py"):
                paths_of[word].append(path)
    assert len(paths_of["Returns"]) > len(paths_of["The"]) > 0
    assert not {word: paths for word, paths in paths_of.items() if third_person(word) in paths_of}
