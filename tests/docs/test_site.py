"""The documentation as a site: it builds without a warning, is whole, and loads nothing from other hosts."""

import json
import re
from pathlib import Path

import pytest

from breakwater.cli.commands.contract import config_schema
from breakwater.records.channels import CHANNELS
from breakwater.records.schema import TABLES
from breakwater.services.request.openapi import document
from deploy.site.__main__ import SETTINGS, build
from deploy.site.reference import commands, pages
from tests.docs.markdown import PAGES

LOADED = re.compile(r'<(?:script|img|link|source)\b[^>]*?(?:src|href)="(https?:)?//', re.IGNORECASE)

pytestmark = pytest.mark.long(about_s=8, together=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "built"
    assert build(out) == 0
    return out


def test_every_page_is_on_the_site_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        assert (site / "docs" / page.stem / "index.html").exists(), f"{page.name} is not in deploy/site/mkdocs.yml"
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert LOADED.search(text) is None, page
        assert "fonts.googleapis" not in text


def test_the_search_finds_pages_before_decisions(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    weights: dict[str, set[float]] = {}
    for entry in index:
        part = re.match(r"docs/adr/|docs/|reference/|CHANGELOG/|CONTRIBUTING/|$", entry["location"])
        weights.setdefault(part[0] if part else "other", set()).add(entry.get("boost", 1))
    assert weights["docs/"] == {1}
    assert all(max(weights[part]) <= 0.5 for part in ("reference/", "CONTRIBUTING/"))
    # A match in a title counts a thousandfold.
    assert all(max(weights[part]) < 0.001 for part in ("docs/adr/", "CHANGELOG/"))


def test_a_link_that_leads_nowhere_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One page with the settings of all: what is wrong with it is wrong with any.
    settings = tmp_path / "mkdocs.yml"
    settings.write_text(re.sub(r"(?<=\nnav:\n)(?:[ ].*\n)+", "  - Tables: reference/sql.md\n", SETTINGS.read_text()))
    monkeypatch.setattr("deploy.site.__main__.SETTINGS", settings)
    monkeypatch.setattr("deploy.site.__main__.pages", lambda: {"sql.md": "[gone](../docs/gone.md)"})
    assert build(tmp_path / "built") != 0
    assert "'reference/sql.md' contains a link '../docs/gone.md'" in capsys.readouterr().err
    assert not (tmp_path / "built").exists()


def test_the_reference_has_every_field_command_operation_subject_and_column_and_links_to_its_own_headings() -> None:
    text = pages()
    for name, part in (("", config_schema()), *config_schema()["$defs"].items()):
        assert all(f"| `{field}` |" in text["config.md"] for field in part.get("properties", {})), name
    paths = [path for path, _ in commands()]
    assert {"breakwater submit", "breakwater keys create", "breakwater executions export"} <= set(paths)
    assert all(f"# `{path}`\n" in text["commands.md"] for path in paths)
    for path, methods in document()["paths"].items():
        assert all(f"`{method.upper()} {path}`" in text["http.md"] for method in methods)
    assert all(f"## `{channel.address}`" in text["subjects.md"] for channel in CHANNELS)
    for table in TABLES:
        assert all(f"| `{column}` |" in text["sql.md"] for column in table.columns)
    for name, page in text.items():
        headings = {
            re.sub(r"[^\w-]", "", one.lower().replace(" ", "-")) for one in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        }
        assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings, name
