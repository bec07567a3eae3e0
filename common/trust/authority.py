"""The cluster's certificate authority, held by the controller alone.

Its key (P-256) stays in the run folder, readable by the owner only, so that the next controller of the same cluster is
the same authority. Certificates are short-lived X.509 SVIDs (SPIFFE X509-SVID, section 3): the single URI name is the
identity, callers check the DNS name of the role, and further names are the addresses of a door.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.ports import is_dns_name
from common.trust.enrolment import Enrolment, EnrolmentRequest
from common.trust.identity import INTERNAL_SUFFIX, Identity, Role, server_name

DAY_S = 86_400.0
_CA_DAYS = 3650
_BACKDATED = datetime.timedelta(days=30)
"""Time for which certificates are valid before they are issued: the clocks of hosts differ, and are set back."""
_BEGINNING = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""Begin of the authority's own certificate, before every clock."""
MAX_NAMES = 64
MAX_NAME_BYTES = 2048
"""Most bytes of all names: proofs and tickets carry the certificate and must fit into the metadata of a call."""
RENEW_SHARE = 2 / 3
"""Share of a certificate's life after which it is renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthoritySettings:
    """Settings that every process gets with its certificate."""

    cluster: str
    is_encrypted: bool
    """Whether connections use TLS; otherwise callers show proofs (`proofs.py`)."""
    allows_plain_text: bool = False
    """Whether listeners that other hosts reach may work without TLS."""
    lifetime_s: float = DAY_S
    """Life of a certificate."""


class Authority:
    """Signs certificates. Any thread."""

    def __init__(
        self, settings: AuthoritySettings, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, secret: bytes
    ) -> None:
        self.settings = settings
        self._key = key
        self._certificate = certificate
        self._block_key = secret
        self.ca_pem = _pem(certificate)

    @property
    def renewal_interval_s(self) -> float:
        """Seconds after which a certificate should be renewed."""
        return RENEW_SHARE * self.settings.lifetime_s

    @classmethod
    def new(cls, settings: AuthoritySettings) -> "Authority":
        """Return a new authority without storing it."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(settings, key, _self_signed(key, settings.cluster), secrets.token_bytes(32))

    @classmethod
    def open(cls, folder: Path, settings: AuthoritySettings) -> "Authority":
        """Return the authority of a folder, created if missing. Raises OSError, ValueError for damaged files."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        key_path, secret_path, certificate_path = (folder / name for name in ("ca.key", "block.key", "ca.pem"))
        if not (key_path.exists() and secret_path.exists() and certificate_path.exists()):
            new_key = ec.generate_private_key(ec.SECP256R1())
            write_private(secret_path, secrets.token_bytes(32).hex().encode())
            certificate_path.write_bytes(_pem(_self_signed(new_key, settings.cluster)))
            write_private(key_path, private_pem(new_key))
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path} holds no elliptic-curve key; delete the folder {folder} to make a new one")
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        if certificate.public_key() != key.public_key():  # such as a partial restore
            raise ValueError(f"{certificate_path} is not for ca.key; delete the folder {folder} to make new ones")
        return cls(settings, key, certificate, bytes.fromhex(secret_path.read_text(encoding="ascii")))

    def enrol(self, request: EnrolmentRequest, *, role: Role, name: str) -> Enrolment:
        """Return a certificate for a process that the caller has started under this name. Raises ValueError.

        The caller vouches for role and name. Only a router is certified for the hosts in its request, by which clients
        know its doors. Other processes are known by their role, so a compromised worker cannot pose as a door.
        """
        public_key = _requested_key(request.csr_pem, name)
        hosts = _general_names(request.hosts)
        identity = Identity(cluster=self.settings.cluster, role=role, name=name)
        now = datetime.datetime.now(datetime.UTC)
        lifetime = datetime.timedelta(seconds=self.settings.lifetime_s)
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(identity.uri),
            x509.DNSName(server_name(self.settings.cluster, role)),
            *(hosts if role is Role.ROUTER else ()),
        ]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - _BACKDATED, _BEGINNING))
            .not_valid_after(now + lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_key_usage(for_authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return Enrolment(
            identity_uri=identity.uri,
            certificate_pem=_pem(builder.sign(self._key, hashes.SHA256())).decode(),
            ca_pem=self.ca_pem.decode(),
            lifetime_s=self.settings.lifetime_s,
            is_encrypted=self.settings.is_encrypted,
            allows_plain_text=self.settings.allows_plain_text,
            block_key=self._block_key.hex() if role is Role.ROUTER else "",
        )


def _requested_key(csr_pem: str, name: str) -> ec.EllipticCurvePublicKey:
    """Return the public key of a signing request, whose signature proves possession. Raises ValueError."""
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        is_signed, key = request.is_signature_valid, request.public_key()
    except (x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise ValueError(f"cannot enrol {name}: {error}") from error
    if not is_signed:
        raise ValueError(f"cannot enrol {name}: the signature of its request is not valid")
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"cannot enrol {name}: its key is not an elliptic-curve key")
    return key


def _self_signed(key: ec.EllipticCurvePrivateKey, cluster: str) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvrelay {cluster}")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINNING)
        .not_valid_after(now + datetime.timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(for_authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_usage(*, for_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not for_authority,
        key_cert_sign=for_authority,
        crl_sign=for_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return addresses and DNS names in the form of certificates. Raises ValueError."""
    if len(hosts) > MAX_NAMES:
        raise ValueError(f"cannot enrol: {len(hosts)} names, at most {MAX_NAMES}")
    names: list[x509.GeneralName] = []
    num_bytes = 0
    for host in dict.fromkeys(hosts):
        try:
            address = ipaddress.ip_address(host.strip("[]"))
            names.append(x509.IPAddress(address))
            num_bytes += len(address.packed)
        except ValueError:
            if host.lower().rstrip(".").endswith(INTERNAL_SUFFIX):
                raise ValueError(f"cannot enrol: {host} is a name that only the authority gives out") from None
            if not is_dns_name(host):
                raise ValueError(f"cannot enrol: {host!r} is neither an address nor a DNS name") from None
            names.append(x509.DNSName(host))
            num_bytes += len(host)
    if num_bytes > MAX_NAME_BYTES:
        raise ValueError(
            f"cannot enrol: its names have {num_bytes} bytes together, at most {MAX_NAME_BYTES}; shorten tls.names"
        )
    return names


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in PEM, unencrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_private(path: Path, content: bytes) -> None:
    """Replace a file atomically by one that only its owner may read."""
    scratch = path.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)  # noqa: PTH105 - the atomic one, by its usual name


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
