"""Faults of the simulated network: which messages are lost, repeated, late or held, and what a call sees of it."""

import asyncio
from contextvars import copy_context
from typing import Any

import grpc

from measure.simulate.faults import FaultRates, SeededFaults, Transmission
from measure.simulate.loop import PROCESS
from measure.simulate.wire import KEEPALIVE_S
from tests.measure.simulate.scene import LATENCY_S, Scene, failure_of, numbers, on_virtual_time

WELL = (Transmission.ONCE, 0.0)


@on_virtual_time(WELL, (Transmission.LOST, 0.0), (Transmission.DUPLICATED, 0.0), (Transmission.ONCE, 3.0))
async def test_faults_lose_repeat_and_delay_single_messages_of_a_stream_in_order(scene: Scene) -> None:
    call = scene.stream(numbers)(4)
    assert [message async for message in call] == [1, 1, 2, 3]
    assert scene.loop.time() == 2 * LATENCY_S + 3.0


async def assert_connection_breaks(scene: Scene) -> None:
    async def nothing(request: int, context: Any) -> None:
        return

    assert (await failure_of(anext(scene.stream(nothing)(0)))).code() is grpc.StatusCode.UNAVAILABLE
    assert scene.loop.time() >= KEEPALIVE_S


@on_virtual_time((Transmission.LOST, 0.0))
async def test_without_its_first_message_a_calls_connection_is_broken(scene: Scene) -> None:
    await assert_connection_breaks(scene)


@on_virtual_time(WELL, (Transmission.LOST, 0.0))
async def test_without_its_last_message_a_calls_connection_is_broken(scene: Scene) -> None:
    await assert_connection_breaks(scene)


def test_seeded_faults_come_at_their_rates_and_are_the_same_for_the_same_seed() -> None:
    rates = FaultRates(lose=0.1, repeat=0.2, delay=0.3, max_delay_s=2.0)

    def draws(seed: int) -> list[tuple[Transmission, float]]:
        faults = SeededFaults(rates, seed=seed, now_s=lambda: 0.0)
        return [faults.transmission("a", "b") for _ in range(4000)]

    transmissions = draws(1)
    assert transmissions == draws(1) != draws(2)
    assert 300 < sum(transmission is Transmission.LOST for transmission, _late_s in transmissions) < 500
    assert 650 < sum(transmission is Transmission.DUPLICATED for transmission, _late_s in transmissions) < 950
    late = [late_s for _transmission, late_s in transmissions if late_s]
    assert 1050 < len(late) < 1350 and max(late) <= 2.0


def test_seeded_faults_a_host_that_stalls_delays_all_that_it_sends_until_it_goes_on() -> None:
    now_s = 0.0
    faults = SeededFaults(FaultRates(stall=1.0, stall_s=3.0), seed=1, now_s=lambda: now_s)
    assert faults.transmission("a", "b") == (Transmission.ONCE, 3.0)
    faults.is_quiet = True
    assert faults.transmission("a", "b") == (Transmission.ONCE, 0.0)


@on_virtual_time()
async def test_cut_holds_what_arrives_in_its_direction_until_it_heals(scene: Scene) -> None:
    cuts, back = scene.network.cuts, ("server:1", "client:1")
    cuts.cut(back)
    cuts.cut(back)
    scene.loop.call_later(1.0, cuts.heal, back)
    scene.loop.call_later(2.0, cuts.heal, back)
    scene.loop.call_later(1.5, lambda: scene.told.append(cuts.parts("client:1", "server:1")))
    assert [message async for message in scene.stream(numbers)(3)] == [0, 1, 2]
    assert scene.loop.time() == 2.0
    assert scene.told == [True]
    assert not cuts.parts("client:1", "server:1")


@on_virtual_time()
async def test_message_of_a_sender_that_is_stopped_afterwards_arrives(scene: Scene) -> None:
    context = copy_context()
    context.run(PROCESS.set, "server")
    scene.server.context = context

    async def two(request: int, context: Any) -> None:
        await context.write(1)
        scene.loop.stop_process("server")
        await asyncio.sleep(0.1)
        await context.write(2)

    call = scene.stream(two)(0)
    assert await anext(call) == 1
    scene.loop.call_later(5.0, scene.loop.continue_process, "server")
    assert await anext(call) == 2
    assert scene.loop.time() > 5.0
    await anext(call, None)
