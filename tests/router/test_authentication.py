"""Identifying callers, and separating their caches."""

import hashlib
from typing import Any

import pytest

from common.config import ConfigError, ServingConfig, parse_config
from common.errors import Unauthenticated
from common.trust.identity import Role
from router.doors.authentication import make_authenticator, make_block_key
from router.tenants import Tenant
from tests.trust import credentials_of

KEY_A, KEY_B = "key-of-tenant-a-0001", "key-of-tenant-b-0001"
SECRET = "a secret of sixteen characters or more"


def serving(*tenants: dict[str, Any], secret: str | None = SECRET) -> ServingConfig:
    router = {"auth": "api_key", "salt_secret": secret}
    return parse_config({"router": router, "tenants": list(tenants)}, source="test")


def identify(config: ServingConfig, key: str, *, scheme: str = "Bearer") -> Tenant:
    return make_authenticator(config).identify([("user-agent", "x"), ("authorization", f"{scheme} {key}")])


def salt(name: str, *, secret: str | None = SECRET, **fields: Any) -> str:
    return identify(serving({"name": name, "api_keys": [KEY_A], **fields}, secret=secret), KEY_A).cache_salt


def test_key_in_clear_as_digest_and_from_the_environment_names_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_C", "key-of-tenant-c-0001")
    config = serving(
        {"name": "a", "api_keys": [KEY_A], "weight": 2.0},
        {"name": "b", "api_key_sha256": [hashlib.sha256(KEY_B.encode()).hexdigest()]},
        {"name": "c", "api_keys": ["env:KEY_OF_C"]},
    )
    assert [identify(config, key).name for key in (KEY_A, KEY_B, "key-of-tenant-c-0001")] == ["a", "b", "c"]
    assert identify(config, KEY_A, scheme="bearer").weight == 2.0


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "no API key"),
        (None, "no API key"),
        ([("authorization", KEY_A)], "not of the form"),
        ([("authorization", f"Basic {KEY_A}")], "not of the form"),
        ([("authorization", "Bearer wrong-key-0123456789")], "unknown"),
        ([("authorization", "Bearer ")], "no API key"),
        ([("authorization", b"\xff\xfe")], "not of the form"),
    ],
)
def test_caller_that_does_not_show_a_known_key_is_refused_without_repeating_it(metadata: Any, reason: str) -> None:
    authenticator = make_authenticator(serving({"name": "a", "api_keys": [KEY_A]}))
    with pytest.raises(Unauthenticated, match=reason) as caught:
        authenticator.identify(metadata)
    assert caught.value.field == "authorization"
    assert "wrong-key" not in caught.value.message
    assert KEY_A not in caught.value.message


def test_operators_key_may_have_the_dots_of_a_proof() -> None:
    key = "key.of.operators-0001"
    config = serving({"name": "boss", "api_keys": [key], "operator": True})
    authenticator = make_authenticator(config, credentials_of(Role.ROUTER, "router-0"))
    authenticator.check_operator([("authorization", f"Bearer {key}")])
    with pytest.raises(Unauthenticated, match="an operator's proof, which names no tenant"):
        authenticator.check_operator([("authorization", "Bearer a.b.c")])


def test_without_authentication_all_calls_belong_to_default_without_salt() -> None:
    config = parse_config({"tenants": [{"name": "default", "max_concurrent": 3}]}, source="test")
    tenant = make_authenticator(config).identify([("authorization", "Bearer whatever")])
    assert (tenant.name, tenant.max_concurrent, tenant.cache_salt) == ("default", 3, "")
    assert make_authenticator(ServingConfig()).identify(None).name == "default"


def test_salts_differ_by_tenant_and_secret_and_agree_between_routers() -> None:
    salts = [salt("a"), salt("b"), salt("a", secret="another secret of enough characters"), salt("a", secret=None)]
    assert len(set(salts)) == 4
    assert salt("a") == salt("a")
    assert "" not in salts


def test_tenants_that_share_their_cache_have_one_salt_of_their_own() -> None:
    shared = {salt(name, share_cache=True) for name in ("a", "b")}
    assert len(shared) == 1
    assert shared.isdisjoint({salt("shared"), salt("a"), ""})


def test_block_key_follows_from_the_secret_or_is_the_issued_one() -> None:
    configs = [
        parse_config({"router": {"salt_secret": secret}}, source="test")
        for secret in (SECRET, "another secret of enough characters", None)
    ]
    issued = b"issued" * 5
    assert make_block_key(configs[0], issued) == make_block_key(configs[0].model_copy(), b"another")
    assert len({make_block_key(config, issued) for config in configs}) == 3
    assert make_block_key(configs[2], issued) == issued


def test_length_of_a_salt_is_that_of_the_secret_not_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = serving({"name": "a", "api_keys": [KEY_A]}, secret="env:SALT")
    monkeypatch.setenv("SALT", SECRET)
    assert identify(config, KEY_A).cache_salt == salt("a")
    monkeypatch.setenv("SALT", "short")
    for use in (make_authenticator, lambda config: make_block_key(config, b"")):
        with pytest.raises(ConfigError, match="has 5 characters; at least 16") as caught:
            use(config)
        assert caught.value.key == "router.salt_secret"


@pytest.mark.parametrize(
    ("tenants", "reason"),
    [
        ([{"name": "a", "api_keys": ["short"]}], "tenants.0.api_keys.0: has 5 characters; at least 16"),
        ([{"name": "a", "api_keys": ["env:KVRELAY_TEST_UNSET"]}], "variable KVRELAY_TEST_UNSET is not set"),
        ([{"name": "a", "api_keys": ["env:KVRELAY_TEST_SHORT"]}], "has 5 characters; at least 16"),
        (
            [{"name": "a", "api_keys": [KEY_A]}, {"name": "b", "api_keys": [KEY_A]}],
            "tenants.1: a key of b is also one of a",
        ),
        (
            [{"name": "a", "api_keys": [KEY_A]}, {"name": "b", "api_keys": ["env:KVRELAY_TEST_SAME"]}],
            "a key of b is also one of a",
        ),
    ],
)
def test_keys_that_cannot_be_used_are_named_by_place_and_not_by_value(
    tenants: list[dict[str, Any]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_TEST_SHORT", "short")
    monkeypatch.setenv("KVRELAY_TEST_SAME", KEY_A)
    with pytest.raises(ConfigError, match=reason) as caught:
        make_authenticator(serving(*tenants))
    assert KEY_A not in str(caught.value)


def test_short_key_stops_the_start_under_the_file_where_it_stands() -> None:
    tenants = [{"name": "a", "api_keys": [KEY_A, "short"]}]
    with pytest.raises(ConfigError, match=r"^mine\.yaml:tenants\.0\.api_keys\.1: has 5 characters; at least 16$"):
        parse_config({"router": {"auth": "api_key"}, "tenants": tenants}, source="mine.yaml")
