"""Identifies callers: from an API key to a tenant, with the salts that keep the cached KV of tenants apart.

Only the SHA-256 of a key is stored. Keys are looked up under a digest that is keyed with a random number of this
process, so that the duration of a look-up reveals nothing about existing keys, and then compared in constant time.

A tenant's cache salt is blake2b(its name, keyed with `router.salt_secret`), and goes into the first link of its block
hashes: tenants with different salts have no block in common on any worker, so that neither cached tokens nor times
reveal to one tenant what another has sent. The salt is never taken from a request. The block key, which keys the first
link of all hashes, follows from the same secret, or comes from the cluster's authority when there is none: without the
key no hash can be computed. Routers with the same secret derive the same salts and the same key; a changed secret makes
every cached prefix unreachable.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from common.config import ENV_PREFIX, ConfigError, ServingConfig, TenantConfig
from common.config.router import checked_key
from common.errors import AccessDenied, InvalidRequest, Unauthenticated
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.proofs import OPERATOR_AUDIENCE
from router.tenants import ANYBODY, Overload, Tenant

_SCHEME = "bearer "
_JWT_DOTS = 2
_MAX_NAMED = 20
"""Tenants that a message names at most."""


class Authenticator:
    """Maps credentials to tenants."""

    def __init__(
        self, *, anybody: Tenant | None, tenants: Mapping[bytes, Tenant], credentials: Credentials | None = None
    ) -> None:
        """`anybody` is the tenant of all calls without authentication; `tenants` go by the SHA-256 of their keys.

        `credentials` verify the proofs of operators of this cluster.
        """
        self._credentials = credentials
        self._anybody = anybody
        self._pepper = secrets.token_bytes(32)
        self._tenants = {self._digest(key): (key, tenant) for key, tenant in tenants.items()}

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return the tenant of a call by its metadata. Raises Unauthenticated, which never repeats the key."""
        return self._anybody if self._anybody is not None else self._tenant_of(_bearer(metadata))

    def _tenant_of(self, token: str) -> Tenant:
        key = hashlib.sha256(token.encode()).digest()
        known, tenant = self._tenants.get(self._digest(key), (b"", None))
        if tenant is None or not hmac.compare_digest(known, key):
            if token.count(".") == _JWT_DOTS:
                why = "it gave an operator's proof, which names no tenant, or an unknown API key"
            else:
                why = "its API key is unknown"
            raise Unauthenticated(f"cannot identify the caller: {why}", field="authorization")
        return tenant

    def check_operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Return if a call comes from an operator, by API key or proof. Raises KvrelayError otherwise."""
        if self._anybody is not None:
            return
        token = _bearer(metadata)
        if self._credentials is not None and token.count(".") == _JWT_DOTS:
            with suppress(Unauthenticated):  # an API key may have dots, too
                identity = self._credentials.held.verifier.identify(token, audience=OPERATOR_AUDIENCE)
                if identity.role is Role.OPERATOR:
                    return
        tenant = self._tenant_of(token)
        if not tenant.is_operator:
            raise AccessDenied(
                f"cannot show or change the cluster for tenant {tenant.name}: it is not an operator;"
                " set `operator: true` for it, or ask on the host where the cluster's run folder is"
            )

    def tenant_named(self, name: str) -> Tenant:
        """Return a tenant. Raises InvalidRequest."""
        tenants = self._by_name()
        if name not in tenants:
            known = ", ".join([*tenants][:_MAX_NAMED]) + (", …" if len(tenants) > _MAX_NAMED else "")
            raise InvalidRequest(f"there is no tenant {name[:80]!r}; there is {known}", field="tenant")
        return tenants[name]

    def sharing(self, tenant: Tenant) -> Sequence[str]:
        """Return the names of other tenants that share a tenant's cached blocks."""
        others = self._by_name().items()
        return [name for name, each in others if name != tenant.name and each.cache_salt == tenant.cache_salt]

    def _by_name(self) -> Mapping[str, Tenant]:
        tenants = [tenant for _key, tenant in self._tenants.values()]
        return {tenant.name: tenant for tenant in (tenants if self._anybody is None else [self._anybody])}

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=16).digest()


def _bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the bearer token of a call. Raises Unauthenticated."""
    given = next((value for name, value in metadata or () if name == "authorization"), None)
    if given is None:
        raise Unauthenticated(
            "no API key: send the metadatum or header `authorization: Bearer <key>`, or over HTTP `x-api-key: <key>`",
            field="authorization",
        )
    text = given if isinstance(given, str) else given.decode(errors="replace")
    if text.lower().strip() == _SCHEME.strip():
        raise Unauthenticated("no API key: nothing follows `Bearer`", field="authorization")
    if not text.lower().startswith(_SCHEME):
        raise Unauthenticated("the credentials are not of the form `Bearer <key>`", field="authorization")
    return text[len(_SCHEME) :].strip()


def make_authenticator(config: ServingConfig, credentials: Credentials | None = None) -> Authenticator:
    """Return the authenticator for the tenants of serving.yaml. Raises ConfigError for unusable keys."""
    if config.router.auth == "none":
        limits = next(iter(config.tenants), None)
        anybody = ANYBODY if limits is None else replace(_tenant(limits, cache_salt=""), is_operator=True)
        return Authenticator(anybody=anybody, tenants={})
    secret = _salt_secret(config)
    tenants: dict[bytes, Tenant] = {}
    for position, tenant_config in enumerate(config.tenants):
        what = "shared" if tenant_config.share_cache else f"tenant\0{tenant_config.name}"
        tenant = _tenant(tenant_config, cache_salt=_salt(secret, what))
        where = f"tenants.{position}"
        for key in _keys(tenant_config, where):
            if key in tenants:
                raise ConfigError(f"a key of {tenant.name} is also one of {tenants[key].name}", key=where)
            tenants[key] = tenant
    return Authenticator(anybody=None, tenants=tenants, credentials=credentials)


def make_block_key(config: ServingConfig, issued: bytes) -> bytes:
    """Return the key of all block hashes: derived from `router.salt_secret`, else the one that the authority `issued`.

    Raises ConfigError when the environment variable of the secret is not set, or is short.
    """
    secret = _salt_secret(config)
    if not secret:
        return issued
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(key=key, person=b"kvrelay-block", digest_size=32).digest()


def _salt_secret(config: ServingConfig) -> str:
    """Return the secret of salts and block hashes, or "" without one."""
    return _resolved_key(config.router.salt_secret, "router.salt_secret") if config.router.salt_secret else ""


def _keys(config: TenantConfig, where: str) -> Sequence[bytes]:
    """Return the SHA-256 of every key of a tenant."""
    keys = [bytes.fromhex(digest) for digest in config.api_key_sha256]
    for position, value in enumerate(config.api_keys):
        key = _resolved_key(value, f"{where}.api_keys.{position}")
        keys.append(hashlib.sha256(key.encode()).digest())
    return keys


def _resolved_key(value: str, where: str) -> str:
    """Return the secret, or what the environment variable that it names holds. Raises ConfigError for a short one."""
    if value.startswith(ENV_PREFIX):
        name = value.removeprefix(ENV_PREFIX)
        value = os.environ.get(name, "")
        if not value:
            raise ConfigError(f"the environment variable {name} is not set", key=where)
    try:
        return checked_key(value)
    except ValueError as error:
        raise ConfigError(str(error), key=where) from error


def _salt(secret: str, what: str) -> str:
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(what.encode(), key=key, person=b"kvrelay-salt", digest_size=16).hexdigest()


def _tenant(config: TenantConfig, *, cache_salt: str) -> Tenant:
    shared = config.model_dump(exclude={"api_keys", "api_key_sha256", "overload", "operator", "share_cache"})
    overload = None if config.overload is None else Overload(config.overload)
    return Tenant(**shared, overload=overload, is_operator=config.operator, cache_salt=cache_salt)
