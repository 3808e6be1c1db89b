from __future__ import annotations

import pytest
from aiohttp import web

from breakwater.calls.providers.registry import AzureSettings
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import KEY, answering, call, perform, settings
from tests.flow.kit import USAGE, model


async def test_a_deployment_answers_as_openai_does() -> None:
    script = {"api_keys": [KEY], "models": {"azure/gpt-x": model(answer="hi", usage={**USAGE, "cached_tokens": 20})}}
    async with SimulatedProvider(script) as sim:
        answer = await perform(settings("azure", sim.url.removesuffix("/v1")), call(model="gpt-x"))
        assert [made.model for made in sim.ledger.calls] == ["azure/gpt-x"]
    assert (answer.output, answer.usage) == ("hi", Usage(120, 40, 20))


@pytest.mark.parametrize(
    ("base", "version", "name", "path"),
    [
        ("", None, "gpt-4o", "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"),
        (
            "/",
            "2025-04-01-preview",
            "a b/c",
            "/openai/deployments/a%20b%2Fc/chat/completions?api-version=2025-04-01-preview",
        ),
        ("/", "v1", "gpt-4o", "/openai/v1/chat/completions"),
    ],
)
async def test_the_url_names_deployment_and_version_and_the_key_has_its_header(
    base: str, version: str | None, name: str, path: str
) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        seen.append((request.raw_path, request.headers.get("api-key"), request.headers.get("Authorization")))
        return web.json_response({"choices": [{"message": {"content": "hi"}}]})

    more = {} if version is None else {"api_version": version}
    async with answering(note) as origin:
        await perform(settings("azure", f"{origin}{base}", **more), call(model=name))
    assert seen == [(path, KEY, None)]


def test_a_key_is_not_needed() -> None:
    assert AzureSettings(kind="azure", base_url="http://x").api_key is None
