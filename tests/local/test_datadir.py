import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import mask_url
from breakwater.local import stack
from breakwater.local.datadir import (
    AlreadyRunningError,
    DataDir,
    DataDirError,
    Endpoints,
    NotRunningError,
    read_endpoints,
)
from breakwater.local.ports import PortInUseError, free_port, standard_port
from tests.tables import each_row

HOLD = """
import sys, time
from pathlib import Path
from breakwater.local.datadir import DataDir
with DataDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(600)
"""
CREATE_AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from breakwater.local.datadir import DataDir, DataDirError
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    DataDir(Path(sys.argv[1])).create()
except DataDirError as error:
    print(error)
"""


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    found = DataDir(tmp_path / "data")
    found.create()
    return found


@pytest.fixture
def holder(data: DataDir) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(data.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def endpoints(data: DataDir) -> Endpoints:
    return Endpoints(
        request_url="http://127.0.0.1:8080",
        console_url="http://127.0.0.1:8081",
        nats_url="nats://cli:n4ts-secret@127.0.0.1:4222",
        redis_url="redis://:r3dis-secret@127.0.0.1:6379/0",
        clickhouse_url="http://breakwater:ch-secret@127.0.0.1:8123",
        api_key_file=data.secret_file("api-key"),
        config_file=data.path / "breakwater.yaml",
        data_dir=data.path,
        pid=os.getpid(),
        started_at=datetime(2026, 11, 21, 10, 0, 0, 1000, tzinfo=UTC),
    )


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_owner_may_enter_a_new_data_directory(data: DataDir) -> None:
    assert mode(data.path) == mode(data.path / "secrets") == mode(data.logs) == 0o700
    assert sorted(path.name for path in data.path.iterdir()) == ["logs", "secrets"]


def test_the_mode_of_a_directory_that_was_there_is_left_and_its_secrets_are_closed(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    DataDir(tmp_path).create()
    assert (mode(tmp_path), mode(tmp_path / "secrets")) == (0o755, 0o700)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_named_with_what_to_do(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataDirError, match="Name another data directory") as caught:
        DataDir(tmp_path / "file" / below).create()
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
def test_a_place_where_nothing_can_be_created_is_named() -> None:
    with pytest.raises(DataDirError, match="/proc/nowhere/data: No such file"):
        DataDir(Path("/proc/nowhere/data")).create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_a_directory_of_another_user_is_refused_with_the_permission_that_is_missing() -> None:
    # Not in tmp_path, which other users cannot even enter.
    with tempfile.TemporaryDirectory() as foreign:
        Path(foreign).chmod(0o755)
        command = [sys.executable, "-c", CREATE_AS_ANOTHER_USER, foreign]
        reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert reported.startswith(f"{foreign}: Permission denied. Give its owner write permission")


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_named_and_costs_no_file_that_was_there(small_disk: Path) -> None:
    data = DataDir(small_disk / "data")
    data.create()
    data.write_endpoints(endpoints(data))
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
    with pytest.raises(DataDirError, match=r"No space left on device\. Make room"):
        data.create()
    with pytest.raises(DataDirError, match="No space left"):
        data.secret("new")
    assert read_endpoints(data.path) == endpoints(data)
    assert sorted(path.name for path in data.path.iterdir()) == ["endpoints.json", "logs", "secrets"]


def test_a_disk_without_room_is_named_with_what_a_stack_needs(
    data: DataDir, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = DataDir(small_disk / "data")
    small.create()
    with pytest.raises(DataDirError, match=r"/data: needs 900 MB of free disk space, has 0 MB\. Make room"):
        small.require_room()
    # What is there needs less to start again.
    usage = shutil.disk_usage(data.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=330_000_000))
    with pytest.raises(DataDirError, match="has 330 MB"):
        data.require_room()
    with data.lock():
        data.require_room()


def test_a_read_only_file_system_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DataDirError, match="Read-only"):
        DataDir(small_disk / "data").create()


def test_a_second_stack_is_refused_with_the_pid_of_the_first(data: DataDir, holder: subprocess.Popen[str]) -> None:
    assert data.holder() == holder.pid
    with pytest.raises(AlreadyRunningError, match=f"process {holder.pid}") as caught, data.lock():
        pass
    assert (caught.value.pid, caught.value.path) == (holder.pid, data.path)


def test_the_lock_of_a_killed_process_is_no_obstacle(data: DataDir, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert (data.path / "up.lock").read_text() == f"{holder.pid}\n"
    assert data.holder() is None
    with data.lock():
        assert data.holder() == os.getpid()
    assert data.holder() is None


def test_what_a_killed_stack_left_running_still_holds_the_directory(
    data: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.local.datadir._HANDOVER_S", 0.2)
    with data.lock() as lock:
        leftover = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
    (data.path / "up.lock").write_text(f"{gone.pid}\n")
    with (
        pytest.raises(AlreadyRunningError, match=f"children of process {gone.pid} that are still running"),
        data.lock(),
    ):
        pass
    leftover.communicate(b"\n")
    with data.lock():
        pass


def test_a_secret_is_made_once_and_only_its_owner_reads_it(data: DataDir) -> None:
    made = data.secret("nats-worker")
    assert data.secret("nats-worker") == DataDir(data.path).secret("nats-worker") == made
    assert data.secret("nats-sink") != made
    assert len(made) >= 43, "256 bits"
    assert mode(data.secret_file("nats-worker")) == 0o600


def test_an_emptied_secret_is_not_used(data: DataDir) -> None:
    data.secret_file("api-key").touch()
    with pytest.raises(DataDirError, match=r"empty\. Delete it"):
        data.secret("api-key")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "UPPER"])
def test_a_secret_has_a_plain_name(data: DataDir, name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name for a secret"):
        data.secret(name)


def test_endpoints_are_read_as_they_were_written_and_only_by_the_owner(data: DataDir) -> None:
    data.write_endpoints(endpoints(data))
    assert read_endpoints(data.path) == endpoints(data)
    assert mode(data.path / "endpoints.json") == 0o600
    stored = json.loads((data.path / "endpoints.json").read_text())
    assert stored["started_at"] == "2026-11-21T10:00:00.001Z"
    assert stored["nats_url"] == "nats://cli:n4ts-secret@127.0.0.1:4222"


def test_no_password_of_the_endpoints_is_ever_shown(data: DataDir) -> None:
    for shown in (repr(endpoints(data)), str(endpoints(data)), f"{[endpoints(data)]}"):
        assert "secret" not in shown.replace("secrets/", "")
        assert "nats://cli:***@127.0.0.1:4222" in shown


@each_row(
    ("url", "shown"),
    [
        ("redis://:p@h:1/0", "redis://:***@h:1/0"),
        ("http://h:1/a@b:c", "http://h:1/a@b:c"),
        ("http://u:p%40x:y@h", "http://u:***@h"),
        ("nats://u:p@x@h", "nats://u:***@h"),
        ("http://h:1?a=b@c", "http://h:1?a=b@c"),
        ("nats://h:4222", "nats://h:4222"),
        ("nats://u:a@h1:1,nats://u:b@h2:2", "nats://u:***@h1:1,nats://u:***@h2:2"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_endpoints_that_are_missing_or_strange_are_distinguished(data: DataDir) -> None:
    with pytest.raises(NotRunningError, match="breakwater up"):
        read_endpoints(data.path)
    (data.path / "endpoints.json").write_text('{"nats_url": 1}')
    with pytest.raises(DataDirError, match=r"endpoints\.json: these endpoints were written"):
        read_endpoints(data.path)
    data.remove_endpoints()
    data.remove_endpoints()
    with pytest.raises(NotRunningError):
        read_endpoints(data.path)


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
def test_a_port_that_something_listens_on_is_refused_or_passed_over(family: socket.AddressFamily, address: str) -> None:
    both = family is socket.AF_INET6
    with socket.create_server((address, 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            free_port(port)
        assert standard_port(port) != port
    assert standard_port(port) == port


def test_a_port_whose_server_has_just_ended_is_free_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    assert free_port(port) == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is not held")
def test_a_port_of_a_stack_whose_server_is_just_started_again_is_passed_over() -> None:
    hold = f"from breakwater.local.ports import free_port; print(free_port({free_port()}), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        held = int(other.stdout.readline())
        # Nothing listens there, and only its server can.
        assert standard_port(held) != held
        with socket.create_server(("127.0.0.1", held)):
            pass
        other.communicate("\n")
    assert standard_port(held) == held


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is not held")
def test_a_free_port_is_given_to_nobody_else() -> None:
    held = {free_port() for _ in range(100)}
    assert len(held) == 100
    port = held.pop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        clients = [socket.create_connection(server.getsockname()) for _ in range(100)]
        assert not held & {client.getsockname()[1] for client in clients}
        for client in clients:
            client.close()


def test_the_engine_runs_without_what_it_imports_for_data_frames(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from breakwater.local.clickhouse.engine import Engine
Engine(Path(sys.argv[1]))
print({"numpy", "pandas"} & sys.modules.keys(), sys.modules["pyarrow"], flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("set() None\n", "")


def test_a_taken_standard_port_is_told_of_and_its_substitute_stays(
    data: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("providers: {p: {base_url: 'http://127.0.0.1:9'}}\nagents: {a: {model: m}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        standard = taken.getsockname()[1]
        monkeypatch.setattr(stack, "HTTP_PORT", standard)
        first = stack.plan_stack(data, config, environment={}, console_port=free_port())
    port = urlsplit(first.endpoints.request_url).port
    assert first.port_notes == (
        f"Port {standard} was in use: {port} takes its place and stays; `--http-port {standard}` goes back.",
    )
    again = stack.plan_stack(data, config, environment={}, console_port=free_port())
    assert (again.endpoints.request_url, again.port_notes) == (first.endpoints.request_url, first.port_notes)
    assert stack.plan_stack(data, config, environment={}, http_port=standard, console_port=free_port()).port_notes == ()


def test_a_running_cluster_may_have_hosts_and_addresses_of_ipv6(data: DataDir, tmp_path: Path) -> None:
    config = tmp_path / "breakwater.yaml"
    config.write_text("providers: {p: {base_url: 'http://127.0.0.1:9'}}\nagents: {a: {model: m}}\n")
    url = "nats://client:pass%20word@n1:4222,[::1]:4222"
    planned = stack.plan_stack(data, config, environment={"BREAKWATER_NATS_URL": url})
    endpoints = planned.endpoints
    assert (endpoints.nats_url, endpoints.nats_server) == (url, "nats://n1:4222,[::1]:4222")
    assert (endpoints.nats_user, endpoints.nats_password) == ("client", "pass word")
    with pytest.raises(ConfigError, match="BREAKWATER_NATS_URL: an address of the URL has no host, or a port"):
        stack.plan_stack(data, config, environment={"BREAKWATER_NATS_URL": "nats://n1:port"})
