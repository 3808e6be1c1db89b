"""Conformance testers, which test a door with a model of each API: `llm-comply`, `compatcanary` and the schemas."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAMS = HERE / ".installed" / "requirements" / "bin"
PYTHON, COMPLY = PROGRAMS / "python", PROGRAMS / "llm-comply"
CANARY = HERE / "node" / "node_modules" / ".bin" / "compatcanary"
FORMATS = {"chat": "openai-chat", "Responses": "open-responses", "Messages": "anthropic"}
"""Names of doors' formats in llm-comply."""
STATUSES = {"pass": "passed", "warn": "warned", "fail": "failed", "skip": "skipped"}
"""Words of compatcanary."""
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one test.

    Attributes:
        tester: the program.
        door: the API that it tests; of compatcanary, chat and Responses together.
        model: the one that it calls.
        what: is tested.
        status: `passed`, `failed`, `skipped` or `warned`.
        errors: reasons.
    """

    tester: str
    door: str
    model: str
    what: str
    status: str
    errors: tuple[str, ...] = ()


def verdicts(url: str, key: str, models: Sequence[str]) -> Iterator[Verdict]:
    """Runs all testers against a base URL, with each of the models."""
    yield from _schemas(url, key)
    for model in models:
        for door in FORMATS:
            yield from _comply(url, key, door, model)
        yield from _canary(url, key, model)


def _schemas(url: str, key: str) -> Iterator[Verdict]:
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    command = (PYTHON, HERE / "with_schemas.py")
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    for line in ran.stdout.splitlines():
        one = json.loads(line)
        failed = () if one["error"] is None else (one["error"],)
        yield Verdict("schemas", one["door"], "one of each API", one["what"], "failed" if failed else "passed", failed)


def _comply(url: str, key: str, door: str, model: str) -> Iterator[Verdict]:
    # The version is a header that Anthropic's API requires; others ignore it.
    options = ("--format", FORMATS[door], "--header", "anthropic-version:2023-06-01")
    report = _report((COMPLY, *options, "--json", "--base-url", url, "--model", model), {"OPENRESPONSES_API_KEY": key})
    for one in report["results"]:
        warned = one["status"] == "passed" and one.get("warnings")
        errors = (*one.get("errors", ()), *one.get("warnings", ()))
        yield Verdict("llm-comply", door, model, one["name"], "warned" if warned else one["status"], errors)


def _canary(url: str, key: str, model: str) -> Iterator[Verdict]:
    options = ("scan", "--profile", "modern", "--format", "json", "--fail-on", "never")
    report = _report((CANARY, *options, "--base-url", url, "--model", model), {"OPENAI_API_KEY": key})
    for one in report["results"]:
        yield Verdict(
            "compatcanary", "chat and Responses", model, one["name"], STATUSES[one["status"]], (one["summary"],)
        )


def _report(command: Sequence[str | Path], key: Mapping[str, str]) -> dict[str, Any]:
    environment = {**os.environ, **key}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if "{" not in ran.stdout:
        raise RuntimeError(f"{Path(command[0]).name} has no report: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout[ran.stdout.index("{") :])


def table(through: Sequence[Verdict]) -> Iterator[str]:
    """The rows of a table: each tester, door and model, with all that has not passed."""
    if through:
        yield from ("", "| tester | door | model | passed | not passed |", "|---|---|---|---|---|")
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for one in through:
        groups.setdefault((one.tester, one.door, one.model), []).append(one)
    for (tester, door, model), each in groups.items():
        rest = [f"{one.what} ({one.status})" for one in each if one.status != "passed"]
        passed = f"{len(each) - len(rest)} of {len(each)}"
        yield f"| `{tester}` | {door} | `{model}` | {passed} | {'; '.join(rest) or '-'} |"
