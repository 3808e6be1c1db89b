"""What every test may use. The real servers are in servers.py, with the rules for where they come from."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from _pytest.runner import runtestprotocol
from hypothesis import settings

from tests import collect_once, prefork

pytest_plugins = ["tests.servers", "tests.flow.fixtures", "tests.shown", "tests.finished_demo"]

# How long one example takes says more of the machine than of the code; benchmarks measure, and pytest has a timeout.
# Every run draws other examples: those of a day say more than ten times as many in one run, for which others wait.
settings.register_profile("breakwater", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("breakwater")

CLICKHOUSE_ENGINES = 2
SERVER_TEST_S = 0.3
"""Of a test on real servers, beside the other workers."""

_PYTHON = pytest.StashKey[str]()
"""What xdist's workers are started with."""

LONG_S = 15
"""Of a test whose mark gives no time."""

MEMORY = Path("/dev/shm")
ROOM = 4 * 2**30


def _keep_files_in_memory() -> None:
    """Puts all temporary files where no disk can be slow, if there is such a place.

    A hundred servers that flush their files keep a shared disk busy for seconds, in which nothing they were sent is
    acknowledged. A killed process loses as little here as there; a power cut is not tested.
    """
    if "TMPDIR" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free > ROOM and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None  # it may have been looked up before


def _write_bytecode() -> None:
    """Lets a module be compiled once, and not in each process of the tests again, whatever the environment says."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the process that collects all tests, and that xdist's workers are forks of."""
    if getattr(session.config.option, "dist", "no") == "no" or hasattr(session.config, "workerinput"):
        gc.disable()  # until all is collected
        return
    _collect_garbage_seldom()
    root = session.config.rootpath
    places = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = {file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])}
    paths = sorted(file.relative_to(root).with_suffix("").parts for file in files if file.is_relative_to(root))
    if sys.platform == "linux":
        modules = [".".join(parts) for parts in paths if not any(part.startswith(".") for part in parts)]
        option = session.config.option
        collect = partial(collect_once.collect, list(session.config.invocation_params.args), len(option.tx))
        from tests.finished_demo import USED_IN, finish_demo  # a plugin, which pytest wants to import first

        demo = None
        # Not where tests are left out of their modules, perhaps all that look at it.
        if not option.keyword and not option.lf and any(module.startswith(USED_IN) for module in modules):
            demo = partial(finish_demo, session.config._tmp_path_factory.getbasetemp())
        session.config.stash[_PYTHON] = prefork.start(modules, collect, demo)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Has workers forked from there."""
    for spec in specs:
        spec.python = config.stash.get(_PYTHON, None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> pytest.ExitCode | None:
    """Has workers run what was collected there."""
    return collect_once.run(config)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Has a worker of xdist report what the run prints, and no more.

    A message to the controller costs both sides half a millisecond. xdist sends five of them for a test that passes,
    with its output: of three phases, of its begin and of its end.
    """
    options = item.config.option
    if (
        not hasattr(item.config, "workerinput")
        or options.verbose > 0
        or options.durations
        or "P" in options.reportchars
    ):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.passed:
            report.sections, report.keywords = [], {}
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(trylast=True)  # once those are left out that do not run: the parts are counted
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each worker of xdist its share of the long tests first: one that begins last would be waited for alone.

    xdist splits the list into equal parts, one for each worker, and moves tests from the end of one part to whoever has
    nothing left. So those that share what is costly to set up stay with one worker: a file's
    (`together=True`), or those of several files that name the same thing (`together="console"`). Tests on ClickHouse
    are the share of two workers: its engine takes a core for seconds to start, and its tables another to be created.

    Files without servers come last in each part: of the last tests, each is to keep a core busy, and none to wait.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with_servers = {item.path for item in items if _uses(item, "servers")}
    waiting: list[pytest.Item] = []
    computing: list[pytest.Item] = []
    on_clickhouse: list[pytest.Item] = []
    groups: dict[str, _LongGroup] = {}
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is None and _is_on_clickhouse(item):
            on_clickhouse.append(item)
        elif mark is None:
            (waiting if item.path in with_servers else computing).append(item)
        else:
            together = mark.kwargs.get("together")
            name = together if isinstance(together, str) else str(item.path) if together else item.nodeid
            groups.setdefault(name, _LongGroup()).add(item, mark)
    shares = [_LongGroup() for _ in range(workers)]
    with_engine = shares[:CLICKHOUSE_ENGINES]
    half = -(-len(on_clickhouse) // len(with_engine))
    for number, share in enumerate(with_engine):
        share.short = on_clickhouse[number * half : (number + 1) * half]
    for group in sorted(groups.values(), key=lambda group: group.about_s, reverse=True):
        candidates = with_engine if any(map(_is_on_clickhouse, group.items)) else shares
        min(candidates, key=lambda share: share.about_s).extend(group)
    size = -(-len(items) // workers)
    about_s = sum(share.about_s for share in shares) + len(waiting) * SERVER_TEST_S
    for share in shares:
        room = max(0, size - len(share))
        count = min(room, max(0, round((about_s / workers - share.about_s) / SERVER_TEST_S)))
        share.short += waiting[:count] + computing[: room - count]
        del waiting[:count], computing[: room - count]
    items[:] = [item for share in shares for item in share.items + share.short] + waiting + computing


def _is_on_clickhouse(item: pytest.Item) -> bool:
    return _uses(item, "clickhouse_server")


def _uses(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


class _LongGroup:
    """Long tests of one worker. A file's mark gives the time of all of its tests, and counts once."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []
        self.short: list[pytest.Item] = []
        """The others of its worker, which come after them."""
        self._marks: dict[int, float] = {}

    @property
    def about_s(self) -> float:
        return sum(self._marks.values()) + len(self.short) * SERVER_TEST_S

    def add(self, item: pytest.Item, mark: pytest.Mark) -> None:
        self.items.append(item)
        self._marks[id(mark)] = mark.kwargs.get("about_s", LONG_S)

    def extend(self, other: _LongGroup) -> None:
        self.items += other.items
        self._marks |= other._marks

    def __len__(self) -> int:
        return len(self.items) + len(self.short)


def pytest_collection_finish() -> None:
    """Has garbage collected again, but what has been made until now: to look through thousands of tests takes long."""
    _collect_garbage_seldom()
    gc.enable()


def _collect_garbage_seldom() -> None:
    """Keeps the garbage collector from looking at modules and thousands of tests, which stay, again and again.

    And from looking at what tests make as often as it does by default, which is 3 to 5 % of their CPU.
    """
    gc.freeze()
    gc.set_threshold(20_000)


def _log_plain_tracebacks() -> None:
    """Keeps structlog from drawing tracebacks with all local variables, which takes 15 ms of CPU and more for each."""
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


def _take_interrupts() -> None:
    """Undoes what a shell does to a command in the background: programs that the tests interrupt would ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_log_plain_tracebacks()
_take_interrupts()
_keep_files_in_memory()
_write_bytecode()  # before the workers start
