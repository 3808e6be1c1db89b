import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import redis.asyncio as redis
import yaml

from breakwater.local.datadir import DataDir
from breakwater.local.ports import free_port
from breakwater.local.process import ProcessSpec, log_size, log_tail, open_log, spawn
from breakwater.local.servers import nats_spec, redis_spec
from breakwater.local.supervisor import ProcessEvent, ProcessFailedError, Supervisor, restart_delay_s
from tests.helpers import until, wait_until
from tests.local.stack import IGNORE_TERM, PARENT, SLEEPER, main, never, python_spec, says_up


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Heard(list[ProcessEvent]):
    def brief(self) -> list[str]:
        return [f"{event.kind} {event.name}" for event in self]

    def of(self, kind: str) -> list[ProcessEvent]:
        return [event for event in self if event.kind == kind]


def restart_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Supervisor.__module__}.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(f"{Supervisor.__module__}.LONGEST_DELAY_S", 0.05)


@pytest.fixture
def heard() -> Heard:
    return Heard()


async def test_what_is_started_later_stops_before_it(tmp_path: Path, heard: Heard) -> None:
    async with Supervisor(on_event=heard.append) as supervisor:
        for name in ("first", "second"):
            await supervisor.start([python_spec(tmp_path, name, SLEEPER)])
        assert [one.ready.is_set() for one in supervisor.keepers.values()] == [True, True]
    assert heard.brief() == [
        *("started first", "ready first", "started second", "ready second"),
        *("stopping second", "stopped second", "stopping first", "stopped first"),
    ]
    assert [event.signal for event in heard.of("stopped")] == [signal.SIGTERM, signal.SIGTERM]


async def test_processes_that_are_started_together_stop_together_and_before_the_servers(
    tmp_path: Path, heard: Heard
) -> None:
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.1), sys.exit(0)))"
    slow += "; print('up', flush=True); time.sleep(600)"
    async with Supervisor(on_event=heard.append) as supervisor:
        await supervisor.start([python_spec(tmp_path, "server", SLEEPER)])
        workers = [says_up(python_spec(tmp_path, f"worker-{number}", slow)) for number in (1, 2, 3)]
        await supervisor.start(workers)
    ending = [event.kind for event in heard if event.kind in {"stopping", "stopped"}]
    assert ending == [*["stopping"] * 3, *["stopped"] * 3, "stopping", "stopped"]
    assert heard.brief()[-1] == "stopped server"
    assert [event.code for event in heard.of("stopped")][:3] == [0, 0, 0]


async def test_a_process_that_exits_at_once_is_reported_with_its_code_and_the_end_of_its_log(
    tmp_path: Path, heard: Heard
) -> None:
    log = tmp_path / "logs" / "broken.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    code = "import sys; print('starting'); sys.exit('the port is taken')"
    spec = replace(python_spec(tmp_path, "broken", code), ready=never)
    async with Supervisor(on_event=heard.append) as supervisor:
        with pytest.raises(ProcessFailedError) as caught:
            await supervisor.start([spec])
    assert caught.value.exit_code == 1
    text = str(caught.value)
    assert text.startswith("broken exited with code 1")
    assert str(log) in text
    assert "the port is taken" in text
    assert "earlier run" not in text
    assert heard.brief() == ["started broken", "exited broken", "gave_up broken"]


async def test_a_program_that_does_not_exist_is_named_in_the_error(tmp_path: Path) -> None:
    spec = replace(python_spec(tmp_path, "ghost", ""), argv=("/nowhere/ghost-server", "--flag"), ready=never)
    async with Supervisor() as supervisor:
        with pytest.raises(ProcessFailedError, match="/nowhere/ghost-server: could not be run: No such file"):
            await supervisor.start([spec])


async def test_a_process_that_does_not_get_ready_in_time_is_killed_and_reported(tmp_path: Path, heard: Heard) -> None:
    spec = replace(python_spec(tmp_path, "mute", SLEEPER), ready=never, ready_timeout_s=0.3)
    async with Supervisor(on_event=heard.append) as supervisor:
        with pytest.raises(ProcessFailedError, match=r"mute was not ready within 0\.3 s and was killed"):
            await supervisor.start([spec])
        pid = heard[0].pid
        assert pid is not None
        assert is_gone(pid)


async def test_a_killed_process_comes_back_with_a_new_pid(tmp_path: Path, heard: Heard) -> None:
    async with Supervisor(on_event=heard.append) as supervisor:
        await supervisor.start([python_spec(tmp_path, "worker-1", SLEEPER)])
        before = supervisor.keepers["worker-1"].pid
        supervisor.keepers["worker-1"].signal(signal.SIGKILL)
        await supervisor.keepers["worker-1"].until_ready()
        assert supervisor.keepers["worker-1"].restarts == 1
        assert supervisor.keepers["worker-1"].pid not in {None, before}
    exited, waiting = heard.of("exited")[0], heard.of("restarting_in")[0]
    assert (exited.signal, exited.code) == (signal.SIGKILL, None)
    assert waiting.delay_s == 0.2


def flapping(directory: Path) -> ProcessSpec:
    """A process that exits once `end_when_ready` has heard that it is ready: one that exits sooner never was."""
    code = f"""
import pathlib, time
marker = pathlib.Path({str(directory / "end")!r})
while not marker.exists():
    time.sleep(0.002)
marker.unlink()
raise SystemExit(3)
"""
    return python_spec(directory, "flapping", code)


def end_when_ready(directory: Path, heard: Heard, event: ProcessEvent) -> None:
    heard.append(event)
    if event.kind == "ready":
        (directory / "end").touch()


async def test_a_process_that_dies_again_and_again_waits_longer_and_is_reported_each_time(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart_soon(monkeypatch)
    async with Supervisor(on_event=partial(end_when_ready, tmp_path, heard)) as supervisor:
        await supervisor.start([flapping(tmp_path)])
        await until(lambda: supervisor.keepers["flapping"].restarts >= 5)
    waiting = heard.of("restarting_in")
    assert [event.delay_s for event in waiting][:5] == [0.01, 0.02, 0.04, 0.05, 0.05]
    assert [event.failures for event in waiting][:5] == [1, 2, 3, 4, 5]
    assert {event.message for event in waiting} == {"exited with code 3"}
    assert not heard.of("gave_up")


async def test_health_resets_the_wait_and_a_new_outage_is_reported_again(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart_soon(monkeypatch)
    monkeypatch.setattr(f"{Supervisor.__module__}.HEALTHY_S", 0.0)
    async with Supervisor(on_event=partial(end_when_ready, tmp_path, heard)) as supervisor:
        await supervisor.start([flapping(tmp_path)])
        await until(lambda: supervisor.keepers["flapping"].restarts >= 3)
    assert {event.delay_s for event in heard.of("restarting_in")} == {0.01}
    assert {event.failures for event in heard.of("exited")} == {1}


def test_the_default_waits_double_from_a_fifth_of_a_second_to_thirty() -> None:
    assert [restart_delay_s(failures) for failures in (1, 2, 3, 6, 8, 9, 1000)] == [
        *(0.2, 0.4, 0.8, 6.4, 25.6, 30.0, 30.0)
    ]


async def test_a_part_that_finds_its_config_wrong_at_a_restart_is_tried_again_and_the_others_work_on(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "wrong"
    code = f"import pathlib, sys, time\nif pathlib.Path({str(marker)!r}).exists(): sys.exit(78)\n{SLEEPER}"
    restart_soon(monkeypatch)

    async def ready() -> bool:
        return not marker.exists()

    async with Supervisor(on_event=heard.append) as supervisor:
        worker = replace(python_spec(tmp_path, "worker", code), ready=ready)
        await supervisor.start([python_spec(tmp_path, "server", SLEEPER), worker])
        server = supervisor.keepers["server"].pid
        marker.touch()
        supervisor.keepers["worker"].signal(signal.SIGKILL)
        await until(lambda: len([event for event in heard.of("exited") if event.code == 78]) >= 3)
        marker.unlink()
        await supervisor.keepers["worker"].until_ready()
        assert supervisor.keepers["server"].pid == server
    assert not heard.of("gave_up")


async def test_a_failure_while_others_start_ends_the_start(tmp_path: Path) -> None:
    def report(event: ProcessEvent) -> None:
        if event.kind == "exited":
            raise BrokenPipeError(f"nobody reads that {event.name} exited with code {event.code}")

    supervisor = Supervisor(on_event=report)

    async def bring_up() -> None:
        await supervisor.start([python_spec(tmp_path, "once", "import time; time.sleep(0.3)")])
        await supervisor.start([replace(python_spec(tmp_path, "mute", SLEEPER), ready=never, ready_timeout_s=600)])

    with pytest.raises(BrokenPipeError, match="once exited with code 0"):
        async with asyncio.timeout(60):
            await supervisor.run(bring_up)


async def test_a_process_that_ignores_its_stop_signal_is_killed_with_all_it_started(tmp_path: Path) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])"
    code = f"{IGNORE_TERM}import subprocess, sys; print('up', {child}.pid, flush=True); {SLEEPER}"
    spec = replace(says_up(python_spec(tmp_path, "stubborn", code)), stop_timeout_s=0.2)
    supervisor = Supervisor()
    await supervisor.start([spec])
    pid, grandchild = supervisor.keepers["stubborn"].pid, int(spec.log_file.read_text().split()[1])
    assert pid is not None
    assert not is_gone(grandchild)
    await supervisor.stop()
    assert is_gone(pid)
    wait_until(lambda: is_gone(grandchild))


def test_nats_has_the_time_of_compose_to_write_its_index(tmp_path: Path) -> None:
    compose = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())
    assert (
        f"{nats_spec(tmp_path, free_port(), {}).stop_timeout_s:g}s"
        == compose["services"]["nats-1"]["stop_grace_period"]
    )


async def test_what_a_crashed_process_had_started_dies_with_it(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        await supervisor.start([python_spec(tmp_path, "worker", PARENT)])
        pid = supervisor.keepers["worker"].pid
        assert pid is not None
        await until(lambda: psutil.Process(pid).children())
        (grandchild,) = psutil.Process(pid).children()
        supervisor.keepers["worker"].signal(signal.SIGKILL)
        await until(lambda: is_gone(grandchild.pid))


async def test_data_of_real_servers_is_there_after_a_crash_and_a_stop_leaves_no_process(tmp_path: Path) -> None:
    redis_port = free_port()
    async with Supervisor() as supervisor:
        await supervisor.start([nats_spec(tmp_path, free_port(), {}), redis_spec(tmp_path, redis_port, "pass word")])
        running = {psutil.Process(one.pid) for one in supervisor.keepers.values()}
        async with redis.Redis(port=redis_port, password="pass word") as client:
            await client.set("spend", "7")
        supervisor.keepers["redis"].signal(signal.SIGKILL)
        await supervisor.keepers["redis"].until_ready()
        running.add(psutil.Process(supervisor.keepers["redis"].pid))
        async with redis.Redis(port=redis_port, password="pass word") as client:
            assert await client.get("spend") == b"7"
    assert [process for process in running if process.is_running()] == []
    assert (tmp_path / "nats" / "jetstream").is_dir()
    assert (tmp_path / "redis" / "appendonly.aof").exists() or (tmp_path / "redis" / "appendonlydir").exists()


async def test_a_process_that_was_not_yet_started_when_the_stop_came_is_not_started_any_more(
    tmp_path: Path, heard: Heard
) -> None:
    supervisor = Supervisor(on_event=heard.append)
    starting = asyncio.create_task(supervisor.start([python_spec(tmp_path, "late", SLEEPER)]))
    await asyncio.sleep(0)  # the start has begun, and its process has not
    supervisor.kill_all()
    await starting
    await supervisor.stop()
    assert heard == []
    with pytest.raises(RuntimeError, match="being stopped"):
        await supervisor.start([python_spec(tmp_path, "later", SLEEPER)])


async def test_a_name_is_used_once(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(ValueError, match="'twin'"):
            await supervisor.start([python_spec(tmp_path, "twin", SLEEPER)] * 2)


def test_a_process_is_not_started_from_a_thread_whose_end_would_kill_it(tmp_path: Path) -> None:
    problems: list[str] = []

    def start() -> None:
        with pytest.raises(RuntimeError) as caught:
            spawn(python_spec(tmp_path, "worker", SLEEPER))
        problems.append(str(caught.value))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in problems[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_a_program_is_woken_as_late_as_it_may_be(tmp_path: Path) -> None:
    code = "print(open('/proc/self/timerslack_ns').read())"
    slacks = {0: "50000", 5_000: "5000000"}
    for slack_us in slacks:
        spawn(replace(python_spec(tmp_path, f"by-{slack_us}", code), timer_slack_us=slack_us)).wait()
    assert {us: (tmp_path / "logs" / f"by-{us}.log").read_text().strip() for us in slacks} == slacks


def test_a_log_of_over_ten_megabytes_is_moved_aside_and_a_smaller_one_continued(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "worker.log"
    for content in (b"first", b"second"):
        with open_log(log) as descriptor:
            os.write(descriptor, content)
    assert log.read_bytes() == b"firstsecond"
    assert log.stat().st_mode & 0o777 == 0o600
    os.truncate(log, 10 * 1024 * 1024 + 1)
    with open_log(log) as descriptor:
        os.write(descriptor, b"third")
    assert log.read_bytes() == b"third"
    assert log.with_name("worker.log.1").stat().st_size == 10 * 1024 * 1024 + 1


def test_the_end_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    assert log_tail(log) == ""
    log.write_text("".join(f"{'x' * 500} {number}\n" for number in range(100)))
    assert [line.split()[1] for line in log_tail(log, lines=3).splitlines()] == ["97", "98", "99"]
    start = log_size(log)
    assert log_tail(log, since=start) == ""


class ForkedStack:
    """The stack of tests/local/stack.py, in a fork of this process: starting Python for it takes 0.8 s of CPU."""

    def __init__(self, data: Path, *flags: str) -> None:
        receiving, sending = os.pipe()
        self._process = get_context("fork").Process(target=self._run, args=(sending, str(data), *flags))
        self._process.start()
        os.close(sending)
        self.printed = os.fdopen(receiving)

    @staticmethod
    def _run(printing: int, *arguments: str) -> None:
        os.dup2(printing, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.argv[1:] = arguments
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60) -> int | None:
        """The exit code; None if it still runs then."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def stack(data: Path, *flags: str) -> Generator[tuple[ForkedStack, dict[str, int]]]:
    """Runs a stack until it is up; gives its process and the pids of its children."""
    process = ForkedStack(data, *flags)
    children: dict[str, int] = {}
    try:
        for line in process.printed:
            if line.startswith("{"):
                children = json.loads(line)
                break
        assert children, "the stack did not come up"
        yield process, children
    finally:
        process.kill()
        process.printed.close()


@pytest.mark.parametrize(
    ("sig", "code", "loop"),
    [(signal.SIGINT, 130, []), (signal.SIGTERM, 143, ["--uvloop"])],
    ids=["interrupted, asyncio", "terminated, uvloop"],
)
def test_one_signal_stops_the_stack_in_order(tmp_path: Path, sig: signal.Signals, code: int, loop: list[str]) -> None:
    with stack(tmp_path / "data", *loop) as (process, children):
        process.send_signal(sig)
        assert "stopped sleeper" in process.printed.read()
        assert process.wait() == code
        assert all(is_gone(pid) for pid in children.values())


def test_a_signal_in_the_middle_of_the_start_stops_what_was_started(tmp_path: Path) -> None:
    with stack(tmp_path / "data", "--hang") as (process, children):
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert all(is_gone(pid) for pid in children.values())


async def test_a_hangup_is_passed_on_if_somebody_wants_it_and_the_stack_stays() -> None:
    hangups = asyncio.Queue[str]()
    supervisor = Supervisor(on_hangup=lambda: hangups.put_nowait("hangup"))

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        return await hangups.get()

    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
    try:
        assert await supervisor.run(work) == "hangup"
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, handler)


async def test_an_error_of_work_that_was_interrupted_is_not_logged_as_never_retrieved() -> None:
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(str(context.get("exception"))))
    at_work = asyncio.Event()

    async def work() -> None:
        at_work.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("interrupted at its work") from None

    supervisor = Supervisor()
    running = asyncio.create_task(supervisor.run(work))
    await at_work.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == signal.SIGTERM
    del running
    gc.collect()
    await asyncio.sleep(0)
    assert "interrupted at its work" not in logged  # tasks of other tests may be collected here


def test_a_second_interrupt_kills_everything_at_once(tmp_path: Path) -> None:
    with stack(tmp_path / "data", "--stubborn") as (process, children):
        process.send_signal(signal.SIGINT)
        assert process.printed.readline() == "stopping stubborn\n"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130  # and not after the ten minutes that it gives its process to stop
        assert all(is_gone(pid) for pid in children.values())


def test_a_killed_supervisor_leaves_no_process_and_no_lock_behind(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with stack(data, "--servers", "--stubborn") as (process, children):
        assert set(children) == {"nats", "redis", "sleeper", "stubborn"}
        assert DataDir(data).holder() == process.pid
        process.kill()
        with DataDir(data).lock():
            assert all(is_gone(pid) for pid in children.values()), "the lock was given while they still ran"
