"""How a release was built: a statement of in-toto with the provenance of SLSA.

Nobody has signed it. Who publishes the release signs its checksums, which include this statement's.
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Mapping
from importlib import metadata

from google.protobuf.json_format import MessageToDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import BuildDefinition, Builder, Provenance, RunDetails
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement

PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "urn:breakwater:make-release:1"
"""The kind of build: `make release` in a checkout of the commit."""


def provenance(subjects: Mapping[str, str], commit: str, pins: Mapping[str, str]) -> str:
    """Returns the statement, as JSON.

    Args:
        subjects: the SHA-256 of each file of the release, by its name.
        commit: the source.
        pins: the SHA-256 of each file of pinned packages, by its path.
    """
    source = ResourceDescriptor(name="source", digest={"gitCommit": commit})
    inputs = [source, *(ResourceDescriptor(name=name, digest={"sha256": digest}) for name, digest in pins.items())]
    definition = BuildDefinition(build_type=BUILD, resolved_dependencies=[each.pb for each in inputs])
    definition.external_parameters.update({"commit": commit})
    tools = {
        "python": platform.python_version(),
        "zlib": zlib.ZLIB_RUNTIME_VERSION,
        "hatchling": metadata.version("hatchling"),
    }
    predicate = Provenance(
        build_definition=definition, run_details=RunDetails(builder=Builder(id=BUILD, version=tools))
    )
    statement = Statement(
        [ResourceDescriptor(name=name, digest={"sha256": digest}).pb for name, digest in subjects.items()],
        PREDICATE,
        MessageToDict(predicate),
    )
    statement.validate()
    return json.dumps(MessageToDict(statement.pb), indent=2, sort_keys=True) + "\n"
