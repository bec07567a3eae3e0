"""The sessions that measurements with real clusters play fit their models, whatever was recorded."""

from pathlib import Path

from benchmarks import tier_sessions
from tests.measure.workload.test_session_traces import ask, write


def test_sessions_are_played_smaller_and_faster_without_those_that_do_not_fit(tmp_path: Path) -> None:
    from benchmarks import session_clients  # and two clients, for which every other test would wait

    turns = [ask(0, 6_400, 640, [[1, 3]], think_s=0.0), ask(90, 9_600, 320, [[4, 1]], think_s=80.0)]
    fits = {"session": "fits", "requests": [*turns, ask(200, 12_800, 640, [[5, 1]], think_s=90.0)]}
    longest = {"session": "long", "requests": [ask(0, 1_000_000, 640, [[1, 3]], think_s=0.0)]}
    path = write(tmp_path, longest, fits)

    (stream,) = tier_sessions.workload_of(path, 2, 2).streams
    (session,) = stream.sessions
    assert session.prompt_lengths() == [200, 300]
    assert [turn.think_s for turn in session.turns] == [0.0, 4.0]

    plan = session_clients.plan_of(path, num_sessions=2, num_turns=2, seed=0)
    (session,) = plan.sessions
    assert session.prompt_lengths() == [25, 37]
    assert [turn.think_s for turn in session.turns] == [0.0, 8.0]
    assert plan.calls == {(0, 0), (0, 1)}
