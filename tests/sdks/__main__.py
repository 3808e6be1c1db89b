"""Runs unmodified SDKs, and a conformance tester, against `breakwater up --simulate`: `make sdks`.

Installs what it needs beside this file, in the versions that are pinned here; starts a plane of its own in a temporary
directory, with an API key that is bound to one agent; prints a table of what was run. Exit code 1: something failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.environments import ROOT, install_node, install_python

HERE = Path(__file__).parent
INSTALLED, NODE = HERE / ".installed", HERE / "node"
PROGRAMS = Path(sys.executable).parent
AGENT = "content-writer"
START_S = 120

CLIENTS = {
    "openai": ("requirements", "with_openai.py"),
    "langchain-openai": ("requirements", "with_langchain.py"),
    "pydantic-ai-slim": ("requirements", "with_pydantic_ai.py"),
    "litellm": ("litellm", "with_litellm.py"),
    "openai (Node.js)": ("node", "with_openai.mjs"),
    "ai": ("node", "with_ai.mjs"),
}
"""By name: where it is pinned, and the program that uses it."""


@dataclass(frozen=True, slots=True)
class Check:
    """What one client did."""

    client: str
    what: str
    error: str | None


@dataclass(frozen=True, slots=True)
class Plane:
    """A running plane."""

    url: str
    key: str
    simulated: str
    """The URL of the simulated provider."""

    @property
    def environment(self) -> dict[str, str]:
        """All that an SDK gets to know."""
        found = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        more = {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "AI_SDK_LOG_WARNINGS": "false"}
        return {**found, **more, "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key}


def install() -> None:
    """Installs what is not there yet, or not in the pinned versions."""
    for name in ("requirements", "litellm"):
        install_python(HERE / f"{name}.txt", INSTALLED / name)
    install_node(NODE)


@contextmanager
def plane() -> Generator[Plane]:
    """A plane with the example config, whose models call tools."""
    with (
        tempfile.TemporaryDirectory(prefix="breakwater-sdks-") as directory,
        (Path(directory) / "up.log").open("wb") as log,
    ):
        data = Path(directory) / "data"
        config = ROOT / "examples" / "breakwater.yaml"
        up = [PROGRAMS / "breakwater", "up", "--data", data, "--config", config, "--simulate"]
        process = subprocess.Popen(up, cwd=directory, stdout=log, stderr=log)
        try:
            started = time.monotonic()
            while not (data / "endpoints.json").exists():
                if process.poll() is not None or time.monotonic() > started + START_S:
                    sys.exit(f"the plane has not started:\n{(Path(directory) / 'up.log').read_text()}")
                time.sleep(0.1)
            yield _prepared(data)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _prepared(data: Path) -> Plane:
    endpoints = json.loads((data / "endpoints.json").read_text())
    [provider] = set(re.findall(r"http://127\.0\.0\.1:\d+", (data / "breakwater.simulated.yaml").read_text()))
    script = json.loads((data / "simulation.json").read_text())
    script["models"]["gpt-4o"]["tool_calls"] = [{"name": "find_ship", "arguments": {"name": "ferry"}}]
    urllib.request.urlopen(urllib.request.Request(f"{provider}/_sim/script", json.dumps(script).encode()), timeout=30)
    make = [PROGRAMS / "breakwater", "keys", "create", "sdks", "--scope", "submit", "--agent", AGENT, "--data", data]
    key = subprocess.run(make, check=True, capture_output=True, text=True).stdout.strip()
    return Plane(endpoints["request_url"], key, f"{provider}/v1")


def run(client: str, found: Plane) -> Iterator[Check]:
    """Runs the program of a client."""
    room, program = CLIENTS[client]
    command = ["node", NODE / program] if room == "node" else [INSTALLED / room / "bin" / "python", HERE / program]
    ran = subprocess.run(
        command, env=found.environment, cwd=HERE, capture_output=True, text=True, timeout=300, check=False
    )
    for line in ran.stdout.splitlines():
        if line.startswith('{"what"'):
            yield Check(client, **json.loads(line))
    if ran.returncode != 0:
        yield Check(client, "the program", f"exit code {ran.returncode}: {ran.stderr[-2000:]}")


def conformance(url: str, key: str, model: str) -> dict[str, str]:
    """What llm-comply says of each of its tests: passed, failed or skipped."""
    comply = INSTALLED / "requirements" / "bin" / "llm-comply"
    options = ("--format", "openai-chat", "--json", "--base-url", url, "--model", model)
    environment = {**os.environ, "OPENRESPONSES_API_KEY": key}
    ran = subprocess.run([comply, *options], env=environment, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(ran.stdout[ran.stdout.index("{") :])
    return {one["name"]: one["status"] for one in report["results"]}


def version(client: str) -> str:
    """The pinned one."""
    name = client.partition(" ")[0]
    if CLIENTS[client][0] == "node":
        return json.loads((NODE / "package.json").read_text())["dependencies"][name]
    pinned = re.search(rf"^{name}==(\S+)", (HERE / f"{CLIENTS[client][0]}.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def main() -> int:
    """Prints the table, and what failed."""
    install()
    failed: list[Check] = []
    rows = ["| client | version | passed |", "|---|---|---|"]
    with plane() as found:
        for client in CLIENTS:
            checks = list(run(client, found))
            bad = [check for check in checks if check.error is not None]
            failed += bad
            passed = "; ".join(check.what for check in checks if check.error is None)
            rows.append(f"| `{client}` | {version(client)} | {len(checks) - len(bad)} of {len(checks)}: {passed} |")
        alone = conformance(found.simulated, "any", "gpt-4o")
        through = conformance(found.url + "/v1", found.key, "gpt-4o")
    print("\n".join(rows))
    for name, results in (("the simulated provider alone", alone), ("the plane", through)):
        counts = {status: list(results.values()).count(status) for status in sorted(set(results.values()))}
        print(f"llm-comply on {name}: {counts}")
    for check in failed:
        print(f"FAILED {check.client}, {check.what}: {check.error}", file=sys.stderr)
    return int(bool(failed) or alone != through or "failed" in through.values())


if __name__ == "__main__":
    sys.exit(main())
