"""Each block of docs/providers.md is a whole config that `breakwater config check` accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from breakwater.calls.providers.registry import KINDS
from breakwater.config import parse_config
from breakwater.config.load import named_secrets
from breakwater.config.pricing import pricing_of
from breakwater.config.starting_providers import BY_NAME
from tests.commands import run_command
from tests.docs.markdown import ROOT, blocks, headings, section
from tests.sdks.__main__ import SERVERS, version
from tests.tables import each_row

PAGE = ROOT / "docs" / "providers.md"
BLOCKS = [block for block in blocks(PAGE) if block.language == "yaml"]
WANTED = (
    "OpenAI Azure Anthropic Bedrock Vertex_AI Gemini Mistral Groq DeepSeek xAI OpenRouter Together Fireworks Cohere "
    "Ollama vLLM llama.cpp LM_Studio TGI SGLang"
)


def test_each_provider_has_its_block() -> None:
    assert headings(PAGE)[2:] == [name.replace("_", " ") for name in WANTED.split()]
    assert len(BLOCKS) == len(headings(PAGE))
    served = {str(settings.kind) for block in BLOCKS for settings in parse_config(block.text).providers.values()}
    assert served == {kind for kind, settings in KINDS.items() if not settings.local}
    sections = PAGE.read_text().split("\n## ")[2:]
    assert all("**native**: " in section and "**tested**:" in section for section in sections)


@each_row("place", range(len(BLOCKS)))
def test_a_block_passes_the_check(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BLOCKS[place].text
    config = parse_config(text)
    for _, secret in named_secrets(config):
        if secret.env is not None:
            monkeypatch.setenv(secret.env, "sk-1")
    file = tmp_path / "breakwater.yaml"
    file.write_text(text)
    checked = run_command("config", "check", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    model = config.agents["assistant"].chain[0]
    name = config.provider_name(config.agents["assistant"], model)
    if name != "gateway":
        assert pricing_of(config, name or "", model) is not None, f"{model} has no price"


def test_the_blocks_are_those_that_init_writes() -> None:
    of_one_provider = (providers for block in BLOCKS if len(providers := yaml.safe_load(block.text)["providers"]) == 1)
    shown = {name: entry for providers in of_one_provider for name, entry in providers.items()}
    assert shown.keys() - BY_NAME.keys() == {"gateway"}
    assert not BY_NAME.keys() - shown.keys()
    for name, provider in BY_NAME.items():
        entry = shown[name]
        assert entry.get("kind", "openai") == provider.kind
        if provider.base_url and provider.kind == "openai":
            assert entry["base_url"] == provider.base_url
        assert entry.get("api_key", {}).get("env") in (provider.key_env, None)


def test_the_server_that_is_run_has_its_version_on_the_page() -> None:
    tested = section(PAGE, "llama.cpp")
    for package in SERVERS:
        assert f"`{package}` {version(package)})" in tested


def test_the_page_stays_short() -> None:
    assert len(PAGE.read_text().split()) <= 1_800
    assert max(len(line) for line in PAGE.read_text().splitlines()) <= 120
    assert not re.search(r"sk-\w{3}", PAGE.read_text())
