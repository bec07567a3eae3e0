"""The arms of a comparison."""

import pytest

from benchmarks.side_by_side.arms import ARMS, plan_of


@pytest.mark.parametrize("name", ARMS)
def test_arms_have_as_many_threads(name: str) -> None:
    plan = plan_of(name)

    assert plan.arm.num_threads == 2
    assert plan.serving is None
