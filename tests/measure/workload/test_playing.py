"""Sessions that are played: which turns are due when, and what their prompts begin with."""

from measure.workload.playing import Due, SessionPlay, cut_segment
from measure.workload.sessions import Beginning, Segment, Session, Turn


def turn(content: int, tokens: int, *, out: int = 10, think_s: float = 0.0, **how: object) -> Turn:
    return Turn(segments=(Segment(content, tokens),), num_output_tokens=out, think_s=think_s, **how)  # type: ignore[arg-type]


def play(*turns: Turn) -> SessionPlay[Segment]:
    return SessionPlay(Session(index=0, kind="agent", start_s=0.0, turns=turns), cut_segment)


def ask(played: SessionPlay[Segment], index: int) -> list[tuple[int, int]]:
    prompt = played.prompt(index, played.session.turns[index].segments)
    return [(segment.content, segment.num_tokens) for segment in prompt]


def answer(index: int) -> Segment:
    return Segment(100 + index, 10)


def test_conversation_is_due_its_think_time_after_each_answer_and_holds_it() -> None:
    played = play(turn(0, 5), turn(1, 3, think_s=2.0))
    assert played.begin(7.0) == [Due(0, 7.0)]
    assert ask(played, 0) == [(0, 5)]
    assert played.answered(0, answer(0), 9.0) == [Due(1, 11.0)]
    assert ask(played, 1) == [(0, 5), (100, 10), (1, 3)]
    assert played.answered(1, answer(1), 12.0) == []
    assert played.is_over


def test_sub_agent_runs_beside_its_parent_which_waits_for_it_only_where_told_to() -> None:
    anew = Beginning(0, 0)
    helper = turn(1, 4, beginning=anew, after=(0,), think_s=1.0)
    main = turn(2, 3, beginning=Beginning(0, 15), after=(0,), think_s=3.0)
    joined = turn(3, 1, beginning=Beginning(2, 28), after=(1, 2), think_s=0.5)
    played = play(turn(0, 5), helper, main, joined)
    played.begin(0.0)
    ask(played, 0)
    assert played.answered(0, answer(0), 10.0) == [Due(1, 11.0), Due(2, 13.0)]
    assert ask(played, 1) == [(1, 4)]
    assert ask(played, 2) == [(0, 5), (100, 10), (2, 3)]
    assert played.answered(2, answer(2), 20.0) == []
    assert not played.is_over
    assert played.answered(1, answer(1), 30.0) == [Due(3, 30.5)]
    assert ask(played, 3) == [(0, 5), (100, 10), (2, 3), (102, 10), (3, 1)]


def test_compacted_prompt_begins_with_part_of_an_earlier_text() -> None:
    played = play(turn(0, 5), turn(1, 6), turn(2, 2, beginning=Beginning(1, 18), after=(1,)))
    played.begin(0.0)
    for index in (0, 1):
        ask(played, index)
        played.answered(index, answer(index), 1.0)
    assert ask(played, 2) == [(0, 5), (100, 10), (1, 3), (2, 2)]
    assert played.session.prompt_lengths() == [5, 21, 20]


def test_nothing_follows_a_request_without_answer_and_what_runs_ends_the_session() -> None:
    beside = turn(2, 4, beginning=Beginning(0, 5), after=(0,))
    played = play(turn(0, 5), turn(1, 4, after=(0,)), beside, turn(3, 1, beginning=Beginning(1, 5), after=(1,)))
    played.begin(0.0)
    ask(played, 0)
    played.answered(0, answer(0), 1.0)
    ask(played, 1)
    ask(played, 2)
    played.failed()
    assert not played.is_over
    assert played.answered(1, answer(1), 2.0) == []
    assert played.is_over


def test_texts_are_kept_only_for_prompts_that_begin_with_them() -> None:
    played = play(turn(0, 5), turn(1, 3), turn(2, 3, beginning=Beginning(0, 5), after=(1,)))
    played.begin(0.0)
    for index in range(3):
        ask(played, index)
        assert played.is_continued(index) is (index == 0)
        played.answered(index, answer(index), 1.0)
