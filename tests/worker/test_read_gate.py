"""A worker does not read from a tier what it computes sooner, and notices when the tier is fast again."""

from common.timing import MIN_SAMPLES, LinkModel, StepModel
from tests.clock import ManualClock
from worker.read_gate import TRY_AGAIN_S, ReadGate
from worker.timing import WorkerTiming

TOKEN_BYTES = 1000.0
PIECE = 1_000_000


class Worker:
    """A gate over a worker that computes 1,000 tokens in 0.1 s, after 0 s of other prompts."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.backlog_s = 0.0
        self.timing = WorkerTiming(max_step_tokens=1 << 20, clock=self.clock)
        self.timing._prefill.model = StepModel(constant_s=0.0, per_prefill_token_s=1e-4)  # noqa: SLF001
        self.timing.change_budget(1 << 20)
        self.gate = ReadGate(
            lambda: self.timing, backlog_s=lambda: self.backlog_s, token_bytes=TOKEN_BYTES, clock=self.clock
        )

    def set_tier(self, bytes_per_s: float) -> None:
        """Let it have measured a rate."""
        self.timing._tier_read.model = LinkModel(latency_s=0.0, bytes_per_s=bytes_per_s, num_samples=99)  # noqa: SLF001
        self.timing.change_budget(1 << 20)

    def read(self, *, times: int, bytes_per_s: float) -> None:
        for _ in range(times):
            self.gate.note_read(PIECE, PIECE / bytes_per_s)

    def lets(self, num_tokens: int = 1000) -> bool:
        return self.gate.lets(num_tokens, 0)


def test_all_is_read_until_enough_reads_were_measured() -> None:
    worker = Worker()
    worker.read(times=MIN_SAMPLES - 1, bytes_per_s=1e6)
    assert worker.lets() and worker.lets()
    worker.read(times=MIN_SAMPLES, bytes_per_s=1e6)
    assert not worker.lets()


def test_slow_tier_is_read_where_the_line_is_longer_or_the_read_too_short_to_matter() -> None:
    worker = Worker()
    worker.set_tier(5e6)  # 0.2 s for 1,000 tokens
    assert worker.lets()  # the first one ever
    assert not worker.lets()
    worker.backlog_s = 0.2
    assert worker.lets()
    worker.backlog_s = 0.0
    assert not worker.lets()
    assert worker.lets(num_tokens=10)


def test_slow_tier_is_tried_again_now_and_then_and_more_often_once_it_is_fast() -> None:
    worker = Worker()
    worker.read(times=4 * MIN_SAMPLES, bytes_per_s=1e6)
    assert [worker.lets() for _ in range(3)] == [True, False, False]
    worker.clock.advance(TRY_AGAIN_S)
    assert [worker.lets() for _ in range(3)] == [True, False, False]
    worker.read(times=1, bytes_per_s=2e6)
    assert not worker.lets(), "still slower than computing"
    num_reads = 0
    worker.clock.advance(TRY_AGAIN_S)
    while worker.lets() and num_reads < 1000:
        worker.read(times=1, bytes_per_s=1e9)
        num_reads += 1
    assert num_reads == 1000
    assert worker.timing.model.tier_read_s(PIECE) < 0.1


def test_fast_tier_is_always_read() -> None:
    worker = Worker()
    worker.set_tier(1e9)
    assert all(worker.lets(num_tokens) for num_tokens in (1, 100, 10_000, 1_000_000))
