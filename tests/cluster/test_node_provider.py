"""The user's own hosts as typed pools for Ray's autoscaler."""

from pathlib import Path
from typing import Any

import pytest

from common.model_files import CACHE_ENV

pytest.importorskip("ray")

from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    TAG_RAY_NODE_KIND,
    TAG_RAY_USER_NODE_TYPE,
)

from cluster.ray.node_provider import HostPools

CONFIG: dict[str, Any] = {"head_ip": "192.0.2.10", "pools": {"prefill": ["192.0.2.11"], "decode": ["b", "c"]}}
HEAD = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head"}


def worker(pool: str) -> dict[str, str]:
    return {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: pool}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    monkeypatch.delenv("RAY_CLOUD_INSTANCE_ID", raising=False)


def provider(**changes: Any) -> HostPools:
    return HostPools(CONFIG | changes, "test")


def addresses(hosts: HostPools, **tags: str) -> set[str]:
    return {hosts.internal_ip(node_id) for node_id in hosts.non_terminated_nodes(tags)}


def test_nodes_are_hosts_of_their_own_pool_and_known_to_other_processes() -> None:
    provider().create_node({}, worker("decode"), 2)
    provider().create_node({}, worker("prefill"), 1)

    assert addresses(provider(), **{TAG_RAY_USER_NODE_TYPE: "decode"}) == {"b", "c"}
    assert addresses(provider()) == {"192.0.2.11", "b", "c"}


def test_pool_without_enough_free_hosts_launches_none() -> None:
    hosts = provider()
    hosts.create_node({}, worker("decode"), 1)

    with pytest.raises(NodeLaunchException, match="1 free hosts, 2 are wanted"):
        hosts.create_node({}, worker("decode"), 2)
    assert len(hosts.non_terminated_nodes({})) == 1


def test_host_that_comes_back_has_a_new_id() -> None:
    hosts = provider()
    (first,) = hosts.create_node({}, worker("prefill"), 1)
    hosts.terminate_node(first)
    (second,) = hosts.create_node({}, worker("prefill"), 1)

    assert first != second
    assert hosts.internal_ip(first) == hosts.internal_ip(second) == "192.0.2.11"
    assert hosts.is_terminated(first)
    assert hosts.is_running(second)
    assert hosts.node_tags(first) == {}


def test_tags_of_a_terminated_node_do_not_bring_it_back() -> None:
    hosts = provider()
    (node_id,) = hosts.create_node({}, worker("prefill"), 1)
    hosts.set_node_tags(node_id, {"status": "up"})
    assert hosts.node_tags(node_id)["status"] == "up"

    hosts.terminate_node(node_id)
    hosts.terminate_node(node_id)
    hosts.set_node_tags(node_id, {"status": "late"})
    assert hosts.non_terminated_nodes({}) == []


def test_head_exists_for_its_creator_and_on_the_head_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = provider()
    assert hosts.non_terminated_nodes({}) == []

    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "192.0.2.10")
    assert provider().non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD}) == ["192.0.2.10"]

    monkeypatch.delenv("RAY_CLOUD_INSTANCE_ID")
    hosts.create_node({}, HEAD, 1)
    assert hosts.is_running("192.0.2.10")
    assert hosts.external_ip("192.0.2.10") == "192.0.2.10"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"head_ip": None}, "provider.head_ip"),
        ({"pools": ["a"]}, "provider.pools"),
        ({"pools": {"decode": ["a", "a"]}}, "provider.pools.decode"),
        ({"pools": {"decode": ["192.0.2.10"]}}, "provider.pools.decode"),
    ],
)
def test_invalid_pools_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        provider(**changes)
