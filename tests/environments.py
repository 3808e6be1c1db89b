"""Programs of other makers, in environments of their own: what `make sdks` and `make bench-peers` run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def install_python(pins: Path, directory: Path) -> None:
    """Makes a virtual environment with these pins, if it is not there yet."""
    done = directory / "pins.txt"
    if done.is_file() and done.read_text() == pins.read_text():
        return
    print(f"Installing {pins.relative_to(ROOT)} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    pip = (directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", pins], check=True)
    done.write_text(pins.read_text())


def install_node(directory: Path) -> None:
    """Installs what the `package.json` of a directory names, beside it; if it has a lock file, once what that names."""
    lock = directory / "package-lock.json"
    done = directory / "node_modules" / "installed-lock.json"
    if done.is_file() and done.read_text() == lock.read_text():
        return
    print(f"Installing {(directory / 'package.json').relative_to(ROOT)} ...", flush=True)
    command = ("ci",) if lock.is_file() else ("install", "--no-package-lock")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--silent")
    subprocess.run(["npm", *command, *options, "--prefix", directory], check=True)
    if lock.is_file():
        done.write_text(lock.read_text())
