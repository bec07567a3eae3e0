"""Whole runs: real generator processes against real servers in this process."""

from loadtest.records import Outcome, PoolSample, RequestRecord
from loadtest.run import run_load
from loadtest.spec import LoadSpec, RunStart
from loadtest.targets.interface import TargetSpec
from tests.e2e.in_process import running_system
from tests.loadtest.workloads import closed_loop, open_loop, workload


class Watching:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.starts: list[RunStart] = []
        self.records: list[RequestRecord] = []
        self.samples: list[PoolSample] = []

    def started(self, start: RunStart) -> None:
        self.starts.append(start)

    def record(self, request: RequestRecord) -> None:
        self.records.append(request)

    def sample(self, sample: PoolSample) -> None:
        self.samples.append(sample)


async def test_run_load_against_our_grpc_api_measures_every_turn_of_open_and_closed_loops() -> None:
    streams = (open_loop([0.0, 0.05, 0.1], turns=2), closed_loop(4, 2, first_index=10))
    observer = Watching()
    async with running_system() as system:
        spec = LoadSpec(name="small", target=TargetSpec(url=system.address), workload=workload(*streams))
        run = await run_load(spec, observer)
        await system.until_idle()

    asked = [(session, turn) for session in range(3) for turn in range(2)] + [(session, 0) for session in range(10, 14)]
    assert sorted((r.session, r.turn) for r in run.requests) == asked
    assert {r.outcome for r in run.requests} == {Outcome.COMPLETED}
    assert all(r.num_output_tokens == r.num_wanted_tokens for r in run.requests)
    assert sorted(r.session for r in observer.records) == sorted(r.session for r in run.requests)
    assert run.info.num_workers == {"prefill": 1, "decode": 1}
    assert run.samples and {worker.role for worker in run.samples[0].workers} == {"prefill", "decode"}
    later = [r for r in run.requests if r.turn == 1]
    assert all(r.num_prompt_tokens == 4 + 2 + 4 for r in later)  # prompt, answer, prompt
    assert all(r.server.request_id and r.server.decode_worker for r in run.requests)
