"""Bytes of strangers and of members that do not behave: each is refused as documented, whatever parsers make of it."""

import base64
import json
import time
from functools import partial
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from common.config import TlsConfig
from common.errors import Unauthenticated
from common.ids import Epoch, WorkerId
from common.rpc_server import start_server
from common.trust.channels import connect_to
from common.trust.credentials import Credentials, Held
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.identity import Role
from common.trust.proofs import ProofVerifier
from common.trust.tickets import PullRight, check_ticket, issuer, of_blocks
from tests.trust import AUTHORITY, credentials_of, worker_guard

AUDIENCE = "worker:1"
DEEP = "[" * 100_000
ENROL = partial(AUTHORITY.enrol, role=Role.WORKER, name="worker-0")


def member() -> Held:
    return credentials_of(Role.WORKER, "worker-0").held


def verifier() -> ProofVerifier:
    ca = x509.load_pem_x509_certificate(AUTHORITY.ca_pem)
    return ProofVerifier(ca, cluster="test")


def certificate_der() -> bytes:
    certificate = x509.load_pem_x509_certificate(member().certificate_pem)
    return certificate.public_bytes(serialization.Encoding.DER)


def token_of(der: bytes, **claims: Any) -> str:
    key = serialization.load_pem_private_key(member().key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    header = {"x5c": [base64.b64encode(der).decode()]}
    whole = {"sub": member().signer.identity.uri, "aud": AUDIENCE, **claims}
    return jwt.api_jws.encode(json.dumps(whole).encode(), key, algorithm="ES256", headers=header)


def test_proof_with_a_certificate_of_an_unknown_version_is_refused() -> None:
    other_version = certificate_der().replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020109"), 1)
    with pytest.raises(Unauthenticated):
        verifier().verify(token_of(other_version, exp=time.time() + 60), audience=AUDIENCE)


def test_proof_whose_end_is_a_string_of_digits_is_taken_again_and_again() -> None:
    checking = verifier()
    token = token_of(certificate_der(), exp=str(int(time.time()) + 60))
    for _ in range(2):
        assert checking.identify(token, audience=AUDIENCE).name == "worker-0"


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"csr_pem": 5, "hosts": []}', '{"csr_pem": "", "hosts": [5]}'])
def test_what_is_no_request_for_a_certificate_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        EnrolmentRequest.from_json(text)
    with pytest.raises(ValueError):
        ENROL(EnrolmentRequest.from_json(json.dumps({"csr_pem": text, "hosts": []})))


def test_answer_with_a_field_of_another_type_is_refused() -> None:
    fields = json.loads(member().enrolment.to_json())
    assert Enrolment.from_json(json.dumps(fields)) == member().enrolment
    for name in fields:
        with pytest.raises(ValueError):
            Enrolment.from_json(json.dumps({**fields, name: [1]}))


def test_request_of_another_version_or_curve_is_refused() -> None:
    der = x509.load_pem_x509_csr(Credentials().request(()).csr_pem.encode()).public_bytes(serialization.Encoding.DER)
    curve = bytes.fromhex("2a8648ce3d030107")
    for changed in (
        der.replace(bytes.fromhex("020100"), bytes.fromhex("020109"), 1),
        der.replace(curve, curve[:-1] + b"\x63", 1),
    ):
        assert changed != der
        body = base64.encodebytes(changed).decode()
        pem = f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"
        with pytest.raises(ValueError):
            ENROL(EnrolmentRequest(csr_pem=pem, hosts=()))


LONG_NAMES = [*(f"{number:02}{'x' * 60}" for number in range(32)), "2001:db8:1111:2222:3333:4444:5555:6666"]


async def test_process_with_the_longest_names_can_call_others() -> None:
    router = Credentials.of(AUTHORITY, Role.ROUTER, "router-0", LONG_NAMES)
    server = await start_server(lambda _server: [], host="127.0.0.1", port=0, guard=worker_guard())
    try:
        async with connect_to(Role.WORKER, router)(f"127.0.0.1:{server.port}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.stop(0)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_process_with_the_longest_names_can_sign_tickets() -> None:
    router = Credentials.of(AUTHORITY, Role.ROUTER, "router-0", LONG_NAMES)
    right = PullRight(
        puller=WorkerId("worker-0"),
        source=WorkerId("w" * 64),
        epoch=Epoch(2**62),
        subject=of_blocks(b""),
        tenant="t" * 64,
    )
    check_ticket(
        issuer(lambda: router.held.signer)(right),
        right,
        caller=credentials_of(Role.WORKER, "worker-0").identity,
        verifier=verifier(),
    )
    with pytest.raises(ValueError, match=r"tls\.names"):
        Credentials.of(AUTHORITY, Role.ROUTER, "router-0", [*LONG_NAMES, "x" * 100])


def test_names_that_no_certificate_could_hold_are_refused_with_the_configuration() -> None:
    with pytest.raises(ValidationError, match="1400"):
        TlsConfig(names=tuple(f"{number:02}{'x' * 60}" for number in range(32)))
    TlsConfig(names=tuple(f"{number:02}{'x' * 40}" for number in range(32)))


def test_key_that_nobody_could_prove_anything_with_is_not_certified() -> None:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    with pytest.raises(ValueError, match="elliptic-curve"):
        ENROL(EnrolmentRequest(csr_pem=request.public_bytes(serialization.Encoding.PEM).decode(), hosts=()))
