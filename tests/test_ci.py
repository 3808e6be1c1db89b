"""What CI makes of tests that fail, and pass at a second try."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
[ -e "$PYTEST_CACHE/twice" ] && run=second || run=first
touch "$PYTEST_CACHE/twice"
cp "$PYTEST_CACHE/$run" "$PYTEST_CACHE/v/cache/lastfailed"
[ "$(cat "$PYTEST_CACHE/$run")" = "{}" ]
"""


@pytest.mark.parametrize(
    ("first", "second", "passes", "flaky"),
    [
        ([], [], True, []),
        (["a", "b"], ["b"], False, ["a"]),
        (["a", "b"], ["a", "b"], False, []),
        (["t::c[x y]", "a", "b"], [], True, ["a", "b", "t::c[x y]"]),
        (["a", "b", "c", "d"], [], False, ["a", "b", "c", "d"]),
    ],
)
def test_what_passes_at_a_second_try_is_named_and_more_than_three_fail(
    tmp_path: Path, first: list[str], second: list[str], passes: bool, flaky: list[str]
) -> None:
    (tmp_path / "v" / "cache").mkdir(parents=True)
    for name, failed in (("first", first), ("second", second)):
        (tmp_path / name).write_text(json.dumps(dict.fromkeys(failed, True)))
    (make := tmp_path / "make").write_text(MAKE)
    make.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTEST_CACHE": str(tmp_path),
        "PYTHON": sys.executable,
    }
    done = subprocess.run([ROOT / ".ci" / "tests"], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode == 0) is passes, done.stderr
    said = done.stdout.partition("== FLAKY: ")[2].splitlines()[1:]
    assert said == flaky
