"""What the local stack takes: the time until it is up, and the memory of each process.

    python -m bench.local_stack [--idle-s 20]

Memory is PSS (proportional set size): a page that processes share is divided among them, so the sum is what the machine
gives. RSS counts it for each. Linux only. Ports are free ones; the data goes to a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
UP = "import sys; from breakwater.cli.main import main; sys.exit(main())"


@asynccontextmanager
async def running_stack(config: dict[str, Any], data: Path, workers: int = 1) -> AsyncGenerator[dict[str, Any]]:
    """Runs the local stack with a config and its data below a directory. Yields its endpoints."""
    path = data / "breakwater.yaml"
    path.write_text(yaml.safe_dump(config))
    options = ["--config", str(path), "--data", str(data / "plane"), "--workers", str(workers), "--json"]
    command = [sys.executable, "-c", UP, "up", *options]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert up.stdout is not None
    try:
        while '"up"' not in await asyncio.to_thread(up.stdout.readline):
            assert up.poll() is None, "the stack did not start"
        yield json.loads((data / "plane" / "endpoints.json").read_text())
    finally:
        up.send_signal(signal.SIGINT)
        await asyncio.to_thread(up.wait)


def main() -> None:
    """Starts it, waits for a while, and prints a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle-s", type=float, default=20.0, help="wait so long before memory is read (default 20)")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        config = ROOT / "examples" / "breakwater.yaml"
        command = [sys.executable, "-c", UP, "up", "--config", str(config), "--simulate", "--data", data, "--json"]
        began = time.monotonic()
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        try:
            for line in up.stdout:
                if json.loads(line)["event"] == "up":
                    break
            print(f"up after {time.monotonic() - began:.1f} s")
            time.sleep(wanted.idle_s)
            processes = [psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)]
            memory = [(one.name(), " ".join(one.cmdline()[-3:])[-60:], one.memory_full_info()) for one in processes]
        finally:
            up.send_signal(signal.SIGINT)
            up.wait()
    for name, arguments, used in sorted(memory, key=lambda one: one[2].pss):
        print(f"{used.pss / 1e6:6.0f} MB PSS {used.rss / 1e6:6.0f} MB RSS  {name:16} {arguments}")
    print(f"{sum(used.pss for *_, used in memory) / 1e6:6.0f} MB PSS in all")


if __name__ == "__main__":
    main()
