"""`breakwater up` gives each service only the secrets it needs, and no program can read those of the services."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest
import yaml

from breakwater.local.datadir import DataDir
from breakwater.local.process import ProcessSpec
from breakwater.local.stack import plan_stack
from tests.commands import run_command
from tests.helpers import runs, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a process from reading another")

SECRETS = {
    "TEST_PROVIDER_KEY": "marker-of-the-provider-7f3a",
    "TEST_WEBHOOK_SECRET": "whsec_bWFya2VyLW9mLXRoZS13ZWJob29rLTdmM2EtMDEyMzQ1Njc4OQ==",
    "TEST_LINKS_SECRET": "marker-of-the-links-7f3a-0123456789abcdef",
    "TEST_CALLABLE_TOKEN": "marker-of-the-callable-7f3a",
    "TEST_UNRELATED": "marker-of-something-else-7f3a",
}
NEEDED = {
    "worker": {"TEST_PROVIDER_KEY", "TEST_CALLABLE_TOKEN"},
    "alerter": {"TEST_WEBHOOK_SECRET", "TEST_LINKS_SECRET"},
    "request": {"TEST_LINKS_SECRET"},
}

SPY = """
import glob, json, os, sys
json.load(sys.stdin)
found, read = {}, 0
for directory in glob.glob("/proc/[0-9]*"):
    try:
        environment = open(directory + "/environ", "rb").read()
    except OSError:
        continue
    read += 1
    if names := [name for name in ("TEST_PROVIDER_KEY", "TEST_WEBHOOK_SECRET", "TEST_UNRELATED", "BREAKWATER_REDIS_URL")
                 if (name + "=").encode() in environment]:
        found[open(directory + "/comm").read().strip() + " " + open(directory + "/cmdline").read()] = names
try:
    open(f"/proc/{os.getppid()}/mem", "rb").close()
    memory = "open"
except OSError:
    memory = "refused"
print(json.dumps({"status": "success", "code": 0, "result": {"found": found, "read": read, "memory": memory}}))
"""

AS_USER = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: root is then a user like any other
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    spy = tmp_path / "spy.py"
    spy.write_text(SPY)
    path = tmp_path / "breakwater.yaml"
    document = {
        "providers": {
            "remote": {"base_url": "http://127.0.0.1:1/v1", "api_key": {"env": "TEST_PROVIDER_KEY"}},
            "spy": {"kind": "process", "command": [sys.executable, str(spy)]},
        },
        "agents": {"writer": {"provider": "remote", "model": "gpt-4.1"}, "spy": {"provider": "spy", "timeout_s": 60}},
        "alerts": {
            "links": {"base_url": "http://127.0.0.1:8080", "secret": {"env": "TEST_LINKS_SECRET"}},
            "channels": {
                "ops": {"webhook": {"url": "https://example.com/hook", "secret": {"env": "TEST_WEBHOOK_SECRET"}}}
            },
        },
        "environment": {"worker": ["TEST_CALLABLE_TOKEN"]},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def service(spec: ProcessSpec) -> str:
    assert spec.service is not None
    return spec.service


def test_each_service_gets_what_it_needs(config: Path, tmp_path: Path) -> None:
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


@pytest.fixture
def up(config: Path, tmp_path: Path) -> Generator[Path]:
    """A running plane, whose processes have no rights of root; gives its data directory."""
    data, log = tmp_path / "data", tmp_path / "up.log"
    command = [sys.executable, "-c", AS_USER, "-m", "breakwater.cli", "up"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--config", str(config), "--data", str(data)],
            env={**os.environ, **SECRETS},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: (data / "endpoints.json").exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield data
        processes = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(120) == 143, log.read_text()
        # The tracker of its resources ends once it has read the end of a pipe from it.
        wait_until(lambda: not [child for child in processes if runs(child)], "the end of all its processes")
        assert not (data / "endpoints.json").exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long(about_s=10)
def test_a_program_reads_no_secret_of_the_services_and_no_service_holds_those_of_another(up: Path) -> None:
    answer = json.loads(run_command("submit", "spy", "look", "--json", "--data", str(up)).stdout)
    seen = answer["output"]
    assert seen["found"] == {}
    assert seen["memory"] == "refused"
    assert seen["read"] > 1  # it can look at what is not hidden: itself, and the servers

    if os.geteuid() != 0:
        return  # who may look into memory
    plane = psutil.Process(json.loads((up / "endpoints.json").read_text())["pid"])
    held = {
        process.name(): secrets_of(process.pid)
        for process in plane.children(recursive=True)
        if process.name().startswith("bw-")
    }
    assert held == {
        f"bw-{name}": NEEDED.get(name, set())
        for name in ("worker", "breaker", "budget", "alerter", "sink", "request", "console")
    }


def secrets_of(pid: int) -> set[str]:
    """Those that are anywhere in the memory of a process that it can have written."""
    process, found = Path(f"/proc/{pid}"), set[str]()
    with (process / "maps").open() as maps, (process / "mem").open("rb", buffering=0) as memory:
        for line in maps:
            mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw(.*)", line)
            if mapping is None or "[vvar" in line or "[vsyscall" in line:
                continue
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:
                continue  # a mapping of a device
            found |= {name for name, secret in SECRETS.items() if secret.encode() in held}
    return found
