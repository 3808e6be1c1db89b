"""The pages on production: their config is valid, and their versions and volumes are those of compose.yaml."""

from __future__ import annotations

import re

from breakwater.config import parse_config
from tests.compose import COMPOSE, ROOT, SERVICES
from tests.docs.markdown import blocks

DOCS = ROOT / "docs"


def test_the_config_of_five_services_is_valid_and_each_has_a_key() -> None:
    [block] = [block for block in blocks(DOCS / "adoption.md") if block.language == "yaml"]
    config = parse_config(block.text)
    assert len(config.agents) == 5
    bound = re.findall(r"keys create \S+ --agent (\S+)", (DOCS / "adoption.md").read_text())
    assert set(bound) == set(config.agents)


def test_the_versions_of_servers_are_those_of_compose() -> None:
    text = (DOCS / "deployment.md").read_text()
    for service, name in (("nats-1", "NATS"), ("clickhouse", "ClickHouse")):
        release = SERVICES[service]["image"].partition(":")[2].removesuffix("-alpine")
        assert f"| {name} {release} |" in text


def test_a_backup_of_containers_is_made_where_all_addresses_and_the_first_keys_are() -> None:
    text = (DOCS / "upgrade.md").read_text()
    project, volume, place, service = re.findall(r"--volume (\w+)_(\w+):(\S+) (\w+) breakwater backup create", text)[0]
    assert (project, volume in COMPOSE["volumes"]) == (COMPOSE["name"], True)
    assert f"{volume}:{place}" in SERVICES["request"]["volumes"]
    assert {f"BREAKWATER_{server}_URL" for server in ("NATS", "REDIS", "CLICKHOUSE")} <= SERVICES[service][
        "environment"
    ].keys()
