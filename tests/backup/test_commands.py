"""`breakwater backup` says what is wrong, with an exit code for scripts."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from breakwater.backup.archive import read_manifest
from breakwater.backup.storage import Folder
from breakwater.kernel.commands.errors import ExitCode
from tests.backup.test_archive import FILES, KEY, store
from tests.commands import run_command


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "problem"),
    [
        (["verify", "nothing"], {}, ExitCode.FAILED, "nothing has no backup"),
        (["verify", "nothing"], {"BREAKWATER_BACKUP_KEY": "short"}, ExitCode.FAILED, "BACKUP_KEY is not a key"),
        (["restore", "nothing"], {}, ExitCode.FAILED, "nothing has no backup"),
        (["verify", "s3://"], {}, ExitCode.FAILED, "names no bucket"),
        (["create", "new"], {}, ExitCode.USAGE, "there is no config file breakwater.yaml"),
        (["create", "new", "--config", "c.yaml", "--file", "c.yaml"], {}, ExitCode.USAGE, "--file needs a key"),
        (["create", "new", "--config", "c.yaml"], {}, ExitCode.UNREACHABLE, "no plane is running in .breakwater"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], code: ExitCode, problem: str
) -> None:
    (tmp_path / "c.yaml").write_text("agents: {}")
    environment = {"PATH": os.environ["PATH"], **variables}
    ran = run_command("backup", *arguments, "--json", environment=environment, directory=tmp_path)
    error = json.loads(ran.stderr)
    assert (ran.returncode, problem in error["error"]["message"]) == (code, True), ran.stderr


def test_verify_tells_what_a_backup_has(tmp_path: Path) -> None:
    asyncio.run(store(Folder(tmp_path / "backup"), FILES, None))
    manifest = asyncio.run(read_manifest(Folder(tmp_path / "backup"), None))
    environment = {"PATH": os.environ["PATH"]}
    ran = run_command("backup", "verify", "backup", "--json", environment=environment, directory=tmp_path)
    document = json.loads(ran.stdout)
    assert (document["bytes"], document["decrypted"], document["key"]) == (manifest.bytes, True, None)
    ran = run_command("backup", "verify", "backup", environment=environment, directory=tmp_path)
    assert ran.stdout.startswith("backup is whole, as of 20")


def test_verify_without_the_key_says_that_it_compared_checksums(tmp_path: Path) -> None:
    asyncio.run(store(Folder(tmp_path / "backup"), {"streams/KEYS": b"k"}, KEY))
    ran = run_command("backup", "verify", "backup", environment={"PATH": os.environ["PATH"]}, directory=tmp_path)
    assert "only checksums were compared, as BREAKWATER_BACKUP_KEY is not set" in ran.stderr
