"""A backup that is made and restored by the commands of the page on upgrades."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.docs.conftest import Checkout, checkout
from tests.docs.markdown import ROOT, blocks
from tests.helpers import wait_until

__all__ = ["checkout"]

pytestmark = pytest.mark.chaos

UPGRADE_PAGE = ROOT / "docs" / "upgrade.md"


@contextmanager
def up_again(checkout: Checkout) -> Generator[None]:
    """The plane of a checkout, started another time."""
    process = checkout.start("breakwater", "up", "--simulate")
    try:
        wait_until((checkout.path / ".breakwater" / "endpoints.json").exists, "the plane", timeout_s=240)
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_what_is_backed_up_is_restored_and_redis_need_not_be(checkout: Checkout, tmp_path: Path) -> None:
    def spent(one: Checkout) -> list[tuple[str, str]]:
        listed = json.loads(one.breakwater("budgets", "list", "--json").stdout)["budgets"]
        return sorted((budget["budget"], budget["spent"]) for budget in listed)

    submitted = checkout.breakwater("submit", "content-writer", "Write a haiku.", "--job-id", "kept", "--json")
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: checkout.breakwater("executions", "kept").returncode == 0, "the record")
    before = spent(checkout)
    assert any(float(amount) > 0 for _, amount in before)
    plane = psutil.Process(checkout.endpoints["pid"])
    plane.terminate()
    wait_until(lambda: not plane.is_running() or plane.status() == psutil.STATUS_ZOMBIE, "the plane to stop")

    shutil.copy(checkout.path / "examples" / "breakwater.yaml", checkout.path)
    saved, restored = [block.text for block in blocks(UPGRADE_PAGE) if "breakwater-backup" in block.text]
    for command in saved.splitlines():
        ran = checkout.sh(command)
        assert ran.returncode == 0, ran.stderr
    shutil.copy(checkout.path / "breakwater-backup.tar.gz", tmp_path)
    elsewhere = replace(checkout, path=tmp_path)
    for command in restored.splitlines():
        ran = elsewhere.sh(command)
        assert ran.returncode == 0, ran.stderr
    shutil.rmtree(tmp_path / ".breakwater" / "redis")
    with up_again(elsewhere):
        again = elsewhere.breakwater("submit", "content-writer", "Write a haiku.", "--job-id", "kept", "--json")
        assert json.loads(again.stdout) == json.loads(submitted.stdout)
        assert elsewhere.get("/api/v1/jobs/kept")[0] == 200  # with the key from before
        wait_until(lambda: spent(elsewhere) == before, "the budgets to be rebuilt")
        assert elsewhere.breakwater("executions", "kept").returncode == 0
