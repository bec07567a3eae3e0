"""The plan: processes, names, threads, devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.processes.plan import (
    POOLS,
    HostResources,
    PlanError,
    ProcessRole,
    ProcessSpec,
    largest_crowd,
    make_plan,
    pool_order,
    threads_of_ranks,
    with_living_names,
)
from common.config import ServingConfig
from tests.cluster.support import make_spec

PREFILL, DECODE = POOLS


def make_config(
    *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None, engine: str = "torch"
) -> ServingConfig:
    pools = {"prefill": prefill or {}, "decode": decode or {}}
    return ServingConfig.model_validate({"model": {"engine": engine}, "pools": pools})


def make_host(*, cores: int = 8, gpus: list[str] | None = None) -> HostResources:
    return HostResources(cores=cores, gpus=gpus)


def test_plan_lists_routers_then_prefill_then_decode_by_index() -> None:
    specs = make_plan(make_config(prefill={"count": 1}, decode={"count": 2}), make_host())

    assert [(spec.name, spec.role) for spec in specs] == [
        ("router-0", ProcessRole.ROUTER),
        ("prefill-0", PREFILL),
        ("decode-0", DECODE),
        ("decode-1", DECODE),
    ]


def test_plan_gives_the_router_its_configured_place_and_workers_a_free_port() -> None:
    config = ServingConfig.model_validate({"router": {"host": "0.0.0.0", "port": 7001}})

    router, *workers = make_plan(config, make_host())

    assert (router.host, router.port) == ("0.0.0.0", 7001)
    assert {(worker.host, worker.port) for worker in workers} == {("127.0.0.1", 0)}


def test_several_routers_have_consecutive_ports_and_all_but_the_first_other_hosts() -> None:
    config = ServingConfig.model_validate({"router": {"count": 3, "host": "0.0.0.0", "port": 7001}})

    here, anywhere = make_plan(config, make_host())[:3], make_plan(config, None)[:3]

    places = [(spec.name, spec.index, spec.host, spec.port) for spec in here]
    assert places == [(f"router-{idx}", idx, "0.0.0.0", 7001 + idx) for idx in range(3)]
    assert [spec.host for spec in anywhere] == ["0.0.0.0", None, None]
    assert [spec.port for spec in anywhere] == [7001, 7002, 7003]


@pytest.mark.parametrize(
    ("cores", "num_workers", "threads"), [(2, 2, "1"), (8, 2, "4"), (7, 2, "3"), (2, 5, "1"), (1, 1, "1")]
)
def test_threads_auto_shares_the_cores_among_all_workers_at_least_one_each(
    cores: int, num_workers: int, threads: str
) -> None:
    specs = make_plan(make_config(prefill={"count": num_workers - 1}, decode={"count": 1}), make_host(cores=cores))

    for spec in specs[1:]:
        assert spec.env == {"OMP_NUM_THREADS": threads, "KVRELAY_THREADS": threads}


def test_threads_given_wins_over_the_share() -> None:
    specs = make_plan(make_config(prefill={"threads": 3}), make_host(cores=64))

    assert specs[1].env["OMP_NUM_THREADS"] == "3"
    assert specs[2].env["OMP_NUM_THREADS"] == "32"


def test_plan_for_unknown_hosts_uses_reserved_cpus_and_the_hosts_own_address() -> None:
    _, prefill, decode = make_plan(make_config(prefill={"num_cpus": 4}, decode={"num_cpus": 0.5}), None)

    assert (prefill.env["OMP_NUM_THREADS"], prefill.host) == ("4", None)
    assert (decode.env["OMP_NUM_THREADS"], decode.host) == ("1", None)


def test_ranks_of_a_worker_are_reserved_together_in_one_process() -> None:
    pools = {"prefill": {"tensor_parallel": 3, "num_cpus": 2}, "decode": {}}
    config = ServingConfig.model_validate({"model": {"engine": "vllm", "device": "cpu"}, "pools": pools})

    _, prefill, decode = make_plan(config, None)

    assert (prefill.num_cpus, prefill.env["OMP_NUM_THREADS"], prefill.env["KVRELAY_NUM_CPUS"]) == (6, "6", "6")
    assert decode.num_cpus == 1


def test_memory_is_divided_equally_among_all_workers() -> None:
    config = make_config(prefill={"count": 1}, decode={"count": 2, "kv_memory_gib": 1})

    _, *workers = make_plan(config, HostResources(cores=8, gpus=None, memory_bytes=31))

    assert [worker.env["KVRELAY_MEMORY_BYTES"] for worker in workers] == ["10", "10", "10"]


def test_workers_on_unknown_hosts_get_their_reserved_cpus_instead_of_memory() -> None:
    _, prefill, decode = make_plan(make_config(prefill={"num_cpus": 4}, decode={"num_cpus": 0}), None)

    assert [worker.env.get("KVRELAY_MEMORY_BYTES") for worker in (prefill, decode)] == [None, None]
    assert [worker.env["KVRELAY_NUM_CPUS"] for worker in (prefill, decode)] == ["4", "1"]


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "expected"),
    [
        ({"num_gpus": 2, "tensor_parallel": 2}, {"count": 2, "num_gpus": 1}, "4 5 6 7", ["4,5", "6", "7"]),
        ({"num_gpus": 0.5}, {"count": 2, "num_gpus": 0.5}, "0 1", ["0", "0", "1"]),
    ],
    ids=["whole", "halves"],
)
def test_gpus_are_assigned_in_order_and_never_to_two_owners(
    prefill: dict[str, object], decode: dict[str, object], gpus: str, expected: list[str]
) -> None:
    specs = make_plan(make_config(prefill=prefill, decode=decode, engine="vllm"), make_host(gpus=gpus.split()))

    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs[1:]] == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "gpus", "cards", "num_sharing"),
    [
        ({"count": 1}, {"count": 3}, "0 1 2 3", ["0,1,2,3", "1,0,2,3", "2,0,1,3", "3,0,1,2"], [1, 1, 1, 1]),
        ({"count": 1}, {"count": 2}, "0 1", ["0,1", "1,0", "0,1"], [2, 1, 2]),
        ({"count": 1}, {"count": 2, "num_gpus": 1}, "0 1 MIG-a", ["MIG-a", "0", "1"], [1, None, None]),
        ({"count": 1}, {"count": 1, "num_gpus": 1}, "4 5", ["5,4", "4,5"], [1, None]),
        ({"count": 1}, {"count": 1}, "", [None, None], [None, None]),
    ],
    ids=["a card each", "more workers than cards", "slices", "beside reserved ones", "no cards"],
)
def test_workers_that_reserve_no_gpu_are_dealt_those_of_the_host_in_turn(
    prefill: dict[str, object], decode: dict[str, object], gpus: str, cards: list[str], num_sharing: list[int | None]
) -> None:
    pools = {"prefill": prefill, "decode": decode}
    config = ServingConfig.model_validate({"model": {"engine": "torch"}, "pools": pools})
    _, *workers = make_plan(config, make_host(gpus=gpus.split()))
    assert [worker.env.get("CUDA_VISIBLE_DEVICES") for worker in workers] == cards
    assert [worker.env.get("KVRELAY_GPU_WORKERS") for worker in workers] == [n and str(n) for n in num_sharing]
    assert largest_crowd(workers) == max(n or 0 for n in num_sharing)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ({}, {"count": 9}, 0),
        ({}, {"count": 2, "tensor_parallel": 3}, 7),
        ({"threads": 2}, {"tensor_parallel": 3, "threads": 7}, 8),
        ({"count": 0}, {"tensor_parallel": 4, "threads": 2}, 4),
    ],
)
def test_every_rank_counts_one_thread_at_least_where_a_worker_has_several(
    prefill: dict[str, object], decode: dict[str, object], expected: int
) -> None:
    config = make_config(prefill=prefill, decode=decode)
    assert threads_of_ranks(config, make_plan(config, make_host())) == expected


@pytest.mark.parametrize(
    ("gpus", "cards", "num_sharing"),
    [("0 1 2", ["0,1", "2"], "1 1"), ("0 1", ["0,1", "0"], "2 2"), ("0", ["0"] * 2, "2 2")],
)
def test_worker_with_ranks_that_reserves_no_gpu_is_dealt_one_for_each(
    gpus: str, cards: list[str], num_sharing: str
) -> None:
    config = make_config(prefill={"tensor_parallel": 2}, engine="vllm")
    _, *workers = make_plan(config, make_host(gpus=gpus.split()))
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == cards
    assert [worker.env["KVRELAY_GPU_WORKERS"] for worker in workers] == num_sharing.split()


@pytest.mark.parametrize("model", [{"device": "cpu"}, {"engine": "fake"}])
def test_workers_that_compute_on_no_gpu_are_dealt_none(model: dict[str, str]) -> None:
    _, *workers = make_plan(ServingConfig.model_validate({"model": model}), make_host(gpus=["0", "1"]))
    assert not any("CUDA_VISIBLE_DEVICES" in worker.env for worker in workers)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({"num_gpus": 1}, {"num_gpus": 2, "tensor_parallel": 2}, r"pools\.decode\.num_gpus: 2 more wanted"),
        ({"num_gpus": 1.5}, {}, r"pools\.prefill\.num_gpus: 1\.5 is neither a whole number"),
    ],
)
def test_gpus_that_cannot_be_assigned_are_refused_by_key(
    prefill: dict[str, object], decode: dict[str, object], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        make_plan(make_config(prefill=prefill, decode=decode, engine="vllm"), make_host(gpus=["0", "1"]))


def test_gpus_left_to_ray_are_reserved_and_not_assigned() -> None:
    _, prefill, _ = make_plan(make_config(prefill={"num_gpus": 1}), make_host(gpus=None))

    assert prefill.num_gpus == 1
    assert "CUDA_VISIBLE_DEVICES" not in prefill.env


def test_variables_with_secrets_of_the_routers_are_empty_for_workers() -> None:
    tenant = {"name": "a", "api_keys": ["env:KEY_OF_A", "key-of-tenant-a-0001"]}
    config = ServingConfig.model_validate(
        {"router": {"auth": "api_key", "salt_secret": "env:CLUSTER_SALT"}, "tenants": [tenant]}
    )

    router, *workers = make_plan(config, make_host())

    for worker in workers:
        assert (worker.env["KEY_OF_A"], worker.env["CLUSTER_SALT"]) == ("", "")
    assert not {"KEY_OF_A", "CLUSTER_SALT"} & router.env.keys()


def named(*names: str, role: ProcessRole) -> list[ProcessSpec]:
    return [make_spec(name, role) for name in names]


def planned(num_prefill: int, num_decode: int) -> list[ProcessSpec]:
    return [
        make_spec(f"{role}-{i}", role)
        for role, n in zip(POOLS, (num_prefill, num_decode), strict=True)
        for i in range(n)
    ]


def test_pool_is_in_order_of_numbers_with_those_of_the_other_pool_last() -> None:
    pool = named("prefill-1", "decode-10", "decode-2", "prefill-0", role=DECODE)

    assert [spec.name for spec in sorted(pool, key=pool_order)] == ["decode-2", "decode-10", "prefill-0", "prefill-1"]


def test_new_worker_beside_a_flipped_one_gets_an_unused_number() -> None:
    living = {PREFILL: named("prefill-0", role=PREFILL), DECODE: named("decode-0", "prefill-1", role=DECODE)}

    specs = with_living_names(planned(2, 2), living)

    assert [(spec.name, spec.role) for spec in specs] == [
        ("prefill-0", PREFILL),
        ("prefill-2", PREFILL),
        ("decode-0", DECODE),
        ("prefill-1", DECODE),
    ]


WORKERS = st.dictionaries(
    st.builds(lambda role, number: f"{role}-{number}", st.sampled_from(POOLS), st.integers(0, 6)),
    st.sampled_from(POOLS),
)


@given(workers=WORKERS, num_prefill=st.integers(0, 8), num_decode=st.integers(0, 8))
def test_names_are_unique_keep_the_living_and_fill_the_lowest_gaps(
    workers: dict[str, ProcessRole], num_prefill: int, num_decode: int
) -> None:
    living = {
        role: sorted((make_spec(name, its) for name, its in workers.items() if its is role), key=pool_order)
        for role in POOLS
    }

    specs = with_living_names(planned(num_prefill, num_decode), living)

    assert len({spec.name for spec in specs}) == len(specs)
    for role, wanted in zip(POOLS, (num_prefill, num_decode), strict=True):
        names = [spec.name for spec in specs if spec.role is role]
        stay = [spec.name for spec in living[role]][:wanted]
        assert len(names) == wanted
        assert names[: len(stay)] == stay
        new = names[len(stay) :]
        assert not set(new) & set(workers)
        free = [name for number in range(20) if (name := f"{role}-{number}") not in workers]
        assert new == free[: len(new)]
