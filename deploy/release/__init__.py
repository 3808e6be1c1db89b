"""Builds a release of a commit twice, in clean folders, and describes it.

A release is one folder: what is installed, the pins of what that needs, a bill of materials, a statement of how it was
built, and the checksums of all of it. It follows from the commit and from Python's version alone, whose zlib packs it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.release.bill_of_materials import bill_of_materials
from deploy.release.provenance import provenance

ROOT = Path(__file__).parent.parent.parent
CHART = Path("deploy/helm/breakwater")
SUMS = "SHA256SUMS"

SURROUNDINGS: tuple[Mapping[str, str], Mapping[str, str]] = (
    {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"},
    {"TZ": "Pacific/Chatham", "LC_ALL": "C", "PYTHONHASHSEED": "2"},
)
"""What the two builds differ in, beside the folder."""


class ReleaseError(Exception):
    """There is no release; its text says why."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The source of a release."""

    id: str
    time: int
    """In seconds since the epoch: the time of every packed file."""

    @classmethod
    def of(cls, root: Path, revision: str = "HEAD") -> Commit:
        """Looks a revision up. Raises ReleaseError: it is unknown here."""
        try:
            found = _git(root, "log", "-1", "--format=%H %ct", revision, "--").decode().split()
        except subprocess.CalledProcessError as error:
            raise ReleaseError(f"{root} has no commit {revision}: {error.stderr.decode().strip()}") from None
        return cls(found[0], int(found[1]))


def release(root: Path, into: Path, revision: str = "HEAD") -> tuple[str, ...]:
    """Builds the release of a commit into a folder, which it replaces only when all is done.

    Args:
        root: the repository. What is not committed is not released.
        into: the folder.
        revision: the commit.

    Returns:
        The names of its files.

    Raises:
        ReleaseError: the two builds differ, or a build failed.
    """
    commit = Commit.of(root, revision)
    # Beside the result, so that it can be moved there; a build that was killed is removed by the next.
    work = into.with_name(f".{into.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    builds = [work / "first", work / "the-second"]
    for folder, surroundings in zip(builds, SURROUNDINGS, strict=True):
        _build(root, commit, folder, surroundings)
    first, second = (sums(folder / "built") for folder in builds)
    if differing := sorted(name for name in first | second if first.get(name) != second.get(name)):
        raise ReleaseError(f"two builds of {commit.id} differ in {', '.join(differing)}; they are in {work}")
    built, source = builds[0] / "built", builds[0] / "source"
    for name in ("embedded", "runtime"):
        shutil.copyfile(source / "requirements" / f"{name}.txt", built / f"{name}.txt")
    version = _version(source)
    bill = bill_of_materials(source / "requirements", version, commit.id, commit.time)
    (built / f"breakwater-plane-{version}.cdx.json").write_text(bill, "utf-8")
    pins = {f"requirements/{file.name}": _sha256(file) for file in sorted((source / "requirements").glob("*.txt"))}
    statement = provenance(sums(built), commit.id, pins)
    (built / f"breakwater-plane-{version}.intoto.json").write_text(statement, "utf-8")
    checksums = sums(built)
    (built / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in checksums.items()), "utf-8")
    shutil.rmtree(into, ignore_errors=True)
    built.rename(into)
    shutil.rmtree(work)
    return (*checksums, SUMS)


def sums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file in a folder, by its name, sorted."""
    return {file.name: _sha256(file) for file in sorted(folder.iterdir())}


def _build(root: Path, commit: Commit, folder: Path, surroundings: Mapping[str, str]) -> None:
    """Builds wheel, sdist, chart and the image's context in a folder of its own, from what is committed alone."""
    source, built = folder / "source", folder / "built"
    source.mkdir(parents=True)
    built.mkdir()
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "--format=tar", commit.id))) as archive:
        archive.extractall(source, filter="data")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_"))}
    environment |= {"SOURCE_DATE_EPOCH": str(commit.time), **surroundings}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(built)]
    ran = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode != 0:
        raise ReleaseError(f"the build failed:\n{ran.stdout}{ran.stderr}")
    version = _version(source)
    context = list(_image_context(source))
    pack(source, context, built / f"breakwater-{version}-image.tar.gz", commit.time)
    if (source / CHART).is_dir():
        _package_chart(source / CHART, folder, built, commit.time)


def _version(source: Path) -> str:
    return re.findall(r'^__version__ = "(.+)"$', (source / "libs/breakwater/__init__.py").read_text("utf-8"), re.M)[0]


def _image_context(source: Path) -> Iterable[Path]:
    """What `docker build` sends of the source, by .dockerignore, which excludes all and then names what it includes."""
    yield from (Path("Dockerfile"), Path(".dockerignore"))
    for line in (source / ".dockerignore").read_text("utf-8").splitlines():
        if line.startswith("!"):
            path = source / line[1:]
            files = [path] if path.is_file() else path.rglob("*")
            yield from (file.relative_to(source) for file in files if file.is_symlink() or not file.is_dir())


def _package_chart(chart: Path, folder: Path, built: Path, time: int) -> None:
    """Packages the chart with Helm, and gives its files the commit's time instead of the present."""
    # Loaded only for a chart: it is a library of 70 MB.
    from helm_python.chart import package

    packaged = Path(package(chart, destination=folder))
    unpacked = folder / "chart"
    with tarfile.open(packaged) as archive:
        archive.extractall(unpacked, filter="data")
    files = (file.relative_to(unpacked) for file in unpacked.rglob("*") if file.is_file())
    pack(unpacked, files, built / packaged.name, time)


def pack(source: Path, files: Iterable[Path], into: Path, time: int) -> None:
    """Packs files into a .tar.gz that depends on nothing but their paths, contents and whether they are executable."""

    def anonymous(file: tarfile.TarInfo) -> tarfile.TarInfo:
        file.uid = file.gid = 0
        file.uname = file.gname = ""
        file.mtime = time
        file.mode = 0o755 if file.mode & 0o100 else 0o644
        return file

    with (
        into.open("wb") as packed,
        gzip.GzipFile("", "wb", fileobj=packed, mtime=time) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in sorted(files):
            archive.add(source / file, file, recursive=False, filter=anonymous)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout  # noqa: S603, S607
