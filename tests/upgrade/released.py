"""The version before this one, installed from its own commit beside the packages of this one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TAG = "v0.1.0"


def released_commit() -> str:
    """Returns the commit of the tag, or where a clone has no tags the one in released.txt; else skips the test."""
    named = Path(__file__).with_name("released.txt").read_text().split()[0]
    for revision in (TAG, named):
        command = ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
        looked_up = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if looked_up.returncode == 0:
            return looked_up.stdout.strip()
    pytest.skip(f"this clone has neither the tag {TAG} nor the commit {named}: there is nothing to upgrade from")


def install_released(directory: Path) -> Path:
    """Builds the wheel of the released commit, and installs it. Downloads nothing. Returns its Python."""
    source, wheels, venv = (directory / name for name in ("source", "wheels", "venv"))
    archive = subprocess.run(["git", "archive", released_commit()], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(source, filter="data")
    uv, python = Path(sys.executable).with_name("uv"), venv / "bin" / "python"
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=source, capture_output=True, check=True)
    (wheel,) = wheels.iterdir()
    for command in (
        [uv, "venv", "--offline", "--python", sys.executable, venv],
        [uv, "pip", "install", "--offline", "--no-deps", "--compile-bytecode", "--python", python, wheel],
    ):
        subprocess.run(command, cwd=directory, capture_output=True, check=True)
    (site,) = (venv / "lib").glob("*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = "import breakwater; print(breakwater.__file__)"
    imported = subprocess.run([python, "-c", program], cwd=directory, capture_output=True, text=True, check=True).stdout
    assert Path(imported.strip()).is_relative_to(site)
    return python
