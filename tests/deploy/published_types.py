"""The objects of the chart that Kubernetes itself does not know, after the CRDs that their makers publish.

Written by hand, and only the fields that the chart uses or might: from KEDA 2.18 (`keda.sh_scaledobjects.yaml`, and the
fields that its NATS JetStream scaler reads), External Secrets 1.0 (`external-secrets.io_externalsecrets.yaml`), the
Prometheus Operator 0.86 (`monitoring.coreos.com_podmonitors.yaml`) and Gateway API 1.4
(`gateway.networking.k8s.io_httproutes.yaml`). All numbers in a trigger's metadata are texts.
"""

from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
TEXT = {"type": "string", "minLength": 1}
NUMBER = {"type": "string", "pattern": r"^[0-9]+$"}
COUNT = {"type": "integer", "minimum": 0}


def mapping(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def one_of(*texts: str) -> dict[str, Any]:
    return {"enum": list(texts)}


def several(items: Any, at_least: int = 1) -> dict[str, Any]:
    return {"type": "array", "minItems": at_least, "items": items}


NATS_JETSTREAM = mapping(
    *("type", "name", "metadata"),
    type={"const": "nats-jetstream"},
    name={"type": "string", "pattern": r"^[a-zA-Z_]\w*$"},  # a variable of the formula
    metadata=mapping(
        *("natsServerMonitoringEndpoint", "account", "stream", "consumer", "lagThreshold"),
        natsServerMonitoringEndpoint=TEXT,
        account=TEXT,
        stream=TEXT,
        consumer=TEXT,
        lagThreshold=NUMBER,
        activationLagThreshold=NUMBER,
        useHttps=one_of("true", "false"),
    ),
)
CPU = mapping(
    *("type", "metricType", "metadata"),
    type={"const": "cpu"},
    metricType=one_of("Utilization", "AverageValue"),
    metadata=mapping("value", value=NUMBER, containerName=TEXT),
)

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): mapping(
        *("scaleTargetRef", "triggers"),
        scaleTargetRef=mapping("name", name=NAME, kind=TEXT, apiVersion=TEXT, envSourceContainerName=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer", "minimum": 1},
        cooldownPeriod=COUNT,
        advanced=mapping(
            scalingModifiers=mapping(
                *("formula", "target"),  # one is refused without the other
                formula=TEXT,
                target=NUMBER,
                activationTarget=NUMBER,
                metricType=one_of("AverageValue", "Value"),
            ),
        ),
        triggers=several({"oneOf": [NATS_JETSTREAM, CPU]}),
    ),
    ("external-secrets.io/v1", "ExternalSecret"): mapping(
        refreshInterval={"type": "string", "pattern": r"^([0-9]+(s|m|h))+$"},
        secretStoreRef=mapping(name=NAME, kind=one_of("SecretStore", "ClusterSecretStore")),
        target=mapping(
            name=NAME,
            creationPolicy=one_of("Owner", "Orphan", "Merge", "None"),
            deletionPolicy=one_of("Delete", "Merge", "Retain"),
        ),
        dataFrom=several(mapping("extract", extract=mapping("key", key=TEXT, property=TEXT, version=TEXT))),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): mapping(
        *("selector", "podMetricsEndpoints"),
        selector=mapping("matchLabels", matchLabels={"type": "object", "additionalProperties": TEXT}),
        podMetricsEndpoints=several(
            mapping(
                port=TEXT,
                interval={"type": "string", "pattern": r"^([0-9]+(s|m|h))+$"},
                relabelings=several(mapping(sourceLabels=several(TEXT), targetLabel=TEXT)),
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): mapping(
        parentRefs=several(
            mapping(
                "name",
                name=TEXT,
                namespace=NAME,
                sectionName=NAME,
                port={"type": "integer", "minimum": 1, "maximum": 65_535},
            )
        ),
        hostnames=several(
            {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
        ),
        rules=several(
            mapping(
                matches=several(
                    mapping(
                        path=mapping(type=one_of("Exact", "PathPrefix", "RegularExpression"), value={"pattern": "^/"})
                    )
                ),
                backendRefs=several(mapping("name", name=NAME, port={"type": "integer", "minimum": 1})),
            )
        ),
    ),
}
"""The schema of `spec`, by apiVersion and kind."""
