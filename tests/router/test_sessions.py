"""Sessions that a router recognizes, and what it learns from when they come back."""

import random

from common.block_hash import BlockHashes, hash_blocks, hash_root
from common.return_curve import ReturnCurve
from router.record import sessions as sessions_module
from router.record.sessions import MAX_TENANTS, MAX_TURNS, MAX_TURNS_OF_ALL, Session, Sessions
from tests.clock import ManualClock

ROOT = hash_root(model_fingerprint="test")


def _prompt(session: int, num_turns: int) -> BlockHashes:
    return hash_blocks([session, *range(num_turns)], root=ROOT, block_size=1)


def _like_s(curve: ReturnCurve | None, age_s: float) -> float:
    assert curve is not None
    return curve.like_s[sum(each <= age_s for each in curve.ages_s)]


def _serve(
    sessions: Sessions, clock: ManualClock, tenant: str, *, person_s: float | None, num: int, first: int = 0
) -> tuple[ReturnCurve | None, ReturnCurve | None]:
    """Let sessions come back 5 s after tool calls, of which every third turn has none; None: never after those.

    Returns the last curves of a turn with a call of a tool and of one without.
    """
    of_tools: ReturnCurve | None = None
    of_persons: ReturnCurve | None = None
    for number in range(first, first + num):
        for turn in range(6):
            prompt = _prompt(number, turn)
            session = sessions.begin(tenant, prompt)
            calls_tool = turn % 3 != 2
            curve = sessions.end(tenant, session, prompt, calls_tool=calls_tool)
            of_tools, of_persons = (curve, of_persons) if calls_tool else (of_tools, curve)
            if not calls_tool and person_s is None:
                break
            clock.advance(5.0 if calls_tool else person_s or 0.0)
    return of_tools, of_persons


def test_turn_before_a_person_is_like_an_older_one_and_one_before_a_tool_is_not() -> None:
    clock = ManualClock()
    of_tools, of_persons = _serve(Sessions(clock), clock, "a", person_s=300.0, num=100)
    assert _like_s(of_tools, 3.0) < _like_s(of_persons, 3.0)
    assert _like_s(of_persons, 3.0) > 5.0


def test_nothing_is_said_before_enough_turns_and_where_no_answer_calls_tools() -> None:
    clock = ManualClock()
    sessions = Sessions(clock)
    assert _serve(sessions, clock, "new", person_s=300.0, num=5) == (None, None)
    for number in range(200):
        for turn in range(3):
            prompt = _prompt(number, turn)
            assert sessions.end("chats", sessions.begin("chats", prompt), prompt, calls_tool=False) is None
            clock.advance(60.0)


def test_what_is_learned_of_one_tenant_says_nothing_of_another() -> None:
    clock = ManualClock()
    sessions = Sessions(clock)
    _serve(sessions, clock, "a", person_s=300.0, num=100)
    prompt = _prompt(99, 6)  # continues a session of the other tenant
    session = sessions.begin("b", prompt, name="x")
    assert session.mean_log_s is None
    assert sessions.end("b", session, prompt, calls_tool=True) is None
    assert sessions.begin("a", _prompt(7, 1), name="x") is not session


def test_tenant_whose_turns_all_come_back_at_once_gets_no_more_room_than_by_age() -> None:
    clock, rng = ManualClock(), random.Random(1)
    sessions = Sessions(clock)
    curve = None
    for number in range(100):
        for turn in range(5):
            prompt = _prompt(number, turn)
            curve = sessions.end("a", sessions.begin("a", prompt), prompt, calls_tool=True)
            clock.advance(0.1 + rng.random() * 8)
    assert curve is not None
    for age_s in (0.5, 1.2, 3.0, 6.0):
        assert _like_s(curve, age_s) >= age_s / 2


def test_request_that_continues_a_turn_is_of_its_session_also_without_a_name() -> None:
    clock = ManualClock()
    sessions = Sessions(clock)
    first = sessions.begin("a", _prompt(1, 3))
    sessions.end("a", first, _prompt(1, 3), calls_tool=True)
    clock.advance(8.0)
    assert sessions.begin("a", _prompt(1, 9)) is first
    assert first.mean_log_s == 3.0
    assert sessions.begin("a", _prompt(2, 9)) is not first


def test_named_session_goes_on_after_its_context_was_compacted() -> None:
    sessions = Sessions(ManualClock())
    session = sessions.begin("a", _prompt(1, 3), name="mine")
    sessions.end("a", session, _prompt(1, 3), calls_tool=True)
    assert sessions.begin("a", _prompt(2, 1), name="mine") is session


def test_tables_are_bounded_by_tenant_and_by_the_number_of_tenants() -> None:
    sessions = Sessions(ManualClock())
    for number in range(MAX_TURNS + 50):
        prompt = _prompt(number, 0)
        sessions.end("many", sessions.begin("many", prompt, name=str(number)), prompt, calls_tool=False)
    assert sessions.num_turns("many") == MAX_TURNS
    for number in range(MAX_TENANTS + 10):
        sessions.begin(str(number), _prompt(0, 0))
    assert sessions.num_tenants == MAX_TENANTS
    assert sessions.num_turns("many") == 0


def test_tenant_with_many_turns_and_names_displaces_nothing_of_another() -> None:
    sessions, prompt = Sessions(ManualClock()), _prompt(1, 3)
    first = sessions.begin("a", prompt, name="mine")
    sessions.end("a", first, prompt, calls_tool=True)
    for number in range(MAX_TURNS + 50):
        other = _prompt(number, 0)
        sessions.end("b", sessions.begin("b", other, name=str(number)), other, calls_tool=False)
    assert sessions.begin("a", _prompt(1, 9)) is first
    assert sessions.begin("a", _prompt(2, 1), name="mine") is first


def test_each_of_many_tenants_has_an_equal_share_of_the_turns() -> None:
    sessions = Sessions(ManualClock())
    share = MAX_TURNS_OF_ALL // MAX_TENANTS
    for tenant in range(MAX_TENANTS):
        sessions.begin(str(tenant), _prompt(0, 0))
    for number in range(share + 10):
        prompt = _prompt(number, 0)
        sessions.end("0", sessions.begin("0", prompt), prompt, calls_tool=True)
    assert sessions.num_turns("0") == share


def test_turns_that_are_too_old_are_given_up_a_few_at_a_time() -> None:
    clock = ManualClock()
    sessions = Sessions(clock)
    for number in range(1000):
        prompt = _prompt(number, 0)
        sessions.end("a", sessions.begin("a", prompt), prompt, calls_tool=True)
    clock.advance(sessions_module.MAX_WAIT_S + 1)
    sessions.begin("a", _prompt(5000, 0))
    assert 900 < sessions.num_turns("a") < 1000
    for _ in range(100):
        sessions.begin("a", _prompt(5000, 0))
    assert sessions.num_turns("a") == 0


def test_turns_that_never_come_back_are_given_up_and_count() -> None:
    clock = ManualClock()
    sessions = Sessions(clock)
    _serve(sessions, clock, "a", person_s=None, num=60)
    clock.advance(sessions_module.MAX_WAIT_S + 1)
    of_tools, of_persons = _serve(sessions, clock, "a", person_s=None, num=60, first=1000)
    assert sessions.num_turns("a") <= 61
    assert _like_s(of_persons, 1.0) > _like_s(of_tools, 1.0)


def test_pace_follows_the_latest_returns() -> None:
    session = Session()
    for age_s in (2.0, 2.0, 64.0, 64.0, 64.0, 64.0, 64.0, 64.0, 64.0, 64.0):
        session.note_return(age_s)
    assert session.mean_log_s is not None
    assert 5.0 < session.mean_log_s < 6.0
