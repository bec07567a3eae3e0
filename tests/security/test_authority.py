"""The authority: what it keeps to itself, what it certifies, and what it refuses to."""

import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cryptography import x509

from cluster.trust import Trust, is_encrypted, operator_credentials
from common.config import ConfigError, ServingConfig, parse_config
from common.ports import names_of
from common.trust.authority import Authority, AuthoritySettings
from common.trust.credentials import Credentials
from common.trust.enrolment import EnrolmentRequest
from common.trust.identity import Identity, Role, server_name
from common.trust.pipe import answer_to

SETTINGS = AuthoritySettings(cluster="test", is_encrypted=True)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_private_and_the_next_controller_is_the_same_authority(tmp_path: Path) -> None:
    config = ServingConfig.model_validate({"name": "test"})
    first = Trust.open(config, tmp_path, is_spread=True)
    second = Trust.open(config, tmp_path, is_spread=True)

    folder = tmp_path / "tls"
    assert mode_of(folder) == 0o700
    assert {path.name for path in folder.iterdir() if mode_of(path) != 0o600} == {"ca.pem"}
    assert first.authority.ca_pem == second.authority.ca_pem == (folder / "ca.pem").read_bytes()
    router = Credentials.of(first.authority, Role.ROUTER, "router-0")
    again = Credentials.of(second.authority, Role.ROUTER, "router-0")
    assert router.held.enrolment.block_key == again.held.enrolment.block_key, "cached KV is found again"


def test_authority_whose_files_do_not_fit_together_is_not_opened(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Authority.open(tmp_path / name, SETTINGS)
    (tmp_path / "a" / "ca.pem").replace(tmp_path / "b" / "ca.pem")
    with pytest.raises(ValueError, match="delete the folder"):
        Authority.open(tmp_path / "b", SETTINGS)


def test_only_routers_get_the_key_of_block_hashes_and_nobody_the_authoritys() -> None:
    authority = Authority.new(SETTINGS)
    for role in Role:
        enrolment = Credentials.of(authority, role, "somebody").held.enrolment
        assert bool(enrolment.block_key) is (role is Role.ROUTER)
        assert "PRIVATE" not in enrolment.to_json()


def test_certificate_names_who_the_launcher_started_and_where_it_is_reached() -> None:
    credentials = Credentials.of(Authority.new(SETTINGS), Role.ROUTER, "router-3", ["10.0.0.7", "host.example"])
    certificate = x509.load_pem_x509_certificate(credentials.held.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://test/router/router-3"]
    assert names.get_values_for_type(x509.DNSName) == [server_name("test", Role.ROUTER), "host.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ROUTER])
def test_compromised_worker_is_certified_for_no_address_and_cannot_pose_as_a_door(role: Role) -> None:
    credentials = Credentials.of(Authority.new(SETTINGS), role, "somebody", ["10.0.0.1", "head.example"])
    certificate = x509.load_pem_x509_certificate(credentials.held.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert names.get_values_for_type(x509.DNSName) == [server_name("test", role)]
    assert names.get_values_for_type(x509.IPAddress) == []


def test_process_cannot_ask_for_the_name_of_another_role() -> None:
    for name in (server_name("test", Role.WORKER), server_name("test", Role.WORKER).upper() + "."):
        with pytest.raises(ValueError, match="only the authority gives out"):
            Credentials.of(Authority.new(SETTINGS), Role.ROUTER, "router-0", [name])


@pytest.mark.parametrize("end", ["\0", "\0.example.com", " ", "\n", "\t", "%00", "é"])
def test_process_cannot_ask_for_a_name_that_tls_libraries_take_for_another_roles(end: str) -> None:
    with pytest.raises(ValueError, match="cannot enrol"):
        Credentials.of(Authority.new(SETTINGS), Role.ROUTER, "router-0", [server_name("test", Role.WORKER) + end])


@pytest.mark.parametrize("name", ["hôte", "my host", "", "a" * 254, "-a.example", "http://host"])
def test_host_with_a_name_that_no_certificate_can_have_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert name not in names_of("0.0.0.0")
    Credentials.of(Authority.new(SETTINGS), Role.ROUTER, "router-0", names_of("0.0.0.0"))


def test_host_with_an_interface_for_each_container_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str) -> object:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        return SimpleNamespace(family=family, address=text)

    containers = [address(f"10.0.{idx}.1") for idx in range(200)]
    links = [address(f"fe80::{idx:x}%veth{idx}") for idx in range(1, 200)]
    found = {"lo": [address("127.0.0.1"), address("::1")], "all": containers + links}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    names = names_of("::")
    assert {"127.0.0.1", "::1", "10.0.0.1"} <= set(names)
    more = [f"balancer-{idx}.example" for idx in range(32)]
    Credentials.of(Authority.new(SETTINGS), Role.ROUTER, "router-0", [*names, *more])


def test_request_with_too_many_names_or_a_damaged_signature_is_refused() -> None:
    authority = Authority.new(SETTINGS)
    with pytest.raises(ValueError, match="at most"):
        Credentials.of(authority, Role.ROUTER, "router-0", [f"h{i}" for i in range(100)])
    with pytest.raises(ValueError, match="PEM"):
        authority.enrol(EnrolmentRequest(csr_pem="nonsense", hosts=()), role=Role.WORKER, name="decode-0")


def test_certificate_for_another_key_is_not_taken() -> None:
    authority = Authority.new(SETTINGS)
    mine, other = Credentials(), Credentials()
    mine.request(())
    answer = authority.enrol(other.request(()), role=Role.WORKER, name="decode-0")
    with pytest.raises(ValueError, match="not for the key"):
        mine.accept(answer)


def test_credentials_of_a_process_that_was_not_enrolled_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="kvrelay up"):
        _ = Credentials().held


def test_answer_on_a_pipe_is_for_requests_alone_and_bad_ones_are_refused() -> None:
    authority = Authority.new(SETTINGS)

    def enrol(request: EnrolmentRequest) -> object:
        return authority.enrol(request, role=Role.WORKER, name="decode-0")

    for line in ("", "hello", "[1]", '{"event": "ready"}'):
        assert answer_to(line, enrol) is None  # type: ignore[arg-type]
    for line in ('{"event": "enrol"}', '{"event": "enrol", "request": "{}"}', '{"event": "enrol", "request": 5}'):
        with pytest.raises(ValueError):
            answer_to(line, enrol)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "uri", ["", "spiffe://", "spiffe://a/b/c/d", "spiffe://a/worker/", "http://a/worker/b", "spiffe://a/king/b"]
)
def test_what_is_no_identity_is_refused(uri: str) -> None:
    with pytest.raises(ValueError):
        Identity.parse(uri)


@pytest.mark.parametrize(
    ("sections", "is_spread", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"router": {"host": "0.0.0.0"}}, False, True),
        ({"router": {"host": "10.1.2.3"}}, False, True),
        ({"router": {"host": "::1"}}, False, False),
        ({"tls": {"mode": "on"}}, False, True),
        ({"tls": {"mode": "off", "insecure": True}, "router": {"host": "0.0.0.0"}}, True, False),
        ({"tls": {"mode": "files", "certificate": "/c", "key": "/k"}}, False, True),
    ],
)
def test_tls_is_used_as_soon_as_another_host_reaches_an_address(
    sections: dict[str, object], is_spread: bool, expected: bool
) -> None:
    assert is_encrypted(ServingConfig.model_validate(sections), is_spread=is_spread) is expected


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"tls": {"mode": "off"}, "router": {"host": "0.0.0.0"}}, "tls.insecure: true"),
        ({"tls": {"insecure": True}}, "insecure belongs to mode: off"),
        ({"tls": {"mode": "files"}}, "certificate and key"),
        ({"tls": {"certificate": "/c", "key": "/k"}}, "certificate and key"),
        ({"tls": {"mode": "files", "certificate": "/c"}}, "certificate and key"),
    ],
)
def test_plain_text_for_other_hosts_has_to_be_asked_for_by_name(sections: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(sections, source="serving.yaml")


def test_operator_of_a_folder_that_is_not_ours_has_no_credentials(tmp_path: Path) -> None:
    assert operator_credentials(tmp_path) is None
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "operator.json").write_text('{"key_pem": 5}')
    assert operator_credentials(tmp_path) is None
