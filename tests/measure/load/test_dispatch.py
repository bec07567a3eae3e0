"""Every session is handed out once, in time and in order; closed loops never exceed their places."""

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from measure.load.dispatch import AHEAD_S, Dispatcher, MovePlaces, Play, Step
from measure.workload.sessions import Stream
from tests.measure.load.workloads import closed_loop, open_loop, session, workload

STARTS = st.lists(st.floats(0, 20, allow_nan=False), max_size=30).map(sorted)


def plays(steps: Sequence[Step]) -> list[Play]:
    return [step for step in steps if isinstance(step, Play)]


@given(first=STARTS, second=STARTS, looks=st.lists(st.floats(0.001, 5), max_size=20), num_processes=st.integers(1, 3))
def test_open_loops_are_handed_out_once_in_order_and_without_delay(
    first: list[float], second: list[float], looks: list[float], num_processes: int
) -> None:
    dispatcher = Dispatcher(workload(open_loop(first), open_loop(second, first_index=100), duration_s=15.0))
    for process in range(num_processes):
        assert dispatcher.add_process(process) == []
    now_s, handed = 0.0, []
    for step_s in [0.0, *looks, 1000.0]:
        now_s += step_s
        handed += plays(dispatcher.take(now_s))
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
    assert [play.session.index for play in plays(dispatcher.take(5.0 - AHEAD_S))] == [0]


def test_open_loop_goes_to_the_process_with_the_fewest_sessions() -> None:
    dispatcher = Dispatcher(workload(open_loop([0.0, 0.0, 0.0, 9.0, 9.0])))
    dispatcher.add_process(0)
    assert [play.process for play in plays(dispatcher.take(0.0))] == [0, 0, 0]
    dispatcher.add_process(1)
    assert [play.process for play in plays(dispatcher.take(9.0))] == [1, 1]


def test_max_requests_counts_turns_and_ends_the_sessions() -> None:
    dispatcher = Dispatcher(workload(open_loop([0.0, 1.0, 2.0], turns=3), max_requests=4))
    dispatcher.add_process(0)
    assert len(plays(dispatcher.take(100.0))) == 2


def test_endless_closed_loop_is_done_after_its_duration_and_its_last_session() -> None:
    dispatcher = Dispatcher(workload(closed_loop(10_000, 2), duration_s=3.0))
    handed = plays(dispatcher.add_process(0))
    assert len(handed) == 2  # one for each place; more as they begin
    assert not dispatcher.is_done
    assert dispatcher.next_s == 3.0
    dispatcher.take(3.0)
    for _ in handed:
        dispatcher.session_over(0)
    assert dispatcher.is_done


class Fleet:
    """A model of the processes: places, waiting and running sessions, and places to give back."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.places: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self.waiting: dict[int, deque[int]] = {}
        self.running: dict[int, list[int]] = {}
        self.begun: list[int] = []

    def obey(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Play():
                    self.waiting[step.process].append(step.session.index)
                case MovePlaces(num_places=num_places) if num_places > 0:
                    self.places[step.process] += num_places
                case MovePlaces():
                    self.asked[step.process] -= step.num_places
        for process in list(self.waiting):
            self.settle(process)

    def settle(self, process: int) -> None:
        while self.asked[process] and len(self.running[process]) < self.places[process]:
            self.asked[process] -= 1
            self.places[process] -= 1
            self.obey(self.dispatcher.place_returned(0))
        while self.waiting[process] and len(self.running[process]) < self.places[process]:
            index = self.waiting[process].popleft()
            self.running[process].append(index)
            self.begun.append(index)
            self.obey(self.dispatcher.session_begun(process, 0))

    def add(self, process: int) -> None:
        self.waiting[process], self.running[process] = deque(), []
        self.obey(self.dispatcher.add_process(process))

    def end_one(self, choice: int) -> None:
        running = [(process, index) for process, indices in self.running.items() for index in indices]
        process, index = running[choice % len(running)]
        self.running[process].remove(index)
        self.dispatcher.session_over(process)
        self.settle(process)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running.values()))


@given(
    concurrency=st.integers(1, 9),
    num_sessions=st.integers(0, 40),
    ends=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60),
)
def test_closed_loop_never_exceeds_its_concurrency_and_levels_its_places(
    concurrency: int, num_sessions: int, ends: list[tuple[int, bool]]
) -> None:
    stream = Stream(kind="chat", sessions=[session(i) for i in range(num_sessions)], concurrency=concurrency)
    fleet = Fleet(Dispatcher(workload(stream)))
    fleet.add(0)
    for choice, adds_process in ends:
        if adds_process and len(fleet.waiting) < 4:
            fleet.add(len(fleet.waiting))
        elif fleet.num_running:
            fleet.end_one(choice)
        assert fleet.num_running <= concurrency
        assert fleet.places.total() <= concurrency
    while fleet.num_running:
        fleet.end_one(0)
        assert fleet.num_running <= concurrency
    assert sorted(fleet.begun) == list(range(num_sessions))  # each once, and none is left behind
    assert fleet.dispatcher.is_done


def test_closed_loop_places_are_shared_out_as_processes_are_added() -> None:
    fleet = Fleet(Dispatcher(workload(closed_loop(1000, 10))))
    for process, shares in enumerate(([10], [5, 5], [4, 3, 3])):
        fleet.add(process)
        for number in range(40):  # sessions have to end before places can move
            fleet.end_one(number)
        assert sorted(fleet.places.values(), reverse=True) == shares
        assert fleet.num_running == 10
