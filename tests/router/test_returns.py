"""Workers are told when sessions come back to the blocks of turns that have ended."""

import asyncio

import pytest

from common.block_hash import BlockHashes
from common.errors import WorkerLost
from common.return_curve import ReturnCurve
from kvrelay.v1 import worker_pb2
from router.fleet.return_notes import MAX_WAITING, ReturnNotes
from router.record.returns import ReturnTimes, TurnKind
from router.record.sessions import Session, Sessions
from tests.router.fake_worker import hashes_of, pair
from tests.router.fakes import Reply, config_with, make_request, running_cluster

CURVE = ReturnCurve(like_s=(1.0, 30.0), ages_s=(60.0,))


def _note(number: int) -> worker_pb2.ExpectedReturn:
    return worker_pb2.ExpectedReturn(ends=[number.to_bytes(16)], like_s=[1.0])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[worker_pb2.ExpectedReturn]:
    """Return the hints for workers, of a router that knows enough to give some."""
    notes: list[worker_pb2.ExpectedReturn] = []
    monkeypatch.setattr(ReturnNotes, "put", lambda _notes, note: notes.append(note))
    monkeypatch.setattr(ReturnTimes, "curve", lambda _times, _kind: CURVE)
    return notes


async def test_sessions_cost_nothing_and_workers_are_told_nothing_where_age_alone_decides(
    told: list[worker_pb2.ExpectedReturn], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = Sessions.begin

    def noted(sessions: Sessions, tenant: str, prompt: BlockHashes, *, name: str = "") -> Session:
        begun.append(name)
        return begin(sessions, tenant, prompt, name=name)

    monkeypatch.setattr(Sessions, "begin", noted)
    request = make_request(10)
    request.session_id = "mine"
    for retention in ("age", "sessions"):
        async with running_cluster(*pair(), config=config_with(retention=retention)) as cluster:
            await cluster.read(cluster.inference.Generate(request), Reply())
        assert bool(told) == (retention == "sessions")
        assert begun == (["mine"] if retention == "sessions" else [])


async def test_workers_that_keep_a_turn_are_told_with_its_end_and_others_of_nothing(
    told: list[worker_pb2.ExpectedReturn], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[TurnKind] = []

    def curve(_times: ReturnTimes, kind: TurnKind) -> ReturnCurve:
        kinds.append(kind)
        return CURVE

    monkeypatch.setattr(ReturnTimes, "curve", curve)
    prefill, decode = pair()
    async with running_cluster(prefill, decode, config=config_with(retention="sessions")) as cluster:
        request = make_request(10)
        request.session_id = "s" * 1000
        await cluster.read(cluster.inference.Generate(request), Reply())
        (asked,) = prefill.requests
        several = make_request(10)
        several.sampling.n = 2
        await cluster.read(cluster.inference.Generate(several), Reply())
    assert kinds == [TurnKind(calls_tool=False, pace=-1)]
    assert told
    for note in told:
        assert note.ends[-1] == hashes_of(asked.sequence)[-1]
        assert (tuple(note.like_s), tuple(note.ages_s)) == (CURVE.like_s, CURVE.ages_s)


async def test_hints_for_a_slow_worker_wait_together_and_the_oldest_go() -> None:
    sent: asyncio.Queue[worker_pb2.ExpectReturnsRequest] = asyncio.Queue()
    answered = asyncio.Event()

    async def send(request: worker_pb2.ExpectReturnsRequest) -> None:
        sent.put_nowait(request)
        await answered.wait()

    notes = ReturnNotes(send)
    notes.put(_note(0))
    assert len((await sent.get()).returns) == 1
    for number in range(1, MAX_WAITING + 10):
        notes.put(_note(number))
    answered.set()
    rest = (await sent.get()).returns
    assert len(rest) == MAX_WAITING
    assert rest[-1] == _note(MAX_WAITING + 9)
    await notes.aclose()


async def test_worker_that_takes_no_hints_gets_later_ones_all_the_same() -> None:
    sent: asyncio.Queue[worker_pb2.ExpectReturnsRequest] = asyncio.Queue()

    async def send(request: worker_pb2.ExpectReturnsRequest) -> None:
        sent.put_nowait(request)
        raise WorkerLost("it is gone")

    notes = ReturnNotes(send)
    for number in range(2):
        notes.put(_note(number))
        assert (await sent.get()).returns[0] == _note(number)
    await notes.aclose()
