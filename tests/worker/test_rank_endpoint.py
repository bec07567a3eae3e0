"""Two ranks of vLLM servers, without vLLM: pages arrive as they were, or the pull is reported as failed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.ids import BlockHash, BlockId, Epoch, HandoffId
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.identity import Role
from engine.vllm.connector.orders import Offer, PromptPages, Pull, RankResults, Source
from engine.vllm.connector.pages import RankPages, copies_of, page_tensors, shape_of
from worker.rank_endpoint import ConnectorConfig, RankEndpoint

BLOCK_SIZE = 4
NUM_BLOCKS = 8
HASH = BlockHash(b"h" * 16)
HANDOFF = HandoffId("ho-1")
_DEADLINE_S = 30.0


class Rank:
    """A rank with random pages."""

    def __init__(self, *, num_slots: int = 4, fingerprint: str = "f", **config: Any) -> None:
        self.layer = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 6)
        layers = page_tensors({"layer": self.layer}, NUM_BLOCKS)
        shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint=fingerprint)
        self.pages = RankPages(copies_of(layers), shape, num_slots=num_slots)
        self.endpoint = RankEndpoint(self.pages, ConnectorConfig(**config), rank=0)
        self.results = RankResults(offered=set(), pulled=set(), invalid_blocks=set())

    def until(self, *, offered: str = "", pulled: str = "") -> RankResults:
        """Return all results so far, once they name a request."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            taken = self.endpoint.take_results()
            self.results.offered |= taken.offered
            self.results.pulled |= taken.pulled
            self.results.invalid_blocks |= taken.invalid_blocks
            if {offered} - {""} <= self.results.offered and {pulled} - {""} <= self.results.pulled:
                return self.results
            time.sleep(0.005)
        raise AssertionError(self.results)


@contextmanager
def rank(**settings: Any) -> Iterator[Rank]:
    made = Rank(**settings)
    try:
        yield made
    finally:
        made.endpoint.close()


def prompt_pages(*block_ids: int, num_tokens: int = 10) -> PromptPages:
    return PromptPages(num_tokens=num_tokens, last_hash=HASH, block_ids=tuple(map(BlockId, block_ids)))


def offer(handoff_id: str = HANDOFF, request_id: str = "p") -> Offer:
    return Offer(request_id=request_id, handoff_id=HandoffId(handoff_id), pages=prompt_pages(1, 4, 2))


def pull_from(peer: Rank, **changes: Any) -> Pull:
    fields: dict[str, Any] = {"request_id": "d", "pages": prompt_pages(0, 5, 7), "first_block": 1}
    fields["source"] = Source(handoff_id=HANDOFF, ranks=(peer.endpoint.address,))
    return Pull(**(fields | changes))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("is_early", [False, True])
def test_pulled_pages_are_those_of_the_prefill_and_no_others_change(transport: str, is_early: bool) -> None:
    with rank() as prefill, rank(transports=(transport,)) as decode:
        before = decode.layer.clone()
        if is_early:
            decode.endpoint.pull(pull_from(prefill), None)
        prefill.endpoint.offer(offer())
        assert prefill.until(offered="p").offered == {"p"}, "vLLM has its pages back before anyone pulls"
        if not is_early:
            decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == set()
        assert torch.equal(decode.layer[[5, 7]], prefill.layer[[4, 2]])
        untouched = [0, 1, 2, 3, 4, 6]
        assert torch.equal(decode.layer[untouched], before[untouched])


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": prompt_pages(0, 5, 7, num_tokens=11)},
        {"pages": replace(prompt_pages(0, 5, 7), last_hash=BlockHash(b"x" * 16))},
        {"pages": prompt_pages(0, 5, 7, 3, num_tokens=16)},
    ],
)
def test_a_prompt_of_another_length_or_hash_is_a_failed_pull(changes: dict[str, Any]) -> None:
    with rank() as prefill, rank() as decode:
        prefill.endpoint.offer(offer())
        pull = pull_from(prefill, **changes)
        decode.endpoint.pull(pull, None)
        assert decode.until(pulled="d").invalid_blocks == set(pull.pages.block_ids[1:])


def test_pages_of_other_weights_are_a_failed_pull() -> None:
    with rank() as prefill, rank(fingerprint="other") as decode:
        prefill.endpoint.offer(offer())
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_an_earlier_life_of_the_prefill_server_is_a_failed_pull() -> None:
    with rank() as prefill, rank() as decode:
        prefill.endpoint.offer(offer())
        earlier = replace(prefill.endpoint.address, epoch=Epoch(1))
        decode.endpoint.pull(pull_from(prefill, source=Source(handoff_id=HANDOFF, ranks=(earlier,))), None)
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
        decode.endpoint.pull(pull_from(decode, source=Source(handoff_id=HANDOFF, ranks=(elsewhere,))), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_a_prefill_that_never_ends_is_a_failed_pull(caplog: pytest.LogCaptureFixture) -> None:
    with rank() as prefill, rank(pull_timeout_s=0.1) as decode:
        decode.endpoint.pull(pull_from(prefill), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}
    assert "it has taken more than pull_timeout_s, 0.1 s" in caplog.text


def test_a_cancelled_pull_is_reported_and_its_pages_are_not_valid() -> None:
    with rank() as prefill, rank() as decode:
        decode.endpoint.pull(pull_from(prefill), None)
        decode.endpoint.cancel({"d", "another"})
        assert decode.until(pulled="d").invalid_blocks == {5, 7}


def test_offers_that_nobody_claims_make_room_when_their_lease_ends() -> None:
    with rank(num_slots=3, lease_ttl_s=0.2) as prefill, rank() as decode:
        prefill.endpoint.offer(offer("ho-unclaimed", "first"))
        prefill.endpoint.offer(offer("ho-too-many", "second"))
        prefill.until(offered="first")
        prefill.until(offered="second")
        refused = Source(handoff_id=HandoffId("ho-too-many"), ranks=(prefill.endpoint.address,))
        decode.endpoint.pull(pull_from(prefill, source=refused), None)
        assert decode.until(pulled="d").invalid_blocks == {5, 7}
        deadline_s = time.monotonic() + _DEADLINE_S
        while prefill.pages.num_free_slots < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        prefill.endpoint.offer(offer())
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
            prefill.endpoint.offer(offer())
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
