"""The user's own hosts as typed pools for Ray's autoscaler, `provider: {type: external}` in a cluster.yaml.

    provider:
      type: external
      module: cluster.ray.node_provider.HostPools
      head_ip: 192.0.2.10
      pools: {prefill: [192.0.2.11], decode: [192.0.2.12, 192.0.2.13]}

Each key of `pools` is the name of a node type under `available_node_types`. Launching a node takes the first free host
of its pool, and terminating it frees the host; the autoscaler itself starts and drains Ray there.

A node id, `address-generation`, is never used twice: Ray 2.60 confuses an id that is reused within one of its passes
with the terminating node, and waits for minutes. The head's id is its address.
"""

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from common.model_files import cache_dir

_HEAD_ENV = "RAY_CLOUD_INSTANCE_ID"
"""The head's id, which `ray up` sets on the head and the autoscaler there inherits."""


@dataclass(slots=True)
class _Table:
    """The content of the file."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tags of the nodes that are not terminated, by id."""
    generation: int = 0
    """Generation of the next node."""


class HostPools(NodeProvider):
    """Hosts by pool. Thread-safe; the processes of one machine share a file and take its lock for each change."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        """Raises ValueError for invalid pools."""
        super().__init__(provider_config, cluster_name)
        self._head, self._pools = _checked(provider_config)
        self._head_type = str(provider_config.get("head_node_type", "head"))
        self._path = cache_dir() / "ray-hosts" / f"{cluster_name}.json"
        self._lock = threading.RLock()

    # Queries of the autoscaler.

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Return the ids of the nodes that have all these tags."""
        return [id_ for id_, tags in self._read().items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        """Return whether a node was launched and not terminated."""
        return node_id in self._read()

    def is_terminated(self, node_id: str) -> bool:
        """Return the opposite of `is_running`."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Return the tags of a node; none for a terminated one."""
        return self._read().get(node_id, {})

    def external_ip(self, node_id: str) -> str:
        """Return the external address of a node, which equals the internal one."""
        return self.internal_ip(node_id)

    def internal_ip(self, node_id: str) -> str:
        """Return the address of a node."""
        return node_id if node_id == self._head else node_id.rpartition("-")[0]

    # Actions of the autoscaler.

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> dict[str, Any]:
        """See `create_node`; the node type determines resources and labels."""
        return self.create_node(node_config, tags, count)

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Take free hosts of the pool that the tags name, all or none. Raises NodeLaunchException."""
        with self._changing() as table:
            if tags[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD:
                table.nodes[self._head] = dict(tags)
                return {self._head: {}}
            pool = tags[TAG_RAY_USER_NODE_TYPE]
            taken = {self.internal_ip(node_id) for node_id in table.nodes}
            free = [address for address in self._pools.get(pool, ()) if address not in taken]
            if len(free) < count:
                reason = f"pool {pool} has {len(free)} free hosts, {count} are wanted"
                raise NodeLaunchException("NoFreeHost", reason, None)
            created = {f"{address}-{table.generation + n}": dict(tags) for n, address in enumerate(free[:count])}
            table.generation += count
            table.nodes |= created
        return {node_id: {} for node_id in created}

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Add tags to a node that is not terminated."""
        with self._changing() as table:
            if node_id in table.nodes:
                table.nodes[node_id] |= tags

    def terminate_node(self, node_id: str) -> None:
        """Free the host of a node. May be repeated."""
        with self._changing() as table:
            table.nodes.pop(node_id, None)

    # The file is replaced as a whole, so that reading needs no lock.

    def _read(self) -> dict[str, dict[str, str]]:
        return self._table().nodes

    def _table(self) -> "_Table":
        try:
            table = _Table(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            table = _Table()
        table.nodes = self._with_head(table.nodes)
        return table

    @contextmanager
    def _changing(self) -> Iterator["_Table"]:
        """Read the table, let the block change it, and write it unless the block raises."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = self._table()
            yield table
            scratch = self._path.with_suffix(".part")
            scratch.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
            scratch.replace(self._path)

    def _with_head(self, nodes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Add the head if this runs on it: `ray up` recorded it on its own machine only."""
        if self._head in nodes or os.environ.get(_HEAD_ENV) != self._head:
            return nodes
        tags = {
            TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
            TAG_RAY_USER_NODE_TYPE: self._head_type,
            TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head",
            TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
        }
        return {self._head: tags} | nodes


def _checked(provider: dict[str, Any]) -> tuple[str, dict[str, list[str]]]:
    """Return the head's address and the pools. Raises ValueError."""
    head, pools = provider.get("head_ip"), provider.get("pools")
    if not isinstance(head, str) or not head:
        raise ValueError("provider.head_ip: must be the head's address")
    if not isinstance(pools, dict) or not all(isinstance(hosts, list) for hosts in pools.values()):
        raise ValueError("provider.pools: must be lists of addresses by node type")
    seen = {head}
    for pool, hosts in pools.items():
        for address in hosts:
            if address in seen:
                raise ValueError(f"provider.pools.{pool}: {address} is listed twice; a host belongs to one pool")
            seen.add(address)
    return head, {str(pool): [str(address) for address in hosts] for pool, hosts in pools.items()}
