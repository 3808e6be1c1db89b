"""Runs unmodified SDKs, coding agents and conformance testers against a plane on the simulated provider: `make sdks`.

A server of models that nobody here wrote stands behind the same plane.

Installs what it needs beside this file, in the versions that are pinned here; starts a plane of its own in a temporary
directory, with an API key that is bound to one agent; prints a table of what was run. Exit code 1: something failed.
Names of clients as arguments (`python -m tests.sdks openai testers`) run those alone.
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
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from breakwater.local.ports import free_port
from tests.clouds import CLAUDE_SHIP, SHIP, Clouds, clouds_in_thread
from tests.environments import install_node, install_python
from tests.sdks import conformance, programs, records
from tests.sdks.strict_proxy import MODELS as STRICT_MODELS
from tests.sdks.strict_proxy import StrictProxy, strict_proxy

HERE = Path(__file__).parent
INSTALLED, NODE = HERE / ".installed", HERE / "node"
PROGRAMS = Path(sys.executable).parent
AGENT = "content-writer"
START_S = 120

CLIENTS = {
    "openai": (
        "requirements",
        ("with_openai.py", "with_responses.py", "with_embeddings.py", "with_kinds_by_openai.py"),
    ),
    "anthropic": ("requirements", ("with_anthropic.py", "with_vertex_directly.py", "with_kinds_by_anthropic.py")),
    "openai-agents": ("requirements", ("with_agents.py", "with_kinds_by_agents.py")),
    "langchain-openai": ("requirements", ("with_langchain.py",)),
    "langchain-anthropic": ("requirements", ("with_langchain_anthropic.py",)),
    "pydantic-ai-slim": ("requirements", ("with_pydantic_ai.py", "with_kinds_by_pydantic_ai.py")),
    "llama-index-embeddings-openai": ("requirements", ("with_llama_index.py",)),
    "litellm": ("litellm", ("with_litellm.py",)),
    "openai (Node.js)": ("node", ("with_openai.mjs", "with_responses.mjs", "with_kinds_by_openai.mjs")),
    "@anthropic-ai/sdk": ("node", ("with_anthropic.mjs", "with_kinds_by_anthropic.mjs")),
    "@openai/agents": ("node", ("with_agents.mjs", "with_kinds_by_agents.mjs")),
    "ai": ("node", ("with_ai.mjs",)),
}
"""By name: where it is pinned, and the programs that use it. Coding agents are in `programs`."""
SERVERS = {"xllamacpp": ("llama_cpp", ("with_llama_cpp.py",))}
"""The same for servers of models: by the package that has the server, the programs that call it over the plane."""
TESTERS = "testers"
TESTED = ("gpt-4o", "gpt-5", "claude-opus-4-5")
"""Models that conformance testers call: one of each API."""

CALLS: dict[str, Any] = {"tool_calls": [{"name": "find_ship", "arguments": {"name": "ferry"}}]}
ON_THE_WAY: dict[str, Any] = {"tool_calls": [{"name": "transfer_to_pilot"}]}
ASKS: dict[str, Any] = {"tool_calls": [{"name": "find_ship", "arguments": {"input": "Where is the ferry?"}}]}
THINKS: dict[str, Any] = {
    "turns": [
        [{"type": "thinking", "text": "A ship; look it up."}, {"type": "tool_call", **CALLS["tool_calls"][0]}],
        [{"type": "thinking", "text": "It is known now."}, {"type": "text", "text": "The ferry is at sea."}],
    ]
}
SEARCHES: dict[str, Any] = {
    "turns": [
        [
            {"type": "hosted", "query": "ferry"},
            {"type": "text", "text": "The ferry is at sea.", "cites": ["https://ships.example.com/ferry"]},
        ]
    ]
}
BUSY: dict[str, Any] = {"faults": [{"status": 429, "retry_after_s": 30}]}
BREAKS: dict[str, Any] = {"faults": [{"stream": "cut", "after_chunks": 6}]}
OVERLOADED: dict[str, Any] = {"faults": [{"status": 529}]}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "chat": {
        "gpt-4o": CALLS,
        "gpt-4o-mini": {},
        "gpt-4o-handoff": ON_THE_WAY,
        "gpt-4o-nested": ASKS,
        "gpt-slow": {"latency_ms": 20_000},
        "gpt-4o-breaks": BREAKS,
        "gpt-busy": BUSY,
        "gpt-overloaded": {"faults": [{"status": 503}]},
        "text-embedding-3-small": {},
    },
    "responses": {
        "gpt-5": CALLS,
        "gpt-5-mini": {},
        "gpt-5-breaks": BREAKS,
        "gpt-5-thinker": THINKS,
        "gpt-5-searcher": SEARCHES,
        "gpt-5-handoff": ON_THE_WAY,
        "gpt-5-nested": ASKS,
        "gpt-5.5": {},  # Codex knows it
        "gpt-5.6-luna": CALLS,  # the Agents SDK's own choice
    },
    "messages": {
        "claude-opus-4-5": CALLS,
        "claude-haiku-4-5": {},
        "claude-opus-4-5-breaks": BREAKS,
        "claude-thinker": THINKS,
        "claude-searcher": SEARCHES,
        "claude-opus-4-5-handoff": ON_THE_WAY,
        "claude-opus-4-5-nested": ASKS,
        "claude-busy": BUSY,
        "claude-overloaded": OVERLOADED,
    },
    "llamacpp": {"tiny": {}},
    "llamacpp-responses": {"tiny-responses": {}},
    "llamacpp-messages": {"tiny-messages": {}},
    **{provider: {model: {}} for provider, model in STRICT_MODELS.items()},
}
"""By provider, named after its API unless it is strict or real: the models, with their behaviour where simulated."""
KINDS: Mapping[str, tuple[str, str]] = {
    "openai": ("chat", "ship-by-chat"),
    "openai-responses": ("responses", "ship-by-responses"),
    "anthropic": ("messages", "claude-ship"),
    "azure": ("azure", "ship"),
    "azure-v1": ("azure-v1", "ship"),
    "bedrock": ("bedrock", "eu.amazon.nova-pro-v1:0"),
    "bedrock-claude": ("bedrock", "eu.anthropic.claude-sonnet-4-5-20250929-v1:0"),
    "gemini": ("gemini-api", "gemini-3-x"),
    "vertex": ("vertex", "gemini-3-pro"),
    "vertex-claude": ("vertex-eu", "claude-opus-4-5@20251101"),
}
"""Models of each kind of provider, called `ship-<kind>`, all with the same answers: their provider and its name."""
SHIPS = {"ship-by-chat": SHIP, "ship-by-responses": SHIP, "claude-ship": CLAUDE_SHIP}
"""Those that the simulated provider has."""
PRICE = {"input_usd_per_mtok": 2, "output_usd_per_mtok": 8}
SHIP_PRICE = {**PRICE, "cached_input_usd_per_mtok": 0.2, "cache_write_usd_per_mtok": 2.5}
COMMON: dict[str, Any] = {"price": PRICE, "stream": {"tokens_per_s": 100}}
"""The behaviour of each: streams that take a moment, as what comes at once is sent in one piece."""


@dataclass(frozen=True, slots=True)
class Check:
    """What one client did."""

    client: str
    what: str
    error: str | None
    door: str = "chat"


@dataclass(frozen=True, slots=True)
class Plane:
    """A running plane."""

    url: str
    key: str
    clickhouse: str
    """The URL of ClickHouse, for a reader."""
    simulated: str
    """The URL of the simulated provider."""
    strict: StrictProxy
    clouds: Clouds
    llama_cpp_port: int

    @property
    def environment(self) -> dict[str, str]:
        """All that an SDK gets to know."""
        found = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        quiet = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "AI_SDK_LOG_WARNINGS": "false",
            # Sent to OpenAI's servers with the key, whatever the base URL is.
            "OPENAI_AGENTS_DISABLE_TRACING": "true",
        }
        keys = {"OPENAI_API_KEY": self.key, "ANTHROPIC_API_KEY": self.key}
        double = {
            "url": self.clouds.providers["vertex"]["base_url"],
            "token": self.clouds.issuers["google"].new_token(lifetime_s=600),
        }
        keys["VERTEX_DOUBLE"] = json.dumps(double)
        return {**found, **quiet, **keys, "OPENAI_BASE_URL": f"{self.url}/v1", "ANTHROPIC_BASE_URL": self.url}


def install() -> None:
    """Installs what is not there yet, or not in the pinned versions."""
    for name in ("requirements", "litellm", "llama_cpp"):
        install_python(HERE / f"{name}.txt", INSTALLED / name)
    install_node(NODE)
    programs.install()


@contextmanager
def plane() -> Generator[Plane]:
    """A plane with one agent, whose models are of providers that speak each API."""
    with tempfile.TemporaryDirectory(prefix="breakwater-sdks-") as name:
        directory, port = Path(name), free_port()
        llama_cpp_port = free_port()
        data, script, config = directory / "data", directory / "script.json", directory / "config.json"
        url = f"http://127.0.0.1:{port}"
        models = SHIPS | {model: rules for each in MODELS.values() for model, rules in each.items()}
        script.write_text(json.dumps({"models": {model: {**COMMON, **rules} for model, rules in models.items()}}))
        module = "breakwater.local.provider"
        simulated = (sys.executable, "-m", module, "--port", str(port), "--script", str(script))
        up = (PROGRAMS / "breakwater", "up", "--data", data, "--config", config)
        with ExitStack() as stack:
            strict = stack.enter_context(strict_proxy(url))
            clouds = stack.enter_context(clouds_in_thread(directory))
            config.write_text(json.dumps(settings(url, strict.url, clouds, llama_cpp_port)))
            provider = stack.enter_context(running(simulated, directory))
            whole = stack.enter_context(running(up, directory, clouds.environment))
            processes = (provider, whole)
            started = time.monotonic()
            while not (data / "endpoints.json").exists():
                ended = any(process.poll() is not None for process in processes)
                if ended or time.monotonic() > started + START_S:
                    logs = (log.read_text() for log in sorted(directory.glob("*.log")))
                    sys.exit("the plane has not started:\n" + "\n".join(logs))
                time.sleep(0.1)
            yield _prepared(data, f"{url}/v1", strict, clouds, llama_cpp_port)


@contextmanager
def running(
    command: Sequence[str | Path], directory: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Generator[subprocess.Popen[bytes]]:
    """A process with some more variables, whose log is in the directory."""
    with (directory / f"{Path(command[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env={**os.environ, **more})
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def settings(simulated: str, strict: str, clouds: Clouds, llama_cpp_port: int) -> dict[str, Any]:
    """The config of the plane, whose providers are simulated at these addresses, or doubles of clouds, or real."""
    models: dict[str, Any] = {model: {"provider": provider} for provider, models in MODELS.items() for model in models}
    for kind, (provider, name) in KINDS.items():
        models[f"ship-{kind}"] = {"deployments": [{"provider": provider, "name": name}], "price": SHIP_PRICE}
    llama_cpp = f"http://127.0.0.1:{llama_cpp_port}/v1"
    return {
        "providers": {
            "chat": {"base_url": f"{simulated}/v1"},
            "responses": {"base_url": f"{simulated}/v1", "api": "responses"},
            "messages": {"kind": "anthropic", "base_url": f"{simulated}/v1"},
            **clouds.providers,
            "llamacpp": {"base_url": llama_cpp},
            "llamacpp-responses": {"base_url": llama_cpp, "api": "responses"},
            "llamacpp-messages": {"base_url": llama_cpp, "kind": "anthropic"},
            **{provider: {"base_url": f"{strict}/{provider}/v1"} for provider in STRICT_MODELS},
        },
        "models": {model: {"price": PRICE, **rules} for model, rules in models.items()},
        "agents": {
            AGENT: {
                "model": "gpt-4o",
                # Without fallbacks: no other model may hide that one fails.
                "allowed_models": sorted(models.keys() - {"gpt-4o"}),
                "allowed_params": ["tools"],  # of the provider's own, which cost more than tokens
                "max_tokens": 4000,
                "retry": {"per_kind": {"network": {"max": 8}}},  # until a server has started again
            }
        },
    }


def _prepared(data: Path, simulated: str, strict: StrictProxy, clouds: Clouds, llama_cpp_port: int) -> Plane:
    endpoints = json.loads((data / "endpoints.json").read_text())
    make = [PROGRAMS / "breakwater", "keys", "create", "sdks", "--scope", "submit", "--agent", AGENT, "--data", data]
    key = subprocess.run(make, check=True, capture_output=True, text=True).stdout.strip()
    return Plane(endpoints["request_url"], key, endpoints["clickhouse_url"], simulated, strict, clouds, llama_cpp_port)


def run(client: str, found: Plane) -> Iterator[Check]:
    """Runs the programs of a client."""
    if client in programs.VERSIONS:
        for one in programs.RUNS:
            if one.client == client:
                error = programs.run(one, found.url, found.key, found.simulated) or found.strict.problem(one.model)
                yield Check(client, one.what, error, one.door)
        return
    room, files = (CLIENTS | SERVERS)[client]
    environment = found.environment
    if client in SERVERS:
        environment |= {"LLAMA_CPP_PORT": str(found.llama_cpp_port), "RECORDS_URL": found.clickhouse}
    for program in files:
        command = ["node", NODE / program] if room == "node" else [INSTALLED / room / "bin" / "python", HERE / program]
        ran = subprocess.run(
            command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=300, check=False
        )
        made = [Check(client, **json.loads(line)) for line in ran.stdout.splitlines() if line.startswith('{"what"')]
        if ran.returncode != 0:
            made.append(Check(client, program, f"exit code {ran.returncode}: {ran.stderr[-2000:]}"))
        if program.startswith("with_kinds"):
            made.append(_recorded(client, found, {check.door for check in made}))
        yield from made


def _recorded(client: str, found: Plane, doors: Collection[str]) -> Check:
    """The records of a client's conversations with each kind of provider, and what the doubles have refused."""
    deployments = {kind: f"{provider}/{name}" for kind, (provider, name) in KINDS.items()}
    wrong = [*records.problems(found.clickhouse, client, doors, deployments, SHIP_PRICE), *found.clouds.refusals()]
    return Check(client, "each kind of provider", "; ".join(wrong) or None, "records")


def version(client: str) -> str:
    """The pinned one."""
    name = client.partition(" ")[0]
    if client in programs.VERSIONS:
        return programs.VERSIONS[client]
    room, _ = (CLIENTS | SERVERS)[client]
    if room == "node":
        return json.loads((NODE / "package.json").read_text())["dependencies"][name]
    pinned = re.search(rf"^{name}==(\S+)", (HERE / f"{room}.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def main(clients: Sequence[str]) -> int:
    """Prints the table, and what failed."""
    install()
    checks: list[Check] = []
    verdicts: list[conformance.Verdict] = []
    with plane() as found:
        # The coding agents come last: they replace the script of the simulated provider.
        for client in clients or (*CLIENTS, *SERVERS, TESTERS, *programs.VERSIONS):
            if client == TESTERS:
                verdicts += conformance.verdicts(f"{found.url}/v1", found.key, TESTED)
            else:
                checks += run(client, found)
    print("\n".join((*table(checks), *conformance.table(verdicts))))
    failed = [f"{one.client}, {one.door}, {one.what}: {one.error}" for one in checks if one.error is not None]
    failed += [
        f"{one.tester}, {one.door}, {one.model}, {one.what}: {'; '.join(one.errors)}"
        for one in verdicts
        if one.status == "failed"
    ]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failed))


def table(checks: Iterable[Check]) -> Iterator[str]:
    """The rows of a table of the checks, by client and door."""
    yield from ("| client | version | through | passed |", "|---|---|---|---|")
    rows: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        rows.setdefault((check.client, check.door), []).append(check)
    for (client, door), each in rows.items():
        good = [check.what for check in each if check.error is None]
        yield f"| `{client}` | {version(client)} | {door} | {len(good)} of {len(each)}: {'; '.join(good)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
