import io

from rich.console import Console

from measure.load.live import LiveView
from measure.load.records import Outcome, PoolSample
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetInfo, TargetSpec
from measure.workload.sessions import Content, Workload
from tests.clock import ManualClock
from tests.measure.load.made_runs import make_failure, make_request, make_worker

SPEC = LoadSpec(
    name="chats",
    target=TargetSpec(url="fake"),
    workload=Workload(name="chats", content=Content.TOKENS, streams=(), duration_s=60.0),
)
INFO = TargetInfo(
    system="kvrelay 0", model="fake", max_model_len=None, vocab_size=None, num_workers={"prefill": 1, "decode": 2}
)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=is_terminal, color_system=None, markup=False)


async def test_live_view_on_a_pipe_prints_a_line_of_the_last_ten_seconds() -> None:
    pipe, clock = console(is_terminal=False), ManualClock()
    with LiveView(pipe, clock) as view:
        view.started(SPEC, INFO)
        view.record(make_request(0, due_s=1.0, ttft_s=9.0))  # ended too long ago
        view.record(make_request(1, due_s=19.0, ttft_s=0.2, gaps_s=[0.05]))
        view.record(make_request(2, due_s=20.0, ttft_s=0.4, gaps_s=[0.07]))
        view.record(make_failure(3, Outcome.REFUSED, due_s=19.0))
        workers = (
            make_worker("p0", "prefill", num_waiting=4),
            make_worker("d0", "decode", num_running=2, num_used_blocks=30),
            make_worker("d1", "decode", num_running=1, num_used_blocks=50),
        )
        view.sample(PoolSample(at_s=20.0, num_queued=7, workers=workers))
        clock.advance(22.0)
        view.show()
    first, line = printed(pipe).splitlines()
    assert first.startswith("chats: kvrelay 0, fake (1 prefill, 2 decode); open loop for 60 s; Ctrl-C ends it")
    assert line == (
        "22 s of 60 s  4 requests ended, 1 of them failed · 0.3/s, 0.4 tokens/s; TTFT p50 300 ms, p99 398 ms;"
        " TPOT p50 60 ms, p99 69.8 ms; 7 in line; prefill 0 running, 4 waiting, KV 0 %; decode 3 running, KV 40 %"
    )


async def test_live_view_on_a_terminal_tells_how_far_it_is_and_when_it_only_waits() -> None:
    terminal, clock = console(is_terminal=True), ManualClock()
    with LiveView(terminal, clock) as view:
        view.started(SPEC, INFO)
        clock.advance(30.0)
        view.show()
        assert "30 s of 60 s" in printed(terminal)
        assert "waiting for the last answers" not in printed(terminal)
        clock.advance(31.0)
        view.show()
    assert "61 s of 60 s, waiting for the last answers" in printed(terminal)


def test_live_view_before_the_start_shows_nothing() -> None:
    pipe = console(is_terminal=False)
    with LiveView(pipe, ManualClock()) as view:
        view.show()
    assert printed(pipe) == ""
