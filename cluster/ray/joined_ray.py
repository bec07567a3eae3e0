"""A Ray cluster that is there already, as the controller in it sees it: where actors go, and which there are.

Actors are detached and named `<cluster>/<process>`. Ray knows them as long as its own head does, so they outlive the
controller, and whoever comes after it finds them by name.
"""

import contextlib
import logging
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.processes.plan import Placement, ProcessRole, ProcessSpec
from cluster.ray.private_ray import NAMESPACE

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
_POOL_LABEL = "pool"
_ROUTER_POOL = "router"
_WORKER_POOLS = frozenset({str(ProcessRole.PREFILL), str(ProcessRole.DECODE)})
_NODE_ID_LABEL = "ray.io/node-id"
_PIN = 0.001
"""Of the one unit of `node:<ip>` that Ray gives every host."""


def pinned_to(ip: str) -> dict[str, Any]:
    """Return options that keep an actor on a host, also when Ray was started anew there, under another id."""
    return {"resources": {f"node:{ip}": _PIN}}


def this_host() -> str:
    """Return the address by which Ray knows this host."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def named_actors(cluster: str) -> frozenset[str]:
    """Return a cluster's processes, the controller among them, that Ray runs or will run again."""
    prefix = f"{cluster}/"
    return frozenset(
        each["name"].removeprefix(prefix)
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)
    )


def remove_actors(cluster: str) -> frozenset[str]:
    """End everything of a cluster at once, its controller first; returns what there was."""
    names = named_actors(cluster)
    if CONTROLLER in names:
        _kill(f"{cluster}/{CONTROLLER}")
    return names | remove_workers(cluster)


def remove_workers(cluster: str) -> frozenset[str]:
    """End every process of a cluster but its controller, at once; returns what there was."""
    names = named_actors(cluster) - {CONTROLLER}
    for name in names:
        _kill(f"{cluster}/{name}")
        _remove_group(f"{cluster}/{name}")
    _request({})
    return names


def _kill(name: str) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


class JoinedRay:
    """A RayHome in an actor of that Ray. Event loop only."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._wanted: dict[str, ProcessSpec] = {}
        """What has not served yet."""

    @property
    def description(self) -> str:
        """Where it is, for messages."""
        return "of the cluster"

    def open(self) -> None:
        """Nothing to do: an actor is connected."""
        assert ray.is_initialized(), "the controller is an actor"

    def found(self) -> frozenset[str]:
        """Return which processes an earlier controller has left."""
        return named_actors(self._cluster) - {CONTROLLER}

    def options(self, spec: ProcessSpec) -> dict[str, Any]:
        """Return where an actor goes, and that it stays; asks the autoscaler, if there is one, for room."""
        self._wanted[spec.name] = spec
        _request(self._wanted)
        place = self._router_place(spec) if spec.role is ProcessRole.ROUTER else self._worker_place(spec)
        return {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, **place}

    def served(self, name: str) -> None:
        """Take back what was asked of the autoscaler for a process: it keeps its host by running there.

        A standing request would keep any host that could carry it, an empty one of the pool rather than the right one.
        """
        if self._wanted.pop(name, None) is not None:
            _request(self._wanted)

    def forget(self, name: str) -> None:
        """Give up what was kept for a process that is gone."""
        self.served(name)
        _remove_group(f"{self._cluster}/{name}")

    async def close(self) -> None:
        """Stay connected: the actor outlives its cluster by a moment."""

    def _router_place(self, spec: ProcessSpec) -> dict[str, Any]:
        """The first router is where `kvrelay up` ran, by whose address clients know it; others are elsewhere."""
        if spec.index == 0:
            return pinned_to(this_host())
        if _ROUTER_POOL in _pools():
            return {"label_selector": {_POOL_LABEL: _ROUTER_POOL}, "scheduling_strategy": "SPREAD"}
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        here = ray.get_runtime_context().get_node_id()
        pool = next(node for node in nodes if node["NodeID"] == here).get("Labels", {}).get(_POOL_LABEL)
        if pool is not None and pool not in _WORKER_POOLS:
            # No worker ever runs here, so that other hosts are there or will come.
            other = {_POOL_LABEL: f"!{pool}"}
        elif len(nodes) > 1:
            other = {_NODE_ID_LABEL: f"!{here}"}
        else:
            return pinned_to(this_host())
        return {"label_selector": other, "scheduling_strategy": "SPREAD"}

    def _worker_place(self, spec: ProcessSpec) -> dict[str, Any]:
        selector = _selector(spec)
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
                [_bundle(spec)],
                name=name,
                lifetime="detached",
                bundle_label_selector=[selector] if selector else None,
            )


def _pools() -> set[str]:
    """Return which pools hosts say they belong to."""
    labels = (node.get("Labels", {}) for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    return {each[_POOL_LABEL] for each in labels if _POOL_LABEL in each}


def _selector(spec: ProcessSpec) -> dict[str, str]:
    """Return the label of a worker's hosts; nothing where no host has one."""
    return {_POOL_LABEL: str(spec.role)} if _pools() else {}


def _bundle(spec: ProcessSpec) -> dict[str, float]:
    """Return what a worker reserves."""
    return {kind: amount for kind, amount in (("CPU", spec.num_cpus), ("GPU", spec.num_gpus)) if amount}


def _remove_group(name: str) -> None:
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(ray.util.get_placement_group(name))


def _request(wanted: dict[str, ProcessSpec]) -> None:
    """Tell Ray's autoscaler for which processes hosts have to be there. Where there is none, nobody hears it.

    The request stands until the next one, and there is one for the whole Ray cluster.
    """
    workers = [spec for spec in wanted.values() if spec.role is not ProcessRole.ROUTER and _bundle(spec)]
    try:
        request_resources(
            bundles=[_bundle(spec) for spec in workers],
            bundle_label_selectors=[_selector(spec) for spec in workers],
        )
    except (RayError, RuntimeError, ValueError, TypeError, OSError) as error:
        logger.warning("the autoscaler was not asked", extra={"reason": str(error)})
