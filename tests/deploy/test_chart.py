"""The Helm chart: what it renders is what compose.yaml runs, with no more rights than that needs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from breakwater import __version__
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.clickhouse.client import connect as clickhouse
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import consumers
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.server_urls import server_urls
from breakwater.services.__main__ import NAMES
from breakwater.services.request.openapi import document
from tests.compose import GIVEN, OURS, ROOT, SERVICES, size
from tests.deploy.charts import (
    CHART,
    CONFIG,
    NEWEST,
    SCHEMA,
    SHAPES,
    Objects,
    chart,
    check,
    containers,
    environment,
    helm,
    of_kind,
    pods,
    render,
    shape_of,
    values_of,
)
from tests.tables import each_row
from tests.test_compose_up import DOCKERFILE, IMAGE_ENVIRONMENT, IMAGE_HEALTH

UNITS = {"Mi": "m", "Gi": "g"}
LABEL = "app.kubernetes.io/component"
OLDEST = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"].removeprefix(">=").removesuffix(".0-0")


def with_servers_of_compose(**values: Any) -> dict[str, Any]:
    return {
        "config": CONFIG,
        "nats": {"url": "nats://nats:4222", "replicas": 3},
        "redis": {"url": "redis://redis:6379/0"},
        "clickhouse": {"url": "http://clickhouse:8123/breakwater"},
        **values,
    }


@each_row("shape", SHAPES)
def test_helm_finds_nothing_to_mend(shape: str) -> None:
    report = helm().lint(CHART, values_of(shape), strict=True)
    assert [message for message in report["messages"] if message["error"] != "icon is recommended"] == []
    assert report["errors"] == []


@each_row("shape", SHAPES)
def test_kubernetes_knows_every_object_and_field(shape: str) -> None:
    objects = shape_of(shape)
    for found in objects.values():
        check(found, OLDEST)
        check(found, NEWEST)
    assert set(of_kind(objects, "Deployment")) == set(of_kind(objects, "PodDisruptionBudget")) == set(NAMES)


def test_the_chart_has_the_version_of_the_package(tmp_path: Path) -> None:
    metadata = chart().metadata
    assert metadata["version"] == metadata["appVersion"] == __version__
    packaged = helm().package(CHART, destination=tmp_path)
    assert Path(packaged).name == f"breakwater-{__version__}.tgz"
    images = {one["image"] for pod in pods(render({"config": CONFIG})).values() for one in containers(pod)}
    assert images == {OURS["worker"]["image"]}
    digest = "sha256:" + "a" * 64
    image = {"repository": "registry.example.com/breakwater", "digest": digest}
    [pinned] = {
        one["image"] for pod in pods(render({"config": CONFIG, "image": image})).values() for one in containers(pod)
    }
    assert pinned == f"registry.example.com/breakwater@{digest}"


def test_each_container_is_the_one_of_compose() -> None:
    rendered = pods(render(with_servers_of_compose()))
    assert set(rendered) == {*NAMES, "setup"}
    # Different here: where API keys and the console's way to `request` are, and what a container can't hear of.
    ours = {"BREAKWATER_API_KEYS_FILE", "BREAKWATER_REQUEST_URL", "BREAKWATER_FOLLOW_CONFIG", "BREAKWATER_LOG_LEVEL"}
    for name, pod in rendered.items():
        [container] = pod["spec"]["containers"]
        assert container["command"] == OURS[name]["command"]
        variables = {key: value for key, value in environment(container).items() if not key.startswith("BW_")}
        expected = {key: str(value) for key, value in OURS[name].get("environment", {}).items()}
        assert {key: value for key, value in variables.items() if key not in ours} == {
            key: value for key, value in expected.items() if key not in ours
        }, name
        assert set(expected) <= set(variables)
        files = [file["path"].removesuffix(".env") for file in OURS[name].get("env_file", ())]
        assert [source["secretRef"]["name"] for source in container.get("envFrom", ())] == [
            f"breakwater-{file}" for file in files
        ]
        if name in NAMES:
            limit = container["resources"]["limits"]["memory"]
            assert size(limit[:-2] + UNITS[limit[-2:]]) == size(OURS[name]["mem_limit"])
            ports = {port["containerPort"] for port in container["ports"]}
            published = {int(port.rpartition(":")[2]) for port in OURS[name].get("ports", ())}
            assert ports == {int(variables["BREAKWATER_METRICS_PORT"]), *published}


def test_the_job_checks_all_secrets_and_then_prepares_the_servers() -> None:
    for upgrade in (False, True):
        objects = render(with_servers_of_compose(), upgrade=upgrade)
        spec = pods(objects)["setup"]["spec"]
        [checked] = spec["initContainers"]
        assert checked["command"] == OURS["check"]["command"]
        assert environment(checked) == {}
        named = [source["secretRef"]["name"].removeprefix("breakwater-") for source in checked["envFrom"]]
        assert [f"{name}.env" for name in named] == [file["path"] for file in OURS["check"]["env_file"]]
        [container] = spec["containers"]
        assert container["command"] == OURS["setup"]["command"]
        # Nothing of the release exists before the hooks: what the Job needs are earlier hooks.
        before = {key for key, found in objects.items() if found["metadata"].get("annotations", {}).get("helm.sh/hook")}
        [mounted] = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
        assert "serviceAccountName" not in spec
        assert before == {("Job", "breakwater-setup"), ("ConfigMap", mounted), ("NetworkPolicy", "breakwater-setup")}
        weights = {key: int(objects[key]["metadata"]["annotations"]["helm.sh/hook-weight"]) for key in before}
        assert max(weights, key=lambda key: weights[key]) == ("Job", "breakwater-setup")


def test_every_variable_is_one_that_services_read() -> None:
    settings_ = {f"BREAKWATER_{name.upper()}" for name in Settings.model_fields}
    settings_ |= {f"BREAKWATER_TLS_{name}" for name in ("CA", "CERT", "KEY")}
    tls = {"secret": "servers", "cert": "tls.crt", "key": "tls.key"}
    for pod in pods(render({"config": CONFIG, "tls": tls})).values():
        for container in containers(pod):
            variables = {variable["name"] for variable in container.get("env", ())}
            assert variables <= settings_ | set(GIVEN)
            if variables:
                assert {name for name in variables if "_TLS_" in name} == {
                    name for name in settings_ if "_TLS_" in name
                }
                assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/etc/breakwater-tls"}


@each_row("shape", SHAPES)
def test_secrets_are_named_and_never_shown(shape: str) -> None:
    objects = shape_of(shape)
    assert not of_kind(objects, "Secret")
    assert {tuple(found["data"].items()) for found in objects.values() if found["kind"] == "ConfigMap"} == {
        (("breakwater.yaml", CONFIG),)
    }
    for pod in pods(objects).values():
        for container in containers(pod):
            assert "$(" not in json.dumps([container["command"], container.get("args")])
            for variable in container.get("env", ()):
                if "_PASSWORD" in variable["name"] or variable["name"].endswith("_KEY"):
                    assert set(variable) == {"name", "valueFrom"}
                address = urlsplit(variable.get("value", ""))
                assert address.password is None or re.fullmatch(r"\$\(BW_\w+_PASSWORD\)", address.password)
                assert not address.query or address.query == "sentinel_password=$(BW_SENTINEL_PASSWORD)"
            # A password is one of this service: of another's user, it would be worth a connection.
            own = {key for key in environment(container) if key.startswith("BW_NATS_")}
            assert len(own) <= 1


def test_secrets_of_a_store_have_the_names_that_pods_use() -> None:
    objects = shape_of("external")
    wanted = {name for (kind, name) in objects if kind == "ExternalSecret"}
    used = {
        source["secretRef"]["name"]
        for pod in pods(objects).values()
        for container in containers(pod)
        for source in container.get("envFrom", ())
    }
    assert wanted <= used | {"breakwater-passwords", "breakwater-api-keys"}
    # Each upgrade makes these hooks anew; the Secret must outlive that.
    assert {objects["ExternalSecret", name]["spec"]["target"]["creationPolicy"] for name in wanted} == {"Orphan"}


@each_row("shape", SHAPES)
def test_pods_have_no_more_rights_than_they_need(shape: str) -> None:
    objects = shape_of(shape)
    [user] = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    written = {str(Path(IMAGE_ENVIRONMENT[f"BREAKWATER_{name}"]).parent) for name in ("LAST_GOOD_CONFIG", "ALIVE_FILE")}
    for name, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(user),
            "fsGroup": int(user),
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert spec["automountServiceAccountToken"] is False
        # Else, Kubernetes sets BREAKWATER_CONSOLE_PORT=tcp://10.0.0.1:8081 for a Service `breakwater-console`.
        assert spec["enableServiceLinks"] is False
        assert {kind for volume in spec["volumes"] for kind in volume} <= {"name", "configMap", "emptyDir", "secret"}
        kinds = {volume["name"]: volume for volume in spec["volumes"]}
        for container in containers(pod):
            assert container["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == written
            assert all("emptyDir" in kinds[mounts[path]["name"]] for path in written)
            # A file of its own (subPath) would stay as it is when the ConfigMap changes.
            assert not [mount for mount in mounts.values() if "subPath" in mount]
            assert str(Path(IMAGE_ENVIRONMENT["BREAKWATER_CONFIG"]).parent) in mounts
        if name in NAMES:
            assert objects["ServiceAccount", spec["serviceAccountName"]]["automountServiceAccountToken"] is False
            zones = [one["topologyKey"] for one in spec["topologySpreadConstraints"]]
            assert zones == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
            chosen = objects["Deployment", f"breakwater-{name}"]["spec"]["selector"]["matchLabels"]
            assert chosen.items() <= pod["metadata"]["labels"].items()


def test_probes_ask_what_services_answer_and_a_stop_has_time() -> None:
    drain_s = 90
    config = CONFIG + f"\nlimits: {{drain_s: {drain_s}}}\n"
    paths = set(document()["paths"])
    for name, pod in pods(render({"config": config})).items():
        if name == "setup":
            continue
        [container] = pod["spec"]["containers"]
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        if "exec" in probes["liveness"]:
            assert probes["readiness"]["exec"]["command"] == ["sh", "-c", IMAGE_HEALTH]
            assert probes["startup"]["exec"]["command"] == ["sh", "-c", IMAGE_HEALTH]
            patient = IMAGE_HEALTH.replace("-20 seconds", "-300 seconds")
            assert probes["liveness"]["exec"]["command"] == ["sh", "-c", patient]
        else:
            assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
            assert {probe["httpGet"]["path"] for probe in probes.values()} <= paths
            assert (probes["readiness"]["httpGet"]["path"] == "/readyz") == (name == "request")
        # Kubernetes counts from the hook on, which waits for the Service to forget the pod.
        before_stop_s = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1])
        assert before_stop_s == (5 if "http" in {port["name"] for port in container["ports"]} else 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] == drain_s + 20 + before_stop_s


def test_a_node_is_drained_also_where_a_service_has_one_pod() -> None:
    for budget in of_kind(shape_of("small"), "PodDisruptionBudget").values():
        assert "minAvailable" not in budget["spec"]
        assert budget["spec"]["maxUnavailable"] == 1


PLACED = {
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "priorityClassName": "plane",
}


def test_what_a_cluster_wants_of_pods_reaches_them() -> None:
    secret = {"secretKeyRef": {"name": "collector", "key": "token"}}
    worker = {
        "env": {"COLLECTOR_TOKEN": secret, "OTEL_SERVICE_NAME": "workers"},
        "volumes": [{"name": "keys", "secret": {"secretName": "provider-keys"}}],
        "volumeMounts": [{"name": "keys", "mountPath": "/etc/keys", "readOnly": True}],
    }
    values = {
        **PLACED,
        "config": CONFIG,
        "runAsUser": None,
        "image": {"repository": "plane", "pullSecrets": ["registry"]},
        "serviceAccount": {"name": "0"},
        "services": {"worker": worker},
        "setup": {name: worker[name] for name in ("volumes", "volumeMounts")},
        "networkPolicy": {"dnsPorts": [5353], "internet": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    }
    objects = render(values)
    for rendered in objects.values():
        check(rendered, NEWEST)
    assert not of_kind(objects, "ServiceAccount")
    for name, pod in pods(objects).items():
        spec = pod["spec"]
        assert {key: spec[key] for key in PLACED} == PLACED
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert "runAsUser" not in spec["securityContext"], "OpenShift refuses users that it has not chosen"
        assert spec.get("serviceAccountName") == (None if name == "setup" else "0")
        egress = of_kind(objects, "NetworkPolicy")[name]["spec"]["egress"]
        assert egress[0]["ports"] == [{"port": 5353, "protocol": "UDP"}, {"port": 5353, "protocol": "TCP"}]
        to_internet = [rule["to"] for rule in egress if rule["ports"] == [{"port": 443, "protocol": "TCP"}]]
        called = {"worker", "alerter", "request"}
        assert to_internet == ([[{"ipBlock": {"cidr": "10.0.0.0/8"}}]] if name in called else [])
    spec = pods(objects)["worker"]["spec"]
    [container] = spec["containers"]
    assert [one for one in container["env"] if one["name"] in worker["env"]] == [
        {"name": "COLLECTOR_TOKEN", "valueFrom": secret},
        {"name": "OTEL_SERVICE_NAME", "value": "workers"},
    ]
    for name in ("worker", "setup"):  # which checks that the files of the config can be read
        assert pods(objects)[name]["spec"]["volumes"][-1:] == worker["volumes"]
        for container in containers(pods(objects)[name]):
            assert container["volumeMounts"][-1:] == worker["volumeMounts"]


def test_a_large_user_id_is_written_as_a_whole_number() -> None:
    for pod in pods(render({"config": CONFIG, "runAsUser": 1_000_680_000})).values():
        context = pod["spec"]["securityContext"]
        assert repr([context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")]) == repr([1_000_680_000] * 3)


def test_prometheus_finds_all_pods_and_names_services_as_the_rules_do() -> None:
    [monitor] = of_kind(shape_of("three-nodes"), "PodMonitor").values()
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for name, pod in pods(shape_of("three-nodes")).items():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        named = {port["name"] for port in pod["spec"]["containers"][0].get("ports", ())}
        assert (endpoint["port"] in named) == (name in NAMES)
    label = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", LABEL)
    assert endpoint["relabelings"] == [{"sourceLabels": [label], "targetLabel": "service"}]


def test_sentinels_are_asked_with_their_user_and_a_password_of_the_secret() -> None:
    sentinels = {"url": "redis+sentinel://s1,s2/mymaster", "sentinel": {"user": "watch", "password": True}}
    for redis, query in (
        (sentinels, "sentinel_username=watch&sentinel_password=of-sentinels"),
        ({**sentinels, "url": "redis://valkey:6379/0"}, ""),
    ):
        worker = pods(render({"config": CONFIG, "redis": redis}))["worker"]["spec"]["containers"][0]
        assert urlsplit(environment(worker)["BREAKWATER_REDIS_URL"]).query == query
        assert ("BW_SENTINEL_PASSWORD" in environment(worker)) == bool(query)


def ports_to_servers(container: dict[str, Any]) -> set[int]:
    """The ports of the servers whose addresses a container has; behind Sentinels, Redis has its usual one."""
    defaults = {"tls": 4222, "http": 8123, "https": 8443, "rediss+sentinel": 26379}
    ports: set[int] = set()
    for name, value in environment(container).items():
        if name.endswith("_URL") and "_REQUEST_" not in name:
            address = urlsplit(value)
            for host in address.netloc.rpartition("@")[2].split(","):
                ports.add(int(host.partition(":")[2] or defaults[address.scheme]))
            ports |= {6379} if "sentinel" in address.scheme else set()
    return ports


@each_row("shape", SHAPES)
def test_a_pod_reaches_its_servers_and_no_others(shape: str) -> None:
    objects = shape_of(shape)
    policies = of_kind(objects, "NetworkPolicy")
    rendered = pods(objects)
    assert set(policies) == set(rendered)
    internet = {"worker", "alerter", "request"}
    for name, policy in policies.items():
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert spec["podSelector"]["matchLabels"].items() <= rendered[name]["metadata"]["labels"].items()
        [container] = rendered[name]["spec"]["containers"]
        open_ports = {(port["port"], port["protocol"]) for rule in spec["egress"] for port in rule["ports"]}
        expected = {(53, "UDP"), (53, "TCP")} | {(port, "TCP") for port in ports_to_servers(container)}
        expected |= {(443, "TCP")} if name in internet else set()
        expected |= {("http", "TCP")} if name == "console" else set()
        expected |= {(4318, "TCP")} if (name, shape) == ("worker", "external") else set()
        assert open_ports == expected, name
        names = {port["name"] for port in container.get("ports", ())}
        heard = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        assert heard == names - (set() if shape == "three-nodes" else {"metrics"})


@each_row("shape", SHAPES)
def test_services_take_the_addresses_of_the_servers(shape: str) -> None:
    for pod in pods(shape_of(shape)).values():
        variables = environment(pod["spec"]["containers"][0])
        for name, takes in (("NATS", server_urls), ("REDIS", Redis), ("CLICKHOUSE", clickhouse)):
            if url := variables.get(f"BREAKWATER_{name}_URL"):
                takes(url)


def test_request_is_reached_by_the_named_clients_and_the_console() -> None:
    policies = of_kind(shape_of("three-nodes"), "NetworkPolicy")
    [rule] = [rule for rule in policies["request"]["spec"]["ingress"] if rule["ports"][0]["port"] == "http"]
    clients = values_of("three-nodes")["networkPolicy"]["clients"]
    assert rule["from"][:-1] == clients
    assert rule["from"][-1]["podSelector"]["matchLabels"][LABEL] == "console"
    [rule] = [rule for rule in policies["console"]["spec"]["ingress"] if rule["ports"][0]["port"] == "http"]
    assert rule["from"] == clients
    assert not of_kind(render({"config": CONFIG, "networkPolicy": {"enabled": False}}), "NetworkPolicy")


AGENTS = "providers: {p: {base_url: http://127.0.0.1:1/v1}}\n" + (
    "defaults: {provider: p, model: m, concurrency: 700}\n"
    "agents: {plain: {}, 'dotted.name:v~2/ü': {concurrency: 40}, _A-1: {concurrency: 9}}\n"
)


def test_workers_are_scaled_by_the_consumer_of_each_agent() -> None:
    scaling = {"enabled": True, "jobsPerWorker": 300, "maxReplicas": 7}
    objects = render({"config": AGENTS, "autoscaling": scaling})
    check(objects["ScaledObject", "breakwater-worker"], NEWEST)
    spec = objects["ScaledObject", "breakwater-worker"]["spec"]
    deployment = objects["Deployment", spec["scaleTargetRef"]["name"]]
    assert "replicas" not in deployment["spec"]
    config = parse_config(AGENTS)
    ours = {
        one.durable_name: one.max_ack_pending for stream, one in consumers(bus_plan(config)) if stream is Stream.JOBS
    }
    triggers = {one["metadata"]["consumer"]: one for one in spec["triggers"] if one["type"] == "nats-jetstream"}
    assert set(triggers) == set(ours)
    assert {one["metadata"]["stream"] for one in triggers.values()} == {Stream.JOBS}
    # From KEDA's own namespace.
    [server] = {one["metadata"]["natsServerMonitoringEndpoint"] for one in triggers.values()}
    assert server == "nats-headless.llm.svc.cluster.local:8222"
    elsewhere = {**scaling, "natsMonitoring": "nats.messaging.svc:8222"}
    [scaled] = of_kind(render({"config": AGENTS, "autoscaling": elsewhere}), "ScaledObject").values()
    assert scaled["spec"]["triggers"][0]["metadata"]["natsServerMonitoringEndpoint"] == "nats.messaging.svc:8222"
    [account] = {one["metadata"]["account"] for one in triggers.values()}
    users = (ROOT / "deploy/nats/users.conf").read_text()
    assert f'"{account}": {{\n    "jetstream": "enabled",\n    "users": [\n      {{\n        "user": "worker"' in users
    # The formula is also one of Python's. What waits beyond an agent's concurrency can't run, however many workers.
    lags = {trigger["name"]: 10_000 for trigger in triggers.values()}
    formula = spec["advanced"]["scalingModifiers"]["formula"]
    assert eval(formula, {"min": min}, lags) == sum(ours.values()) == 749
    assert eval(formula, {"min": min}, dict.fromkeys(lags, 5)) == 15
    assert spec["advanced"]["scalingModifiers"]["target"] == "300"


def test_what_is_reached_from_outside_leads_to_a_service_and_its_port() -> None:
    hosts = {"console": "console.example.com", "request": "api.example.com"}
    ways = {"ingress": {"enabled": True}, "gateway": {"parentRefs": [{"name": "public"}]}}
    objects = render({"config": CONFIG, "hosts": hosts, **ways})
    ingresses, routes = of_kind(objects, "Ingress"), of_kind(objects, "HTTPRoute")
    assert set(ingresses) == set(routes) == set(hosts)
    for name, host in hosts.items():
        service = objects["Service", f"breakwater-{name}"]
        [port] = service["spec"]["ports"]
        pod = pods(objects)[name]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert port["targetPort"] in {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
        [rule] = ingresses[name]["spec"]["rules"]
        assert rule["host"] == host
        [path] = rule["http"]["paths"]
        backend = {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
        assert path["backend"]["service"] == backend
        [route] = routes[name]["spec"]["rules"]
        assert routes[name]["spec"]["hostnames"] == [host]
        assert route["backendRefs"] == [{"name": service["metadata"]["name"], "port": port["port"]}]
    reached = environment(pods(objects)["console"]["spec"]["containers"][0])["BREAKWATER_REQUEST_URL"]
    assert urlsplit(reached).hostname == "breakwater-request"
    assert not of_kind(render({"config": CONFIG, "hosts": hosts}), "Ingress")


def test_the_config_reaches_the_plane_as_it_is() -> None:
    config = CONFIG + "\n# {{ .Values.secret }} $(HOME) \t 'é'\n"
    maps = [found["data"] for found in render({"config": config}).values() if found["kind"] == "ConfigMap"]
    assert maps == [{"breakwater.yaml": config}] * 2


def test_notes_say_what_to_do_in_three_lines() -> None:
    [notes] = [
        text for file, text in chart().render(values_of("small"), name="b").items() if file.endswith("NOTES.txt")
    ]
    assert len(notes.strip().splitlines()) == 3


def properties(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and the schema of every value that the chart names."""
    for name, found in schema["properties"].items():
        resolved = found
        if "$ref" in found:
            resolved = {**SCHEMA["definitions"][found["$ref"].rpartition("/")[2]], **found}
        yield f"{place}{name}", resolved
        if "properties" in resolved:
            yield from properties(resolved, f"{place}{name}.")


VALUES = dict(properties(SCHEMA))


def at(values: Any, place: str) -> Any:
    for name in place.split("."):
        values = values[name]
    return values


def nested(place: str, value: Any) -> dict[str, Any]:
    for name in reversed(place.split(".")):
        value = {name: value}
    return value


def test_every_value_has_a_description_and_a_default() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for place, schema in VALUES.items():
        assert schema.get("description"), place
        assert schema["type"] != "object" or schema.get("additionalProperties") is not True
        if (
            place != "global"
            and not re.search(r"resources\..+\.(cpu|memory)$", place)
            and place != "setup.resources.limits"
        ):
            at(defaults, place)


def test_a_wrong_value_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    wrong: dict[str, Any] = {
        "config": "",
        "image.tag": "latest",
        "image.digest": "sha256:12",
        "nats.url": "nats://worker:hunter2@nats:4222",
        "redis.url": "redis://:hunter2@valkey:6379/0",
        "clickhouse.url": "http://clickhouse:8123",
        "nats.replicas": 0,
        "services.worker.replicas": "two",
        "services.worker.env.OPENAI_API_KEY": "sk-1",
        "services.worker.volumes": [{"secret": {}}],
        "runAsUser": 0,
        "services.worker.env.BREAKWATER_NATS_URL": "nats://worker:hunter2@nats:4222",
        "services.workers": {},
        "networkPolicy.clients": [{"namespaceSelectors": {}}],
        "podLabels": {"app.kubernetes.io/name": "podLabels"},
        "spread": "Never",
        "hosts.console": "https://breakwater.example.com",
        **{f"{place}.unheard_of": 1 for place, schema in VALUES.items() if schema.get("additionalProperties") is False},
    }
    for place, value in wrong.items():
        with subtests.test(place):
            with pytest.raises(helm().HelmValuesError) as refused:
                chart().validate_schema({"config": CONFIG} | nested(place, value))
            assert place.rpartition(".")[2] in str(refused.value)
    for values, why in (
        ({"config": "a: [b"}, "config: is not YAML"),
        ({"config": CONFIG, "autoscaling": {"enabled": True, "maxReplicas": 1}}, "autoscaling.maxReplicas"),
    ):
        with subtests.test(why), pytest.raises(helm().HelmRenderError, match=why):
            render(values)


def any_value(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows, of the parts of JSON Schema that this one uses."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == ["integer", "null"]:
        return st.none() | any_value({**schema, "type": "integer"})
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "array":
        return st.lists(
            any_value(schema["items"]), min_size=schema.get("minItems", 0), max_size=2, unique_by=json.dumps
        )
    if kind == "object":
        optional = {name: any_value(one) for name, one in schema.get("properties", {}).items() if name != "config"}
        required = {name: optional.pop(name) for name in schema.get("required", ()) if name in optional}
        if "properties" not in schema and schema.get("additionalProperties") is not None:
            return st.dictionaries(
                st.from_regex(r"\A[a-zA-Z][a-z0-9]{0,9}\Z"), st.text("aZ0 :{'\"#", max_size=5), max_size=2
            )
        return st.fixed_dictionaries(required, optional=optional)
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True, alphabet=PRINTED).filter(lambda text: text != "latest")
    return st.text(PRINTED, max_size=9)


PRINTED = st.characters(min_codepoint=32, max_codepoint=126)
ANY_PEER = {"podSelector": {"matchLabels": {"a": "b"}}}
# As Kubernetes has them: their shapes are not the chart's.
AS_THEY_ARE: dict[str, Any] = {
    **{name: value for name, value in PLACED.items() if name != "priorityClassName"},
    "networkPolicy": {"clients": [ANY_PEER], "nats": [ANY_PEER]},
}


# Without shrinking, which takes minutes: the values are printed, and few.
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_the_schema_allows_is_rendered_to_valid_objects(data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(set(SCHEMA["properties"]) - {"config", "global"})), min_size=3))
    values = {"config": CONFIG} | {
        name: AS_THEY_ARE.get(name) or data.draw(any_value(SCHEMA["properties"][name]), name) for name in sorted(names)
    }
    scaling = values.get("autoscaling", {})
    if "minReplicas" in scaling or "maxReplicas" in scaling:
        scaling["minReplicas"], scaling["maxReplicas"] = 2, 9
    for service in (*values.get("services", {}).values(), values.get("setup", {})):
        for as_it_is in ("egress", "volumes", "volumeMounts"):
            service.pop(as_it_is, None)
    objects: Objects = render(values)
    for found in objects.values():
        check(found, NEWEST)
    assert set(pods(objects)) == {*NAMES, "setup"}


def test_the_charts_of_the_servers_get_what_compose_runs() -> None:
    nats = yaml.safe_load((CHART.parent / "servers/nats.yaml").read_text())
    server = (ROOT / "deploy/nats/server.conf").read_text()
    assert f"sync_interval: {nats['config']['jetstream']['merge']['sync_interval']}" in server
    assert f"max_payload: {nats['config']['merge']['max_payload'].strip('<> ')}" in server
    assert f"nats:{nats['container']['image']['tag']}" == SERVICES["nats-1"]["image"]
    variables = nats["container"]["env"]
    assert set(re.findall(r"\$(BW_\w+)", (ROOT / "deploy/nats/users.conf").read_text())) <= set(variables)
    for name in variables:
        if name.startswith("BW_NATS_"):
            quoted = re.fullmatch(r"'\$\((\w+)\)'", variables[name])
            assert quoted is not None
            assert quoted[1] < name  # the chart sorts them, and Kubernetes knows those before
            assert variables[quoted[1]]["valueFrom"]["secretKeyRef"]["key"] == name
    valkey = yaml.safe_load((CHART.parent / "servers/valkey.yaml").read_text())
    assert f"valkey/valkey:{valkey['image']['tag']}" == SERVICES["redis"]["image"]
    script = SERVICES["redis"]["command"][-1]
    assert all(line in script for line in valkey["valkeyConfig"].splitlines())
    assert valkey["auth"]["aclUsers"]["default"]["passwordKey"] in GIVEN
