"""Who gets in, what is open, and what the documentation says."""

import os
import re
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
from openapi_spec_validator import validate
from referencing import Registry

from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.services.request.openapi import document as openapi
from tests.helpers import start_service, wait_until
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, HttpApi, settings_for

JOB = {"agent": "writer", "prompt": "x"}


async def test_nobody_gets_in_without_a_key(api: HttpApi) -> None:
    for path in ("/api/v1/jobs", "/api/v1/jobs/x", "/api", "/api/nothing", "/%61pi/v1/jobs"):
        for header in ("", "bw_0_x", "Bearer", "Bearer bw_0123456789ab_x", "Basic Yjpi", "Bearer é"):
            answer = await api.ask("POST", path, json=JOB, headers={"Authorization": header})
            assert (answer.status, answer.code) == (401, "unauthorized")
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert await api.queued() == 0


async def test_a_key_opens_from_its_creation_to_its_revocation(api: HttpApi) -> None:
    path = api.settings.api_keys_file
    key = create_key(path, "late")
    assert (await api.post(JOB, Authorization=f"bearer {key}")).status == 202
    revoke_key(path, key.split("_")[1])
    assert (await api.post(JOB, Authorization=f"Bearer {key}")).status == 401


async def test_health_and_documentation_are_open(api: HttpApi) -> None:
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert (await api.ask("GET", path, headers={"Authorization": ""})).status == 200


async def test_the_documentation_page_shows_all_and_loads_nothing(api: HttpApi) -> None:
    answer = await api.ask("GET", "/docs")
    page, document = answer.body.decode(), openapi()
    assert not set(re.findall(r"<(script|link rel=.stylesheet|img|iframe)", page))
    assert "https://" not in page
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}" in page
            assert f'id="{operation["operationId"]}"' in page
    links, places = (set(re.findall(rf'{name}="#?([^"]+)"', page)) for name in ("href", "id"))
    assert links - places == {"data:,", "openapi.json"}
    assert document["components"]["schemas"].keys() <= places


async def test_the_document_is_the_one_that_is_generated_without_a_server(api: HttpApi) -> None:
    assert (await api.ask("GET", "/openapi.json")).json == openapi()


@contextmanager
def crawling_once() -> Generator[None]:
    """Has a registry of schemas looked through once: for each of 900 anchors again, it is half of a validation."""
    crawled: dict[int, tuple[Registry[Any], Registry[Any]]] = {}
    crawl = Registry[Any].crawl

    def crawl_once(registry: Registry[Any]) -> Registry[Any]:
        if id(registry) not in crawled:
            crawled[id(registry)] = registry, crawl(registry)
        return crawled[id(registry)][1]

    with patch.object(Registry, "crawl", crawl_once):
        yield


def test_the_document_is_valid_and_complete() -> None:
    document = openapi()
    with crawling_once():
        validate(document)
    submit = document["paths"]["/api/v1/jobs"]["post"]
    assert submit["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Job"}
    assert "additionalProperties" in document["components"]["schemas"]["Job"]
    assert set(submit["responses"]) >= {"200", "202", "400", "401", "404", "408", "413", "422", "503"}
    for status, response in submit["responses"].items():
        wanted = {"200": "Result", "202": "AcceptedJob"}.get(status, "ErrorBody")
        schema = response["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{wanted}"}
    assert document["paths"]["/healthz"]["get"]["security"] == []


def test_every_example_in_the_document_is_what_its_schema_says() -> None:
    document = openapi()
    checked = 0
    for operations in document["paths"].values():
        for operation in operations.values():
            bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
            for content in (body["content"].get("application/json", {}) for body in bodies if "content" in body):
                for example in content.get("examples", {}).values():
                    schema = {**content["schema"], "components": document["components"]}
                    jsonschema.validate(example["value"], schema)
                    checked += 1
    assert checked > 60


async def test_what_the_document_says_of_paths_is_what_is_served_and_to_nobody_without_a_key(api: HttpApi) -> None:
    for path, operations in openapi()["paths"].items():
        for method, operation in operations.items():
            asked = path.format(
                job_id="x",
                incident_id="inc_3f9a1c07",
                dead_letter_id=1,
                model="writer",
                execution_id="x",
                plan_id="p",
                response_id="resp_x",
                run_id="r",
                key="k",
                limit_id="l",
            )
            answer = await api.ask(method.upper(), asked, headers={"Authorization": ""})
            # Who signs in has no key yet, and there is no provider here.
            open_to_all = 404 if operation["tags"] == ["openid"] else 200
            assert answer.status == (401 if operation["security"] else open_to_all), path
            refusals = {"unauthorized", "invalid_api_key", "authentication_error", "no_openid"}
            assert answer.status == 200 or answer.code in refusals


@pytest.fixture
def environment(nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path) -> dict[str, str]:
    settings = settings_for(nats_server.url, redis_server.url, tmp_path)
    config = tmp_path / "breakwater.yaml"
    config.write_text(CONFIG)
    return {
        "BREAKWATER_CONFIG": str(config),
        "BREAKWATER_NATS_URL": nats_server.url,
        "BREAKWATER_REDIS_URL": redis_server.url,
        "BREAKWATER_HTTP_PORT": str(settings.http_port),
        "BREAKWATER_API_KEYS_FILE": str(settings.api_keys_file),
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_in_order_when_it_is_asked_to(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    process = start_service("request", environment, log)
    try:
        wait_until(lambda: process.poll() is not None or '"listening"' in log.read_text())
        os.kill(process.pid, number)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


def test_a_port_that_is_taken_is_reported_and_ends_the_process(environment: dict[str, str], tmp_path: Path) -> None:
    port, log = int(environment["BREAKWATER_HTTP_PORT"]), tmp_path / "log"
    with socket.create_server(("127.0.0.1", port)):
        process = start_service("request", environment, log)
        assert process.wait(60) == 1
    said = log.read_text()
    assert f"can't listen on 127.0.0.1:{port}: another program already listens there" in said
    assert "BREAKWATER_HTTP_PORT" in said
    assert "Traceback" not in said
