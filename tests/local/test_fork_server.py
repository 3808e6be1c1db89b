"""Services that are forked: processes of their own, ended with the fork server, and started again if that has died."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from multiprocessing import current_process, forkserver
from multiprocessing.popen_forkserver import Popen
from pathlib import Path

import psutil
import pytest

from breakwater.local import fork_server
from breakwater.local.fork_server import SUPPORTED, ForkServerError
from breakwater.local.ports import free_port
from breakwater.local.process import ProcessSpec, kill_group, until_ended
from breakwater.local.stack import SERVICES
from breakwater.local.supervisor import Supervisor
from tests.helpers import own_fork_server, wait_until

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="there is a fork server on Linux only"),
    pytest.mark.long(about_s=5, together=True),
]


OTHER_SERVICES = {f"breakwater.services.{name}.app" for name in SERVICES if name != "breaker"}


@pytest.fixture(scope="module", autouse=True)
def server() -> Generator[None]:
    """A fork server of this module's own, which has imported the one service that most of its tests start."""
    own_modules = [name for name in fork_server._preloaded() if name not in OTHER_SERVICES]
    with own_fork_server(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_preloaded", lambda: own_modules)
        yield


@pytest.fixture
def bare_server(server: None, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A fork server that has imported no service, for tests that end it: importing one takes a second of CPU."""
    bare_modules = ["breakwater.local.preload", fork_server.__name__]
    monkeypatch.setattr(fork_server, "_preloaded", lambda: bare_modules)
    with own_fork_server():
        yield


def server_process() -> psutil.Process:
    """The process of the fork server, which may be importing the services."""
    return psutil.Process(forkserver._forkserver._forkserver_pid)  # pyright: ignore


def config_in(directory: Path) -> Path:
    path = directory / "breakwater.yaml"
    path.write_text("providers: {local: {base_url: http://127.0.0.1:1/v1}}\nagents: {writer: {model: gpt-4.1}}\n")
    return path


def waiting_for_a_bus(directory: Path) -> dict[str, str]:
    """The environment of a service that finds no bus, and so waits for one."""
    return {
        **os.environ,
        "BREAKWATER_CONFIG": str(config_in(directory)),
        "BREAKWATER_NATS_URL": f"nats://127.0.0.1:{free_port()}",
        "BREAKWATER_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
    }


def fork(directory: Path, service: str = "breaker", **environment: str) -> Popen:
    fork_server.start()
    with (directory / f"{service}.log").open("ab") as log:
        return fork_server.fork(service, log.fileno(), waiting_for_a_bus(directory) | environment)


def test_all_that_the_server_imports_is_there() -> None:
    # It ignores an import that fails.
    assert [name for name in fork_server._preloaded() if find_spec(name) is None] == []


@pytest.mark.usefixtures("bare_server")
async def test_a_server_that_takes_too_long_is_killed_and_started_again(tmp_path: Path) -> None:
    fork_server.start()
    hanging = server_process()
    hanging.suspend()
    with (tmp_path / "log").open("ab") as log, pytest.raises(ForkServerError, match=r"within 0\.2 s"):
        await fork_server.fork_within(0.2, "breaker", log.fileno(), os.environ, inherit=())
    assert hanging.status() == psutil.STATUS_ZOMBIE
    assert fork(tmp_path).poll() is None


def test_each_is_a_process_of_its_own_with_its_name_its_log_and_its_group(tmp_path: Path) -> None:
    one, two = fork(tmp_path), fork(tmp_path, "budget")
    assert one.pid != two.pid
    wait_until(lambda: [psutil.Process(one.pid).name(), psutil.Process(two.pid).name()] == ["bw-breaker", "bw-budget"])
    assert (os.getpgid(one.pid), os.getpgid(two.pid)) == (one.pid, two.pid)
    wait_until(lambda: (tmp_path / "breaker.log").read_text() and (tmp_path / "budget.log").read_text())
    said = json.loads((tmp_path / "budget.log").read_text().splitlines()[0])
    assert said["service"] == "budget"


def test_it_ends_by_a_signal_and_says_by_which(tmp_path: Path) -> None:
    process = fork(tmp_path)
    assert process.poll() is None
    assert process.wait(0.01) is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert process.poll() == process.returncode == -signal.SIGKILL
    kill_group(process)  # one that has ended is left alone
    stopped = fork(tmp_path)
    stopped.terminate()
    assert stopped.wait(60) in {0, -signal.SIGTERM}  # by itself, or before it could handle the signal


def test_a_wrong_config_is_its_exit_code_and_its_reason_is_in_the_log(tmp_path: Path) -> None:
    process = fork(tmp_path, BREAKWATER_CONFIG=str(tmp_path / "none.yaml"))
    assert process.wait(60) == os.EX_CONFIG
    assert "none.yaml" in (tmp_path / "breaker.log").read_text()


async def test_requests_that_come_together_start_a_service_each(tmp_path: Path) -> None:
    fork(tmp_path)
    server_process().suspend()
    environments = ({"BREAKWATER_CONFIG": "none", "LONG": "x" * 120_000}, {"BREAKWATER_CONFIG": "none"})
    with (tmp_path / "log").open("ab") as log:
        forks = [
            asyncio.create_task(
                fork_server.fork_within(60, "breaker", log.fileno(), {**os.environ, **environment}, inherit=())
            )
            for environment in environments
        ]
        await asyncio.sleep(0)  # now both have begun
        server_process().resume()
        processes = await asyncio.gather(*forks)
    assert [process.wait(60) for process in processes] == [os.EX_CONFIG] * 2


async def test_its_end_is_awaited(tmp_path: Path) -> None:
    process = fork(tmp_path)
    process.kill()
    await until_ended(process)
    assert process.poll() == -signal.SIGKILL


def test_its_environment_is_what_was_given_and_stands_not_in_proc(tmp_path: Path) -> None:
    process = fork(tmp_path, ONLY_FOR_IT="a secret")
    assert b"a secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()


def test_forks_do_not_share_their_randomness(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    (tmp_path / "draws.py").write_text(
        "import os, pathlib, random\n"
        "pathlib.Path(os.environ['DRAWN'], str(os.getpid())).write_text(str(random.random()))\n"
        "def hook(alert): ...\n"
    )
    channels = "alerts: {channels: {one: {python: {callable: 'draws:hook'}}}}\n"
    path = tmp_path / "alerter.yaml"
    path.write_text(config_in(tmp_path).read_text() + channels)
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    for _ in range(2):
        fork(tmp_path, "alerter", BREAKWATER_CONFIG=str(path), PYTHONPATH=str(tmp_path), DRAWN=str(drawn))
    wait_until(lambda: len(list(drawn.iterdir())) == 2, "two draws")
    one, two = drawn.iterdir()
    assert one.read_text() != two.read_text()


@pytest.mark.usefixtures("bare_server")
def test_with_a_server_that_was_killed_or_stopped_ends_every_service_and_the_next_call_starts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = fork(tmp_path)
    server_process().kill()
    assert process.wait(60) == 255, "nobody is left to report its exit code"
    wait_until(lambda: not psutil.pid_exists(process.pid))
    # In a temporary directory whose name is too long for a socket's.
    (long := tmp_path / ("x" * 100)).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(long))
        patch.delitem(current_process()._config, "tempdir", raising=False)  # pyright: ignore
        processes = [fork(tmp_path), fork(tmp_path, "budget")]
        assert [process.poll() for process in processes] == [None] * 2
        assert not list(long.iterdir())
        assert tempfile.gettempdir() == str(long)
    fork_server.stop()
    assert [process.wait(60) for process in processes] == [255] * 2


@pytest.mark.usefixtures("bare_server")
def test_a_service_that_cannot_be_imported_says_why_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server._preloaded().append("breakwater.services.__main__")  # which the server fails to import, too
    (tmp_path / "uvloop.py").write_text("raise ImportError('broken')")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.syspath_prepend(str(tmp_path))  # which the server gets from here since Python 3.14
        process = fork(tmp_path)
    assert process.wait(60) == 1
    assert "broken" in (tmp_path / "breaker.log").read_text()


@pytest.mark.usefixtures("bare_server")
async def test_a_stop_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    supervisor = Supervisor(fork=True)
    await supervisor.start([])
    hanging = server_process()
    hanging.suspend()
    spec = ProcessSpec("worker", ("unused",), tmp_path / "worker.log", never, service="worker")
    starting = asyncio.create_task(supervisor.start([spec]))
    await asyncio.sleep(0.2)
    assert not starting.done()
    async with asyncio.timeout(30):
        await supervisor.stop()
        await asyncio.gather(starting, return_exceptions=True)
    assert hanging.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("bare_server")
def test_services_end_with_a_supervisor_that_is_killed_and_keep_its_lock_until_then(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(waiting_for_a_bus(tmp_path)))
    (tmp_path / "preloaded.json").write_text(json.dumps(fork_server._preloaded()))
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        service, server = map(int, killed.stdout.readline().split())
        with (tmp_path / "lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            killed.kill()
            fcntl.flock(lock, fcntl.LOCK_EX)
    wait_until(lambda: not psutil.pid_exists(service) and not psutil.pid_exists(server))


SUPERVISOR = """
import fcntl, json, os, time
import psutil
from breakwater.local import fork_server

fork_server._preloaded = lambda: json.load(open("preloaded.json"))
with open("lock", "w") as lock, open("log", "w") as log:
    fcntl.flock(lock, fcntl.LOCK_EX)
    fork_server.start()
    environment = json.load(open("environment.json"))
    service = fork_server.fork("breaker", log.fileno(), environment, inherit=[lock.fileno()])
print(service.pid, psutil.Process(service.pid).ppid(), flush=True)
time.sleep(600)
"""
