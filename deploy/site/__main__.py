"""Builds the documentation as a site, into a directory that is then served as files: `make site`.

The pages are those of the repository, at the same paths, so that their links hold in both; the reference is made from
the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deploy.site.reference import pages

HERE = Path(__file__).parent
SETTINGS = HERE / "mkdocs.yml"
ROOT = HERE.parent.parent

RANKS = {"docs/adr/": 0.0001, "CHANGELOG.md": 0.0001, "CONTRIBUTING.md": 0.3, "reference/": 0.5}
"""Factors by which the search weighs pages, by the beginning of their paths: pages for users come before records.

The search multiplies a match in a title by 1,000, so records weigh less than a thousandth."""

_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def gather(into: Path) -> None:
    """Copies the pages that the site's settings name, writes the reference, and copies what any of these link to."""
    for name, text in pages().items():
        _write(into / "reference" / name, (_rank(f"reference/{name}") + text).encode())
    named = re.findall(r": (\S+\.md)$", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    waiting = set(named)
    seen: set[str] = set()
    while waiting:
        seen.add(name := waiting.pop())
        if (ROOT / name).is_file():
            _write(into / name, _rank(name).encode() + (ROOT / name).read_bytes())
        if name.endswith(".md") and (into / name).is_file():
            links = _LINK.findall((into / name).read_text(encoding="utf-8"))
            waiting |= {os.path.normpath(Path(name).parent / link) for link in links if "://" not in link} - seen


def _rank(name: str) -> str:
    """The head of a page that weighs less in the search; empty for others."""
    weight = next((weight for begin, weight in RANKS.items() if name.startswith(begin) and name.endswith(".md")), None)
    return "" if weight is None else f"---\nsearch:\n  boost: {weight}\n---\n"


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def build(out: Path) -> int:
    """Builds the site anew.

    Returns:
        The exit code of the generator, which has said what is wrong, such as a link that leads nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        gather(work / "pages")
        shutil.copyfile(HERE / "site.css", work / "pages" / "site.css")
        shutil.copyfile(SETTINGS, work / SETTINGS.name)
        command = (sys.executable, "-m", "mkdocs", "build", "--strict")
        # Else the theme advertises its successor, which reads the same settings but can't be installed everywhere yet.
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        ran = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if ran.returncode != 0:
            sys.stderr.write(ran.stderr)
            return ran.returncode
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "site", out)
    return 0


if __name__ == "__main__":
    sys.exit(build(ROOT / "site"))
