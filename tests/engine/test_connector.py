"""The connector's bookkeeping and pages, without vLLM: what is offered, what is pulled, which bytes are a block's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from common.ids import BlockId, Epoch, HandoffId
from engine.model.config import UnsupportedModel
from engine.vllm.connector.orders import RankAddress, Source
from engine.vllm.connector.pages import DeviceCopies, HostCopies, RankPages, RingFull, copies_of, page_tensors, shape_of
from engine.vllm.connector.scheduling import OrderBook

BLOCK_SIZE = 4
NUM_BLOCKS = 6
RANK = RankAddress(address="127.0.0.1:1", epoch=Epoch((1 << 62) + 1))
PULL = Source(handoff_id=HandoffId("ho-1"), ranks=(RANK,)).to_params()
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
    num_computed_tokens: int = 10
    reason: str = "length"

    def get_finished_reason(self) -> str:
        return self.reason


def book(kv_role: str = "kv_both", fingerprint: str = "model") -> OrderBook:
    made = OrderBook(fingerprint=fingerprint, block_size=BLOCK_SIZE, kv_role=kv_role)
    made.set_ranks([RANK])
    return made


def test_a_finished_prefill_offers_its_prompt_and_says_where() -> None:
    prefill = book()
    params = prefill.finished(Request(kv_transfer_params=OFFER), [7, 3, 5, 9])
    source = Source.from_params(params)
    assert source is not None
    assert source.ranks == (RANK,)
    (offer,) = prefill.take_orders().offers
    assert offer.handoff_id == source.handoff_id
    assert (offer.pages.num_tokens, offer.pages.block_ids) == (10, (7, 3, 5))
    assert prefill.take_orders().offers == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": "abort"},
        {"num_computed_tokens": 9},
        {"lora_request": object()},
        {"mm_features": (object(),)},
        {"prompt_token_ids": None},
        {"kv_transfer_params": None},
    ],
)
def test_what_another_server_could_not_use_is_not_offered(changes: dict[str, Any]) -> None:
    prefill = book()
    assert prefill.finished(Request(**({"kv_transfer_params": OFFER} | changes)), [7, 3, 5]) is None
    assert prefill.take_orders().offers == ()


def test_a_pull_fills_the_pages_that_are_not_cached_here_once() -> None:
    decode, request = book(), Request(kv_transfer_params=PULL)
    decode.expect(request)
    assert decode.num_matched(request, 4) == 6
    decode.allocated(request, [2, 8, 6, 1], 6)
    assert decode.num_matched(request, 4) == 0, "after a failed pull the prompt is computed here"
    decode.allocated(request, [2, 8, 6, 1], 0)
    (pull,) = decode.take_orders().pulls
    assert (pull.first_block, pull.pages.block_ids) == (1, (2, 8, 6))
    assert pull.source == Source.from_params(PULL)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        PULL | {"ranks": PULL["ranks"] * 3},
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


def test_servers_keep_to_their_roles() -> None:
    producer, consumer = book("kv_producer"), book("kv_consumer")
    producer.expect(Request(kv_transfer_params=PULL))
    assert producer.num_matched(Request(), 0) == 0
    assert consumer.finished(Request(kv_transfer_params=OFFER), [1, 2, 3]) is None


def test_a_prompts_name_covers_its_tail_its_salt_and_the_model() -> None:
    def name(model: str = "model", **changes: Any) -> bytes:
        prefill = book(fingerprint=model)
        prefill.finished(Request(kv_transfer_params=OFFER, **changes), [1, 2, 3])
        return prefill.take_orders().offers[0].pages.last_hash

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


def keys_and_values_apart() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 3, 5) for i in range(2)}


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
@pytest.mark.parametrize("make", [standard, keys_and_values_apart, tokens_before_heads, latent, shared])
def test_blocks_keep_their_elements_in_every_layout(
    make: Callable[[], dict[str, torch.Tensor]], copies: type[HostCopies | DeviceCopies]
) -> None:
    layers = page_tensors(make(), NUM_BLOCKS)
    shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint="f")
    before = [layer.clone() for layer in layers]
    pages = RankPages(copies(layers), shape, num_slots=4)
    slots = pages.take_slots(2)
    pages.stage([BlockId(1), BlockId(4)], slots)
    data = pages.read_blocks(slots)
    assert data.nbytes == 2 * shape.block_bytes
    pages.write_blocks([BlockId(5), BlockId(0)], data)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[5], old[1])
        assert torch.equal(layer[0], old[4])
        assert torch.equal(layer[1:5], old[1:5])


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"a": [torch.zeros(NUM_BLOCKS, 2)]}, "layer a: it keeps a state"),
        ({"a": torch.zeros(NUM_BLOCKS + 1, 2, 3)}, "6 blocks are not one dimension"),
        ({"a": torch.zeros(NUM_BLOCKS, NUM_BLOCKS, 3)}, "6 blocks are not one dimension"),
        ({"a": torch.zeros(NUM_BLOCKS, 2, 4), "b": torch.zeros(NUM_BLOCKS, 2, 8)}, "layers of different shapes"),
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
    with pytest.raises(RingFull, match="2 blocks do not fit into the 1 of 3"):
        pages.take_slots(2)
    pages.free_slots(slots)
    assert len(pages.take_slots(3)) == 3
