"""A small stack in a process of its own, for tests that interrupt or kill it. Its arguments are those of a program.

It prints one JSON line with the pids of its processes when it is up, and one line per event before that.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import uvloop

from breakwater.local.datadir import DataDir
from breakwater.local.ports import free_port
from breakwater.local.process import ProcessSpec
from breakwater.local.servers import nats_spec, redis_spec
from breakwater.local.supervisor import ProcessEvent, Supervisor

SLEEPER = "import time; time.sleep(600)"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
STUBBORN = f"{IGNORE_TERM}print('up', flush=True); {SLEEPER}"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"


async def at_once() -> bool:
    return True


async def never() -> bool:
    return False


def python_spec(data: Path, name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code), data / "logs" / f"{name}.log", at_once)


def says_up(spec: ProcessSpec) -> ProcessSpec:
    async def ready() -> bool:
        return spec.log_file.exists() and "up" in spec.log_file.read_text()

    return ProcessSpec(spec.name, spec.argv, spec.log_file, ready)


def show(event: ProcessEvent) -> None:
    print(f"{event.kind} {event.name}", flush=True)


async def run(data: DataDir, *, servers: bool, stubborn: bool, hang: bool) -> int:
    with data.lock() as lock:
        supervisor = Supervisor(on_event=show, inherit=[lock])

        async def stay_up() -> NoReturn:
            if servers:
                await supervisor.start([nats_spec(data.path, free_port(), {}), redis_spec(data.path, free_port(), "x")])
            await supervisor.start([python_spec(data.path, "sleeper", SLEEPER)])
            if stubborn:
                spec = says_up(python_spec(data.path, "stubborn", STUBBORN))
                await supervisor.start([replace(spec, stop_timeout_s=600.0)])
            print(json.dumps({name: keeper.pid for name, keeper in supervisor.keepers.items()}), flush=True)
            if hang:
                mute = replace(python_spec(data.path, "mute", SLEEPER), ready=never, ready_timeout_s=600.0)
                await supervisor.start([mute])
            while True:
                await asyncio.Event().wait()

        return 128 + await supervisor.run(stay_up)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    for flag in ("--servers", "--stubborn", "--hang", "--uvloop"):
        parser.add_argument(flag, action="store_true")
    wanted = parser.parse_args()
    data = DataDir(wanted.data)
    data.create()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if wanted.uvloop else None) as runner:
        code = runner.run(run(data, servers=wanted.servers, stubborn=wanted.stubborn, hang=wanted.hang))
    sys.exit(code)
