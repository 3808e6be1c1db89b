"""Coding agents from the npm registry, unmodified, on a scripted provider: each is asked to edit a file.

Each runs in a home directory of its own, with what its maker offers to keep it off the network: it reaches the base URL
and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.environments import install_node

HERE = Path(__file__).parent
PROGRAMS = HERE / "node_modules" / ".bin"
SETUPS = ("@anthropic-ai/claude-code/install.cjs", "opencode-ai/postinstall.mjs")
"""The makers' own scripts that put the program for this machine in its place."""
VERSIONS: dict[str, str] = json.loads((HERE / "package.json").read_text())["dependencies"]
"""The pinned ones, by the npm package."""
PRICE = {"input_usd_per_mtok": 2, "output_usd_per_mtok": 8}
FILE, BEFORE, AFTER = "harbour.txt", "The ferry is late.\n", "The ferry is on time.\n"
TASK = f"Say in {FILE} that the ferry is on time."
THOUGHT = {"type": "thinking", "text": "One word."}
DONE, AGAIN, SAID = "The harbour knows.", "And now?", "All is said."
"""The last answer of the task, the question after it, in a new process, and its answer."""
TIMEOUT_S = 180
PATCH = f"*** Begin Patch\n*** Update File: {FILE}\n@@\n-{BEFORE}+{AFTER}*** End Patch\n"

Turns = list[list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Run:
    """A program on its way through a door. It is called twice: the second time, it goes on with the conversation.

    Attributes:
        client: the npm package.
        door: the API that it speaks.
        what: the API that the model's provider speaks.
        model: it asks for.
        turns: the answers of the model, by the directory of the file.
        commands: with the model.
        files: it reads, by their paths below its home directory, with the address of the plane.
        environment: by the address of the plane and the key.
    """

    client: str
    door: str
    what: str
    model: str
    turns: Callable[[Path], Turns]
    commands: Callable[[str], tuple[list[str], list[str]]]
    files: Callable[[str], Mapping[str, str]] = field(default=lambda _: {})
    environment: Callable[[str, str], Mapping[str, str]] = field(default=lambda _, key: {"BREAKWATER_API_KEY": key})


def calls(name: str, *, also: str = "", **arguments: str) -> list[dict[str, Any]]:
    """A turn that calls a tool, after a word if there is one."""
    text = [{"type": "text", "text": also}] if also else []
    return [*text, {"type": "tool_call", "name": name, "arguments": arguments}]


def with_shell(_: Path) -> Turns:
    """Codex, whose models edit with a shell unless it knows them."""
    return [calls("exec_command", also="One word.", cmd=f"sed -i 's/late/on time/' {FILE}")]


def with_patch(_: Path) -> Turns:
    """Codex with a model that it knows: a custom tool, whose input is no JSON."""
    return [[{"type": "tool_call", "name": "apply_patch", "input": PATCH}]]


def with_claude_code(directory: Path) -> Turns:
    """Claude Code edits only what it has read."""
    path = str(directory / FILE)
    edit = calls("Edit", file_path=path, old_string="late", new_string="on time")
    return [calls("Read", file_path=path), edit]


def with_opencode(directory: Path) -> Turns:
    """opencode, too."""
    path = str(directory / FILE)
    return [calls("read", filePath=path), calls("edit", filePath=path, oldString="late", newString="on time")]


def with_opencode_patch(_: Path) -> Turns:
    """opencode with a model that it gives another tool for editing."""
    return [calls("apply_patch", patchText=PATCH)]


def codex_config(url: str) -> str:
    """A provider of Codex: see docs/sdks.md."""
    return f"""\
model_provider = "breakwater"

[model_providers.breakwater]
name = "Breakwater"
base_url = "{url}/v1"
env_key = "BREAKWATER_API_KEY"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1

[analytics]
enabled = false
"""


CHAT_ONLY = ('web_search = "disabled"\n', "\n[agents]\nenabled = false\n")
"""Before and after the provider: leaves out tools that no chat completion can express."""


def codex(model: str, what: str, turns: Callable[[Path], Turns], around: tuple[str, str] = ("", "")) -> Run:
    """Codex, with a sandbox that may write to its directory."""
    options = ("--strict-config", "--skip-git-repo-check")
    return Run(
        "@openai/codex",
        "Responses",
        what,
        model,
        turns,
        lambda model: (
            ["codex", "exec", *options, "--sandbox", "workspace-write", "--model", model, TASK],
            ["codex", "exec", "resume", "--last", *options, "--model", model, AGAIN],
        ),
        lambda url: {".codex/config.toml": codex_config(url).join(around)},
    )


def claude_code(model: str, what: str) -> Run:
    """Claude Code, which may edit without asking."""
    return Run(
        "@anthropic-ai/claude-code",
        "Messages",
        what,
        model,
        with_claude_code,
        lambda model: (
            ["claude", "--print", "--permission-mode", "acceptEdits", "--model", model, TASK],
            ["claude", "--print", "--continue", "--model", model, AGAIN],
        ),
        environment=lambda url, key: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def opencode(door: str, package: str, model: str, what: str, turns: Callable[[Path], Turns] = with_opencode) -> Run:
    """opencode through a door: its provider names the package of the AI SDK that speaks the API."""

    def files(url: str) -> Mapping[str, str]:
        options = {"baseURL": f"{url}/v1", "apiKey": "{env:BREAKWATER_API_KEY}"}
        limit = {"context": 128_000, "output": 4_000}
        config = {
            "share": "disabled",
            "autoupdate": False,
            "permission": {"edit": "allow"},
            "provider": {
                "breakwater": {"npm": package, "options": options, "models": {model: {"name": model, "limit": limit}}}
            },
        }
        return {".config/opencode/opencode.json": json.dumps(config)}

    return Run(
        "opencode-ai",
        door,
        what,
        model,
        turns,
        lambda model: (
            ["opencode", "run", "--model", f"breakwater/{model}", TASK],
            ["opencode", "run", "--continue", "--model", f"breakwater/{model}", AGAIN],
        ),
        files,
        lambda _, key: {
            "BREAKWATER_API_KEY": key,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            # It fetches a package for plugins, and goes on without.
            "NPM_CONFIG_REGISTRY": "http://127.0.0.1:9",
        },
    )


RUNS = (
    codex("gpt-5.5", "Responses, with `apply_patch`", with_patch),
    codex("gpt-5", "Responses, with a shell", with_shell),
    codex("gpt-4o", "chat", with_shell, CHAT_ONLY),
    claude_code("claude-opus-4-5", "Messages"),
    claude_code("gpt-4o", "chat"),
    opencode("chat", "@ai-sdk/openai-compatible", "gpt-4o", "chat"),
    opencode("Responses", "@ai-sdk/openai", "gpt-5", "Responses", with_opencode_patch),
    opencode("Responses", "@ai-sdk/openai", "gpt-4o", "chat"),
    opencode("Messages", "@ai-sdk/anthropic", "claude-opus-4-5", "Messages"),
    opencode("Messages", "@ai-sdk/anthropic", "gpt-4o", "chat"),
    codex("gemini-3-pro", "chat, with Gemini's signatures", with_shell, CHAT_ONLY),
    claude_code("deepseek-reasoner", "chat, with DeepSeek's thinking"),
    opencode("Messages", "@ai-sdk/anthropic", "kimi-k2-thinking", "chat, with Kimi's ids"),
)


def install() -> None:
    """Installs the programs beside this file."""
    install_node(HERE)
    for setup in SETUPS:
        subprocess.run(["node", HERE / "node_modules" / setup], check=True)


def run(one: Run, url: str, key: str, simulated: str) -> str | None:
    """Runs a program against a plane, and returns what went wrong.

    Args:
        one: the program.
        url: of the plane, without `/v1`.
        key: of the plane.
        simulated: URL of the simulated provider, with `/v1`; its script is replaced.
    """
    with tempfile.TemporaryDirectory(prefix="breakwater-program-") as name:
        # Resolved: a program sees its directory as it is, and compares.
        home, work = Path(name).resolve() / "home", Path(name).resolve() / "harbour"
        for path, content in {work / FILE: BEFORE, **{home / path: of for path, of in one.files(url).items()}}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        said = [[{"type": "text", "text": text}] for text in (DONE, SAID)]
        turns = [[THOUGHT, *turn] for turn in (*one.turns(work), *said)]
        script = {"price": PRICE, "answer": DONE, "turns": turns}
        _post(f"{simulated.removesuffix('/v1')}/_sim/script", {"models": {one.model: script}})
        found = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment = {**found, "HOME": str(home), **one.environment(url, key)}
        for command, answer in zip(one.commands(one.model), (DONE, SAID), strict=True):
            if (wrong := _call(command, environment, work, answer)) is not None:
                return f"{' '.join(command)}: {wrong}"
        text = (work / FILE).read_text()
        return None if text == AFTER else f"the file says {text!r}"


def _call(command: list[str], environment: Mapping[str, str], directory: Path, answer: str) -> str | None:
    """Calls a program, and returns what went wrong."""
    try:
        ran = subprocess.run(
            [PROGRAMS / command[0], *command[1:]],
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"has not ended after {TIMEOUT_S} s: {late.stdout!r} {late.stderr!r}"
    if ran.returncode == 0 and answer in ran.stdout:
        return None
    return f"exit code {ran.returncode}, without {answer!r}: {(ran.stdout + ran.stderr)[-2000:]}"


def _post(url: str, document: Any) -> None:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(document).encode()), timeout=30)
