"""Two ranks of vLLM servers, without vLLM: pages arrive as they were, or the pull is reported as failed."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ids import BlockHash, BlockId, Epoch, HandoffId
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.identity import Role
from engine.vllm.connector.orders import Chunk, Offer, Prompt, Pull, RankAddress, RankResults, Source, Wish
from engine.vllm.connector.pages import RankPages, copies_of, page_tensors, shape_of
from engine.vllm.connector.routes import RankPlace
from worker.connector_config import ConnectorConfig
from worker.rank_endpoint import RankEndpoint

BLOCK_SIZE = 4
NUM_BLOCKS = 8
HASH = BlockHash(b"h" * 16)
HANDOFF = HandoffId("ho-1")
ALONE = RankPlace(rank=0, num_ranks=1, num_heads=2)
_DEADLINE_S = 30.0


class Rank:
    """A rank with random pages."""

    def __init__(self, place: RankPlace = ALONE, *, num_slots: int = 8, fingerprint: str = "f", **config: Any) -> None:
        self.place = place
        self.layer = torch.randn(NUM_BLOCKS, len(place.heads), BLOCK_SIZE, 6)
        layers = page_tensors({"layer": self.layer}, NUM_BLOCKS)
        shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint=fingerprint)
        self.pages = RankPages(copies_of(layers), shape, num_slots=num_slots)
        self.endpoint = RankEndpoint(self.pages, ConnectorConfig(**config), place)
        self.results = RankResults.none()

    def begin(self, handoff_id: str = HANDOFF, request_id: str = "p", num_pullers: int = 1) -> None:
        """Begin to offer a prompt."""
        wish = Wish(handoff_id=HandoffId(handoff_id), num_pullers=num_pullers)
        self.endpoint.begin(Offer(request_id=request_id, wish=wish, prompt=prompt_of()))

    def offer(self, handoff_id: str = HANDOFF, request_id: str = "p", num_pullers: int = 1) -> None:
        """Offer a prompt in two chunks, and end its request."""
        self.begin(handoff_id, request_id, num_pullers)
        self.endpoint.add(Chunk(request_id=request_id, block_ids=pages(1), num_tokens=6), None)
        self.endpoint.add(Chunk(request_id=request_id, block_ids=pages(4, 2), num_tokens=10), None)
        self.endpoint.end([request_id])

    def until(self, *, offered: str = "", pulled: str = "") -> RankResults:
        """Return all results so far, once they name a request."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            taken = self.endpoint.take_results(wait_s=0.1)
            self.results.offered |= taken.offered
            self.results.pulled |= taken.pulled
            self.results.invalid_blocks |= taken.invalid_blocks
            for name, amount in taken.counts.items():
                self.results.count(name, amount)
            if {offered} - {""} <= self.results.offered and {pulled} - {""} <= self.results.pulled:
                return self.results
        raise AssertionError(self.results)


@contextmanager
def rank(**settings: Any) -> Iterator[Rank]:
    made = Rank(**settings)
    try:
        yield made
    finally:
        made.endpoint.close()


def prompt_of(num_tokens: int = 10, last_hash: BlockHash = HASH) -> Prompt:
    return Prompt(num_tokens=num_tokens, num_blocks=-(-num_tokens // BLOCK_SIZE), last_hash=last_hash)


def pages(*block_ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, block_ids))


def source(*ranks: RankAddress, num_pullers: int = 1) -> Source:
    return Source(handoff_id=HANDOFF, ranks=ranks, num_pullers=num_pullers)


def pull_from(peer: Rank, **changes: Any) -> Pull:
    fields: dict[str, Any] = {"request_id": "d", "prompt": prompt_of(), "block_ids": pages(0, 5, 7), "first_block": 1}
    fields["source"] = source(peer.endpoint.address)
    return Pull(**(fields | changes))


@pytest.mark.parametrize("transport", ["shm", "grpc", "nixl"])
@pytest.mark.parametrize("is_early", [False, True])
def test_pulled_pages_are_those_of_the_prefill_and_no_others_change(transport: str, is_early: bool) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    with rank(transports=(transport,)) as prefill, rank(transports=(transport,)) as decode:
        before = decode.layer.clone()
        if is_early:
            decode.endpoint.pull(pull_from(prefill), None)
        prefill.offer()
        assert prefill.until(offered="p").offered == {"p"}, "vLLM has its pages back before anyone pulls"
        if not is_early:
            decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == set()
        assert torch.equal(decode.layer[[5, 7]], prefill.layer[[4, 2]])
        counts = decode.results.counts
        assert (counts["pulls"], counts["pulled_bytes"]) == (1, decode.layer[[5, 7]].nbytes)
        assert counts["exposed_seconds"] > 0
        untouched = [0, 1, 2, 3, 4, 6]
        assert torch.equal(decode.layer[untouched], before[untouched])


@pytest.mark.parametrize(
    ("num_heads", "num_sources", "num_pullers"),
    [(3, 3, 1), (3, 1, 3), (6, 2, 3), (2, 4, 1), (2, 1, 4), (1, 3, 3), (1, 2, 3)],
)
def test_each_rank_gets_its_heads_from_any_number_of_ranks(num_heads: int, num_sources: int, num_pullers: int) -> None:
    whole = torch.randn(NUM_BLOCKS, num_heads, BLOCK_SIZE, 6)

    with ExitStack() as held:

        def server(num_ranks: int) -> list[Rank]:
            places = [RankPlace(rank=i, num_ranks=num_ranks, num_heads=num_heads) for i in range(num_ranks)]
            return [held.enter_context(rank(place=place, num_slots=64)) for place in places]

        prefill, decode = server(num_sources), server(num_pullers)
        addresses = source(*(each.endpoint.address for each in prefill), num_pullers=num_pullers)
        for each in decode:
            each.endpoint.pull(pull_from(each, source=addresses, first_block=0), None)
        for each in prefill:
            each.layer.copy_(whole[:, each.place.heads.start : each.place.heads.stop])
            each.offer(num_pullers=num_pullers)
        for each in decode:
            assert each.until(pulled="d").invalid_blocks == set()
            assert torch.equal(each.layer[[0, 5, 7]], whole[[1, 4, 2]][:, list(each.place.heads)])
        for each in prefill:
            each.until(offered="p")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": prompt_of(11)},
        {"prompt": prompt_of(last_hash=BlockHash(b"x" * 16))},
        {"prompt": prompt_of(16), "block_ids": pages(0, 5, 7, 3)},
    ],
)
def test_a_prompt_of_another_length_or_hash_is_a_failed_pull(changes: dict[str, Any]) -> None:
    with rank() as prefill, rank() as decode:
        prefill.offer()
        pull = pull_from(prefill, **changes)
        decode.endpoint.pull(pull, None)
        assert decode.until(pulled="d").invalid_blocks == set(pull.block_ids[1:])


def test_pages_of_other_weights_are_a_failed_pull() -> None:
    with rank() as prefill, rank(fingerprint="other") as decode:
        prefill.offer()
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_an_earlier_life_of_the_prefill_server_is_a_failed_pull() -> None:
    with rank() as prefill, rank() as decode:
        prefill.offer()
        earlier = replace(prefill.endpoint.address, epoch=Epoch(1))
        decode.endpoint.pull(pull_from(prefill, source=source(earlier)), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_a_prefill_server_that_has_ended_is_a_failed_pull() -> None:
    with rank() as decode:
        with rank() as prefill:
            pass
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_another_host_is_not_pulled_from_without_tls() -> None:
    with rank() as decode:
        elsewhere = replace(decode.endpoint.address, address="192.0.2.1:9")
        decode.endpoint.pull(pull_from(decode, source=source(elsewhere)), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_chunks_are_pulled_during_a_prefill_and_its_abort_ends_the_pull() -> None:
    with rank() as prefill, rank() as decode:
        decode.endpoint.pull(pull_from(prefill, first_block=0), None)
        prefill.begin()
        prefill.endpoint.add(Chunk(request_id="p", block_ids=pages(1), num_tokens=6), None)
        deadline_s = time.monotonic() + _DEADLINE_S
        while not torch.equal(decode.layer[0], prefill.layer[1]):
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert decode.endpoint.take_results().pulled == set()
        prefill.endpoint.end(["p"])
        assert decode.until(pulled="d").invalid_blocks == {0, 5, 7}
        assert prefill.until(offered="p").offered == {"p"}
        assert (prefill.results.counts, decode.results.counts) == ({"failed_offers": 1}, {"failed_pulls": 1})


def test_pages_of_a_preempted_request_are_copied_before_they_have_another_owner() -> None:
    with rank() as prefill, rank() as decode:
        prefill.begin()
        prefill.endpoint.add(Chunk(request_id="p", block_ids=pages(1, 4), num_tokens=8), None)
        prefill.endpoint.settle(["p", "of another server"])
        computed = prefill.layer.clone()
        prefill.layer.zero_()
        prefill.layer[3] = computed[2]
        prefill.endpoint.add(Chunk(request_id="p", block_ids=pages(3), num_tokens=10), None)
        decode.endpoint.pull(pull_from(prefill, first_block=0), None)
        assert decode.until(pulled="d").invalid_blocks == set()
        assert torch.equal(decode.layer[[0, 5, 7]], computed[[1, 4, 2]])


class DeviceEvent:
    """An event of a device that is still at work."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.is_awaited = threading.Event()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.came.wait(_DEADLINE_S)


def test_pages_are_neither_read_nor_written_while_a_device_is_at_work_on_them() -> None:
    with rank() as prefill, rank() as decode:
        computed, reads, writes = prefill.layer.clone(), DeviceEvent(), DeviceEvent()
        prefill.begin()
        prefill.layer.zero_()
        prefill.endpoint.add(Chunk(request_id="p", block_ids=pages(1, 4, 2), num_tokens=10), reads)
        decode.endpoint.pull(pull_from(prefill, first_block=0), writes)
        for event in (reads, writes):
            assert event.is_awaited.wait(_DEADLINE_S)
        prefill.layer.copy_(computed)
        reads.came.set()
        prefill.endpoint.end(["p"])
        prefill.until(offered="p")
        decode.layer.zero_()
        writes.came.set()
        assert decode.until(pulled="d").invalid_blocks == set()
        assert torch.equal(decode.layer[[0, 5, 7]], computed[[1, 4, 2]])


def test_an_id_that_two_requests_choose_is_the_first_ones() -> None:
    with rank() as prefill, rank() as decode:
        prefill.offer()
        prefill.offer(request_id="second")
        assert prefill.until(offered="second").offered >= {"second"}
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == set()
        assert torch.equal(decode.layer[[5, 7]], prefill.layer[[4, 2]])


def test_a_prefill_that_never_ends_is_a_failed_pull(caplog: pytest.LogCaptureFixture) -> None:
    with rank() as prefill, rank(pull_timeout_s=0.1) as decode:
        decode.endpoint.pull(pull_from(prefill), None)
        ended = decode.endpoint.take_results(wait_s=_DEADLINE_S)  # one call is enough: it waits for the end
        assert (ended.pulled, ended.invalid_blocks) == ({"d"}, {5, 7})
    assert "it has taken more than pull_timeout_s, 0.1 s" in caplog.text


def test_a_cancelled_pull_is_reported_and_its_pages_are_not_valid() -> None:
    with rank() as prefill, rank() as decode:
        decode.endpoint.pull(pull_from(prefill), None)
        decode.endpoint.cancel({"d", "another"})
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_offers_that_nobody_claims_make_room_when_their_lease_ends() -> None:
    with rank(num_slots=6, lease_ttl_s=0.2) as prefill, rank() as decode:
        prefill.offer("ho-unclaimed", "first")
        prefill.offer("ho-too-many", "second")
        prefill.until(offered="first")
        prefill.until(offered="second")
        refused = replace(source(prefill.endpoint.address), handoff_id=HandoffId("ho-too-many"))
        decode.endpoint.pull(pull_from(prefill, source=refused), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}
        deadline_s = time.monotonic() + _DEADLINE_S
        while prefill.pages.num_free_slots < 6:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        prefill.offer()
        decode.endpoint.pull(pull_from(prefill, request_id="later"), None)
        decode.until(pulled="later")
        assert torch.equal(decode.layer[[5, 7]], prefill.layer[[4, 2]])


def test_a_rank_that_other_hosts_reach_does_not_start_without_tls() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1 without TLS"):
        Rank(host="192.0.2.1")


def test_ranks_with_certificates_pull_from_those_of_their_own_authority_only(tmp_path: Path) -> None:
    ours, theirs = (Authority.new(AuthoritySettings(cluster=name, is_encrypted=True)) for name in ("ours", "theirs"))
    folders = [tls_dir(tmp_path / name, authority) for name, authority in (("p", ours), ("d", ours), ("x", theirs))]
    with rank(tls_dir=folders[0]) as prefill, rank(tls_dir=folders[1]) as decode:
        with rank(tls_dir=folders[2]) as stranger, rank() as unknown:
            prefill.offer()
            for other in (stranger, unknown):
                other.endpoint.pull(pull_from(prefill), None)
                assert other.until(pulled="d").invalid_blocks == {5, 7}
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == set()


def tls_dir(folder: Path, authority: Authority) -> Path:
    held = Credentials.of(authority, Role.ROUTER, "router-0", ["127.0.0.1"]).held
    folder.mkdir()
    for name, pem in (("ca", held.ca_pem), ("cert", held.certificate_pem), ("key", held.key_pem)):
        (folder / f"{name}.pem").write_bytes(pem)
    return folder
