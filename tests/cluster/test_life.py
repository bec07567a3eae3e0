"""The life of a process: phases, standings and pauses between starts."""

import pytest

from cluster.processes.life import Life, ProcessPhase, Standing, restart_delay_s
from common.lifecycle import IllegalTransition


@pytest.mark.parametrize(("num_short_lives", "delay_s"), [(0, 0), (1, 0), (2, 0.25), (3, 0.5), (6, 4), (7, 5), (99, 5)])
def test_restart_delay_is_zero_once_then_doubles_up_to_five_seconds(num_short_lives: int, delay_s: float) -> None:
    assert restart_delay_s(num_short_lives) == delay_s


def test_life_that_dies_early_waits_longer_each_time_and_not_after_a_long_one() -> None:
    life = Life()
    delays = []
    for lived_s in (1.0, 1.0, 1.0, 60.0):
        life.enter(ProcessPhase.STARTING)
        life.enter(ProcessPhase.READY)
        delays.append(life.die("killed\nby a test", lived_s=lived_s))

    assert delays == [0.0, 0.25, 0.5, 0.0]
    assert (life.phase, life.num_lives, life.last_exit) == (ProcessPhase.WAITING, 4, "killed")


def test_stopped_process_never_starts_again() -> None:
    life = Life()
    life.enter(ProcessPhase.STOPPED)

    with pytest.raises(IllegalTransition, match="stopped -> starting"):
        life.enter(ProcessPhase.STARTING)


@pytest.mark.parametrize("standing", list(Standing))
def test_only_members_are_known_to_routers_and_none_joins_twice(standing: Standing) -> None:
    life = Life(standing=standing)

    assert life.is_known_to_routers is (standing in (Standing.MEMBER, Standing.DRAINING))
    if standing is not Standing.JOINING:
        with pytest.raises(IllegalTransition):
            life.stand(Standing.JOINING)
