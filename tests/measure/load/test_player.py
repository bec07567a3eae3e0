"""Sessions are played at their times, whatever the server does. All times are virtual, so they are exact."""

import asyncio
from array import array

import pytest

from common.errors import DeadlineExceeded, EngineFault, Overloaded
from kvrelay.client.chat import ChatMessage
from measure.load.records import Outcome, RequestRecord
from measure.load.sending import Said
from measure.load.session_figures import session_outcomes
from measure.workload.sessions import Beginning, Content, Segment, Session, Turn
from tests.measure.load.virtual import ScriptedTarget, Told, in_virtual_time, playing, terms
from tests.measure.load.workloads import session


def played(target: ScriptedTarget, *sessions: Session, content: Content = Content.TOKENS) -> list[RequestRecord]:
    """Play sessions of an open loop to their ends."""
    told = Told()

    async def main() -> None:
        async with playing(target, told, terms(content=content)) as player:
            for one in sessions:
                player.play(one)

    in_virtual_time(main)
    assert told.over == [None] * len(sessions)
    return told.records


def test_requests_due_during_a_stall_show_the_whole_rest_of_it() -> None:
    target = ScriptedTarget(ttft_s=0.1, gap_s=0.01, stall=(2.0, 5.0))
    records = played(target, *(session(i, start_s=0.5 * i) for i in range(14)))

    by_due = {record.due_s: record for record in records}
    assert [by_due[0.5 * i].sent_s for i in range(14)] == pytest.approx([0.5 * i for i in range(14)])
    for due_s, record in by_due.items():
        stalled_s = 5.0 - due_s if 2.0 <= due_s < 5.0 else 0.0
        assert record.ttft_s == pytest.approx(stalled_s + 0.1)
        assert record.e2e_s == pytest.approx(stalled_s + 0.11)


def test_later_turn_is_due_its_think_time_after_the_end_of_the_answer() -> None:
    first, second, third = played(ScriptedTarget(ttft_s=0.1, gap_s=0.01), session(0, start_s=1.0, turns=3, think_s=2.0))
    assert first.end_s == pytest.approx(1.11)
    assert (second.due_s, second.sent_s) == pytest.approx((3.11, 3.11))
    assert third.due_s == pytest.approx(5.22)


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (Overloaded("full"), Outcome.REFUSED),
        (DeadlineExceeded("late"), Outcome.TIMED_OUT),
        (EngineFault("broken"), Outcome.FAILED),
    ],
)
def test_turn_that_fails_is_recorded_and_ends_its_session(failure: Exception, outcome: Outcome) -> None:
    target = ScriptedTarget(failures={1: failure})
    first, second = played(target, session(0, turns=3))
    assert (first.outcome, second.outcome) == (Outcome.COMPLETED, outcome)
    assert second.error == f"{type(failure).__name__}: {failure}"
    assert second.chunk_s == ()


def test_later_prompt_continues_the_servers_real_answer() -> None:
    target = ScriptedTarget()
    played(target, session(0, turns=2, tokens=3))
    assert list(target.requests[0].prompt) == [0, 1, 2]
    assert list(target.requests[1].prompt) == [0, 1, 2, 1, 2, 1, 2, 3]  # prompt, answer, content 1 of three tokens
    assert [request.num_prompt_tokens for request in target.requests] == [3, 8]
    assert [request.wants_token_ids for request in target.requests] == [True, False]


def test_later_prompt_of_a_server_without_token_ids_has_as_many_planned_ones() -> None:
    target = ScriptedTarget(tells_ids=False)
    played(target, session(0, turns=2, tokens=3), session(1, turns=2, tokens=3))
    first, second = (list(request.prompt) for request in target.requests[2:])
    assert len(first) == len(second) == 3 + 2 + 3
    assert first[3:5] != second[3:5]


def test_chat_is_a_growing_list_of_messages() -> None:
    target = ScriptedTarget()
    played(target, session(7, turns=2), content=Content.CHAT)
    assert target.requests[1].prompt == (
        ChatMessage(role="user", content="c7000"),
        ChatMessage(role="assistant", content="1 2"),
        ChatMessage(role="user", content="c7001"),
    )


def agents() -> Session:
    """Return a session whose second turn is a sub-agent's, beside the third; the fourth waits for both."""

    def turn(content: int, think_s: float, after: tuple[int, ...], beginning: Beginning) -> Turn:
        segments = (Segment(content=content, num_tokens=2),)
        return Turn(segments=segments, num_output_tokens=2, think_s=think_s, after=after, beginning=beginning)

    anew = Beginning(0, 0)
    turns = (
        turn(10, 0.0, (), anew),
        turn(20, 1.0, (0,), anew),
        turn(30, 3.0, (0,), Beginning(0, 4)),
        turn(40, 0.5, (1, 2), Beginning(2, 5)),
    )
    return Session(index=0, kind="agent", start_s=0.0, turns=turns)


def test_sub_agent_is_sent_beside_its_parent_and_kept_texts_may_be_cut() -> None:
    target = ScriptedTarget(ttft_s=0.1, gap_s=0.01)
    records = played(target, agents())
    assert [(record.turn, record.due_s) for record in records] == [
        (0, 0.0),
        (1, pytest.approx(1.11)),
        (2, pytest.approx(3.11)),
        (3, pytest.approx(3.72)),
    ]
    prompts = [list(request.prompt) for request in target.requests]
    assert prompts == [[10, 11], [20, 21], [10, 11, 1, 2, 30, 31], [10, 11, 1, 2, 30, 40, 41]]
    assert [request.wants_token_ids for request in target.requests] == [True, False, True, False]
    (outcome,) = session_outcomes(records)
    assert outcome.is_complete
    assert outcome.waiting_s == pytest.approx(3 * 0.11)


def test_sub_agent_that_fails_ends_the_session_when_its_parents_request_has_ended() -> None:
    target = ScriptedTarget(ttft_s=5.0, failures={1: EngineFault("broken")})
    records = played(target, agents())
    assert [record.turn for record in records] == [0, 1, 2]


def test_text_that_is_kept_in_part_ends_with_a_whole_word() -> None:
    said = Said(9, array("I"), "The old tree stands.", "user")
    assert said.leading(2) == Said(2, array("I"), "The old", "user")


def test_late_session_of_an_open_loop_has_its_lag_and_one_of_a_closed_loop_none() -> None:
    target, told = ScriptedTarget(), Told()

    async def main() -> None:
        async with playing(target, told) as player:
            await asyncio.sleep(0.7)
            player.play(session(0, start_s=0.2))
            player.play(session(1), 3)

    in_virtual_time(main)
    assert [(record.due_s, record.lag_s) for record in told.records] == [
        pytest.approx(t) for t in ((0.2, 0.5), (0.7, 0))
    ]
    assert told.over == [None, 3]


def test_stop_cancels_and_records_running_requests_and_sends_nothing_more() -> None:
    target, told = ScriptedTarget(ttft_s=1.0), Told()

    async def main() -> None:
        async with playing(target, told) as player:
            player.play(session(0, start_s=0.0))
            player.play(session(1, start_s=5.0))
            player.play(session(2), 0)
            await asyncio.sleep(0.5)
            player.stop()
            player.play(session(3), 0)

    in_virtual_time(main)
    assert sorted((record.session, record.outcome) for record in told.records) == [
        (0, Outcome.CANCELLED),
        (2, Outcome.CANCELLED),
    ]
    assert [record.end_s for record in told.records] == pytest.approx([0.5, 0.5])
    assert target.num_cancelled == 2
