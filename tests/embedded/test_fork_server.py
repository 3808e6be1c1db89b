"""Services that are forked: processes of their own, ended with the fork server, and started again if that has died."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from breakwater.embedded.fork_server import SUPPORTED, ForkedProcess, ForkServer, ForkServerError
from breakwater.embedded.ports import free_port
from breakwater.embedded.process import ProcessSpec, kill_group, until_ended
from breakwater.embedded.supervisor import Supervisor
from tests.helpers import wait_until

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="there is a fork server on Linux only"),
    pytest.mark.long(about_s=8, together=True),  # each server imports all services, which takes over a second
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("fork-server") / "log")
    yield server
    server.stop()


def config_in(directory: Path) -> Path:
    path = directory / "breakwater.yaml"
    path.write_text("providers: {local: {base_url: http://127.0.0.1:1/v1}}\nagents: {writer: {model: gpt-4.1}}\n")
    return path


def fork(server: ForkServer, directory: Path, service: str = "breaker", **environment: str) -> ForkedProcess:
    """A service that finds no bus, and so waits for one."""
    defaults = {
        "BREAKWATER_CONFIG": str(config_in(directory)),
        "BREAKWATER_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "BREAKWATER_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
    }
    with (directory / f"{service}.log").open("ab") as log:
        return ForkedProcess(service, server.request(service, log.fileno(), os.environ | defaults | environment))


async def test_a_server_that_takes_too_long_is_ended_and_started_again(server: ForkServer, tmp_path: Path) -> None:
    server.stop()
    before = {child.pid for child in psutil.Process().children()}
    server.start()
    [hanging] = [child for child in psutil.Process().children() if child.pid not in before]
    hanging.suspend()
    with (tmp_path / "log").open("ab") as log, pytest.raises(ForkServerError, match=r"within 0\.2 s"):
        await server.fork("breaker", log.fileno(), os.environ, 0.2)
    assert not hanging.is_running()
    assert fork(server, tmp_path).poll() is None


def test_each_is_a_process_of_its_own_with_its_name_its_log_and_its_group(server: ForkServer, tmp_path: Path) -> None:
    one, two = fork(server, tmp_path), fork(server, tmp_path, "budget")
    assert one.pid != two.pid
    wait_until(lambda: [psutil.Process(one.pid).name(), psutil.Process(two.pid).name()] == ["bw-breaker", "bw-budget"])
    assert (os.getpgid(one.pid), os.getpgid(two.pid)) == (one.pid, two.pid)
    wait_until(lambda: (tmp_path / "breaker.log").read_text() and (tmp_path / "budget.log").read_text())
    said = json.loads((tmp_path / "budget.log").read_text().splitlines()[0])
    assert said["service"] == "budget"


def test_it_ends_by_a_signal_and_says_by_which(server: ForkServer, tmp_path: Path) -> None:
    process = fork(server, tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert process.poll() == process.returncode == -signal.SIGKILL
    kill_group(process)  # one that has ended is left alone
    stopped = fork(server, tmp_path)
    stopped.terminate()
    assert stopped.wait(60) in {0, -signal.SIGTERM}  # by itself, or before it could handle the signal


def test_a_wrong_config_is_its_exit_code_and_its_reason_is_in_the_log(server: ForkServer, tmp_path: Path) -> None:
    process = fork(server, tmp_path, BREAKWATER_CONFIG=str(tmp_path / "none.yaml"))
    assert process.wait(60) == os.EX_CONFIG
    assert "none.yaml" in (tmp_path / "breaker.log").read_text()


async def test_requests_that_come_together_start_a_service_each(server: ForkServer, tmp_path: Path) -> None:
    forker = psutil.Process(fork(server, tmp_path).pid).parent()
    assert forker is not None
    # Of a request that the kernel takes in two parts, the second one is read together with the request behind it.
    environments = ({"BREAKWATER_CONFIG": "none", "LONG": "x" * 120_000}, {"BREAKWATER_CONFIG": "none"})
    with (tmp_path / "log").open("ab") as log:
        forker.suspend()
        forks = [
            asyncio.create_task(server.fork("breaker", log.fileno(), os.environ | environment, 60))
            for environment in environments
        ]
        await asyncio.sleep(0)  # now both have asked
        forker.resume()
        processes = await asyncio.gather(*forks)
    assert [process.wait(60) for process in processes] == [os.EX_CONFIG] * 2


async def test_its_end_is_awaited(server: ForkServer, tmp_path: Path) -> None:
    process = fork(server, tmp_path)
    process.kill()
    await until_ended(process)
    assert process.poll() == -signal.SIGKILL


def test_its_environment_is_what_was_given_and_stands_not_in_proc(server: ForkServer, tmp_path: Path) -> None:
    process = fork(server, tmp_path, ONLY_FOR_IT="a secret")
    assert b"a secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()


def test_forks_do_not_share_their_randomness(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    (tmp_path / "draws.py").write_text(
        "import os, pathlib, random\n"
        "pathlib.Path(os.environ['DRAWN'], str(os.getpid())).write_text(str(random.random()))\n"
        "def hook(alert): ...\n"
    )
    path = config_in(tmp_path)
    path.write_text(path.read_text() + "alerts: {channels: {one: {python: {callable: 'draws:hook'}}}}\n")
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    for _ in range(2):
        with (tmp_path / "alerter.log").open("ab") as log:
            environment = os.environ | {
                "BREAKWATER_CONFIG": str(path),
                "BREAKWATER_NATS_URL": f"nats://127.0.0.1:{free_port()}",
                "PYTHONPATH": str(tmp_path),
                "DRAWN": str(drawn),
            }
            ForkedProcess("alerter", server.request("alerter", log.fileno(), environment))
    wait_until(lambda: len(list(drawn.iterdir())) == 2, "two draws")
    one, two = drawn.iterdir()
    assert one.read_text() != two.read_text()


def test_a_server_that_was_killed_takes_its_services_along_and_is_started_again(
    server: ForkServer, tmp_path: Path
) -> None:
    process = fork(server, tmp_path)
    parent = psutil.Process(process.pid).parent()
    assert parent is not None
    parent.kill()
    assert process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == "zombie")
    assert fork(server, tmp_path).poll() is None


def test_a_server_that_cannot_import_a_service_says_where_its_reason_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(tmp_path / "fork-server.log")
    with pytest.raises((ForkServerError, OSError)):
        fork(server, tmp_path)
    server.stop()
    assert "broken" in (tmp_path / "fork-server.log").read_text()


async def test_a_stop_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    supervisor = Supervisor(fork_log=tmp_path / "fork-server.log")
    before = {child.pid for child in psutil.Process().children()}
    await supervisor.start([])
    [hanging] = [child for child in psutil.Process().children() if child.pid not in before]
    hanging.suspend()
    spec = ProcessSpec("worker", ("unused",), tmp_path / "worker.log", never, service="worker")
    starting = asyncio.create_task(supervisor.start([spec]))
    await asyncio.sleep(0.2)
    assert not starting.done()
    async with asyncio.timeout(30):
        await supervisor.stop()
        await asyncio.gather(starting, return_exceptions=True)
    assert not hanging.is_running()


def test_with_the_server_ends_every_service(server: ForkServer, tmp_path: Path) -> None:
    processes = [fork(server, tmp_path), fork(server, tmp_path, "budget")]
    server.stop()
    assert [process.wait(60) for process in processes] == [-signal.SIGKILL] * 2
