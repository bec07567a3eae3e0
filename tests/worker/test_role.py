"""A worker that changes its role: what stays, what is refused, and when."""

import asyncio
from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError, Overloaded, StaleEpoch
from common.ids import mint_handoff_id
from common.kv_events import KvEvents, decode_events
from common.wire_names import ROLE_NAMES
from kvrelay.v1 import prefill_pb2, worker_pb2, worker_pb2_grpc
from tests.builders import expected_tokens, make_request
from tests.rpc import answer_of
from tests.trust import as_controller
from tests.worker.calls import error_of, messages, spec_of, until_prefilled
from tests.worker.cluster import Pool, core_of, held_steps, running_pool, stop_lease_clock, watched
from tests.worker.prefixes import PREFIX_BLOCKS, outcomes, prompt, warm_pool, where
from worker.metrics import RuntimeCollector
from worker.prefix_pull import PullOutcome

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE


def service(pool: Pool, name: str) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(as_controller(pool.workers[name].address))


async def set_role(pool: Pool, name: str, role: Any, *, epoch: int | None = None, grace_s: float = 0.0) -> int:
    """Ask a worker for a role and return its epoch. Raises KvrelayError."""
    if epoch is None:
        epoch = pool.workers[name].runtime.epoch
    request = worker_pb2.SetRoleRequest(role=role, epoch=epoch, grace_s=grace_s)
    return int((await answer_of(service(pool, name).SetRole(request))).epoch)


async def test_flipped_worker_finds_its_prefix_and_serves_it_to_others() -> None:
    async with warm_pool() as pool:
        await set_role(pool, "prefill-0", DECODE)
        flipped = pool.pair("prefill-1", "prefill-0")
        answer = await flipped.generate_locally(prompt(2))
        assert (answer.num_cached, answer.num_pulled) == (40, 0)
        pulled = await pool.pair("prefill-1", "decode-0").generate(prompt(3), where(pool.workers["prefill-0"]))
        assert pulled.num_pulled == 40
        await flipped.generate(prompt(4))


async def test_flip_there_and_back_keeps_the_cache_and_serves_both_kinds_of_calls() -> None:
    async with warm_pool() as pool:
        for role in (DECODE, PREFILL):
            await set_role(pool, "prefill-0", role)
        answer = await pool.pair("prefill-0", "decode-0").generate(prompt(2))
        assert answer.num_cached == 40


async def test_flip_refuses_calls_handoffs_and_pulls_of_the_old_epoch() -> None:
    async with warm_pool() as pool:
        old = pool.workers["prefill-0"].runtime.epoch
        pulled_before = where(pool.workers["prefill-0"])
        epoch = await set_role(pool, "prefill-0", DECODE)
        assert epoch == pool.workers["prefill-0"].runtime.epoch != old
        spec = spec_of(make_request(range(20)))
        late_prefill = prefill_pb2.PrefillRequest(sequence=spec, handoff_id="x", epoch=old)
        pair = pool.pair("prefill-0", "decode-0")
        assert isinstance(await error_of(pair.prefill_stub.Prefill(late_prefill)), StaleEpoch)
        handoff = pair.handoff(mint_handoff_id())
        handoff.prefill_epoch = old
        assert isinstance(await error_of(pair.open_decode_of(spec, handoff=handoff)), StaleEpoch)
        await pool.pair("prefill-1", "decode-0").generate(prompt(2), pulled_before)
        assert outcomes(pool.workers["prefill-1"]) == {PullOutcome.STALE: 1}


async def test_flip_ends_subscriptions_and_new_ones_start_with_everything_cached() -> None:
    async with warm_pool() as pool, watched(pool, "prefill-0") as before:
        first = await before.read()
        await set_role(pool, "prefill-0", DECODE)
        assert isinstance(await error_of(before), StaleEpoch)
        async with watched(pool, "prefill-0") as after:
            again = await after.read()
        assert (again.seq, again.epoch) == (0, pool.workers["prefill-0"].runtime.epoch)
        events: KvEvents = decode_events(again.kv_events)
        assert events.is_snapshot
        assert set(events.stored) == set(decode_events(first.kv_events).stored)
        assert len(events.stored) >= PREFIX_BLOCKS


async def test_flip_adopts_the_limits_of_the_other_pool() -> None:
    limits = {"max_step_tokens": 24, "max_running": 5, "max_waiting": 7}
    async with running_pool({"prefill-0": {"decode_pool": limits}}) as pool:
        runtime = pool.workers["prefill-0"].runtime
        await set_role(pool, "prefill-0", DECODE)
        found = await runtime.engine.call(lambda core: core_of(core).scheduler.limits)
        assert (found.max_step_tokens, found.max_running, found.max_waiting) == (24, 5, 7)
        assert runtime.timing.model.max_step_tokens == 24
        described = await service(pool, "prefill-0").DescribeWorker(worker_pb2.DescribeWorkerRequest())
        assert (described.role, described.epoch) == (DECODE, runtime.epoch)
        labels = {
            tuple(sample.labels.values())[:2] for each in RuntimeCollector(runtime).collect() for sample in each.samples
        }
        assert labels == {("prefill-0", "decode")}
        await set_role(pool, "prefill-0", PREFILL)
        assert (await runtime.engine.call(lambda core: core_of(core).scheduler.limits)).max_step_tokens == 32


async def test_flip_of_a_worker_with_a_running_answer_is_refused_and_changes_nothing() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {}}) as pool:
        pair, before = pool.pair("prefill-0", "decode-0"), pool.workers["decode-0"].runtime.epoch
        request = make_request(range(20), max_tokens=200, ignore_eos=True)
        with held_steps(pair.decode):
            running = pair.open_decode(request, None)
            await running.read()
            with pytest.raises(Overloaded, match="decode-0 still has 1 calls"):
                await set_role(pool, "decode-0", PREFILL)
            assert (pool.workers["decode-0"].runtime.epoch, pool.workers["decode-0"].role) == (before, "decode")
            running.cancel()


async def test_flip_waits_for_a_handoff_without_a_puller() -> None:
    async with running_pool({"prefill-0": {"lease_ttl_s": 0.2}}) as pool:
        pair, runtime = pool.pair("prefill-0", "prefill-0"), pool.workers["prefill-0"].runtime
        clock = stop_lease_clock(pair.prefill)
        prefill = pair.open_prefill(make_request(range(20)), mint_handoff_id())
        await until_prefilled(prefill)
        with pytest.raises(Overloaded, match="1 handoffs"):
            await set_role(pool, "prefill-0", DECODE)
        flip = asyncio.create_task(set_role(pool, "prefill-0", DECODE, grace_s=60))
        assert not (await asyncio.wait((flip,), timeout=0.1))[0]
        clock.advance(0.3)
        await flip
        assert (runtime.handoffs.num_expired, runtime.role) == (1, DECODE)


async def test_flip_happens_as_soon_as_the_last_answer_ends() -> None:
    async with running_pool({"prefill-0": {}, "decode-0": {"step_s": 0.002}}) as pool:
        pair = pool.pair("prefill-0", "decode-0")
        request = make_request(range(20), max_tokens=40, ignore_eos=True)
        running = pair.open_decode(request, None)
        await running.read()
        flip = asyncio.create_task(set_role(pool, "decode-0", PREFILL, grace_s=60))
        tokens = [token.token_id async for message in messages(running) for token in message.tokens.tokens]
        await flip
        assert tokens == expected_tokens(request)
        assert pool.workers["decode-0"].role == "prefill"


async def test_setting_the_role_that_it_has_changes_nothing_at_any_epoch() -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        epoch = pool.workers["prefill-0"].runtime.epoch
        flipped = await set_role(pool, "prefill-0", DECODE)
        assert await set_role(pool, "prefill-0", DECODE, epoch=epoch) == flipped, "the answer may have been lost"
        with pytest.raises(StaleEpoch):
            await set_role(pool, "prefill-0", PREFILL, epoch=epoch)
        assert pool.workers["prefill-0"].runtime.epoch == flipped


async def test_two_equal_flips_at_once_are_one() -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        epoch = pool.workers["prefill-0"].runtime.epoch
        first, second = await asyncio.gather(
            *(set_role(pool, "prefill-0", DECODE, epoch=epoch, grace_s=60) for _ in range(2))
        )
        assert first == second != epoch


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": 0}, "role"),
        ({"role": 77}, "role"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"grace_s": float("nan")}, "grace_s"),
        ({"grace_s": 1e9}, "grace_s"),
    ],
)
async def test_set_role_with_a_bad_value_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    async with running_pool({"prefill-0": {}}) as pool:
        with pytest.raises(InvalidRequest) as caught:
            await set_role(pool, "prefill-0", **({"role": DECODE} | changes))
        assert caught.value.field == field
        assert ROLE_NAMES[pool.workers["prefill-0"].runtime.role] == "prefill"


async def test_flip_between_pools_of_different_workers_is_refused_naming_the_key() -> None:
    async with running_pool({"prefill-0": {"decode_pool": {"threads": 3}}}) as pool:
        with pytest.raises(KvrelayError, match=r"pools\.prefill\.threads is auto, pools\.decode\.threads is 3"):
            await set_role(pool, "prefill-0", DECODE)
