"""A release: built twice alike, described, verified as SECURITY.md says, and installed without a network."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import Parse
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

from breakwater import __version__
from deploy.release import ROOT, Commit, ReleaseError, pack, release, sums
from deploy.release.bill_of_materials import bill_of_materials, pins
from deploy.release.provenance import provenance

COMMIT = "0" * 40
SECURITY = (ROOT / "SECURITY.md").read_text()


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BREAKWATER_")}
    environment = inherited | variables
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


def test_the_bill_of_materials_has_each_pinned_package_and_what_needs_it() -> None:
    text = bill_of_materials(ROOT / "requirements", "0.1.0", COMMIT, 1_700_000_000)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    pinned = {pin.reference: pin for name in ("embedded", "clouds") for pin in pins(ROOT / f"requirements/{name}.txt")}
    components = {component["purl"]: component for component in bill["components"]}
    assert components.keys() == pinned.keys()
    for reference, component in components.items():
        (files,) = component["externalReferences"]
        assert {each["content"] for each in files["hashes"]} == set(pinned[reference].hashes) != set()
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    direct = {re.split(r"[@]", reference)[0] for reference in needs["pkg:pypi/breakwater-plane@0.1.0"]}
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["embedded"]]
    assert {f"pkg:pypi/{re.split(r'[^A-Za-z0-9-]', name)[0].lower()}" for name in wanted} <= direct
    required = {component["name"]: component["scope"] for component in bill["components"]}
    assert (required["nats-py"], required["chdb"], required["botocore"]) == ("required", "optional", "optional")


def test_the_statement_names_the_files_the_commit_and_the_pins() -> None:
    text = provenance({"a.whl": "1" * 64}, COMMIT, {"requirements/build.txt": "2" * 64})
    Statement.copy_from_pb(Parse(text, StatementMessage())).validate()
    statement = json.loads(text)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "a.whl", "digest": {"sha256": "1" * 64}}]
    definition = statement["predicate"]["buildDefinition"]
    assert [each["digest"] for each in definition["resolvedDependencies"]] == [
        {"gitCommit": COMMIT},
        {"sha256": "2" * 64},
    ]


def test_a_packed_file_depends_on_its_path_its_content_and_its_right_to_run(tmp_path: Path) -> None:
    packed = []
    for name, umask in (("one", 0o022), ("two", 0o077)):
        source = tmp_path / name
        before = os.umask(umask)
        try:
            (source / "folder").mkdir(parents=True)
            (source / "folder" / "text").write_text("text")
            (source / "run").write_text("#!/bin/sh")
        finally:
            os.umask(before)
        (source / "run").chmod(0o755)
        os.utime(source / "run", (len(packed), len(packed)))
        pack(source, [Path("run"), Path("folder/text")], into := tmp_path / f"{name}.tar.gz", 1_700_000_000)
        packed.append(into.read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        assert [(file.name, file.mode) for file in archive] == [("folder/text", 0o644), ("run", 0o755)]


def commands(heading: str) -> list[str]:
    """The lines of the block of a section of SECURITY.md."""
    section = SECURITY.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return block.splitlines()


def test_three_lines_verify_a_release_and_notice_a_changed_file(tmp_path: Path) -> None:
    """But for the installation, which a longer test does."""
    verify = commands("Verify a release")
    assert len(verify) == 3
    files = tmp_path / "dist" / "release"
    files.mkdir(parents=True)
    (files / "a.whl").write_text("wheel")
    (files / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums(files).items()))
    key_line = re.findall(r"`(ssh-keygen -t ed25519 [^`]+)`", SECURITY)[0]
    run("sh", "-c", f"{key_line} -N '' -q", cwd=tmp_path)
    run("sh", "-c", commands("Make a release")[0], cwd=tmp_path)
    (files / "signers").write_text(f"release@breakwater {(tmp_path / 'KEY.pub').read_text()}")
    for line in verify[:2]:
        run("sh", "-c", line, cwd=files)
    (files / "a.whl").write_text("another")
    changed = subprocess.run(["sh", "-c", verify[1]], cwd=files, capture_output=True, text=True, check=False)
    assert (changed.returncode, changed.stdout) == (1, "a.whl: FAILED\n")
    with (files / "SHA256SUMS").open("a") as checksums:
        checksums.write("0  other\n")
    assert subprocess.run(["sh", "-c", verify[0]], cwd=files, capture_output=True, check=False).returncode != 0


def test_an_unknown_commit_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="has no commit v99"):
        Commit.of(ROOT, "v99")
    with pytest.raises(ReleaseError, match="has no commit v99"):
        release(ROOT, tmp_path / "release", "v99")
    assert list(tmp_path.iterdir()) == []


def start(into: Path) -> subprocess.Popen[bytes]:
    program = f"from pathlib import Path; from deploy.release import *; release(ROOT, Path({str(into)!r}))"
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)


@pytest.mark.chaos
def test_a_build_that_was_killed_leaves_the_release_of_before_and_the_next_one_is_whole(tmp_path: Path) -> None:
    seeded = random.Random(20261130)
    into = tmp_path / "release"
    into.mkdir()
    (into / "before").touch()
    for _ in range(4):
        build = start(into)
        time.sleep(seeded.uniform(0.3, 4))
        os.killpg(build.pid, signal.SIGKILL)
        assert build.wait() == -signal.SIGKILL
        assert [file.name for file in into.iterdir()] == ["before"]
    names = release(ROOT, into)
    assert sorted(file.name for file in into.iterdir()) == sorted(names)
    assert [file.name for file in tmp_path.iterdir()] == ["release"]
    run("sh", "-c", commands("Verify a release")[1], cwd=into)
    with tarfile.open(next(into.glob("*-image.tar.gz"))) as archive:
        context = set(archive.getnames())
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for path in " ".join(copied).split():
        assert any(name == path or name.startswith(f"{path}/") for name in context), path
    assert not any(name.startswith(("tests", "docs", ".git/")) for name in context)
    again = tmp_path / "again"
    release(ROOT, again)
    assert sums(again) == sums(into)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_a_folder_is_enough_to_install_and_to_run_the_demo_without_a_network(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    release(ROOT, folder)
    install, offline = offline_commands()
    downloaded = subprocess.run(["sh", "-c", install], cwd=folder, capture_output=True, text=True, check=False)
    if downloaded.returncode != 0:
        pytest.skip(f"packages can't be downloaded here: {downloaded.stderr[-300:]}")
    uv = Path(sys.executable).with_name("uv")
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    path = f"{tmp_path / 'clean' / 'bin'}:{os.environ['PATH']}"
    # Neither finds an index, whatever the environment and the settings of the machine say.
    no_network = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_CONFIG_FILE": os.devnull, "PATH": path}
    run("sh", "-c", offline, cwd=folder, **no_network)
    assert run("breakwater", "--version", cwd=tmp_path, **no_network) == f"breakwater {__version__}\n"
    tool: Sequence[str | Path] = (uv, "tool", "run", "--offline", "--no-index", "--find-links", folder, "--no-config")
    cache = {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_TOOL_DIR": str(tmp_path / "tools")}
    demo = run(*tool, "breakwater-plane[embedded]", "demo", "--exit", cwd=tmp_path, **cache)
    assert "ledgers" in demo
    shutil.rmtree(tmp_path / "clean")


def offline_commands() -> tuple[str, str]:
    """What docs/deployment.md says of machines without a network: the line for one that has it, and the other one."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    block = next(block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--no-index" in block)
    download, install = [line for line in block.splitlines() if line.startswith("pip ")]
    return download, install
