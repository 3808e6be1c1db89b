"""What a release consists of: every pinned package, as CycloneDX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

PROJECT = "breakwater-plane"
_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^ ;\\]+)")


@dataclass(frozen=True, slots=True)
class Pin:
    """A package in a file of requirements, as `make lock` writes it."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of each of its files that may be installed."""
    needed_by: frozenset[str]

    @property
    def reference(self) -> str:
        """Its package URL."""
        return PackageURL("pypi", None, self.name, self.version).to_string()


def pins(requirements: Path) -> Iterator[Pin]:
    """Reads the pins of a file."""
    for block in re.split(r"\n(?=\S)", requirements.read_text("utf-8").strip()):
        if (pinned := _PIN.match(block)) is None:
            continue
        needs = re.findall(r"# via (.+)", block)[0].split(", ")
        needed_by = frozenset(need.split(" ")[0] for need in needs if not need.startswith("-"))
        hashes = tuple(sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", block)))
        yield Pin(pinned["name"], pinned["version"], hashes, needed_by)


def bill_of_materials(requirements: Path, version: str, commit: str, time: int) -> str:
    """Returns the bill of materials of a release: JSON of CycloneDX 1.6.

    Packages that only the local stack, a cloud or a backup needs are optional.

    Args:
        requirements: the folder of the pins.
        version: the release's.
        commit: its source.
        time: the commit's, in seconds since the epoch.
    """
    required = {pin.name for pin in pins(requirements / "runtime.txt")}
    # Some packages have a version for each range of Python's.
    pinned: dict[str, Pin] = {}
    for name in ("embedded", "clouds"):
        pinned |= {pin.reference: pin for pin in pins(requirements / f"{name}.txt") if pin.reference not in pinned}
    project = Component(
        name=PROJECT,
        version=version,
        type=ComponentType.APPLICATION,
        bom_ref=f"pkg:pypi/{PROJECT}@{version}",
        purl=PackageURL("pypi", None, PROJECT, version),
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
    )
    components = {
        reference: Component(
            name=pin.name,
            version=pin.version,
            bom_ref=reference,
            purl=PackageURL.from_string(reference),
            scope=ComponentScope.REQUIRED if pin.name in required else ComponentScope.OPTIONAL,
            external_references=[
                ExternalReference(
                    type=ExternalReferenceType.DISTRIBUTION,
                    url=XsUri(reference),
                    hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in pin.hashes],
                )
            ],
        )
        for reference, pin in pinned.items()
    }
    bill = Bom(components=components.values(), serial_number=uuid5(NAMESPACE_URL, f"git:{commit}"))
    bill.metadata.component = project
    bill.metadata.timestamp = datetime.fromtimestamp(time, UTC)
    for component in (project, *components.values()):
        needs = [components[reference] for reference, pin in pinned.items() if component.name in pin.needed_by]
        bill.register_dependency(component, needs)
    return make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n"
