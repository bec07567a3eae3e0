"""deploy/kubernetes: fields that KubeRay and Prometheus Operator know, and one set of ports, names and versions."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from cli.main import app
from common.config import ServingConfig, load_config

_REPO = Path(__file__).parents[2]
_FOLDER = _REPO / "deploy" / "kubernetes"

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0}


def an_object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def a_list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


# The fields of Kubernetes, KubeRay 1.7 and Prometheus Operator that the files use, by their API references; a field
# that is not here is refused, as the API server does with strict validation.
METADATA = an_object("name", name=NAME, labels=TEXTS)
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
NOT_ROOT = {"type": "integer", "minimum": 1}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
PROBE = an_object(
    "tcpSocket",
    tcpSocket=an_object("port", port=NAME),
    **dict.fromkeys(("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold"), COUNT),
)
HOOK = an_object("exec", exec=an_object("command", command=a_list(TEXT)))
CONTAINER = an_object(
    "name image",
    name=NAME,
    image=TEXT,
    command=a_list(TEXT),
    env=a_list(an_object("name value", name=TEXT, value={"type": "string"})),
    ports=a_list(an_object("name containerPort", name=NAME | {"maxLength": 15}, containerPort=PORT)),
    lifecycle=an_object(postStart=HOOK, preStop=HOOK),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=an_object(
        requests=QUANTITIES,
        limits=QUANTITIES,
    ),
    securityContext=an_object(
        allowPrivilegeEscalation={"const": False}, capabilities=an_object("drop", drop=a_list(TEXT))
    ),
    volumeMounts=a_list(an_object("name mountPath", name=NAME, mountPath={"type": "string", "pattern": "^/"})),
)
VOLUME = an_object(
    "name",
    name=NAME,
    emptyDir=an_object(medium={"const": "Memory"}, sizeLimit=QUANTITY),
    configMap=an_object("name", name=NAME),
)
POD = an_object(
    "containers securityContext",
    terminationGracePeriodSeconds=COUNT,
    securityContext=an_object(
        "runAsNonRoot runAsUser",
        runAsNonRoot={"const": True},
        runAsUser=NOT_ROOT,
        runAsGroup=NOT_ROOT,
        fsGroup=NOT_ROOT,
        seccompProfile=an_object("type", type={"const": "RuntimeDefault"}),
    ),
    initContainers=a_list(CONTAINER),
    containers=a_list(CONTAINER),
    volumes=a_list(VOLUME),
)
TEMPLATE = an_object("spec", metadata=an_object(labels=TEXTS), spec=POD)
# KubeRay refuses labels and resources there: they are fields of the group.
START = TEXTS | {"propertyNames": {"not": {"enum": ["labels", "resources"]}}}
SECRET = an_object("secret", secret=an_object("name key", name=NAME, key=TEXT))
SCHEMAS = {
    "v1 ConfigMap": an_object("data", data=TEXTS),
    "v1 Service": an_object(
        "spec",
        spec=an_object(
            "selector ports",
            selector=TEXTS,
            ports=a_list(an_object("name port", name=NAME, port=PORT, targetPort=NAME)),
        ),
    ),
    "policy/v1 PodDisruptionBudget": an_object(
        "spec", spec=an_object("selector", maxUnavailable=COUNT, selector=an_object("matchLabels", matchLabels=TEXTS))
    ),
    "ray.io/v1 RayCluster": an_object(
        "spec",
        spec=an_object(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=an_object("mode", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=an_object("template", labels=TEXTS, rayStartParams=START, template=TEMPLATE),
            workerGroupSpecs=a_list(
                an_object(
                    "groupName template",
                    groupName=NAME,
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT),
                    labels=TEXTS,
                    rayStartParams=START,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
    "monitoring.coreos.com/v1 PodMonitor": an_object(
        "spec",
        spec=an_object(
            "selector podMetricsEndpoints",
            jobLabel=TEXT,
            selector=an_object("matchLabels", matchLabels=TEXTS),
            podMetricsEndpoints=a_list(
                an_object(
                    "port",
                    port=NAME,
                    scheme={"enum": ["http", "https"]},
                    tlsConfig=an_object(
                        ca=SECRET, cert=SECRET, keySecret=an_object("name key", name=NAME, key=TEXT), serverName=TEXT
                    ),
                )
            ),
        ),
    ),
}


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((_FOLDER / file).read_text(encoding="utf-8")))


def check(document: dict[str, Any]) -> None:
    """Fail unless every field of a document is one that its kind has."""
    kind = SCHEMAS[f"{document['apiVersion']} {document['kind']}"]
    properties = kind["properties"] | {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA}
    jsonschema.validate(document, kind | {"properties": properties})


def the(kind: str, file: str = "kvrelay.yaml") -> Any:
    (found,) = (document for document in documents(file) if document["kind"] == kind)
    return found


def groups() -> dict[str, Any]:
    """Return the head's group and the workers' by the name of their pool."""
    spec = the("RayCluster")["spec"]
    return {group["labels"]["pool"]: group for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])}


def container(group: Any) -> Any:
    (found,) = group["template"]["spec"]["containers"]
    return found


def ports(group: Any) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(group)["ports"]}


@pytest.fixture
def config(tmp_path: Path) -> ServingConfig:
    path = tmp_path / "serving.yaml"
    path.write_text(the("ConfigMap")["data"]["serving.yaml"], encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize("file", sorted(path.name for path in _FOLDER.glob("*.yaml")))
def test_every_field_is_one_that_its_kind_has(file: str) -> None:
    for document in documents(file):
        check(document)


def test_fields_that_kuberay_refuses_are_found() -> None:
    for group in ("headGroupSpec", "headGroupSpecs"):
        cluster = the("RayCluster")
        cluster["spec"][group] = cluster["spec"].pop("headGroupSpec") | {"rayStartParams": {"labels": "pool=head"}}
        with pytest.raises(jsonschema.ValidationError):
            check(cluster)


def test_rays_autoscaler_reads_the_cluster_as_its_groups_say() -> None:
    kuberay = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    cluster = the("RayCluster") | {"metadata": {"name": "kvrelay", "namespace": "default"}}
    found = kuberay._derive_autoscaling_config_from_ray_cr(cluster)  # noqa: SLF001
    types = found["available_node_types"]
    assert {name: (kind["max_workers"], kind["resources"]["CPU"]) for name, kind in types.items()} == {
        "headgroup": (0, 0),
        "prefill": (1, 2),
        "decode": (2, 2),
    }


def test_every_pool_has_a_group_with_its_label_that_carries_its_workers(config: ServingConfig) -> None:
    for name, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode)):
        group = groups()[name]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == pool.count
        assert int(container(group)["resources"]["limits"]["cpu"]) == pool.num_cpus
        assert ports(group)["metrics"] == pool.port_range.start, "a worker's metrics take the first port"
    assert groups()["head"]["rayStartParams"]["num-cpus"] == "0"
    locked = re.search(r"^ray==(.*)$", (_REPO / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert locked is not None
    assert the("RayCluster")["spec"]["rayVersion"] == locked[1]


def test_doors_of_the_configuration_are_those_of_service_and_monitors(config: ServingConfig) -> None:
    router, open_ports = config.router, ports(groups()["head"])
    assert open_ports | {"gcs": 0} == {
        "gcs": 0,
        "grpc": router.port,
        "https": router.http_port,
        "metrics": router.metrics_port,
    }
    for port in the("Service")["spec"]["ports"]:
        assert port["port"] == open_ports[port["targetPort"]]
    assert config.tls.mode == "auto"
    assert the("Service")["metadata"]["name"] in config.tls.names
    for monitor in documents("monitoring.yaml"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["scheme"] == "https"
        assert all(endpoint["port"] in ports(group) for group in groups().values())
        names = endpoint["tlsConfig"].get("serverName", f"worker.{config.name}.kvrelay.internal")
        assert names == f"worker.{config.name}.kvrelay.internal"


def test_selectors_name_the_cluster_and_pods_give_rules_their_job() -> None:
    for document in (*documents("kvrelay.yaml"), *documents("monitoring.yaml")):
        selector = document.get("spec", {}).get("selector", {})
        for found in (selector.get("matchLabels", selector),) if selector else ():
            assert found["ray.io/cluster"] == the("RayCluster")["metadata"]["name"]
    for group in groups().values():
        assert group["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == "kvrelay"


def test_commands_and_mounts_exist_and_probes_need_no_program(config: ServingConfig) -> None:
    known: Any = typer.main.get_command(app)
    text = (_FOLDER / "kvrelay.yaml").read_text(encoding="utf-8")
    called = re.findall(r"(?:exec|command: \[)\s*kvrelay,? ([a-z-]+)", text)
    assert {"up", "down", "fetch-model"} == set(called)
    assert set(called) <= set(known.commands)
    for group in groups().values():
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for each in (*spec["initContainers"], *spec["containers"]):
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        for probe in ("readinessProbe", "livenessProbe"):
            assert container(group)[probe]["tcpSocket"]["port"] in ports(group)
