"""Keys and tokens that end in the middle of a job, or that can't be had: said clearly, and nothing is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from breakwater.calls.providers.registry import BedrockSettings
from breakwater.local.provider import SimulatedProvider
from tests.flow.kit import PRICE, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.tables import each_row

pytest.importorskip("azure.identity", reason="`make install` brings it")

from tests.calls.providers.cloud_doubles import ServiceAccount, TokenIssuer, app_service, azure, vertex

AGENT: dict[str, Any] = {"model": "p/m", "retry": {"max_attempts": 3, "base_s": 0.05}, "breaker": "off"}
PRICED = {"price": PRICE}
EXPIRED = {"type": "authentication_error", "code": "expired_api_key", "message": "The API key has expired."}
CUT_OFF = {"requests": [1, 1], "stream": "error", "after_chunks": 1, "error": EXPIRED}


def tries(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(attempt["cause"], attempt["outcome"]) for attempt in result["attempts"]]


async def run(plane: WorkerPlane, job_id: str = "j", **job: Any) -> dict[str, Any]:
    return await plane.run({"agent": "writer", "job_id": job_id, "prompt": "x", **job})


# Credentials that can't be had


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which no cloud has left anything."""
    for name in BedrockSettings.variables:
        monkeypatch.delenv(name, raising=False)
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_ID", "AZURE_TENANT_ID", "IDENTITY_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nowhere")
@each_row(
    ("provider", "places"),
    [
        (
            {"kind": "bedrock", "region": "eu-central-1", "base_url": "http://127.0.0.1:1"},
            ["the environment (AWS_ACCESS_KEY_ID)", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE"],
        ),
        (
            {"kind": "vertex", "project": "p", "base_url": "http://127.0.0.1:1"},
            ["GOOGLE_APPLICATION_CREDENTIALS", "application_default_credentials.json", "a metadata server"],
        ),
        (
            {"kind": "azure", "base_url": "http://127.0.0.1:1", "auth": {"entra": "default"}},
            ["EnvironmentCredential", "WorkloadIdentityCredential", "ManagedIdentityCredential", "AzureCliCredential"],
        ),
        (
            {"base_url": "http://127.0.0.1:1", "auth": {"command": ["no-such-program", "--token"]}},
            ["the secret command no-such-program can't be used: No such file"],
        ),
    ],
)
async def test_a_job_whose_provider_has_no_credential_says_where_it_was_looked_for(
    start_worker: StartWorker, provider: dict[str, Any], places: list[str]
) -> None:
    agents = {"writer": {**AGENT, "retry": {"max_attempts": 1}}}
    async with start_worker(
        {"sim/m": model()}, agents, more_providers={"p": provider}, more_models={"p/m": PRICED}
    ) as plane:
        result = await run(plane)
        assert "credential_unreadable" in plane.log("worker")
    error = result["error"]
    assert (result["status"], error["kind"], error["class"]) == ("dead_lettered", "network", "CredentialError")
    assert [place for place in places if place not in error["message"]] == []
    [attempt] = result["attempts"]
    assert (attempt["cost"], attempt["cost_basis"]) == ("0.000000000", "billed"), "nothing was sent"


async def test_a_job_waits_until_a_credential_that_failed_is_looked_for_again(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.calls.providers.credentials.RETRY_S", 1.0)
    runs = tmp_path / "runs"
    script = tmp_path / "token.py"
    script.write_text(
        f"p = {str(runs)!r}\n"
        "open(p, 'a').write('x')\n"
        "if len(open(p).read()) == 1: raise SystemExit(1)\n"
        "print('token')\n"
    )
    async with SimulatedProvider({"models": {"m": model()}}) as other:
        providers = {"p": {"base_url": other.url, "auth": {"command": [sys.executable, str(script)]}}}
        async with start_worker(
            {"sim/m": model()}, {"writer": AGENT}, more_providers=providers, more_models={"p/m": PRICED}
        ) as plane:
            result = await run(plane)
    assert tries(result) == [("first", "error"), ("retry", "success")]
    assert result["attempts"][1]["backoff_ms"] >= 800, "the one before has just failed"
    assert len(runs.read_text()) == 2


async def test_a_deployment_without_a_credential_costs_no_attempt(start_worker: StartWorker) -> None:
    places = [{"provider": "p", "name": "m"}, {"provider": "sim", "name": "m"}]
    models = {"c": {"price": PRICE, "deployments": places, "choose": "ordered"}}
    agents = {"writer": {**AGENT, "model": "c", "retry": {"max_attempts": 1}}}
    provider = {"base_url": "http://127.0.0.1:1", "auth": {"command": ["/no/such/program"]}}
    async with start_worker({"m": model()}, agents, more_providers={"p": provider}, more_models=models) as plane:
        first, second = [await run(plane, name) for name in ("a", "b")]
        spared = await plane.worker.redis.client.keys("bw:held:*")
    assert tries(first) == [("first", "error"), ("redeployment", "success")]
    assert tries(second) == [("first", "success")], "the other one is left alone for some seconds"
    assert spared == [], "other workers may have a credential"


# Keys and tokens that end


@pytest.mark.parametrize("continues", [False, True])
async def test_a_key_that_expires_in_the_middle_of_a_stream_is_read_again_or_the_part_is_kept(
    start_worker: StartWorker, tmp_path: Path, continues: bool
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-old")
    async with SimulatedProvider({"models": {"m": model(CUT_OFF)}}) as other:
        providers = {"p": {"base_url": other.url, "api_key": {"file": str(key)}}}
        agents = {"writer": {**AGENT, **({"on_stream_break": "continue"} if continues else {})}}
        async with start_worker(
            {"sim/m": model()}, agents, more_providers=providers, more_models={"p/m": PRICED}
        ) as plane:
            key.write_text("sk-new")
            result = await run(plane, stream=True)
            after = await run(plane, "after", stream=True)
    if continues:
        assert tries(result) == [("first", "error"), ("credential_refresh", "success")]
        assert result["status"] == "succeeded"
    else:
        assert tries(result) == [("first", "error")]
        assert (result["status"], result["error"]["class"]) == ("dead_lettered", "UnauthorizedError")
        assert result["output"], "the part that was sent is kept"
    assert result["attempts"][0]["cost_basis"] == "estimated"
    assert after["status"] == "succeeded"
    assert "sk-" not in str(result)


@asynccontextmanager
async def cloud(
    kind: str, issuer: TokenIssuer, faults: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[dict[str, Any], SimulatedProvider]]:
    """The settings of a provider whose tokens the issuer gives, and the simulated provider behind it."""
    async with SimulatedProvider({"models": {"m": model(*faults), "claude-m": model(*faults)}}) as sim:
        if kind == "vertex":
            async with vertex(issuer, sim.url, []) as origin, ServiceAccount(issuer).serve() as account:
                monkeypatch.setenv("GOOGLE_KEY", json.dumps(account))
                place = {"base_url": origin, "project": "my-project", "location": "europe-west4"}
                yield {"kind": "vertex", "auth": {"credentials": {"env": "GOOGLE_KEY"}}, **place}, sim
            return
        async with app_service(issuer, monkeypatch), azure(issuer, sim.url) as origin:
            auth = {"entra": "managed_identity"}
            yield {"kind": "azure", "base_url": origin, "api_version": "v1", "auth": auth}, sim


CLOUDS = [("vertex", "m"), ("vertex", "claude-m"), ("azure", "m")]


@pytest.mark.parametrize(("kind", "name"), CLOUDS)
async def test_a_token_that_ends_between_two_attempts_is_replaced_before_the_next(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    issuer = TokenIssuer(lifetime_s=2)
    agents = {"writer": {**AGENT, "model": f"p/{name}", "retry": {"max_attempts": 2, "base_s": 2.5}}}
    async with (
        cloud(kind, issuer, [{"requests": [1, 1], "status": 500}], monkeypatch) as (provider, _),
        start_worker(
            {"sim/m": model()}, agents, more_providers={"p": provider}, more_models={f"p/{name}": PRICED}
        ) as plane,
    ):
        result = await run(plane)
    assert tries(result) == [("first", "error"), ("retry", "success")], result["error"]
    assert result["attempts"][0]["error"]["status_code"] == 500
    assert len(issuer.requests) == 2


@pytest.mark.parametrize(("kind", "name"), CLOUDS)
async def test_a_token_that_is_taken_back_between_two_attempts_costs_none(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    issuer = TokenIssuer()
    agents = {"writer": {**AGENT, "model": f"p/{name}", "retry": {"max_attempts": 2, "base_s": 1.0}}}
    async with (
        cloud(kind, issuer, [{"requests": [1, 1], "status": 500}], monkeypatch) as (provider, sim),
        start_worker(
            {"sim/m": model()}, agents, more_providers={"p": provider}, more_models={f"p/{name}": PRICED}
        ) as plane,
    ):
        await plane.publish({"agent": "writer", "job_id": "j", "prompt": "x"})
        await until(lambda: sim.ledger.totals.calls == 1, "the first call")
        issuer.revoke()
        result = await plane.result("j")
    assert tries(result) == [("first", "error"), ("retry", "error"), ("credential_refresh", "success")]
    assert result["attempts"][1]["error"]["status_code"] == 401


@pytest.mark.parametrize(("kind", "name"), CLOUDS)
async def test_a_token_that_ends_in_the_middle_of_a_stream_is_replaced_and_the_answer_continued(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    issuer = TokenIssuer()
    agents = {"writer": {**AGENT, "model": f"p/{name}", "on_stream_break": "continue"}}
    async with (
        cloud(kind, issuer, [CUT_OFF], monkeypatch) as (provider, _),
        start_worker(
            {"sim/m": model()}, agents, more_providers={"p": provider}, more_models={f"p/{name}": PRICED}
        ) as plane,
    ):
        result = await run(plane, stream=True)
    assert tries(result) == [("first", "error"), ("credential_refresh", "success")], result["error"]
    assert len(issuer.requests) == 2
