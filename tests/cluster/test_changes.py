"""The need of each changed key of serving.yaml."""

from typing import Any

import pytest

from cluster.processes.diff import (
    find_changes,
    generation_of,
    is_new_generation,
    keep_free_ports,
    needs_routers,
    roles_to_renew,
)
from cluster.processes.plan import ProcessRole
from common.config import NEEDS, Need, ServingConfig, leaves
from tests.cluster.support import make_config


def changes_of(**sections: Any) -> list[str]:
    return [change.key for change in find_changes(make_config(), make_config(**sections))]


def test_every_key_of_the_configuration_has_a_need_and_no_other() -> None:
    assert set(NEEDS) == set(leaves(ServingConfig()))


def test_equal_configurations_have_no_changes() -> None:
    assert changes_of() == []


def test_changes_come_by_dotted_key_with_both_values() -> None:
    (change,) = find_changes(make_config(), make_config(pools={"decode": {"max_running": 8}}))

    assert (change.key, change.before, change.after) == ("pools.decode.max_running", 64, 8)
    assert str(change) == f"pools.decode.max_running: 64 → 8: {Need.DECODE}"
    assert not change.is_refused


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({"pools": {"prefill": {"max_waiting": 3}}}, (ProcessRole.PREFILL,)),
        ({"pools": {"decode": {"num_blocks": 99}}}, (ProcessRole.DECODE,)),
        ({"transfer": {"lease_ttl_s": 5}}, (ProcessRole.PREFILL, ProcessRole.DECODE)),
        ({"pools": {"decode": {"threads": 2}, "prefill": {"threads": 2}}}, (ProcessRole.PREFILL, ProcessRole.DECODE)),
        ({"pools": {"decode": {"count": 3}}}, ()),
        ({"slo": {"ttft_s": 1}}, ()),
    ],
)
def test_key_renews_exactly_the_pools_that_read_it(sections: dict[str, Any], roles: tuple[ProcessRole, ...]) -> None:
    assert roles_to_renew(find_changes(make_config(), make_config(**sections))) == roles


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"name": "other"}, "name"),
        ({"launcher": "ray"}, "launcher"),
        ({"router": {"port": 1}}, "router.port"),
    ],
)
def test_change_that_needs_another_cluster_is_refused(sections: dict[str, Any], key: str) -> None:
    before = make_config()
    refused = [change for change in find_changes(before, make_config(**sections)) if change.is_refused]

    assert refused[0].key == key


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"engine": "fake", "id": "/other"}},
        {"model": {"engine": "fake", "max_model_len": 64}},
        {"pools": {"prefill": {"block_size": 32}, "decode": {"block_size": 32}}},
    ],
)
def test_change_that_workers_cannot_share_makes_a_generation(sections: dict[str, Any]) -> None:
    before, after = make_config(), make_config(**sections)
    changes = find_changes(before, after)

    assert is_new_generation(changes) and needs_routers(changes)
    assert generation_of(before) != generation_of(after)


def test_change_that_workers_can_share_makes_no_generation() -> None:
    before, after = make_config(), make_config(pools={"decode": {"max_running": 8}}, router={"policy": "least_load"})

    assert not is_new_generation(find_changes(before, after))
    assert generation_of(before) == generation_of(after)


def test_change_of_secrets_reveals_neither_value() -> None:
    keyed = [{"name": "a", "api_keys": ["open-sesame-open-sesame"]}]
    before = make_config(router={"auth": "api_key", "salt_secret": "sixteen-or-more-1"}, tenants=keyed)
    keyed = [{"name": "a", "api_keys": ["mellon-mellon-mellon"]}]
    after = make_config(router={"auth": "api_key", "salt_secret": "sixteen-or-more-2"}, tenants=keyed)
    told = " ".join(map(str, find_changes(before, after)))

    assert "tenants changes" in told and "router.salt_secret changes" in told
    assert not any(secret in told for secret in ("sesame", "mellon", "sixteen"))


def test_free_ports_of_the_file_are_those_that_the_cluster_has() -> None:
    running = make_config(router={"port": 4321, "http_port": 4322})
    named = make_config(router={"port": 4321, "http_port": 5000})

    assert keep_free_ports(running, make_config(router={"port": 0, "http_port": 0})).router == running.router
    assert keep_free_ports(running, named).router == named.router
