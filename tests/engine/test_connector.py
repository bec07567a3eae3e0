"""The connector's bookkeeping and pages, without vLLM: what is offered, what is pulled, which bytes are a block's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from common.ids import BlockId, Epoch, HandoffId
from engine.vllm.connector.orders import RankAddress, Source, StepOrders
from engine.vllm.connector.pages import DeviceCopies, HostCopies, RankPages, RingFull, copies_of, page_tensors, shape_of
from engine.vllm.connector.scheduling import OrderBook, ScheduledStep
from engine.weights.config import UnsupportedModel

BLOCK_SIZE = 4
NUM_BLOCKS = 6
RANK = RankAddress(address="127.0.0.1:1", epoch=Epoch((1 << 62) + 1))
SOURCE = Source(handoff_id=HandoffId("ho-1"), ranks=(RANK,), num_pullers=1)
PULL = SOURCE.to_params()
OFFER = {"do_remote_decode": True}


@dataclass
class Request:
    """A request of vLLM."""

    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(10)))
    request_id: str = "r"
    prompt_embeds: Any = None
    mm_features: Any = ()
    lora_request: Any = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0


def book(kv_role: str = "kv_both", fingerprint: str = "model") -> OrderBook:
    made = OrderBook(fingerprint=fingerprint, block_size=BLOCK_SIZE, kv_role=kv_role)
    made.set_ranks([RANK])
    return made


def step(orders: OrderBook, request: Request, num_tokens: int, block_ids: Sequence[int] = (7, 3, 5, 9)) -> StepOrders:
    """Schedule tokens of a request, as vLLM does; returns the orders of the step."""
    taken = orders.take_orders(
        ScheduledStep(
            num_tokens={request.request_id: num_tokens}, block_ids_of=lambda _request_id: block_ids, preempted=()
        )
    )
    request.num_computed_tokens += num_tokens
    return taken


NO_STEP = ScheduledStep(num_tokens={}, block_ids_of=lambda _request_id: (), preempted=())


def test_an_offer_begins_with_its_request_and_grows_by_whole_blocks() -> None:
    prefill, request = book(), Request(kv_transfer_params=OFFER)
    prefill.expect(request)
    first, second, last = (step(prefill, request, num_tokens) for num_tokens in (3, 3, 4))
    assert [each.prompt.num_tokens for each in first.offers] == [10]
    assert first.chunks == ()
    assert [(each.block_ids, each.num_tokens) for each in (*second.chunks, *last.chunks)] == [((7,), 6), ((3, 5), 10)]
    stays, params = prefill.finished(request)
    assert stays
    assert Source.from_params(params, num_ranks=1) == replace(SOURCE, handoff_id=first.offers[0].wish.handoff_id)
    assert prefill.take_orders(NO_STEP).ended == ("r",)
    assert prefill.take_orders(NO_STEP) == StepOrders(
        preempted=(), offers=(), chunks=(), ended=(), pulls=(), is_idle=True
    )


def test_a_preempted_prefill_goes_on_where_its_offer_was() -> None:
    prefill, request = book(), Request(kv_transfer_params=OFFER)
    prefill.expect(request)
    step(prefill, request, 9)
    request.num_computed_tokens = 0
    preempted = prefill.take_orders(replace(NO_STEP, preempted=("r", "another")))
    again, last = step(prefill, request, 8, (1, 2, 4)), step(prefill, request, 2, (1, 2, 4))
    assert (preempted.preempted, again.chunks) == (("r",), ())
    assert [each.block_ids for each in last.chunks] == [(4,)]


def test_a_prefill_that_ends_early_keeps_its_pages_until_they_are_copied() -> None:
    prefill, request = book(), Request(kv_transfer_params=OFFER)
    prefill.expect(request)
    step(prefill, request, 9)
    assert prefill.finished(request) == (True, None)
    assert prefill.take_orders(NO_STEP).ended == ("r",)


def test_the_caller_may_choose_the_id_of_a_handoff() -> None:
    prefill = book()
    prefill.expect(Request(kv_transfer_params=OFFER | {"handoff_id": "mine"}))
    prefill.expect(Request(kv_transfer_params=OFFER | {"handoff_id": "x" * 129}, request_id="too long"))
    prefill.expect(Request(kv_transfer_params=OFFER | {"handoff_id": 7}, request_id="no text"))
    assert [each.wish.handoff_id for each in prefill.take_orders(NO_STEP).offers] == ["mine"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": object()},
        {"mm_features": (object(),)},
        {"prompt_token_ids": None},
        {"kv_transfer_params": None},
    ],
)
def test_what_another_server_could_not_use_is_not_offered(changes: dict[str, Any]) -> None:
    prefill, request = book(), Request(**({"kv_transfer_params": OFFER} | changes))
    prefill.expect(request)
    assert prefill.finished(request) == (False, None)
    assert prefill.take_orders(NO_STEP).offers == ()


def test_a_pull_fills_the_pages_that_are_not_cached_here_once() -> None:
    decode, request = book(), Request(kv_transfer_params=PULL)
    decode.expect(request)
    assert decode.num_matched(request, 4) == 6
    decode.allocated(request, [2, 8, 6, 1], 6)
    assert decode.num_matched(request, 4) == 0, "after a failed pull the prompt is computed here"
    decode.allocated(request, [2, 8, 6, 1], 0)
    (pull,) = decode.take_orders(NO_STEP).pulls
    assert (pull.first_block, pull.block_ids) == (1, (2, 8, 6))
    assert pull.source == SOURCE


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        PULL | {"num_pullers": 3},
        PULL | {"ranks": []},
        PULL | {"ranks": [{"address": "127.0.0.1:1", "epoch": "one"}]},
        PULL | {"ranks": 7},
    ],
)
def test_params_that_name_no_pages_are_logged_and_the_prompt_computed(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    decode, request = book(), Request(kv_transfer_params=params)
    decode.expect(request)
    assert decode.num_matched(request, 0) == 0
    assert "cannot pull the prompt of r" in caplog.text


def test_a_prompt_that_is_pulled_is_not_offered_as_well() -> None:
    both, request = book(), Request(kv_transfer_params=PULL | OFFER)
    both.expect(request)
    assert both.num_matched(request, 0) == 10
    assert both.finished(request) == (False, None)


def test_servers_keep_to_their_roles() -> None:
    producer, consumer = book("kv_producer"), book("kv_consumer")
    producer.expect(Request(kv_transfer_params=PULL))
    assert producer.num_matched(Request(), 0) == 0
    consumer.expect(Request(kv_transfer_params=OFFER))
    assert consumer.take_orders(NO_STEP).offers == ()


def test_a_prompts_name_covers_its_tail_its_salt_and_the_model() -> None:
    def name(model: str = "model", **changes: Any) -> bytes:
        prefill = book(fingerprint=model)
        prefill.expect(Request(kv_transfer_params=OFFER, **changes))
        return prefill.take_orders(NO_STEP).offers[0].prompt.last_hash

    others = [
        name(prompt_token_ids=[*range(9), 7]),
        name(prompt_token_ids=[1, *range(1, 10)]),
        name(cache_salt="salt"),
        name(model="other"),
    ]
    assert len({name(), *others}) == 5
    assert name() == name()


def standard() -> dict[str, torch.Tensor]:
    whole = torch.randn(2, NUM_BLOCKS, 3, BLOCK_SIZE, 10, dtype=torch.float32).to(torch.bfloat16)
    return {"layer.0": whole[0], "layer.1": whole[1]}


def blocks_in_parts() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(NUM_BLOCKS * 2, 3, BLOCK_SIZE // 2, 10) for i in range(2)}


def tokens_before_heads() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(NUM_BLOCKS, BLOCK_SIZE, 3, 10).movedim(1, 2) for i in range(2)}


def latent() -> dict[str, torch.Tensor]:
    return {
        "layer.0": torch.randn(NUM_BLOCKS, 1, BLOCK_SIZE, 18),
        "layer.1": torch.randn(NUM_BLOCKS, 1, BLOCK_SIZE, 18),
    }


def shared() -> dict[str, torch.Tensor]:
    first = torch.randn(NUM_BLOCKS, 1, BLOCK_SIZE, 8)
    return {"layer.0": first, "layer.1": first}


@pytest.mark.parametrize("copies", [HostCopies, DeviceCopies])
@pytest.mark.parametrize("make", [standard, blocks_in_parts, tokens_before_heads, latent, shared])
def test_blocks_keep_their_elements_in_every_layout(
    make: Callable[[], dict[str, torch.Tensor]], copies: type[HostCopies | DeviceCopies]
) -> None:
    layers = page_tensors(make(), NUM_BLOCKS)
    shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint="f")
    before = [layer.clone() for layer in layers]
    pages = RankPages(copies(layers), shape, num_slots=6)
    heads = range(layers[0].shape[1])
    slots = pages.take_slots(2 * len(heads))
    pages.stage([BlockId(1), BlockId(4)], heads, slots)
    data = pages.read_blocks(slots)
    assert data.nbytes == 2 * len(heads) * shape.block_bytes
    pages.write_blocks(pages.pieces([BlockId(5), BlockId(0)], heads), data)
    pages.write_blocks(pages.pieces([BlockId(2)], heads[-1:]), pages.read_blocks(slots[len(heads) - 1 : len(heads)]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[5], old[1])
        assert torch.equal(layer[0], old[4])
        assert torch.equal(layer[2, -1], old[1, -1])
        assert torch.equal(layer[2, :-1], old[2, :-1])
        assert torch.equal(layer[[1, 3, 4]], old[[1, 3, 4]])


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"a": [torch.zeros(NUM_BLOCKS, 2)]}, "layer a: it keeps a state"),
        ({"a": torch.zeros(NUM_BLOCKS + 1, 1, 2, 3)}, "are not 6 blocks of heads"),
        ({"a": torch.zeros(2, NUM_BLOCKS, 1, 2, 3)}, "are not 6 blocks of heads"),
        ({"a": torch.zeros(NUM_BLOCKS, 1, 2, 4), "b": torch.zeros(NUM_BLOCKS, 1, 2, 8)}, "layers of different shapes"),
        ({}, "there are none"),
    ],
)
def test_layers_that_cannot_be_handed_over_are_refused_by_name(layers: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        page_tensors(layers, NUM_BLOCKS)


def test_a_full_ring_says_so_and_keeps_its_slots() -> None:
    layers = page_tensors(latent(), NUM_BLOCKS)
    shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint="f")
    pages = RankPages(copies_of(layers), shape, num_slots=3)
    slots = pages.take_slots(2)
    with pytest.raises(RingFull, match="2 pieces do not fit into the 1 of 3"):
        pages.take_slots(2)
    pages.free_slots(slots)
    assert len(pages.take_slots(3)) == 3
