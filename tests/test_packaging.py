"""What a newcomer's first minutes depend on: pins, make targets, licence."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from breakwater import __version__
from tests.tables import each_row

ROOT = Path(__file__).parent.parent
CLOUDS = ("aws", "azure", "gcp")
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


@each_row("name", ["build", "runtime", "embedded", "dev"])
def test_every_requirement_is_pinned_with_its_hashes(name: str) -> None:
    for requirement in re.split(r"\n(?=\S)", PINNED[name].read_text().strip()):
        assert re.match(r"[\w.-]+==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


def test_pins_are_installed_without_looking_for_newer_versions() -> None:
    # Where a package needs another one with an extra, pip 23 looks for the newest, and refuses it as not pinned.
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "$(PIP)" in line and " -r " in line]
    assert len(installs) == 2
    assert all("--no-deps --require-hashes" in line for line in installs)


def test_a_package_has_one_version_wherever_it_is_pinned() -> None:
    dev = pins("dev")
    for name in ("build", "runtime", "embedded", "clouds"):
        assert pins(name).items() <= dev.items()


def test_every_dependency_of_the_project_is_pinned() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = {
        "runtime": project["dependencies"],
        "embedded": [*project["dependencies"], *project["optional-dependencies"]["embedded"]],
        "clouds": [
            *project["dependencies"],
            *(name for extra in CLOUDS for name in project["optional-dependencies"][extra]),
        ],
        "dev": [*project["dependencies"], *project["optional-dependencies"]["dev"]],
    }
    for name, requirements in wanted.items():
        names = {re.split(r"[\[><=~!; ]", requirement)[0].lower() for requirement in requirements}
        assert names <= set(pins(name)), f"run `make lock`; requirements/{name}.txt lacks {names - set(pins(name))}"


def test_bare_make_says_what_there_is_to_do() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in (
        "install",
        "demo",
        "up",
        "test",
        "sdks",
        "lint",
        "types",
        "contract",
        "dist",
        "release",
        "lock",
        "clean",
    ):
        assert re.search(rf"^  make {target} +\S", shown, re.MULTILINE), target


def test_the_env_file_gets_a_password_for_each_user_and_is_not_overwritten(tmp_path: Path) -> None:
    for name in ("Makefile", ".env.example"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, check=True)
    file = tmp_path / ".env"
    passwords = re.findall(r"^\w+_(?:PASSWORD|KEY)=(.*)$", file.read_text(), re.MULTILINE)
    assert len(set(passwords)) == len(passwords) == 14
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in passwords)
    assert file.stat().st_mode & 0o077 == 0
    before = file.read_text()
    assert subprocess.run(["make", "env"], cwd=tmp_path, capture_output=True, check=False).returncode != 0
    assert file.read_text() == before


def test_files_with_secrets_are_never_committed() -> None:
    for name in (".env", "providers.env", "alerts.env", "links.env", "openid.env"):
        checked = subprocess.run(["git", "check-ignore", name], cwd=ROOT, capture_output=True, check=False)
        assert checked.returncode == 0, name


def test_the_licence_is_the_one_that_the_project_names() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist and the wheel, as `make dist` builds them."""
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    return directory


def test_the_sdist_has_what_is_tracked_and_the_wheel_all_of_the_program(dist: Path) -> None:
    tracked = {str(file.relative_to(ROOT)) for file in tracked_files()}
    [sdist], [wheel] = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed - {"PKG-INFO"} == tracked
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [about] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    # The wheel has one top-level package: `services` is too common a name for another.
    rooms = {name.removeprefix("libs/") for name in tracked if name.startswith("libs/")}
    assert names == rooms | {f"breakwater/{name}" for name in tracked if name.startswith("services/")}
    assert "Provides-Extra: embedded" in about
    assert f"Name: breakwater-plane\nVersion: {__version__}\n" in about


def test_the_wheel_works_in_a_clean_environment(dist: Path, tmp_path: Path) -> None:
    """With the dependencies of this one, which pip would otherwise install for minutes; what is ours is the wheel's."""
    [wheel] = dist.glob("*.whl")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BREAKWATER_")}

    def run(*command: str | Path) -> str:
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "clean" / "bin" / "python"
    run(uv, "venv", "--offline", "--python", sys.executable, tmp_path / "clean")
    run(uv, "pip", "install", "--offline", "--no-deps", "--python", python, wheel)
    [site] = (tmp_path / "clean" / "lib").glob("*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    breakwater = python.with_name("breakwater")
    arguments = ["init", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--no-call", "--json"]
    assert json.loads(run(breakwater, *arguments))["next"][0].endswith("up")
    assert (tmp_path / "breakwater.yaml").exists()
    packages = run(python, "-c", "from breakwater import services; print(*services.__path__, sep='\\n')")
    assert packages.splitlines() == [str(site / "breakwater" / "services")]


def test_an_installation_is_no_larger_than_the_readme_says() -> None:
    (most,) = re.findall(r"([\d,]+) MB of disk", (ROOT / "README.md").read_text())
    size = 0
    for name in pins("embedded"):
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:  # for another system
            continue
        size += sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).exists())
    assert size / 1e6 <= float(most.replace(",", ""))
