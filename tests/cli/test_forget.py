import json

from kvrelay.v1 import inference_pb2 as pb
from tests.cli.conftest import Run
from tests.client.fake_server import FakeInference

WHOLE = pb.ForgottenWorker(worker_id="prefill-0", num_tier_blocks=12, num_page_blocks=30)
LOST = pb.ForgottenWorker(worker_id="decode-0", trouble="lost: its blocks may still be there")


def test_forget_tells_what_every_worker_forgot_and_who_shared_it(run: Run, address: str, fake: FakeInference) -> None:
    fake.forgotten.CopyFrom(pb.ForgetTenantResponse(workers=[WHOLE], sharing_tenants=["b", "c"]))
    result = run("forget", "acme", "--cache-salt", "project", "-a", address)
    assert result.exit_code == 0
    assert result.stdout == (
        "prefill-0: forgot 12 blocks in tiers, 30 in pages\nthese blocks were also those of b, c\n"
    )
    assert fake.forget_requests == [pb.ForgetTenantRequest(tenant="acme", cache_salt="project")]


def test_forget_fails_while_blocks_may_be_left(run: Run, address: str, fake: FakeInference) -> None:
    fake.forgotten.CopyFrom(pb.ForgetTenantResponse(workers=[WHOLE, LOST]))
    result = run("forget", "acme", "-a", address)
    assert result.exit_code == 1
    assert "1 of 2 workers may still have blocks of acme" in result.stderr
    assert "decode-0: forgot 0 blocks in tiers, 0 in pages; NOT ALL: lost: its blocks may still" in result.stdout
    as_json = json.loads(run("forget", "acme", "-a", address, "--json").stdout)
    assert as_json["workers"][1]["trouble"] == LOST.trouble
