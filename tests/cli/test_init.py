"""`breakwater init` and `breakwater agents add`: what they write, and what they ask."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web

from breakwater.calls.providers.registry import KINDS
from breakwater.config import load_config
from breakwater.config.commands import init
from breakwater.config.first_config import simulated_config
from breakwater.config.pricing import pricing_of
from breakwater.config.starting_providers import BY_NAME, StartingProvider
from breakwater.kernel.commands.errors import ExitCode
from breakwater.limits.settings import GuardRules
from tests.cli.conftest import Run, in_thread

KEY = "sk-of-the-test"
CONFIG = Path("breakwater.yaml")


@dataclass
class ModelServer:
    """An OpenAI-compatible server."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["qwen3:8b", "llama3.2"])
    calls: list[Any] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    accepted_key: str | None = None

    async def list_models(self, request: web.Request) -> web.Response:
        if self.accepted_key and request.headers.get("Authorization") != f"Bearer {self.accepted_key}":
            return web.json_response({"error": {"message": "no valid key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def complete(self, request: web.Request) -> web.Response:
        self.calls.append(await request.json())
        self.keys.add(request.headers.get("Authorization"))
        if self.calls[-1]["model"] == "missing":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        message = {"role": "assistant", "content": "OK."}
        return web.json_response(
            {"choices": [{"message": message}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
        )


@asynccontextmanager
async def served() -> AsyncGenerator[ModelServer]:
    server = ModelServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"{site.name}/v1"
    yield server
    await runner.cleanup()


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No provider in the environment, and none on this machine."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(init, "FOUND_HERE", ())


@pytest.mark.parametrize(("name", "variable"), [("openai", "OPENAI_API_KEY"), ("anthropic", "ANTHROPIC_API_KEY")])
def test_a_key_in_the_environment_becomes_a_config_that_refers_to_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    monkeypatch.setenv(variable, KEY)
    ran = run("init")
    assert ran.code == ExitCode.OK, ran.err
    text, config = CONFIG.read_text(), load_config(CONFIG)
    assert KEY not in text
    assert len(text.splitlines()) <= 16
    assert (config.providers[name].kind, config.agents["assistant"].budget.enforcement) == (name, "hard")
    assert pricing_of(config, name, config.agents["assistant"].chain[0]) is not None, (
        "the suggested model has no price any more"
    )
    assert [line.split("breakwater ")[1] for line in ran.out.splitlines()[-3:]] == [
        "up",
        'submit assistant "Write a haiku about harbours."',
        "executions --since 1h",
    ]
    again = run("init")
    assert (again.code, "already exists" in again.err) == (ExitCode.USAGE, True)
    assert run("init", "--force").code == ExitCode.OK


def test_without_a_provider_it_says_what_it_looked_for(run: Run) -> None:
    ran = run("init")
    assert (ran.code, "OPENAI_API_KEY" in ran.err, CONFIG.exists()) == (ExitCode.FAILED, True, False)
    assert "breakwater up --simulate" in ran.err
    assert "there is no provider nobody; known: openai, anthropic, " in run("init", "--provider", "nobody").err


def test_the_first_config_of_a_simulation_is_one_of_openai(run: Run) -> None:
    assert run("up").code == ExitCode.USAGE
    simulated_config(CONFIG)
    config = load_config(CONFIG)
    assert (list(config.agents), config.agents["assistant"].budget.enforcement) == (["assistant"], "hard")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "connection refused at 127.0.0.1:9"),
        ("http://nowhere.invalid/v1", "the host name nowhere.invalid cannot be resolved"),
    ],
)
def test_a_server_that_does_not_answer_is_named_by_its_address(run: Run, url: str, said: str) -> None:
    ran = run("init", "--url", url)
    assert (ran.code, said in ran.err, CONFIG.exists()) == (ExitCode.USAGE, True, False)
    ran = run("init", "--url", url, "--model", "m", "--call")
    assert (ran.code, ran.err.count(said), CONFIG.exists()) == (ExitCode.FAILED, 2, True)
    assert "Cannot connect" not in ran.err


async def test_v1_that_was_left_out_is_added_and_what_is_no_list_of_models_is_reported(run: Run) -> None:
    async with served() as server:
        ran = await in_thread(run, "init", "--url", server.url.removesuffix("/v1"))
        assert ran.code == ExitCode.OK, ran.err
        assert f"it is {server.url}" in ran.err
        assert "serves qwen3:8b, llama3.2; took qwen3:8b" in ran.err
        assert f"base_url: {server.url}\n" in CONFIG.read_text()  # noqa: ASYNC240
        ran = await in_thread(run, "init", "--url", f"{server.url}/wrong", "--force")
        assert (ran.code, f"{server.url}/wrong/models answers 404" in ran.err) == (ExitCode.USAGE, True)


async def test_a_server_that_wants_a_key_is_told_of_with_the_option_that_names_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    monkeypatch.setenv("WRONG_KEY", "wrong")
    async with served() as server:
        server.accepted_key = KEY
        said = {
            (): "name the variable that has its key with --key-env NAME",
            ("--key-env", "NO_KEY"): "the key in the environment variable NO_KEY is not set",
            ("--key-env", "WRONG_KEY"): "the key in the environment variable WRONG_KEY is refused",
        }
        for options, words in said.items():
            ran = await in_thread(run, "init", "--url", server.url, *options)
            assert (ran.code, words in ran.err) == (ExitCode.USAGE, True), ran.err


async def test_the_server_of_openai_base_url_is_asked_for_its_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with served() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert (await in_thread(run, "init")).code == ExitCode.OK
    assert load_config(CONFIG).agents["assistant"].model == "qwen3:8b"


async def test_a_url_is_asked_for_its_models_and_called_once_if_allowed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    async with served() as server:
        ran = await in_thread(run, "init", "--url", server.url, "--key-env", "MY_KEY", "--call", "--json")
        assert ran.code == ExitCode.OK, ran.err
        assert (ran.json["model"], ran.json["answer"]) == ("qwen3:8b", "OK.")
        assert [call["model"] for call in server.calls] == ["qwen3:8b"]
        assert server.keys == {f"Bearer {KEY}"}
        assert load_config(CONFIG).agents["assistant"].budget.enforcement == "soft"  # its price is not known
        failed = await in_thread(run, "init", "--url", server.url, "--model", "missing", "--call", "--force")
        assert (failed.code, "no such model" in failed.err) == (ExitCode.FAILED, True)
        assert (await in_thread(run, "init", "--url", server.url, "--no-call", "--force")).code == ExitCode.OK
        assert len(server.calls) == 2


async def test_a_model_server_on_this_machine_is_found_and_costs_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as server:
        here = (("ollama", server.url), ("vllm", "http://127.0.0.1:9/v1"))
        monkeypatch.setattr(init, "FOUND_HERE", tuple(StartingProvider(name, url, is_local=True) for name, url in here))
        ran = await in_thread(run, "init", "--agent", "helper", "--daily-usd", "2.5")
    assert ran.code == ExitCode.OK, ran.err
    config = load_config(CONFIG)
    price = config.models["qwen3:8b"].price
    assert price is not None
    assert (price.input_usd_per_mtok, config.agents["helper"].budget.enforcement) == (0, "hard")


async def test_a_person_is_asked_which_provider_which_model_and_whether_to_call(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    asked: list[str] = []

    def answer(question: str, **_: Any) -> Any:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr(typer, "prompt", answer)
    monkeypatch.setattr(typer, "confirm", answer)
    monkeypatch.setattr(init, "_is_interactive", lambda: True)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with served() as server:
        answers += [2, server.url, "", "llama3.2", True]
        ran = await in_thread(run, "init")
        assert ran.code == ExitCode.OK, ran.err
        assert "It answers: OK." in ran.out
        assert "qwen3:8b, llama3.2" in ran.out
        assert [call["model"] for call in server.calls] == ["llama3.2"]
    assert "may cost" in asked[-1]
    answers.append(3)
    assert "there is no 3 in the list" in (await in_thread(run, "init", "--force")).err


EXISTING = """\
# ours
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {provider: local}
agents:
    # the first
    writer:
        model: m   # a comment
"""


def test_an_agent_is_added_and_the_rest_of_the_file_stays_as_it_is(run: Run) -> None:
    CONFIG.write_text(EXISTING)
    ran = run(
        "agents",
        "add",
        "a-b",
        "--model",
        "gpt-5",
        "--fallback",
        "m",
        "--system-prompt",
        "Say:\nyes",
        "--daily-usd",
        "2",
    )
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    assert [line.split()[1] for line in ran.out.splitlines()[1:]] == ["up", "submit"]
    added = CONFIG.read_text()
    assert [line for line in added.splitlines() if line in EXISTING.splitlines()] == EXISTING.splitlines()
    agent = load_config(CONFIG).agents["a-b"]
    assert (agent.chain, agent.system_prompt, agent.budget.enforcement) == (("gpt-5", "m"), "Say:\nyes", "hard")
    assert "already has an agent a-b" in run("agents", "add", "a-b", "--model", "m").err
    for wrong in ("a/b\n", "my agent"):
        assert "must not contain spaces or control characters" in run("agents", "add", wrong, "--model", "m").err
    assert CONFIG.read_text() == added
    assert "m has no price (set models.m.price)" in run("agents", "add", "c", "--model", "m", "--daily-usd", "1").err


def test_the_commands_that_follow_an_added_agent_work(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    CONFIG.write_text(EXISTING.replace('/v1"}', '/v1", api_key: {env: A_KEY}}'))
    suggested = run("agents", "add", "a", "--model", "gpt-5").out.splitlines()[1:]
    # `up` refuses to start without the key.
    assert suggested[0] == "  export A_KEY=…"
    monkeypatch.setenv("A_KEY", KEY)
    assert len(run("agents", "add", "b", "--model", "gpt-5").out.splitlines()[1:]) == len(suggested) - 1


def test_the_guard_of_an_agent_is_in_the_file_in_figures(run: Run) -> None:
    CONFIG.write_text(EXISTING)
    assert run("agents", "add", "a", "--model", "gpt-5").code == ExitCode.OK
    assert run("agents", "add", "b", "--model", "gpt-5", "--guard", "agent-run").code == ExitCode.OK
    assert run("agents", "add", "c", "--model", "gpt-5", "--guard", "agent-ran").code == ExitCode.USAGE
    guards = [line.strip() for line in CONFIG.read_text().splitlines() if "guard:" in line]
    assert guards == [
        "guard: {preset: agent-run}   # per task: 100 iterations, 200,000 tokens, $10.00",
        "guard: {max_iterations: 10, max_tokens: 200000, max_cost_usd: 10.00}"
        "   # per task; for agents that loop: {preset: agent-run}",
    ]
    agents = load_config(CONFIG).agents
    a, b = agents["a"].guard, agents["b"].guard
    assert a == GuardRules()
    assert b == GuardRules(preset="agent-run", max_iterations=100)
    CONFIG.write_text(EXISTING.replace("defaults: {provider: local}", "defaults: {provider: local, guard: off}"))
    assert run("agents", "add", "a", "--model", "gpt-5").code == ExitCode.OK
    assert load_config(CONFIG).agents["a"].guard is None


def test_a_cap_below_the_cheapest_call_is_warned_of_as_by_config_check(run: Run) -> None:
    CONFIG.write_text(EXISTING)
    added = run("agents", "add", "tiny", "--model", "gpt-5", "--daily-usd", "0.01")
    [warning] = run("config", "check", "--json").json["warnings"]
    assert warning.startswith("agents.tiny: no call is ever made under the hard limit: the output of a call to gpt-5")
    assert "agents.tiny.budget.daily_usd is $0.01 (raise it, or lower max_tokens)" in warning
    assert (added.code, " ".join(added.err.split())) == (ExitCode.OK, warning)


@pytest.mark.parametrize(
    ("given", "nano"),
    [
        ("0.014", 14_000_000),
        ("0.000000001", 1),
        ("8999999.123456789", 8_999_999_123_456_789),
        ("0.1000000010", 100_000_001),
        ("2", 2_000_000_000),
    ],
)
def test_a_budget_is_written_exactly(run: Run, monkeypatch: pytest.MonkeyPatch, given: str, nano: int) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert run("init", "--provider", "openai", "--no-call", "--daily-usd", given).code == ExitCode.OK
    assert run("agents", "add", "b", "--model", "gpt-5", "--daily-usd", given).code == ExitCode.OK
    agents = load_config(CONFIG).agents.values()
    assert [agent.budget.daily_usd for agent in agents] == [nano, nano]


@pytest.mark.parametrize("given", ["0", "-1", "0.0000000001", "much", "nan", "inf"])
def test_what_is_no_amount_is_refused(run: Run, given: str) -> None:
    CONFIG.write_text(EXISTING)
    assert run("agents", "add", "b", "--model", "m", f"--daily-usd={given}").code == ExitCode.USAGE
    assert CONFIG.read_text() == EXISTING


def test_the_config_is_replaced_at_once_and_stays_a_link(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CONFIG.with_name("kept.yaml")
    kept.write_bytes(EXISTING.replace("\n", "\r\n").encode())
    kept.chmod(0o640)
    CONFIG.symlink_to(kept.name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full_disk)
        assert "can't be written: No space left" in run("agents", "add", "b", "--model", "m").err
    assert "b:" not in kept.read_text()
    assert run("agents", "add", "b", "--model", "m").code == ExitCode.OK
    assert (CONFIG.is_symlink(), kept.stat().st_mode & 0o777) == (True, 0o640)
    assert b"# the first\r\n" in kept.read_bytes()


def _full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_agent_for_a_file_in_another_style_is_shown_to_be_added(run: Run) -> None:
    CONFIG.write_text(EXISTING.partition("agents:")[0] + "agents: {writer: {model: m}}\n")
    ran = run("agents", "add", "x", "--model", "m")
    assert (ran.code, "x:\n  model: m" in ran.err) == (ExitCode.FAILED, True)


def test_each_provider_that_is_named_gets_a_config_that_its_kind_accepts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://x.openai.azure.com")
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-project")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    for name, provider in BY_NAME.items():
        if provider.key_env is not None:
            monkeypatch.setenv(provider.key_env, KEY)
        ran = run("init", "--provider", name, "--model", "some-model", "--force")
        assert ran.code == 0, ran.err
        assert KEY not in CONFIG.read_text()
        config = load_config(CONFIG)
        assert config.providers[name].kind == provider.kind
        assert config.agents["assistant"].chain[0] == "some-model"
    assert {provider.kind for provider in BY_NAME.values()} == {
        kind for kind, settings in KINDS.items() if not settings.local
    }


def test_what_a_provider_needs_is_taken_from_options_or_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    ran = run("init", "--provider", "vertex")
    assert ran.code == ExitCode.USAGE
    assert "vertex needs its project" in ran.err
    assert "--set project=…, or in GOOGLE_CLOUD_PROJECT" in ran.err
    assert run("init", "--provider", "vertex", "--set", "project=my-project", "--set", "location=eu").code == 0
    assert "    project: my-project\n    location: eu\n" in CONFIG.read_text()
    ran = run("init", "--provider", "bedrock", "--set", "zone=b", "--force")
    assert "bedrock has no setting zone to set here; known: region" in ran.err
    assert "--set is for --provider" in run("init", "--set", "region=b", "--force").err
    assert "--set takes NAME=VALUE" in run("init", "--provider", "bedrock", "--set", "region", "--force").err


def test_azure_without_a_key_calls_by_entra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_OPENAI_API_KEY", raising=False)
    endpoint = "base_url=https://x.openai.azure.com"
    ran = run("init", "--provider", "azure", "--set", endpoint, "--model", "my-deployment")
    assert ran.code == 0, ran.err
    assert "auth: {entra: default}" in CONFIG.read_text()
    assert "api_version: v1" in CONFIG.read_text()


async def test_a_named_provider_is_asked_for_its_needs_and_called_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as server:
        origin = server.url.removesuffix("/v1")
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
        answers = {"The resource's URL (https://NAME.openai.azure.com)": f"{origin}", "The API's version": "v1"}
        asked: list[str] = []

        def answer(question: str, default: Any = None, **_: Any) -> Any:
            asked.append(question)
            return answers.get(question, default)

        monkeypatch.setattr(typer, "prompt", answer)
        monkeypatch.setattr(typer, "confirm", lambda *_: True)
        monkeypatch.setattr(init, "_is_interactive", lambda: True)
        ran = await in_thread(run, "init", "--provider", "azure", "--model", "my-deployment")
    assert asked == list(answers)
    assert ran.code == ExitCode.FAILED, "this server is no resource of Azure's"
    assert "a call of my-deployment failed" in ran.err
