"""Which of our code the worker runs for one job that succeeds.

    python -m bench.trace_job [--list]

Starts NATS, Redis and the simulated provider, runs the worker in this process, and traces eight jobs after a first one
that has everything imported and cached: an agent with a breaker, budgets, a rate limit and a retry budget, one model,
one call. Of the eight the smallest figures are printed; the worker's background tasks are not part of them.

    files, functions   of `libs/` and `services/` that run for the job; comprehensions belong to their function
    returns            control moves into a file that it had left before, by a call or by coming back from one
    climbs             a file calls back into one that waits for its answer: what a reader has to jump up for

Then what the event loop does for one of them, in the libraries' code, too:

    awaits             coroutines that begin
    wake-ups           the loop runs a task, until its next wait
    tasks, futures     that are made
    timers             that are set

ADR 0037 says why: one file for each gate.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self, TypeVar, cast
from unittest.mock import patch

import nats
from nats.js.errors import NotFoundError
from pydantic import SecretStr

from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.process.settings import Settings
from breakwater.local.provider import SimulatedProvider
from breakwater.services.worker.app import build
from tests.flow.kit import model
from tests.server_sources import embedded_servers

ROOT = Path(__file__).resolve().parents[1]
_PARTS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
"""Comprehensions: what they run is part of the function they stand in."""

_MADE_BY = {"create_task": "tasks", "create_future": "futures", "call_at": "timers"}
"""By methods of the loop; `call_later` sets its timer by `call_at`."""
_OF_MESSAGES = ("Client.", "Subscription.", "PullSubscriber.")
"""Begins the names of the tasks that wait for messages."""

ROOMS = (f"{ROOT}/libs/breakwater/", f"{ROOT}/services/")

JOBS = subjects.job("writer")
TRACED = 8

CONFIG = """
providers: {{sim: {{base_url: "{url}"}}}}
models: {{sim/m: {{price: {{input_usd_per_mtok: "0.15", output_usd_per_mtok: "0.60"}}}}}}
budgets: {{global: {{daily_usd: 100000}}}}
agents:
  writer:
    model: sim/m
    concurrency: 256
    budget: {{daily_usd: 100000}}
    rate_limit: {{requests_per_minute: 1000000}}
"""


class Steps:
    """What the event loop does in this thread while it is on. Tests count this alone: it is cheaper than `Trace`."""

    def __init__(self) -> None:
        self.steps = Counter(dict.fromkeys(("awaits", "wake-ups", *_MADE_BY.values()), 0))
        self.background: set[asyncio.Task[Any]] = set()
        """Tasks whose steps are not counted, nor those of the tasks they make."""
        self._begun: set[FrameType] = set()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for method, step in _MADE_BY.items():
            self._patches.enter_context(patch.object(loop, method, self._counting(step, getattr(loop, method))))
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._patches.close()

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_COROUTINE and not self._in_background():
            self.steps["awaits"] += frame not in self._begun
            self.steps["wake-ups"] += frame.f_back is not None and frame.f_back.f_code is asyncio.Handle._run.__code__
            self._begun.add(frame)

    def _counting(self, step: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            if not self._in_background():
                self.steps[step] += 1
            elif isinstance(made, asyncio.Task):
                self.background.add(cast(asyncio.Task[Any], made))
            return made

        return counted

    def _in_background(self) -> bool:
        try:
            return asyncio.current_task() in self.background
        except RuntimeError:
            return False


class Trace(Steps):
    """Counts also the functions that run in this thread, and how control moves between their files."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: Counter[tuple[str, str]] = Counter()
        self.returns: Counter[str] = Counter()
        self.climbs: Counter[str] = Counter()
        self._file: dict[CodeType, str | None] = {}
        self._seen: set[FrameType] = set()
        self._left: set[str] = set()
        self._at = ""

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        super()._profile(frame, event, _)
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        if code not in self._file:
            found = next((room for room in ROOMS if code.co_filename.startswith(room)), None)
            self._file[code] = None if found is None else code.co_filename.removeprefix(f"{ROOT}/")
        file = self._file[code]
        if file is None or self._in_background():
            return
        if event == "call":
            if frame not in self._seen:  # and not a coroutine that goes on after a wait
                self._seen.add(frame)
                if code.co_name not in _PARTS:
                    self.functions[file, code.co_qualname] += 1
                    below = self._files_below(frame)
                    self.climbs[file] += bool(below) and below[0] != file and file in below
                self._move(file)
        else:
            below = self._files_below(frame)
            if below:
                self._move(below[0])

    def _files_below(self, frame: FrameType) -> list[str]:
        """Our files on the stack, the caller's first."""
        files: list[str] = []
        back = frame.f_back
        while back is not None:
            if (file := self._file.get(back.f_code)) is not None:
                files.append(file)
            back = back.f_back
        return files

    def _move(self, file: str) -> None:
        if file != self._at:
            self._left.add(self._at)
            self.returns[file] += file in self._left
            self._at = file


AnyTrace = TypeVar("AnyTrace", bound=Steps)


class ProviderInAThread:
    """The simulated provider on a loop of its own, so that nothing of it is traced."""

    def __init__(self, models: Mapping[str, Any] | None = None) -> None:
        self.url = ""
        self._models = {"sim/m": model()} if models is None else models
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    async def _serve(self) -> None:
        async with SimulatedProvider({"models": dict(self._models)}) as sim:
            self.url = sim.url
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> ProviderInAThread:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@asynccontextmanager
async def running_worker(
    directory: Path, nats_url: str, redis_url: str, provider_url: str, template: str = CONFIG
) -> AsyncGenerator[None]:
    """A worker that takes up jobs in this thread."""
    path = directory / "breakwater.yaml"
    path.write_text(template.format(url=provider_url))
    config = load_config(path)
    await provision(nats_url, bus_plan(config))
    app = build(Settings(config=path, nats_url=SecretStr(nats_url), redis_url=SecretStr(redis_url)), config)
    await app.start()
    try:
        yield
    finally:
        await app.stop()


async def traces(
    kind: type[AnyTrace], directory: Path, nats_url: str, redis_url: str, provider_url: str
) -> list[AnyTrace]:
    """Runs jobs through one worker, and traces all but the first."""
    before = asyncio.all_tasks()
    done: list[AnyTrace] = []
    async with running_worker(directory, nats_url, redis_url, provider_url):
        for number in range(TRACED + 1):
            trace = kind()
            # Those that wait for messages work for the job; the others look after the whole worker.
            trace.background = {
                task
                for task in asyncio.all_tasks() - before
                if not getattr(task.get_coro(), "__qualname__", "").startswith(_OF_MESSAGES)
            }
            # The client has a thread and a loop of its own, so that nothing of it is traced.
            with trace:
                await asyncio.to_thread(asyncio.run, _run_job(nats_url, f"job-{number}"))
            if number:
                done.append(trace)
    return done


async def _run_job(nats_url: str, job_id: str) -> None:
    client = await nats.connect(nats_url)
    jetstream = client.jetstream()
    job = json.dumps({"agent": "writer", "job_id": job_id, "prompt": "How do I return a parcel?"}).encode()
    await jetstream.publish(JOBS, job, timeout=30, headers={Header.UNIQUE_ID.value: "1"})
    while (await jetstream.stream_info("JOBS")).state.messages or not await _result(jetstream, job_id):
        await asyncio.sleep(0.01)
    await client.close()


async def _result(jetstream: Any, job_id: str) -> bool:
    try:
        found = await jetstream.get_last_msg("RESULTS", f"bw.results.{job_id}", direct=True)
    except NotFoundError:
        return False
    assert json.loads(found.data)["status"] == "succeeded"
    return True


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also each file with its functions")
    options = parser.parse_args()
    with embedded_servers() as (servers, directory), ProviderInAThread() as provider:
        urls = (servers.nats().url, servers.redis().url, provider.url)
        made = asyncio.run(traces(Trace, directory, *urls))
    best = min(made, key=lambda trace: (len(trace.files), len(trace.functions), trace.returns.total()))
    for room in ("", "libs/breakwater/services/worker/"):
        files = {file for file in best.files if file.startswith(room)}
        functions = sum(file in files for file, _ in best.functions)
        returns = sum(count for file, count in best.returns.items() if file in files)
        climbs = sum(count for file, count in best.climbs.items() if file in files)
        figures = f"{len(files):4} files {functions:5} functions {returns:5} returns {climbs:5} climbs"
        print(f"{room.removeprefix('libs/breakwater/') or 'all':17} {figures}")
    steps = ", ".join(f"{min(trace.steps[step] for trace in made)} {step}" for step in best.steps)
    print(f"the event loop    {steps}")
    if options.list:
        for file in sorted(best.files):
            names = sorted(f"{name} {count}" for (other, name), count in best.functions.items() if other == file)
            print(f"{file} ({best.returns[file]} returns): {', '.join(names)}")


if __name__ == "__main__":
    main()
