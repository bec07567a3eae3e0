"""What a diagnosis predicts for another worker, beside what the simulator finds with that worker."""

import itertools
import random
from array import array
from dataclasses import replace
from statistics import fmean

import pytest

from common.config import RouterConfig
from common.ids import WorkerId
from common.timing import StepShape
from kvrelay.v1 import worker_pb2
from measure.load.records import RequestRecord
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, SimRun
from router.diagnosis.changes import PromptTimes, one_more_decoder, one_more_reader
from router.diagnosis.pool import DiagnosedPool, DiagnosedWorker
from tests.measure.simulate.builders import MODEL, make_settings, make_shape

NUM_TOKENS = 512
PREFILL_S = MODEL.step_s(StepShape(num_prefill_tokens=NUM_TOKENS, num_prefill_pairs=NUM_TOKENS * (NUM_TOKENS + 1) // 2))
TIMING = replace(MODEL, decode=replace(MODEL.decode, num_samples=100))
NUMBERS = itertools.count()


def new_prompt(num_tokens: int = NUM_TOKENS) -> "array[int]":
    """Return a prompt that shares no prefix with another one."""
    return array("I", [next(NUMBERS)] * num_tokens)


def simulate(arrivals: list[Arrival], *, num_prefill: int = 1, num_decode: int = 1) -> SimRun:
    """Run prompts, each of which is one step of a prefill worker."""
    router = RouterConfig.model_validate(
        {"metrics_port": None, "local_prefill_max_tokens": 0, "policy": "predictive", "max_prefill_wait_s": 3600.0}
    )
    shape = make_shape(num_prefill, num_decode, num_blocks=4000, max_running=64)
    return run(shape, make_settings(router=router), arrivals)


def pool_of(finished: SimRun, name: str) -> DiagnosedPool:
    """Return a pool as a diagnosis of the whole run sees it."""
    num_tokens = sum(each.num_output_tokens - 1 for each in finished.requests)
    num_context = sum(
        (each.num_output_tokens - 1) * (each.num_prompt_tokens + each.num_output_tokens // 2)
        for each in finished.requests
    )
    workers = []
    for each in finished.workers:
        if each.worker_id.startswith(name):
            steps = worker_pb2.StepTotals(window_s=3600.0, covered_s=finished.end_s)
            if name == "prefill":
                steps.prefill_s = each.busy_s
            else:
                steps.decode_s, steps.num_decode_steps = each.busy_s, each.num_steps
                steps.num_decodes, steps.num_context_tokens = num_tokens, num_context
            status = worker_pb2.WorkerStatus(recent_steps=[steps])
            workers.append(
                DiagnosedWorker(worker_id=WorkerId(each.worker_id), status=status, timing=TIMING, block_size=16)
            )
    return DiagnosedPool(name=name, workers=tuple(workers), window_s=3600.0)


def times_of(finished: SimRun) -> PromptTimes:
    waits_s = waits_of(finished)
    return PromptTimes(waits_s=waits_s, prefills_s=[PREFILL_S] * len(waits_s), alone_s=PREFILL_S)


def waits_of(finished: SimRun) -> list[float]:
    return [max(0.0, (each.ttft_s or 0.0) - PREFILL_S - 0.001) for each in finished.requests]


def test_wait_for_another_prefill_worker_is_predicted_under_an_open_load() -> None:
    arrivals, at_s, draw = [], 0.0, random.Random(1)
    for _ in range(120):
        at_s += draw.expovariate(0.75 / PREFILL_S)
        arrivals.append(Arrival(at_s=at_s, prompt=new_prompt(), num_output_tokens=1))
    one, two = simulate(arrivals), simulate(arrivals, num_prefill=2)

    predicted = one_more_reader(pool_of(one, "prefill"), times_of(one)).predicted

    assert predicted is not None
    assert predicted.expected < 0.1 * predicted.now
    assert fmean(waits_of(two)) == pytest.approx(predicted.expected, rel=0.5)


def test_wait_with_another_prefill_worker_is_predicted_for_the_same_clients() -> None:
    def again(record: RequestRecord) -> list[Arrival]:
        return [ask(record.end_s)] if record.end_s < 3.0 else []

    def ask(at_s: float) -> Arrival:
        return Arrival(at_s=at_s, prompt=new_prompt(), num_output_tokens=1, follow_up=again)

    one, two = simulate([ask(0.0) for _ in range(8)]), simulate([ask(0.0) for _ in range(8)], num_prefill=2)

    predicted = one_more_reader(pool_of(one, "prefill"), times_of(one)).predicted

    assert predicted is not None
    assert predicted.low <= fmean(waits_of(two)) <= predicted.high


def test_step_with_another_decode_worker_is_predicted() -> None:
    arrivals = [Arrival(at_s=0.0, prompt=new_prompt(64), num_output_tokens=200) for _ in range(32)]
    one, two = simulate(arrivals), simulate(arrivals, num_decode=2)

    predicted = one_more_decoder(pool_of(one, "decode")).predicted

    assert predicted is not None
    found = pool_of(two, "decode").mean_decode_step_s
    assert predicted.low <= found <= predicted.high
