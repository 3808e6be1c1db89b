"""Node.js, for tests of what is written in it. Where it, or a package from npm, is missing, such a test is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "node"


def node_with(*packages: str) -> str:
    """The path of `node`, with npm packages that the examples need; skips the test otherwise."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    missing = [name for name in packages if not (EXAMPLES / "node_modules" / name / "package.json").is_file()]
    if missing:
        pytest.skip(f"needs `npm install --prefix examples/node`: there is no {', '.join(missing)}")
    return node
