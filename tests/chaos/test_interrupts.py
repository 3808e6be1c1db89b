"""Ctrl-C at a terminal, once in the demo, and twice in any command and at any moment."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import VARIABLES
from tests.cli.test_demo import demo
from tests.commands import run_command
from tests.helpers import wait_until

pytestmark = pytest.mark.chaos

INTERNALS = re.compile(
    rb'Traceback|Exception ignored|Task |never (retrieved|awaited)|asyncio|KeyboardInterrupt|  File "'
)
COMMAND = Path(sys.executable).with_name("breakwater")


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, directory: Path, arguments: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._shown, inner = pty.openpty()
        self.output = b""
        kept = {
            name: value for name, value in os.environ.items() if name not in {f"BREAKWATER_{one}" for one in VARIABLES}
        }
        self.process = subprocess.Popen(
            [COMMAND, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=directory,
            env={**kept, "TMPDIR": str(directory), "TERM": "xterm", **variables},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        os.set_blocking(self._shown, False)
        self._children: set[psutil.Process] = set()

    def shows(self, text: str) -> None:
        """Waits until it has printed a text."""
        wait_until(
            lambda: re.search(text, self._read().decode(errors="replace")) or self.process.poll() is not None, text
        )

    def has_begun(self) -> None:
        """Waits until the command's own code runs: Python catches SIGINT until then."""
        status = Path(f"/proc/{self.process.pid}/status")

        def is_caught() -> bool:
            mask = re.search(r"SigCgt:\s*(\w+)", status.read_text())
            return mask is not None and bool(int(mask[1], 16) >> (signal.SIGINT - 1) & 1)

        # The moment is short: a slower look would miss it, and take the end of the command for its beginning.
        until = time.monotonic() + 60
        for caught in (True, False):  # first Python's own handler, then none
            while is_caught() != caught:
                assert time.monotonic() < until, "its beginning"
                time.sleep(0.001)

    def ctrl_c(self) -> None:
        with suppress(OSError):  # it has ended
            os.write(self._shown, b"\x03")

    def close(self) -> list[psutil.Process]:
        """Waits until it has ended, and returns those that it has left behind."""
        wait_until(lambda: (self._read(), self.process.poll() is not None)[1], "its end", timeout_s=60)
        self._read()
        os.close(self._shown)
        return psutil.wait_procs(self._children, timeout=10)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> bytes:
        with suppress(psutil.NoSuchProcess):
            self._children |= set(psutil.Process(self.process.pid).children(recursive=True))
        with suppress(BlockingIOError, OSError):
            while more := os.read(self._shown, 65_536):
                self.output += more
        return self.output


@contextmanager
def terminal(directory: Path, *arguments: str, **variables: str) -> Generator[Terminal]:
    opened = Terminal(directory, arguments, variables)
    try:
        yield opened
    finally:
        opened.kill()


@pytest.fixture
def silent_port() -> Generator[int]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def interrupted_twice(opened: Terminal, pause_s: float) -> bool:
    """Presses Ctrl-C twice. False if the command had given its server up before that."""
    opened.ctrl_c()
    time.sleep(pause_s)
    opened.ctrl_c()
    assert opened.close() == []
    assert not INTERNALS.search(opened.output), opened.output.decode(errors="replace")
    if opened.process.returncode in (130, -2):
        return True
    # The terminal shows a Ctrl-C as ^C: before the first one there is the reason for another end.
    assert b"does not answer" in opened.output.partition(b"^C")[0], opened.output
    return False


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_while_a_command_begins(tmp_path: Path, silent_port: int, after_s: float, pause_s: float) -> None:
    for _ in range(10):
        with terminal(tmp_path, "tail", BREAKWATER_NATS_URL=f"nats://127.0.0.1:{silent_port}") as opened:
            opened.has_begun()
            time.sleep(after_s)
            # On a busy machine it may have given NATS up by now.
            if interrupted_twice(opened, pause_s):
                return
    pytest.fail("the command always ended first")


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "writer", "hello"),
        ("submit", "writer", "hello", "--via", "nats"),
        ("query", "SELECT 1"),
        ("tail",),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_while_a_command_waits(tmp_path: Path, silent_port: int, arguments: tuple[str, ...], pause_s: float) -> None:
    url = f"127.0.0.1:{silent_port}"
    plane = {
        "BREAKWATER_URL": f"http://{url}",
        "BREAKWATER_API_KEY": "bw_0123456789abcdef_secret",
        "BREAKWATER_NATS_URL": f"nats://{url}",
        "BREAKWATER_REDIS_URL": f"redis://{url}",
        "BREAKWATER_CLICKHOUSE_URL": f"http://{url}",
    }
    with terminal(tmp_path, *arguments, **plane) as opened:
        time.sleep(2.0)
        assert interrupted_twice(opened, pause_s), opened.output


@pytest.mark.parametrize("pause_s", [0.1])
@pytest.mark.parametrize("moment", ["starting: ", "running: ", "stopping"])
def test_in_the_demo(tmp_path: Path, moment: str, pause_s: float) -> None:
    with terminal(tmp_path, "demo", "--jobs", "100") as opened:
        opened.shows("running: " if moment == "stopping" else moment)
        if moment == "stopping":
            opened.ctrl_c()
            opened.shows(moment)
        assert interrupted_twice(opened, pause_s), opened.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["Ctrl-C stops everything", ""])
def test_in_a_local_stack(tmp_path: Path, moment: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "breakwater.yaml"
    with terminal(tmp_path, "up", "--simulate", "--config", str(example), "--data", "data") as opened:
        if moment:
            opened.shows(moment)
        else:
            time.sleep(1.0)
        assert interrupted_twice(opened, 0.1), opened.output


def test_on_a_terminal_the_demo_stays_with_a_link_to_the_console_until_ctrl_c(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(screen, encoding="utf-8") as shown, demo(tmp_path, "--jobs", "100", stdout=terminal) as process:
        os.close(terminal)
        links = (re.search(r"http://\S+/sign-in/link\?[^\s\x1b]+", line) for line in shown)
        link = next(found[0] for found in links if found)
        signed_in = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with signed_in.open(link) as page:
            assert re.search(r"from=[^&]+Z&to=[^&]+Z$", page.url)
            shown = page.read().decode()
        assert "<h1>Overview</h1>" in shown
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link)
        [data] = tmp_path.glob("breakwater-demo-*")
        another = run_command("console", "--data", str(data)).stdout.strip()
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(another) as page:
            assert page.url.endswith("/")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []
