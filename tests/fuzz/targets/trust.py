"""Parts of the trust boundary: proofs, tickets, certificate requests, and the lines that carry them."""

import base64
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa

from common.errors import AccessDenied, Unauthenticated
from common.ids import Epoch, WorkerId
from common.trust.credentials import Credentials
from common.trust.enrolment import Enrolment
from common.trust.identity import Identity, Role
from common.trust.pipe import answer_to
from common.trust.proofs import ProofVerifier
from common.trust.tickets import PullRight, check_ticket
from tests.fuzz.callers import change_fields, encoded, proof_of
from tests.fuzz.members import AUTHORITY, credentials_of
from tests.fuzz.messages import Source, mangled
from tests.fuzz.target import Target
from tests.fuzz.world import World

_AUDIENCE = "worker:1"
_ENROL = partial(AUTHORITY.enrol, role=Role.WORKER, name="decode-0")
_HOSTS = (
    *("127.0.0.1", "::1", "[::1]", "fe80::1%eth0", "1.2.3.4/5", "host", "a.b", "", ".", "-", "*", "*.a", "ä", "\0"),
    *("\ud800", "a" * 300, "a." * 200, "x" * 100_000, "worker.test.kvrelay.internal", "A.KVRELAY.INTERNAL.", " "),
)
_VALUES: Sequence[Any] = (
    *(None, True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", "x", "\ud800", "\0", [], {}, [[]], ["x"], [None]),
    *({"x": []}, ["h"] * 65, ["h"] * 3000, "x" * 70_000),
    "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
)
_DEEP = ("[" * 100_000, '{"a":' * 50_000, "[" * 1_000 + "]" * 1_000, "1" * 10_000, "-", "nul", "\ufeff{}")


class TrustTarget(Target):
    """Each part by itself: it refuses as documented and never certifies or accepts a wrong identity."""

    name = "trust"

    def prepare(self, world: World, data: bytes) -> Callable[[], str | None]:
        """Return what is to be tried."""
        source = Source(data)
        return source.choose(_TRIES)(source)

    def seeds(self) -> Sequence[bytes]:
        """Return inputs to begin with: each part as it should be, and with decisions by chance."""
        draw = random.Random(1)
        parts = range(len(_TRIES))
        return [
            *(bytes([part]) for part in parts),
            *(bytes([i]) + draw.randbytes(60) for _ in range(10) for i in parts),
        ]

    async def play(self, world: World, plan: Any) -> list[str]:
        """Try it."""
        wrong = plan()
        return [] if wrong is None else [f"protocol: {wrong}"]


def _verifier() -> ProofVerifier:
    return ProofVerifier(x509.load_pem_x509_certificate(AUTHORITY.ca_pem), cluster="test")


def _believed(token: str, *, audience: str = _AUDIENCE) -> Identity | None:
    """Return who is taken to have signed a token; the same one however often it is shown."""
    verifier = _verifier()
    found: list[Identity | None] = []
    for ask in (verifier.identify, verifier.identify, lambda *args, **terms: verifier.verify(*args, **terms)[0]):
        try:
            found.append(ask(token, audience=audience))
        except Unauthenticated:
            found.append(None)
    assert found[0] == found[1] == found[2], "it depends on how often a token was shown who has signed it"
    return found[0]


_DER_PLACES: Mapping[bytes, int] = {
    bytes.fromhex("a003020102"): 4,
    bytes.fromhex("020100"): 2,
    bytes.fromhex("2a8648ce3d0201"): 6,
    bytes.fromhex("2a8648ce3d030107"): 7,
    bytes.fromhex("2a8648ce3d040302"): 7,
    bytes.fromhex("551d11"): 2,
    bytes.fromhex("551d0f"): 2,
}
"""Offsets at which a certificate or a request has a version, an algorithm or an extension."""


def _mangle_der(der: bytes, source: Source) -> bytes:
    """Return other bytes; what they mean is something else, sometimes, in the same form."""
    if source.byte() % 2:
        return mangled(der, source)
    start, place = source.choose(list(_DER_PLACES.items()))
    found = der.find(start)
    return der if found < 0 else der[: found + place] + bytes([source.byte()]) + der[found + place + 1 :]


def _try_proof(source: Source) -> Callable[[], str | None]:
    token, way = proof_of(source.choose((Role.WORKER, Role.ROUTER)), _AUDIENCE), source.byte() % 4
    if way == 0:
        return lambda: None if _believed(token) else "a good proof is refused"
    if way == 1:
        changed = change_fields(token, source)
        signed = changed.rpartition(".")[0] == token.rpartition(".")[0]
        return lambda: "a changed proof is believed" if _believed(changed) and not signed else None
    if way == 2:
        raw = mangled(token.encode(), source)
        shown = source.choose((raw.decode("latin-1"), raw.decode("utf-8", "surrogateescape")))
        signed = shown.rpartition(".")[0] == token.rpartition(".")[0]
        return lambda: "a mangled proof is believed" if _believed(shown) and not signed else None
    position = source.below(1 + len(_DEEP))
    text = f"{encoded(_DEEP[position - 1].encode())[:3900]}.e30.AA" if position else source.rest().decode("latin-1")
    return lambda: "what is no proof is believed" if _believed(text) else None


def _signed_by(key: Any, header: Mapping[str, Any], payload: bytes) -> str:
    return jwt.api_jws.encode(payload, key, algorithm="ES256", headers=dict(header))


_CLAIMS = ("exp", "nbf", "iat", "aud", "sub", "iss", "jti", "cluster")


def _try_certificate(source: Source) -> Callable[[], str | None]:
    """A member whose certificate or claims are odd: what it signs with its own key is not refused for its signature."""
    held = credentials_of(Role.WORKER, "decode-0").held
    key = serialization.load_pem_private_key(held.key_pem, password=None)
    der = x509.load_pem_x509_certificate(held.certificate_pem).public_bytes(serialization.Encoding.DER)
    is_changed = source.byte() % 2 == 1
    if is_changed:
        other = _mangle_der(der, source)
        is_changed, der = other != der, other
    claims: dict[str, Any] = {"sub": held.signer.identity.uri, "aud": _AUDIENCE, "exp": 2**33}
    for _ in range(source.below(4)):
        claims[source.choose(_CLAIMS)] = source.choose((*_VALUES, "9999999999", 1e300, 2**62, [_AUDIENCE], 10**400))
    payload = json.dumps(claims).encode()
    if source.byte() % 8 == 7:
        payload = source.choose((b"", b"[]", b"5", payload[: source.below(len(payload))], b"\xff", b"[" * 2000))
    token = _signed_by(key, {"x5c": [base64.b64encode(der).decode()]}, payload)

    def judge() -> str | None:
        identity = _believed(token)
        if identity is None:
            return None
        if is_changed:
            return "a certificate that the authority has not signed is believed"
        return None if identity == held.signer.identity else f"decode-0 is taken for {identity}"

    return judge


def _try_ticket(source: Source) -> Callable[[], str | None]:
    role, puller = source.choose((Role.ROUTER, Role.CONTROLLER, Role.WORKER)), credentials_of(Role.WORKER, "decode-0")
    right = PullRight(puller=WorkerId("decode-0"), source=WorkerId("w"), epoch=Epoch(7), subject="handoff:h")
    claims: dict[str, Any] = {"puller": "decode-0", "source": "w", "epoch": "7", "subject": "handoff:h"}
    is_changed = False
    for _ in range(source.below(3)):
        name, value = source.choose(list(claims)), source.choose((*_VALUES, "*", 7, "w2"))
        is_changed |= claims[name] != value
        claims[name] = value
    ticket = credentials_of(role, "x").held.signer.sign(claims, audience="kv", lifetime_s=60)
    may_pull = role is Role.ROUTER and not is_changed

    def judge() -> str | None:
        try:
            check_ticket(ticket, right, caller=puller.identity, verifier=_verifier())
        except AccessDenied:
            return "a good ticket is refused" if may_pull else None
        return None if may_pull else f"a ticket of a {role} with {claims} is taken"

    return judge


@cache
def _requests() -> Sequence[bytes]:
    """Return requests for certificates in DER, for keys of many kinds."""
    keys: list[Any] = [ec.generate_private_key(curve()) for curve in (ec.SECP256R1, ec.SECP521R1, ec.SECP256K1)]
    keys += [
        rsa.generate_private_key(65537, 1024),
        dsa.generate_private_key(1024),
        ed25519.Ed25519PrivateKey.generate(),
    ]
    unsigned = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return [
        unsigned.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()).public_bytes(
            serialization.Encoding.DER
        )
        for key in keys
    ]


def _pem(der: bytes) -> str:
    body = base64.encodebytes(der).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"


def _request_json(source: Source) -> str:
    der = source.choose(_requests())
    if source.byte() % 4:
        der = _mangle_der(der, source)
    entry: dict[str, Any] = {"csr_pem": _pem(der), "hosts": [source.choose(_HOSTS) for _ in range(source.below(4))]}
    for _ in range(source.below(2)):
        entry[source.choose(("csr_pem", "hosts", "name"))] = source.choose(_VALUES)
    text = json.dumps(entry)
    if source.byte() % 8 == 7:
        text = source.choose((text[: source.below(len(text))], source.take(20).decode("latin-1"), *_DEEP))
    return text


def _judge_certificate(enrolment: Enrolment) -> str | None:
    """A certificate names whom the authority means, and no role's server but its own."""
    certificate = x509.load_pem_x509_certificate(enrolment.certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    inside = [name for name in names.get_values_for_type(x509.DNSName) if "kvrelay.internal" in name.lower()]
    if uris != ["spiffe://test/worker/decode-0"] or inside != ["worker.test.kvrelay.internal"]:
        return f"a certificate names {uris} and {inside}"
    return None if enrolment.block_key == "" else "a worker is told the block key"


def _try_line(source: Source) -> Callable[[], str | None]:
    entry: Any = {"event": "enrol", "request": _request_json(source)}
    way = source.byte() % 4
    if way == 1:
        entry[source.choose(("event", "request", "more"))] = source.choose(_VALUES)
    line = json.dumps(entry)
    if way == 2:
        line = source.choose((*_DEEP, line[: source.below(len(line))]))
    if way == 3:
        line = source.rest().decode("utf-8", "surrogateescape")

    def judge() -> str | None:
        with suppress(ValueError):
            answer = answer_to(line, _ENROL)
            return None if answer is None else _judge_certificate(Enrolment.from_json(answer))
        return None

    return judge


def _try_answer(source: Source) -> Callable[[], str | None]:
    """Answer to a process that has asked for a certificate."""
    credentials = Credentials()
    fields = json.loads(_ENROL(credentials.request(())).to_json())
    is_odd = False
    for _ in range(source.below(3)):
        name, value = source.choose([*fields, "more"]), source.choose(_VALUES)
        if name in ("certificate_pem", "ca_pem") and source.byte() % 2:
            value = mangled(str(fields.get(name)).encode(), source).decode("latin-1")
        fields[name] = value
        is_odd = True
    text = json.dumps(fields)
    if source.byte() % 8 == 7:
        text, is_odd = source.choose((*_DEEP, text[: source.below(len(text))])), True

    def judge() -> str | None:
        try:
            credentials.accept(Enrolment.from_json(text))
        except ValueError:
            return None if is_odd else "a good answer is refused"
        return None

    return judge


_TRIES = (_try_proof, _try_certificate, _try_ticket, _try_line, _try_answer)
