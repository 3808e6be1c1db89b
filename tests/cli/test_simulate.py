"""`breakwater simulate`, on a simulated provider that no plane calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.datadir import DataDir
from breakwater.local.provider import SimulatedProvider
from tests.cli.conftest import Ran, Run
from tests.cli.test_main import endpoints
from tests.local.provider_kit import MODEL, post, script


async def test_faults_are_added_and_taken_back(run: Run, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()

    async def simulate(*arguments: str) -> Ran:
        return await asyncio.to_thread(run, "simulate", *arguments, "--data", str(data.path))

    async with SimulatedProvider(script()) as sim, aiohttp.ClientSession() as session:
        where = {"simulated_provider_url": sim.url.removesuffix("/v1")}
        data.write_endpoints(endpoints(data.path).model_copy(update=where))
        with data.lock():
            ran = await simulate("fault", MODEL, "--status", "429", "--rate", "1")
            assert (ran.code, ran.out) == (ExitCode.OK, f"{MODEL}: rate 1.0, status 429\n")
            assert (await post(session, sim.url))[0] == 429
            assert (await simulate("fault", MODEL, "--hang-s", "0.01", "--json")).json[MODEL][0] == {"hang_s": 0.01}
            assert (await post(session, sim.url))[0] == 200
            assert (await simulate("reset")).out == f"{MODEL}: answers\n"
            for arguments, message in (
                ((MODEL, "--rate", "0.5"), "error: a fault has either --status or --hang-s; neither is given"),
                (
                    (MODEL, "--status", "500", "--hang-s", "1"),
                    "error: a fault has either --status or --hang-s; both are given",
                ),
                (("none", "--status", "500"), f"error: The simulated provider has no model none; it has {MODEL}"),
            ):
                ran = await simulate("fault", *arguments)
                assert (ran.code, ran.err.startswith(message)) == (ExitCode.USAGE, True)
            data.write_endpoints(
                endpoints(data.path).model_copy(update={"simulated_provider_url": "http://127.0.0.1:9"})
            )
            ran = await simulate("reset")
            assert (ran.code, "connection refused at 127.0.0.1:9" in ran.err) == (ExitCode.UNREACHABLE, True)
            data.write_endpoints(endpoints(data.path))
            assert "breakwater up --simulate" in (await simulate("reset")).err
    ran = run("simulate", "reset")
    assert (ran.code, "no plane is running in .breakwater" in ran.err) == (ExitCode.UNREACHABLE, True)
