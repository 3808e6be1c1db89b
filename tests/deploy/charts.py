"""The Helm chart, rendered by Helm itself, and its objects checked as Kubernetes would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

from tests.compose import GIVEN, ROOT
from tests.deploy.published_types import SPECS

if TYPE_CHECKING:
    import helm_python

CHART = ROOT / "deploy/helm/breakwater"
CONFIG = (ROOT / "examples/breakwater.yaml").read_text()
SHAPES = ("small", "three-nodes", "external")
NEWEST = kubernetes_validate.latest_version()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

# It reads a file of 2 MB for each object.
utils.schema_contents = lru_cache(utils.schema_contents)

Objects = dict[tuple[str, str], dict[str, Any]]
"""Rendered objects by kind and name."""


def helm() -> Any:
    """Helm's package. It starts threads that a fork lacks, so it is imported after the tests have been collected."""
    return import_module("helm_python")


@cache
def chart() -> helm_python.Chart:
    return helm().Chart.load(CHART)


def values_of(shape: str) -> dict[str, Any]:
    return {**yaml.safe_load((CHART / f"examples/{shape}.yaml").read_text()), "config": CONFIG}


def render(values: dict[str, Any], *, upgrade: bool = False) -> Objects:
    files = chart().render(values, name="breakwater", namespace="llm", revision=2 if upgrade else 1, is_upgrade=upgrade)
    objects: Objects = {}
    for file, text in files.items():
        if file.endswith(".txt"):
            continue
        for found in filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader)):
            key = (found["kind"], found["metadata"]["name"])
            assert key not in objects, f"{key} twice"
            objects[key] = found
    return objects


@cache
def shape_of(shape: str) -> Objects:
    """The objects of one of the example files; not to be changed."""
    return render(values_of(shape))


def check(found: dict[str, Any], release: str) -> None:
    """Fails if an object has a field that its kind does not have, or a wrong value."""
    spec = SPECS.get((found["apiVersion"], found["kind"]))
    if spec is None:
        kubernetes_validate.validate(found, release, strict=True)
    else:
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(found["spec"], spec)


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind by the component that they are of."""
    return {
        found["metadata"]["labels"]["app.kubernetes.io/component"]: found
        for (found_kind, _), found in objects.items()
        if found_kind == kind
    }


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """The templates of pods by component: the seven services, and `setup`."""
    return {
        component: found["spec"]["template"]
        for kind in ("Deployment", "Job")
        for component, found in of_kind(objects, kind).items()
    }


def containers(template: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """The variables as Kubernetes sets them: those of Secrets, and `$(NAME)` for one that stands before."""
    variables: dict[str, str] = {}
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "breakwater-passwords"
            variables[variable["name"]] = {**GIVEN, "BW_SENTINEL_PASSWORD": "of-sentinels"}[reference["key"]]
        else:
            variables[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], variable["value"])
    return variables
