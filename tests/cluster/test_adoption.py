"""What a supervisor keeps running that comes after another one."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.processes.adoption import is_stopping, serves_already, wanted_processes
from cluster.processes.plan import make_plan
from cluster.processes.state import ClusterPhase, ClusterState
from common.process import ProcessIdentity
from tests.cluster.support import make_config
from tests.cluster.test_state import make_state

_SELF = ProcessIdentity(pid=1, birth="b:1")
_PLAN_FOR = partial(make_plan, host=None)


def wanted(found: set[str], last: ClusterState | None = None, **pools: int) -> list[str]:
    config = make_config(launcher="ray", pools={role: {"count": count} for role, count in pools.items()})
    return [spec.name for spec in wanted_processes(config, _PLAN_FOR, found=found, last=last)]


def recorded(*names: str) -> ClusterState:
    """Return the state of a cluster of these processes."""
    state = make_state(supervisor=_SELF, members=(_SELF,))
    (process,) = state.processes
    return replace(state, processes=tuple(replace(process, name=name) for name in names))


def test_pools_that_grew_since_the_configuration_stay_as_large() -> None:
    found = {"router-0", "prefill-0", "decode-0", "decode-1", "decode-2"}

    assert wanted(found, recorded(*found)) == ["router-0", "prefill-0", "decode-0", "decode-1", "decode-2"]


def test_pools_that_shrank_since_the_configuration_stay_as_small() -> None:
    found = {"router-0", "decode-1"}

    assert wanted(found, recorded(*found), prefill=2, decode=3) == ["router-0", "decode-1"]


def test_worker_that_was_away_when_the_supervisor_died_is_wanted_again() -> None:
    last = recorded("router-0", "prefill-0", "decode-0", "decode-1")

    assert "decode-1" in wanted({"router-0", "prefill-0", "decode-0"}, last)


def test_without_a_state_what_is_configured_is_wanted_beside_what_runs() -> None:
    assert wanted({"router-0", "decode-2"}, prefill=1, decode=1) == ["router-0", "prefill-0", "decode-0", "decode-2"]


def test_actor_of_somebody_elses_naming_is_left_alone() -> None:
    assert wanted({"router-0", "prefill-0", "decode-0", "decode-x", "cache"}) == ["router-0", "prefill-0", "decode-0"]


@given(numbers=st.sets(st.integers(0, 40)))
def test_every_worker_found_is_wanted_once_under_its_own_name(numbers: set[int]) -> None:
    found = {f"decode-{number}" for number in numbers}

    names = wanted(found, recorded("router-0", "decode-0"))

    assert set(names) == found | {"router-0", "decode-0"}
    assert len(names) == len(set(names))


@pytest.mark.parametrize("phase", list(ClusterPhase))
def test_only_what_served_is_adopted_and_what_was_being_stopped_is_stopped(phase: ClusterPhase) -> None:
    last = replace(recorded("router-0"), phase=phase)

    assert serves_already({"router-0"}, last) is (phase is ClusterPhase.READY)
    assert is_stopping(last) is (phase in (ClusterPhase.STOPPING, ClusterPhase.FAILED))


def test_actors_without_a_state_are_a_cluster_that_served_and_none_are_not() -> None:
    assert serves_already({"decode-0"}, None)
    assert not serves_already(set(), None)
    assert not is_stopping(None)
