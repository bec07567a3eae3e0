"""Every session is handed out once, in time and in order; closed loops never exceed their places."""

from hypothesis import given
from hypothesis import strategies as st

from measure.load.dispatch import AHEAD_S, Dispatcher, Play
from measure.workload.sessions import Stream
from tests.measure.load.workloads import closed_loop, open_loop, session, workload

STARTS = st.lists(st.floats(0, 20, allow_nan=False), max_size=30).map(sorted)


@given(first=STARTS, second=STARTS, looks=st.lists(st.floats(0.001, 5), max_size=20), num_processes=st.integers(1, 3))
def test_open_loops_are_handed_out_once_in_order_and_without_delay(
    first: list[float], second: list[float], looks: list[float], num_processes: int
) -> None:
    dispatcher = Dispatcher(workload(open_loop(first), open_loop(second, first_index=100), duration_s=15.0))
    for process in range(num_processes):
        dispatcher.add_process(process)
    now_s, handed = 0.0, list[Play]()
    for step_s in [0.0, *looks, 1000.0]:
        now_s += step_s
        handed += dispatcher.take(now_s)
        assert dispatcher.next_s > now_s  # nothing that is due within AHEAD_S is left
    starts = [play.session.start_s for play in handed]
    assert starts == sorted(start_s for start_s in first + second if start_s <= 15.0)
    assert len({play.session.index for play in handed}) == len(handed)
    assert all(play.stream is None for play in handed)


def test_session_is_handed_out_just_in_time() -> None:
    dispatcher = Dispatcher(workload(open_loop([5.0])))
    dispatcher.add_process(0)
    assert dispatcher.take(5.0 - AHEAD_S - 0.001) == []
    assert dispatcher.next_s == 5.0 - AHEAD_S
    assert [play.session.index for play in dispatcher.take(5.0 - AHEAD_S)] == [0]


def test_open_loop_goes_to_the_process_with_the_fewest_sessions() -> None:
    dispatcher = Dispatcher(workload(open_loop([0.0, 0.0, 0.0, 9.0, 9.0])))
    dispatcher.add_process(0)
    assert [play.process for play in dispatcher.take(0.0)] == [0, 0, 0]
    dispatcher.add_process(1)
    assert [play.process for play in dispatcher.take(9.0)] == [1, 1]


def test_max_requests_counts_turns_and_ends_the_sessions() -> None:
    dispatcher = Dispatcher(workload(open_loop([0.0, 1.0, 2.0], turns=3), max_requests=4))
    dispatcher.add_process(0)
    assert len(dispatcher.take(100.0)) == 2


def test_endless_closed_loop_is_done_after_its_duration_and_its_last_session() -> None:
    dispatcher = Dispatcher(workload(closed_loop(10_000, 2), duration_s=3.0))
    dispatcher.add_process(0)
    assert len(dispatcher.take(0.0)) == 2  # one for each place
    for end_s in (3.5, 3.6):
        assert not dispatcher.is_done
        dispatcher.session_over(0, 0)
        assert dispatcher.take(end_s) == []
    assert dispatcher.is_done


@given(
    concurrency=st.integers(1, 9),
    num_sessions=st.integers(0, 40),
    ends=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60),
)
def test_closed_loop_plays_every_session_once_within_its_concurrency(
    concurrency: int, num_sessions: int, ends: list[tuple[int, bool]]
) -> None:
    stream = Stream(kind="chat", sessions=[session(i) for i in range(num_sessions)], concurrency=concurrency)
    dispatcher = Dispatcher(workload(stream))
    dispatcher.add_process(0)
    running, begun, num_processes = list[Play](), list[int](), 1
    for choice, adds_process in [*ends, *[(0, False)] * num_sessions]:
        handed = dispatcher.take(0.0)
        begun += [play.session.index for play in handed]
        running += handed
        assert len(running) == min(concurrency, num_sessions - len(begun) + len(running))
        assert dispatcher.num_sessions == len(running)
        if adds_process and num_processes < 4:
            dispatcher.add_process(num_processes)
            num_processes += 1
        elif running:
            ended = running.pop(choice % len(running))
            dispatcher.session_over(ended.process, ended.stream)
    assert sorted(begun) == list(range(num_sessions))
    assert dispatcher.take(0.0) == []
    assert dispatcher.is_done


def test_closed_loop_is_shared_out_as_processes_are_added() -> None:
    dispatcher = Dispatcher(workload(closed_loop(1000, 9)))
    running = list[Play]()
    for process, shares in enumerate(([9], [4, 5], [3, 3, 3])):
        dispatcher.add_process(process)
        for _ in range(9):
            running += dispatcher.take(0.0)
            most = max(range(process + 1), key=lambda one: sum(play.process == one for play in running))
            ended = next(play for play in running if play.process == most)
            running.remove(ended)
            dispatcher.session_over(ended.process, 0)
        running += dispatcher.take(0.0)
        assert sorted(sum(play.process == one for play in running) for one in range(process + 1)) == shares
