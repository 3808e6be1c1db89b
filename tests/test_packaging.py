"""What a newcomer's first minutes depend on: pins, make targets, licence."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINNED = {file.stem: file for file in (ROOT / "requirements").glob("*.txt")}
# In pieces, so that this file does not hold what it looks for.
REGISTRIES = ("py" + "pi.", "pythonhost" + "ed", "https://" + "files", "registry." + "npmjs", "deb" + "ian.org")


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ ;\\]+)", PINNED[name].read_text(), re.MULTILINE))


def test_no_file_names_the_host_of_a_package_registry() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {host}"
        for file in tracked_files()
        for host in REGISTRIES
        if host.encode() in file.read_bytes().lower()
    ]
    assert found == []


@pytest.mark.parametrize("name", ["build", "runtime", "embedded", "dev"])
def test_every_requirement_is_pinned_with_its_hashes(name: str) -> None:
    for requirement in re.split(r"\n(?=\S)", PINNED[name].read_text().strip()):
        assert re.match(r"[\w.-]+==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


def test_a_package_has_one_version_wherever_it_is_pinned() -> None:
    dev = pins("dev")
    for name in ("build", "runtime", "embedded"):
        assert pins(name).items() <= dev.items()


def test_every_dependency_of_the_project_is_pinned() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = {
        "runtime": project["dependencies"],
        "embedded": [*project["dependencies"], *project["optional-dependencies"]["embedded"]],
        "dev": [*project["dependencies"], *project["optional-dependencies"]["dev"]],
    }
    for name, requirements in wanted.items():
        names = {re.split(r"[\[><=~!; ]", requirement)[0].lower() for requirement in requirements}
        assert names <= set(pins(name)), f"run `make lock`; requirements/{name}.txt lacks {names - set(pins(name))}"


def test_bare_make_says_what_there_is_to_do() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("install", "demo", "up", "test", "lint", "types", "contract", "lock", "clean"):
        assert re.search(rf"^  make {target} +\S", shown, re.MULTILINE), target


def test_the_env_file_gets_a_password_for_each_user_and_is_not_overwritten(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, check=True)
    file = tmp_path / ".env"
    passwords = re.findall(r"^\w+_PASSWORD=(.*)$", file.read_text(), re.MULTILINE)
    assert len(set(passwords)) == len(passwords) == 12
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in passwords)
    assert file.stat().st_mode & 0o077 == 0
    before = file.read_text()
    assert subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, check=False).returncode != 0
    assert file.read_text() == before


def test_files_with_secrets_are_never_committed() -> None:
    for name in (".env", "providers.env", "alerts.env", "links.env"):
        checked = subprocess.run(["git", "check-ignore", name], cwd=ROOT, capture_output=True, check=False)
        assert checked.returncode == 0, name


def test_the_licence_is_the_one_that_the_project_names() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
