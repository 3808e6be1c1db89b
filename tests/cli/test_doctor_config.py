"""The doctor reports the version of the config in each process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from breakwater.cli.doctor_checks import config_findings
from breakwater.config import Config, parse_config
from breakwater.local.plane import PlaneLocation

TEXT = "providers: {p: {base_url: 'http://127.0.0.1:9'}}\nagents: {writer: {model: m}}\n"
NOW, EDITED = parse_config(TEXT), parse_config(TEXT + "limits: {drain_s: 3}\n")


@asynccontextmanager
async def serving(*refusing: str, **versions: str) -> AsyncGenerator[dict[str, str]]:
    """Processes that show a version of the config, and where each does so."""

    async def show(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        info = f'breakwater_config_info{{version="{versions[name]}"}} 1.0'
        return web.Response(text=f"x 1\n{info}\nbreakwater_config_refused {float(name in refusing)}\n")

    app = web.Application()
    app.router.add_get("/{name}", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield {name: f"http://127.0.0.1:{port}/{name}" for name in versions}
    finally:
        await runner.cleanup()


async def found(
    monkeypatch: pytest.MonkeyPatch, urls: Mapping[str, str], file: Config | None, in_force: Config | None = NOW
) -> list[tuple[str, str]]:
    async def metrics_urls(_plane: PlaneLocation) -> Mapping[str, str]:
        return urls

    monkeypatch.setattr(PlaneLocation, "metrics_urls", metrics_urls)
    monkeypatch.setattr(PlaneLocation, "effective_config", lambda _plane: in_force)
    return [(one.verdict, one.text) async for one in config_findings(PlaneLocation(None), file)]


async def test_services_that_are_behind_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(worker=NOW.version, budget="0123456789ab") as urls:
        [(verdict, text)] = await found(monkeypatch, urls, NOW)
    assert verdict == "warn"
    assert text == f"version {NOW.version} is not effective in budget (0123456789ab)"


@pytest.mark.parametrize("file", [None, EDITED])
async def test_services_whose_file_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, file: Config | None
) -> None:
    async with serving("worker", worker=NOW.version, budget=EDITED.version) as urls:
        found_here = await found(monkeypatch, urls, file, None)
    text = f"the config file is invalid; the last good one stays effective in worker (version {NOW.version})"
    behind = f"version {EDITED.version} is not effective in worker ({NOW.version})"
    assert found_here == [("warn", text), *([] if file is None else [("warn", behind)])]


async def test_one_version_everywhere_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(worker=NOW.version, budget=NOW.version) as urls:
        assert await found(monkeypatch, urls, NOW, None) == [
            ("ok", f"version {NOW.version} is effective in each of 2 processes")
        ]


@pytest.mark.parametrize(
    ("file", "why"), [(None, "is wrong"), (EDITED, f"is version {EDITED.version} and not applied")]
)
async def test_a_file_that_is_not_in_force_is_reported(
    monkeypatch: pytest.MonkeyPatch, file: Config | None, why: str
) -> None:
    text = f"version {NOW.version} stays effective, as the file {why}"
    assert await found(monkeypatch, {}, file) == [("warn", text)]


async def test_nothing_is_said_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await found(monkeypatch, {}, NOW, None) == []
