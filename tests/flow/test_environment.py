"""`breakwater up` gives each service only the secrets it needs.

tests/cli/test_up.py looks for others in the memory of the services.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from breakwater.local.datadir import DataDir
from breakwater.local.process import ProcessSpec
from breakwater.local.stack import plan_stack
from tests.flow.secrets_of_services import NEEDED, SECRETS, add_secrets


def service(spec: ProcessSpec) -> str:
    assert spec.service is not None
    return spec.service


def test_each_service_gets_what_it_needs(tmp_path: Path) -> None:
    config = tmp_path / "breakwater.yaml"
    document: dict[str, Any] = {
        "providers": {"remote": {"base_url": "http://127.0.0.1:1/v1", "api_key": {"env": "TEST_PROVIDER_KEY"}}},
        "agents": {"writer": {"provider": "remote", "model": "gpt-4.1"}},
    }
    add_secrets(document, tmp_path / "spy.py")
    config.write_text(yaml.safe_dump(document))
    data = DataDir(tmp_path / "data")
    data.create()
    given = {**SECRETS, "HTTPS_PROXY": "http://proxy:3128", "OTEL_SERVICE_NAME": "x", "BREAKWATER_LOG_LEVEL": "debug"}
    stack = plan_stack(data, config, workers=2, environment=given)
    for spec in stack.services:
        assert SECRETS.keys() & spec.env.keys() == NEEDED.get(service(spec), set())
        assert {"HTTPS_PROXY", "OTEL_SERVICE_NAME", "BREAKWATER_LOG_LEVEL"} <= spec.env.keys()
    having = {
        what: {service(spec) for spec in stack.services if f"BREAKWATER_{what}" in spec.env}
        for what in ("NATS_URL", "REDIS_URL", "CLICKHOUSE_URL", "API_KEYS_FILE", "PLANE_KEY")
    }
    assert having == {
        "NATS_URL": {"worker", "breaker", "budget", "alerter", "sink", "request"},
        "REDIS_URL": {"worker", "breaker", "budget", "request"},
        "CLICKHOUSE_URL": {"alerter", "budget", "sink", "request", "console"},
        "API_KEYS_FILE": {"request"},
        "PLANE_KEY": {"worker", "request"},
    }
    for spec in stack.servers:
        assert not SECRETS.keys() & spec.environment.keys()
