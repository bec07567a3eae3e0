"""deploy/kubernetes: fields that Kubernetes, KubeRay and Prometheus Operator know; one set of ports and names."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
import yaml

from cli.main import app
from common.config import ServingConfig, load_config
from tests.cluster.kubernetes_schema import CORE, FILE, POLICY

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


METADATA = an_object("name", name=NAME, labels=TEXTS)
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TEMPLATE = {"$ref": f"#/$defs/{CORE}.PodTemplateSpec"}
# KubeRay refuses labels and resources there: they are fields of the group.
START = TEXTS | {"propertyNames": {"not": {"enum": ["labels", "resources"]}}}
SECRET = an_object("secret", secret=an_object("name key", name=NAME, key=TEXT))
KUBERNETES = {
    "v1 ConfigMap": f"{CORE}.ConfigMap",
    "v1 Service": f"{CORE}.Service",
    "policy/v1 PodDisruptionBudget": f"{POLICY}.PodDisruptionBudget",
}
# The fields of KubeRay 1.7 and Prometheus Operator that the files use, by their API references: no package has the
# definitions themselves. A field that is not here is refused, as the API server does with strict validation.
CUSTOM = {
    "ray.io/v1 RayCluster": an_object(
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
    "monitoring.coreos.com/v1 PodMonitor": an_object(
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
}


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((_FOLDER / file).read_text(encoding="utf-8")))


@cache
def definitions() -> dict[str, Any]:
    """Return Kubernetes' own schema of the kinds that the files use."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["$defs"]
    return found


def check(document: dict[str, Any]) -> None:
    """Fail unless every field of a document is one that its kind has."""
    name = f"{document['apiVersion']} {document['kind']}"
    if name in KUBERNETES:
        schema: dict[str, Any] = {"$ref": f"#/$defs/{KUBERNETES[name]}"}
    else:
        schema = an_object("metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=CUSTOM[name])
    jsonschema_rs.validate(schema | {"$defs": definitions()}, document)


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
        with pytest.raises(jsonschema_rs.ValidationError):
            check(cluster)


def test_fields_that_kubernetes_refuses_are_found() -> None:
    for change in (
        {"containerPort": "http"},
        {"ports": [{"name": "grpc"}]},
        {"livenessProbe": {"tcpSocket": {"port": "gcs"}, "period": 5}},
    ):
        cluster = the("RayCluster")
        container(cluster["spec"]["headGroupSpec"]).update(change)
        with pytest.raises(jsonschema_rs.ValidationError):
            check(cluster)


def test_pods_run_without_root_and_without_any_right() -> None:
    for group in groups().values():
        spec = group["template"]["spec"]
        user = spec["securityContext"]
        assert user["runAsNonRoot"] is True
        assert min(user["runAsUser"], user["runAsGroup"], user["fsGroup"]) > 0
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*spec["initContainers"], *spec["containers"]):
            assert each["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


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
    locked = re.search(r"^ray==(\S+)", (_REPO / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
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


def test_doors_ask_for_a_key_that_only_the_router_gets(config: ServingConfig) -> None:
    assert config.router.auth == "api_key"
    given = {pool: {each["name"] for each in container(group)["env"]} for pool, group in groups().items()}
    assert config.secret_variables <= given["head"]
    assert not config.secret_variables & (given["prefill"] | given["decode"])


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
