"""Azure by tokens of Entra ID, against doubles of Entra, of App Service's managed identity, and of its resource."""

from __future__ import annotations

import asyncio
import sys
import time
from base64 import urlsafe_b64decode
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey
from pydantic import ValidationError

from breakwater.calls.providers import extras
from breakwater.calls.providers.base import CallError
from breakwater.calls.providers.registry import AzureSettings, EntraAuth
from breakwater.calls.rules.classify import TransportFailure
from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef
from tests.calls.providers.cloud_doubles import TokenIssuer, app_service, serving
from tests.calls.providers.kit import call, failure, perform, settings

pytest.importorskip("azure.identity", reason="`make install` brings it")

SECRET = "client~secret~0123"
HOUR = timedelta(hours=1)
SCOPE = "https://cognitiveservices.azure.com/.default"


@pytest.fixture(autouse=True)
def _nothing_of_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AzureSettings.variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ENTRA_SECRET", SECRET)


@asynccontextmanager
async def resource(issuer: TokenIssuer, seen: list[str]) -> AsyncGenerator[str]:
    """An Azure OpenAI resource without keys."""

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.raw_path)
        assert "api-key" not in request.headers
        return issuer.refusal(request) or web.json_response({"choices": [{"message": {"content": "hi"}}]})

    async with serving({"POST /openai/{rest:.*}": answer}) as origin:
        yield origin


async def test_a_managed_identity_calls_a_resource_and_gets_a_new_token_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    issuer = TokenIssuer()
    seen: list[str] = []
    auth = EntraAuth(entra="managed_identity", client_id="11111111-2222")
    async with app_service(issuer, monkeypatch), resource(issuer, seen) as origin:
        provider = AzureSettings(kind="azure", base_url=origin, auth=auth).open()
        for _ in range(3):
            assert (await provider.perform(call(model="gpt-x"))).output == "hi"
        assert len(issuer.requests) == 1
        assert issuer.requests[0]["resource"] == "https://cognitiveservices.azure.com"
        assert issuer.requests[0]["client_id"] == "11111111-2222"
        issuer.revoke()
        with pytest.raises(CallError) as caught:
            await provider.perform(call(model="gpt-x"))
        assert await provider.refresh_credential(caught.value.credential) is True
        assert (await provider.perform(call(model="gpt-x"))).output == "hi"
        await provider.close()
    assert set(seen) == {"/openai/deployments/gpt-x/chat/completions?api-version=2024-10-21"}


async def test_a_token_that_ends_soon_is_renewed_while_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = TokenIssuer(lifetime_s=4)
    async with app_service(issuer, monkeypatch), resource(issuer, []) as origin:
        provider = AzureSettings(kind="azure", base_url=origin, auth=EntraAuth(entra="managed_identity")).open()
        for _ in range(60):
            await provider.perform(call())
            await asyncio.sleep(0.1)
        await provider.close()
    assert 2 <= len(issuer.requests) <= 5


def knows_secret(form: Mapping[str, str], _: str) -> str | None:
    """What is wrong with the proof of an application that has a secret."""
    if form.get("client_secret") == SECRET:
        return None
    return f"AADSTS7000215: Invalid client secret provided: {form.get('client_secret')}."


Proof = Callable[[Mapping[str, str], str], str | None]
"""Of a request for a token and the URL of the token endpoint: what is wrong with it; None if nothing is."""


@asynccontextmanager
async def entra(
    issuer: TokenIssuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: Proof = knows_secret
) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """Entra ID with one directory and one application."""
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(ca))

    async def directory(request: web.Request) -> web.StreamResponse:
        base = f"https://{request.host}/tenant-1"
        return web.json_response(
            {
                "token_endpoint": f"{base}/oauth2/v2.0/token",
                "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
                "issuer": f"{base}/v2.0",
            }
        )

    async def token(request: web.Request) -> web.StreamResponse:
        form = {name: str(value) for name, value in (await request.post()).items()}
        if (text := proof(form, f"https://{request.host}{request.path}")) is not None:
            return web.json_response({"error": "invalid_client", "error_description": text}, status=401)
        return issuer.issue(form, ext_expires_in=3600)

    routes = {
        "GET /tenant-1/v2.0/.well-known/openid-configuration": directory,
        "POST /tenant-1/oauth2/v2.0/token": token,
    }
    async with serving(routes, authority) as origin:
        fields = {
            "entra": "client_secret",
            "tenant_id": "tenant-1",
            "client_id": "app-1",
            "client_secret": SecretRef(env="ENTRA_SECRET"),
            "authority": origin.removeprefix("https://"),
        }
        yield origin, fields


async def test_an_application_shows_its_secret_to_entra_and_its_token_to_the_resource(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = TokenIssuer()
    seen: list[str] = []
    async with entra(issuer, tmp_path, monkeypatch) as (_, fields), resource(issuer, seen) as origin:
        chosen = AzureSettings(kind="azure", base_url=origin, api_version="v1", auth=EntraAuth(**fields))
        assert (await perform(chosen, call(model="gpt-x"))).output == "hi"
    assert (issuer.requests[0]["scope"], issuer.requests[0]["client_id"]) == (SCOPE, "app-1")
    assert seen == ["/openai/v1/chat/completions"]


async def test_a_refused_secret_is_a_failure_that_says_so_and_does_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTRA_SECRET", wrong := "wrong~secret~4567")
    seen: list[str] = []
    issuer = TokenIssuer()
    async with entra(issuer, tmp_path, monkeypatch) as (_, fields), resource(issuer, seen) as origin:
        error = await failure(AzureSettings(kind="azure", base_url=origin, auth=EntraAuth(**fields)))
    assert isinstance(error.failure, TransportFailure)
    assert error.failure.class_name == "CredentialError"
    assert "AADSTS7000215" in error.failure.message
    assert "Microsoft Entra ID (client_secret)" in error.failure.message
    assert wrong not in error.failure.message
    assert not error.maybe_billed
    assert not seen


ASSERTED = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"


@pytest.mark.parametrize("wrong", [None, "another certificate", "no file"])
async def test_an_application_proves_itself_by_its_certificate(
    wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the variables name it, for `entra: default`, in a PEM file whose key has a password."""
    key = rsa.generate_private_key(65537, 2048)
    certificates = [_certificate(key), _certificate(key)]
    registered = certificates[0].fingerprint(hashes.SHA1())

    def signed(form: Mapping[str, str], endpoint: str) -> str | None:
        if form.get("client_assertion_type") != ASSERTED:
            return "AADSTS7000216: client_assertion or client_secret is required."
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        token = jwt.decode(form["client_assertion"], RSAKey.import_key(public), algorithms=["RS256"])
        thumbprint = urlsafe_b64decode(token.header["x5t"] + "==")
        if thumbprint != registered:
            return "AADSTS700027: The certificate with identifier used to sign the assertion is not registered."
        claims = token.claims
        assert (claims["iss"], claims["sub"], claims["aud"]) == ("app-1", "app-1", endpoint)
        assert claims["exp"] > time.time()
        return None

    file = tmp_path / "app.pem"
    encryption = serialization.BestAvailableEncryption(b"of-the-file")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    used = certificates[1 if wrong == "another certificate" else 0]
    if wrong != "no file":
        file.write_bytes(pem + used.public_bytes(serialization.Encoding.PEM))
    variables = {
        "AZURE_TENANT_ID": "tenant-1",
        "AZURE_CLIENT_ID": "app-1",
        "AZURE_CLIENT_CERTIFICATE_PATH": str(file),
        "AZURE_CLIENT_CERTIFICATE_PASSWORD": "of-the-file",
    }
    assert variables.keys() <= set(AzureSettings.variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:1")
    issuer = TokenIssuer()
    async with entra(issuer, tmp_path, monkeypatch, signed) as (_, fields), resource(issuer, []) as origin:
        auth = EntraAuth(entra="default", authority=fields["authority"])
        chosen = AzureSettings(kind="azure", base_url=origin, auth=auth)
        if wrong is None:
            assert (await perform(chosen, call(model="gpt-x", timeout_s=30))).output == "hi"
            assert (issuer.requests[0]["scope"], issuer.requests[0]["client_id"]) == (SCOPE, "app-1")
            return
        error = await failure(chosen, call(timeout_s=30))
    assert ("AADSTS700027" if wrong == "another certificate" else str(file)) in str(error)
    assert "of-the-file" not in str(error)
    assert not issuer.requests


def _certificate(key: rsa.RSAPrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "app-1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + HOUR)
    return builder.sign(key, hashes.SHA256())


@pytest.mark.parametrize("wrong", [None, "of another pod", "no file"])
async def test_a_pod_shows_the_token_of_its_service_account(
    wrong: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    if wrong != "no file":
        file.write_text(f"projected-token {wrong or 1}")
    accepted = ["projected-token 1"]

    def federated(form: Mapping[str, str], _: str) -> str | None:
        if form.get("client_assertion_type") == ASSERTED and form.get("client_assertion") in accepted:
            return None
        return "AADSTS70021: No matching federated identity record found for presented assertion."

    monkeypatch.setenv("AZURE_TENANT_ID", "tenant-1")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(file))
    issuer = TokenIssuer()
    async with entra(issuer, tmp_path, monkeypatch, federated) as (_, fields), resource(issuer, []) as origin:
        auth = EntraAuth(entra="workload_identity", client_id="app-1", authority=fields["authority"])
        provider = AzureSettings(kind="azure", base_url=origin, auth=auth).open()
        if wrong is not None:
            with pytest.raises(CallError) as caught:
                await provider.perform(call())
            words = str(file) if wrong == "no file" else "AADSTS70021"
            assert words in str(caught.value)
            assert "Microsoft Entra ID (workload_identity)" in str(caught.value)
        else:
            assert (await provider.perform(call())).output == "hi"
            # The kubelet replaces the file, and the cluster's old token ends.
            accepted[:] = ["projected-token 2"]
            file.write_text("projected-token 2")
            issuer.revoke()
            with pytest.raises(CallError) as caught:
                await provider.perform(call())
            assert await provider.refresh_credential(caught.value.credential) is True
            assert (await provider.perform(call())).output == "hi"
        await provider.close()


async def test_where_there_is_no_identity_the_failure_names_the_places_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = AzureSettings(kind="azure", base_url="http://127.0.0.1:1", auth=EntraAuth(entra="default"))
    error = await failure(chosen, call(timeout_s=30))
    for place in ("EnvironmentCredential", "WorkloadIdentityCredential", "ManagedIdentityCredential", "AzureCli"):
        assert place in str(error)


@pytest.mark.parametrize(
    ("auth", "problem"),
    [
        ("{entra: client_secret, client_id: a}", "auth: entra: client_secret needs client_secret, tenant_id"),
        ("{entra: default, client_id: a}", "auth: client_id is not for entra: default, which reads AZURE_CLIENT_ID"),
        ("{entra: managed_identity, tenant_id: a}", "auth: tenant_id is for entra: client_secret"),
        ("{entra: managed_identity, authority: a}", "auth: authority is not for entra: managed_identity"),
        ("{entra: nobody}", "auth.entra: should be 'default', 'managed_identity', "),
        ("{}", "auth.entra: is missing"),
        ("{command: []}", "auth.command: "),
        ("{entra: client_secret, client_secret: abc}", "auth.client_secret: a secret does not belong in the config"),
    ],
)
def test_a_mistake_is_named_by_its_place(auth: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            f"agents: {{a: {{model: p/m}}}}\nproviders:\n  p: {{kind: azure, base_url: 'http://x', auth: {auth}}}"
        )
    assert f"providers.p.{problem}" in str(caught.value)


def test_responses_need_the_new_api() -> None:
    with pytest.raises(ValidationError, match="api: responses needs api_version: v1"):
        AzureSettings(kind="azure", base_url="http://x", api="responses")
    assert "responses" in AzureSettings(kind="azure", base_url="http://x", api="responses", api_version="v1").apis_of(
        "m"
    )


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(ConfigError, match=r"install it with: pip install 'breakwater-plane\[azure\]'"):
        settings("azure", "http://x", api_key=None, auth=EntraAuth(entra="default")).open()
    assert extras.in_one_line(ValueError("a\n\tb")) == "a b"
