"""A plane with the demo's data, and somebody at a browser who looks at its console."""

import json
import os
import shutil
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from playwright.sync_api import Browser, Page, StorageState, ViewportSize, expect, sync_playwright

from breakwater.local.ports import free_port
from tests.browser.talk import submit_talk
from tests.finished_demo import FinishedDemo
from tests.forked_commands import CommandProcess, start_command
from tests.helpers import runs, wait_until

UP_WITHIN_S = 240.0
TRACING = '\ntracing: {url_template: "https://traces.example/{trace_id}"}\n'
# The first takes a third of the CPU of the others, which are whole browsers.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    # It would ask after updates and accounts, somewhere else.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # An eighth less CPU: fewer processes, and no code is optimized for pages that are left after a second.
    "--in-process-gpu",
    "--no-zygote",
    "--js-flags=--no-turbofan",
)


@dataclass(frozen=True)
class RunningPlane:
    """A local stack that has done the demo's jobs, and those of a conversation."""

    data: Path
    console_url: str
    request_url: str
    key: str
    provider: str
    """The controls of the simulated provider."""
    script: "dict[str, Any]"
    """How that behaves by default."""

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The HTTP interface's answer."""
        return self._ask(self.request_url + path, method, body, {"Authorization": f"Bearer {self.key}", **headers})

    @contextmanager
    def behaving(self, **models: "dict[str, Any]") -> Generator[None]:
        """The provider with some models otherwise than by default, while the block runs."""
        changed = {name: {**self.script["models"][name], **more} for name, more in models.items()}
        self._ask(f"{self.provider}/_sim/script", "POST", {"models": {**self.script["models"], **changed}}, {})
        try:
            yield
        finally:
            self._ask(f"{self.provider}/_sim/script", "POST", self.script, {})

    def _ask(self, url: str, method: str, body: Any, headers: "dict[str, str]") -> Any:
        data = None if body is None else json.dumps(body).encode()
        sent = {**headers, "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=data, method=method, headers=sent)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@dataclass
class Visitor:
    """A page of the browser, and what went wrong in it."""

    page: Page
    plane: RunningPlane
    troubles: "list[str]" = field(default_factory=list)
    expected: "set[int | str]" = field(default_factory=set)
    """Statuses, and parts of messages, that are no trouble."""

    def __post_init__(self) -> None:
        self._listeners: dict[Any, Callable[[Any], None]] = {
            "console": lambda said: self._note(said.text) if said.type in ("error", "warning") else None,
            "pageerror": lambda error: self._note(str(error)),
            "response": lambda got: self._note(f"{got.status} {got.url}") if got.status >= 400 else None,
            "request": self._check_where,
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def leave(self) -> None:
        """Stops listening to the page."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)

    def open(self, path: str) -> None:
        """Opens a page with all that follows it; again where a part took too long: a busy machine's user would, too."""
        for _ in range(5):
            self.page.goto(self.plane.console_url + path)
            expect(self.page.locator("[data-pending]")).to_have_count(0)
            if not self.page.locator("p.problem").count():
                return

    def shoot(self, name: str) -> None:
        """Keeps a picture of the whole page, where somebody wants them."""
        if folder := os.environ.get("BREAKWATER_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    def _note(self, what: str) -> None:
        if not any(str(status) in what for status in self.expected):
            self.troubles.append(what)

    def _check_where(self, request: Any) -> None:
        if not request.url.startswith((self.plane.console_url, "data:")):
            self.troubles.append(f"asked for {request.url}, which is not ours")


@pytest.fixture(scope="session")
def program() -> str:
    if PROGRAM is None:
        why = "no Chromium is installed (apt install chromium-headless-shell)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return PROGRAM


@pytest.fixture(scope="module")
def chromium(program: str) -> Generator[Browser]:
    """A browser for one module: while it runs, its driver has the event loop of this thread, and no other test does."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(OPTIONS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def plane(
    program: str, finished_demo: FinishedDemo, tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunningPlane]:
    """A stack that goes on with a copy of the demo's data, until it is killed. Only where there is a browser.

    It ends with the tests of this folder: idle, it takes a second of CPU in every fifty.
    """
    directory = tmp_path_factory.mktemp("console")
    data = directory / "data"
    shutil.copytree(finished_demo.data, data, symlinks=True)  # which ClickHouse has
    log = directory / "log"
    config = directory / "breakwater.yaml"
    config.write_text((data / "breakwater.yaml").read_text() + TRACING)
    out = directory / "out"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        running = start_command(
            *("up", "--simulate", "--json", "--config", str(config), "--data", str(data)),
            *("--http-port", str(free_port()), "--console-port", str(free_port())),
            directory=directory,
            environment=os.environ,
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
        )
    try:
        started = _started(running, data, out, log)
        submit_talk(started.ask)
        yield started
    finally:
        processes = psutil.Process(running.pid).children(recursive=True) if running.poll() is None else []
        running.kill()
        running.wait()
        wait_until(lambda: not [one for one in processes if runs(one)], "a killed stack's processes to end")


def _started(running: CommandProcess, data: Path, out: Path, log: Path) -> RunningPlane:
    def reported() -> Any:
        assert running.poll() is None, f"the plane did not start: {log.read_text()[-2000:]}"
        events = [json.loads(line) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return next((event for event in events if event["event"] == "up"), None)

    endpoints = wait_until(reported, "a plane", timeout_s=UP_WITHIN_S)
    assert endpoints["first_api_key"] is None, "there is one"
    simulated = yaml.safe_load((data / "breakwater.simulated.yaml").read_text())
    base_url = next(iter(simulated["providers"].values()))["base_url"]
    return RunningPlane(
        data=data,
        console_url=endpoints["console_url"],
        request_url=endpoints["request_url"],
        key=Path(endpoints["api_key_file"]).read_text().strip(),
        provider=base_url.removesuffix("/v1"),
        script=json.loads((data / "simulation.json").read_text()),
    )


LAPTOP: ViewportSize = {"width": 1360, "height": 900}


@contextmanager
def _opened(chromium: Browser, **how: Any) -> Generator[Page]:
    # What moves has Chromium draw the whole page 60 times a second, which is half of a visit's CPU.
    context = chromium.new_context(reduced_motion="reduce", **how)
    context.set_default_timeout(60_000)
    # On a busy machine five seconds, the default, are not many.
    expect.set_options(timeout=60_000)
    yield context.new_page()
    context.close()


@contextmanager
def _visiting(chromium: Browser, plane: RunningPlane, **how: Any) -> Generator[Visitor]:
    with _opened(chromium, **how) as page:
        visitor = Visitor(page, plane)
        yield visitor
    assert visitor.troubles == []


@pytest.fixture
def stranger(chromium: Browser, plane: RunningPlane) -> Generator[Visitor]:
    """Somebody who is not signed in."""
    with _visiting(chromium, plane, viewport=LAPTOP) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def signed_in(chromium: Browser, plane: RunningPlane) -> StorageState:
    """The cookies of somebody who is signed in."""
    with _visiting(chromium, plane) as visitor:
        visitor.open("/sign-in")
        visitor.page.get_by_label("API key").fill(plane.key)
        visitor.page.get_by_role("button", name="Sign in").click()
        visitor.page.get_by_role("heading", name="Overview", level=1).wait_for()
        return visitor.page.context.storage_state()


@pytest.fixture
def newcomer(chromium: Browser, plane: RunningPlane, signed_in: StorageState) -> Generator[Visitor]:
    """Somebody who is signed in, in a window of their own: for tests that leave something behind in it."""
    with _visiting(chromium, plane, viewport=LAPTOP, storage_state=signed_in) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def window(chromium: Browser, signed_in: StorageState) -> Generator[Page]:
    """The window of a laptop, in which somebody is signed in. Opening another takes 0.2 s of CPU."""
    with _opened(chromium, viewport=LAPTOP, storage_state=signed_in) as page:
        yield page


@pytest.fixture
def visitor(window: Page, plane: RunningPlane) -> Generator[Visitor]:
    """Somebody who is signed in, in the window that all of them share."""
    window.set_viewport_size(LAPTOP)
    window.emulate_media(color_scheme="light")
    visitor = Visitor(window, plane)
    yield visitor
    visitor.leave()
    window.goto("about:blank")
    assert visitor.troubles == []


@pytest.fixture
def by_phone(chromium: Browser, plane: RunningPlane, signed_in: StorageState) -> Generator[Visitor]:
    """The same with a phone, at night."""
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True, "is_mobile": True}
    with _visiting(chromium, plane, storage_state=signed_in, **phone) as visitor:
        yield visitor
