"""The pages on production: their config is valid, and their manifest is that of compose.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from breakwater.config import parse_config
from breakwater.kernel.process.settings import Settings
from breakwater.services.__main__ import NAMES
from breakwater.services.request.openapi import document
from tests.compose import COMPOSE, OURS, ROOT, SERVICES, size
from tests.docs.markdown import blocks, rows
from tests.test_compose_up import DOCKERFILE, IMAGE_ENVIRONMENT, IMAGE_HEALTH

DOCS = ROOT / "docs"
UNITS = {"Mi": "m", "Gi": "g"}


def documents(page: str) -> list[Any]:
    return [yaml.safe_load(block.text) for block in blocks(DOCS / page) if block.language == "yaml"]


def test_the_config_of_five_services_is_valid_and_each_has_a_key() -> None:
    [block] = [block for block in blocks(DOCS / "adoption.md") if block.language == "yaml"]
    config = parse_config(block.text)
    assert len(config.agents) == 5
    bound = re.findall(r"keys create \S+ --agent (\S+)", (DOCS / "adoption.md").read_text())
    assert set(bound) == set(config.agents)


def test_the_manifest_runs_the_worker_as_compose_does() -> None:
    _, deployment, probes = documents("deployment.md")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    worker = OURS["worker"]
    assert container["command"] == worker["command"]
    assert container["livenessProbe"]["exec"]["command"] == ["sh", "-c", IMAGE_HEALTH]
    [user] = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert container["securityContext"]["capabilities"]["drop"] == worker["cap_drop"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is worker["read_only"]
    assert pod["terminationGracePeriodSeconds"] == int(worker["stop_grace_period"].removesuffix("s"))
    limit = container["resources"]["limits"]["memory"]
    assert size(limit[:-2] + UNITS[limit[-2:]]) == size(worker["mem_limit"])

    # Every path that the image writes or reads is mounted.
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    names = ("CONFIG", "LAST_GOOD_CONFIG", "ALIVE_FILE")
    assert {str(Path(IMAGE_ENVIRONMENT[f"BREAKWATER_{name}"]).parent) for name in names} == mounted
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()

    # Variables and those of the secret are those of compose.yaml.
    secret = next(block.text for block in blocks(DOCS / "deployment.md") if block.text.startswith("BREAKWATER_"))
    variables = {one["name"] for one in container["env"]} | set(re.findall(r"^(\w+)=", secret, re.MULTILINE))
    assert variables == {*worker["environment"], "OPENAI_API_KEY"}
    asked = {probe["httpGet"]["path"] for probe in probes.values()}
    assert asked == {"/healthz", "/readyz"} <= set(document()["paths"])


def test_the_table_of_services_has_the_variables_and_limits_of_compose() -> None:
    table = {name: (secret, differs) for name, _, secret, differs in rows(DOCS / "deployment.md", "service")}
    assert {*table, "worker"} == set(NAMES)
    known = {f"BREAKWATER_{name.upper()}" for name in Settings.model_fields}
    for name, (secret, differs) in table.items():
        named = set(re.findall(r"BREAKWATER_\w+", secret + differs))
        assert named <= known
        given = set(OURS[name]["environment"]) - {"BREAKWATER_METRICS_HOST", "BREAKWATER_METRICS_PORT"}
        assert named | ({"BREAKWATER_NATS_URL"} - {"console": {"BREAKWATER_NATS_URL"}}.get(name, set())) == given, name
        own = re.search(r"(\d+)Mi", differs)
        assert size(SERVICES[name]["mem_limit"]) == size(f"{own[1] if own else 1024}m"), name


def test_the_versions_of_servers_are_those_of_compose() -> None:
    text = (DOCS / "deployment.md").read_text()
    for service, name in (("nats-1", "NATS"), ("clickhouse", "ClickHouse")):
        release = SERVICES[service]["image"].partition(":")[2].removesuffix("-alpine")
        assert f"| {name} {release} |" in text


def test_the_backup_of_containers_has_every_volume_but_that_of_redis() -> None:
    looped = re.findall(r"for volume in (.+); do", (DOCS / "upgrade.md").read_text())
    assert len(looped) == 2
    assert all(set(one.split()) == set(COMPOSE["volumes"]) - {"valkey"} for one in looped)
    used = re.findall(r"--volume \"(\w+)_\$volume:", (DOCS / "upgrade.md").read_text())
    assert used == [COMPOSE["name"]] * 2
    assert (DOCS / "upgrade.md").read_text().count(OURS["worker"]["image"]) == 2
