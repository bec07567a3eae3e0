"""An existing Ray cluster as its controller sees it: where actors are placed, and which there are.

Actors are detached and named `<cluster>/<process>`. They outlive the controller, and its successor finds them by name,
for as long as Ray's head remembers them.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.processes.plan import Placement, ProcessRole, ProcessSpec
from cluster.ray.private_ray import NAMESPACE, RayHome, bundle_of

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
_POOL_LABEL = "pool"
_ROUTER_POOL = "router"
_WORKER_POOLS = frozenset({str(ProcessRole.PREFILL), str(ProcessRole.DECODE)})
_NODE_ID_LABEL = "ray.io/node-id"
_END_TIMEOUT_S = 10.0
_POLL_S = 0.05
_PIN = 0.001
"""Share of the one unit of `node:<ip>` that Ray gives every host."""


def pinned_to(ip: str) -> dict[str, Any]:
    """Return options that keep an actor on a host, even after Ray is restarted there under another id."""
    return {"resources": {f"node:{ip}": _PIN}}


def this_host() -> str:
    """Return the address by which Ray knows this host."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def named_actors(cluster: str) -> frozenset[str]:
    """Return a cluster's processes, including the controller, that Ray runs or will restart."""
    prefix = f"{cluster}/"
    return frozenset(
        each["name"].removeprefix(prefix)
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    )


class ActorsLeft(Exception):
    """Ray was asked to end actors, but still has them."""


def remove_actors(cluster: str) -> frozenset[str]:
    """End all actors of a cluster, its controller first; returns their names once Ray has none of them any more.

    Blocks. Raises RayError or RuntimeError if Ray does not answer, ActorsLeft.
    """
    names = named_actors(cluster)
    if CONTROLLER in names:
        _kill(f"{cluster}/{CONTROLLER}")
    removed = names | remove_workers(cluster)
    _until_gone(cluster, removed)
    return removed


def remove_workers(cluster: str) -> frozenset[str]:
    """End all actors of a cluster but its controller; otherwise as `remove_actors`."""
    names = named_actors(cluster) - {CONTROLLER}
    for name in names:
        _kill(f"{cluster}/{name}")
        _remove_group(f"{cluster}/{name}")
    _request({})
    _until_gone(cluster, names)
    return names


def _until_gone(cluster: str, names: frozenset[str]) -> None:
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while left := named_actors(cluster) & names:
        if time.monotonic() > deadline_s:
            raise ActorsLeft(f"{', '.join(sorted(left))} did not end within {_END_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def _kill(name: str) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


class JoinedRay(RayHome):
    """A joined Ray cluster, used from an actor in it, which stays connected. Event loop only."""

    description = "of the cluster"

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._wanted: dict[str, ProcessSpec] = {}
        """Processes that have not served yet."""
        self._labels: dict[str, dict[str, str]] = {}
        """Labels of the hosts on which workers may run."""

    def open(self) -> None:
        """Check the connection, which an actor has."""
        assert ray.is_initialized(), "the controller is an actor"

    def found(self) -> frozenset[str]:
        """Return the processes that an earlier controller left."""
        return named_actors(self._cluster) - {CONTROLLER}

    def options(self, spec: ProcessSpec) -> dict[str, Any]:
        """Return the placement and lifetime of an actor; asks the autoscaler, if any, for its host."""
        self._wanted[spec.name] = spec
        _request(self._wanted)
        place = self._router_place(spec) if spec.role is ProcessRole.ROUTER else self._worker_place(spec)
        return {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, **place}

    def hosts_of(self, spec: ProcessSpec) -> str:
        """Return which hosts may run a process, by their labels as they were when it was placed."""
        labels = [f"{key}={value}" for key, value in self._labels.get(spec.name, {}).items()]
        return " ".join(["host", *(["with the label"] if labels else []), *labels])

    def free_on(self, spec: ProcessSpec) -> list[Mapping[str, float]]:
        """Return the free resources of each host that may run a process."""
        labels = self._labels.get(spec.name, {})
        free = available_resources_per_node()  # type: ignore[no-untyped-call]
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return [free.get(node["NodeID"], {}) for node in nodes if labels.items() <= node.get("Labels", {}).items()]

    def served(self, name: str) -> None:
        """Withdraw the request for a process: it keeps its host by running there.

        A standing request would keep any suitable host, possibly an empty one.
        """
        if self._wanted.pop(name, None) is not None:
            _request(self._wanted)

    def forget(self, name: str) -> None:
        """Withdraw the request and remove the placement group of a process that is gone."""
        self.served(name)
        self._labels.pop(name, None)
        _remove_group(f"{self._cluster}/{name}")

    def _router_place(self, spec: ProcessSpec) -> dict[str, Any]:
        """Place the first router where `kvrelay up` ran, since clients know that address, and the others elsewhere."""
        if spec.index == 0:
            return pinned_to(this_host())
        if _ROUTER_POOL in _pools():
            return {"label_selector": {_POOL_LABEL: _ROUTER_POOL}, "scheduling_strategy": "SPREAD"}
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        here = ray.get_runtime_context().get_node_id()
        pool = next(node for node in nodes if node["NodeID"] == here).get("Labels", {}).get(_POOL_LABEL)
        if pool is not None and pool not in _WORKER_POOLS:
            # No worker ever runs here, so other hosts exist or will be added.
            other = {_POOL_LABEL: f"!{pool}"}
        elif len(nodes) > 1:
            other = {_NODE_ID_LABEL: f"!{here}"}
        else:
            return pinned_to(this_host())
        return {"label_selector": other, "scheduling_strategy": "SPREAD"}

    def _worker_place(self, spec: ProcessSpec) -> dict[str, Any]:
        selector = self._labels[spec.name] = _selector(spec)
        if spec.num_gpus > 1:
            group = self._group(spec, selector)
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)}
        strategy = "SPREAD" if spec.placement is Placement.SPREAD else "DEFAULT"
        return {"scheduling_strategy": strategy} | ({"label_selector": selector} if selector else {})

    def _group(self, spec: ProcessSpec, selector: dict[str, str]) -> Any:
        """Return the placement group that keeps a worker's GPUs together on one host."""
        name = f"{self._cluster}/{spec.name}"
        try:
            return ray.util.get_placement_group(name)
        except ValueError:
            return placement_group(
                [bundle_of(spec)],
                name=name,
                lifetime="detached",
                bundle_label_selector=[selector] if selector else None,
            )


def _pools() -> set[str]:
    """Return the pools that the labels of hosts name."""
    labels = (node.get("Labels", {}) for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    return {each[_POOL_LABEL] for each in labels if _POOL_LABEL in each}


def _selector(spec: ProcessSpec) -> dict[str, str]:
    """Return the label selector of a worker; empty if no host has a label."""
    return {_POOL_LABEL: str(spec.role)} if _pools() else {}


def _remove_group(name: str) -> None:
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(ray.util.get_placement_group(name))


def _request(wanted: dict[str, ProcessSpec]) -> None:
    """Request hosts for these processes from Ray's autoscaler, if there is one.

    The request stands until the next one; the whole Ray cluster has only one.
    """
    workers = [spec for spec in wanted.values() if spec.role is not ProcessRole.ROUTER and bundle_of(spec)]
    try:
        request_resources(
            bundles=[bundle_of(spec) for spec in workers],
            bundle_label_selectors=[_selector(spec) for spec in workers],
        )
    except (RayError, RuntimeError, ValueError, TypeError, OSError) as error:
        logger.warning("the autoscaler was not asked", extra={"reason": str(error)})
