from __future__ import annotations

import subprocess
import sys

import pytest

from breakwater.calls.providers.registry import KINDS
from breakwater.config import parse_config
from breakwater.config.load import named_secrets
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row

BASE = "agents: {a: {model: m, provider: p}}\nproviders:\n  p: "


@each_row(
    ("provider", "kind"),
    [
        ("{base_url: 'http://x/v1'}", "openai"),
        ("{kind: openai, base_url: 'http://x/v1'}", "openai"),
        ("{kind: azure, base_url: 'http://x', api_key: {env: A}}", "azure"),
        ("{kind: anthropic, api_key: {env: A}}", "anthropic"),
    ],
)
def test_a_provider_is_of_the_kind_it_names_or_openai_compatible(provider: str, kind: str) -> None:
    config = parse_config(BASE + provider)
    assert isinstance(config.providers["p"], KINDS[kind])
    assert [place for place, _ in named_secrets(config)] == ["providers.p.api_key"] * ("api_key" in provider)


@each_row(
    ("provider", "lines"),
    [
        ("{kind: opnai}", ["p.kind: 'opnai' is not a known kind of provider; did you mean 'openai'?"]),
        (
            "{kind: 3, base_url: 'http://x'}",
            [f"p.kind: '3' is not a known kind of provider; known: {', '.join(sorted(KINDS))}"],
        ),
        (
            "{kind: [azure]}",
            ["p.kind: \"['azure']\" is not a known kind of provider; did you mean 'azure'?"],
        ),
        ("just words", ["p: should be a mapping of settings"]),
        (
            "{kind: azure, base_url: 'http://x', api_versoin: x}",
            ["p.api_versoin: is not a known setting; did you mean 'api_version'?"],
        ),
        (
            "{kind: azure, zzz: x}",
            [
                "p.base_url: is missing",
                "p.zzz: is not a known setting; known: api, api_key, api_version, auth, base_url, headers, "
                "kind, proxy, proxy_auth, tls",
            ],
        ),
        ("{kind: anthropic, api_version: x}", ["p.api_version: is not a known setting; did you mean 'version'?"]),
        (
            "{base_url: 'http://x', version: x}",
            [
                "p.version: is not a known setting; known: api, api_key, auth, base_url, headers, "
                "kind, organization, project, proxy, proxy_auth, tls"
            ],
        ),
        ("{kind: anthropic, api_key: {enf: A}}", ["p.api_key.enf: is not a known setting; did you mean 'env'?"]),
        (
            "{kind: process, command: [a], env: {X: {enf: A}}}",
            ["p.env.X.enf: is not a known setting; did you mean 'env'?"],
        ),
    ],
)
def test_a_mistake_is_named_by_its_place_in_the_file_and_by_what_its_kind_has(provider: str, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE + provider)
    reported = [
        line.strip().removeprefix("providers.").removesuffix(f" (line {len(BASE.splitlines())})")
        for line in str(caught.value).splitlines()[1:]
    ]
    assert reported[: len(lines)] == lines


def test_a_secret_in_place_of_its_reference_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{BASE}{{kind: anthropic, api_key: sk-planted-1}}")
    assert "providers.p.api_key: a secret does not belong in the config" in str(caught.value)
    assert "sk-planted-1" not in str(caught.value)


def test_a_providers_name_may_be_that_of_a_kind() -> None:
    with pytest.raises(ConfigError, match=r"providers\.azure\.base_url: should be"):
        parse_config("agents: {a: {model: m}}\nproviders: {azure: {base_url: 3}}")


def test_the_settings_are_known_without_a_library_for_http() -> None:
    program = "import sys, breakwater.calls.providers.registry; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
