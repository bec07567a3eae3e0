"""Names of workers that come, go and change their pool."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.changes.scaling import POOLS
from cluster.processes.plan import ProcessRole, ProcessSpec
from cluster.processes.worker_names import home_first, with_living_names
from tests.cluster.support import make_spec

PREFILL, DECODE = ProcessRole.PREFILL, ProcessRole.DECODE


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

    assert [spec.name for spec in sorted(pool, key=home_first)] == ["decode-2", "decode-10", "prefill-0", "prefill-1"]


def test_new_worker_of_a_pool_whose_worker_has_flipped_gets_a_number_that_nobody_has() -> None:
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
        role: sorted((make_spec(name, its) for name, its in workers.items() if its is role), key=home_first)
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
