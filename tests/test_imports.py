"""The import rules of pyproject.toml hold, and would be noticed if they did not."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    # Before the editable install: what is linted is what lies under `root`.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "libs"), str(root)))}
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_rules_hold() -> None:
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def imports(root: Path) -> dict[str, set[str]]:
    """Our modules, and those that each imports, also within its functions."""
    files: dict[str, Path] = {}
    for base, package in (root / "libs", "breakwater"), (root, "services"):
        for file in sorted((base / package).rglob("*.py")):
            files[".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = file

    def statements(within: ast.AST) -> Iterator[ast.AST]:
        """All of them, at any depth. No import is in an expression, of which a module mostly consists."""
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner: ast.AST | list[ast.AST] = getattr(within, part, [])
            for statement in inner if isinstance(inner, list) else []:
                yield statement
                yield from statements(statement)

    def named(file: Path) -> Iterator[str]:
        for node in statements(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield module if module in files else node.module

    return {name: {other for other in named(file) if other in files} - {name} for name, file in files.items()}


def test_no_import_goes_round_in_a_circle() -> None:
    modules = imports(ROOT)
    assert set(TopologicalSorter(modules).static_order()) == set(modules)


def test_a_circle_would_be_noticed(tmp_path: Path) -> None:
    for name, line in ("a", "from breakwater import b"), ("b", "def late():\n    import breakwater.a"):
        (tmp_path / "libs" / "breakwater").mkdir(parents=True, exist_ok=True)
        (tmp_path / "libs" / "breakwater" / f"{name}.py").write_text(line)

    with pytest.raises(CycleError):
        tuple(TopologicalSorter(imports(tmp_path)).static_order())


def test_the_client_for_programs_imports_little() -> None:
    program = "import sys, breakwater.client; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert {"breakwater", "aiohttp", "pydantic"} <= loaded
    assert loaded & {"services", "faststream", "nats", "redis", "pandas", "numpy", "uvicorn", "opentelemetry"} == set()
