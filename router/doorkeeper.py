"""Who is calling: from an API key to a tenant, and what keeps tenants' cached KV apart.

Keys are known by their SHA-256 alone. They are looked up under a digest that is keyed with a number drawn at start, so
that the time of a look-up tells nothing about the keys that exist, and then compared in constant time.

A tenant's cache salt is blake2b(its name, keyed with `router.salt_secret`), and goes into the first link of its block
hashes: tenants with different salts have no block in common, on whichever worker, so that neither cached tokens nor
times tell one of them what another has sent. The salt is never taken from a request. The block key, which keys the
first link of everybody's hashes, follows from the same secret: without it nobody can compute a hash. Routers with the
same secret derive the same salts and the same key; a changed secret makes every cached prefix unreachable.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from common.config import ENV_PREFIX, ConfigError, ServingConfig, TenantConfig
from common.errors import AccessDenied, Unauthenticated
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.proofs import OPERATOR_AUDIENCE
from router.tenants import ANYBODY, Tenant

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
_SCHEME = "bearer "
_JWT_DOTS = 2


class Doorkeeper:
    """Knows every tenant."""

    def __init__(
        self, *, anybody: Tenant | None, tenants: Mapping[bytes, Tenant], credentials: Credentials | None = None
    ) -> None:
        """`anybody` is who calls when nobody has to say; else `tenants` are looked up by the SHA-256 of their keys.

        `credentials` know operators of this cluster by their proofs.
        """
        self._credentials = credentials
        self._anybody = anybody
        self._pepper = secrets.token_bytes(32)
        self._tenants = {self._digest(key): (key, tenant) for key, tenant in tenants.items()}

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return the tenant that a call's metadata names. Raises Unauthenticated, which never repeats the key."""
        return self._anybody if self._anybody is not None else self._tenant_of(_bearer(metadata))

    def _tenant_of(self, token: str) -> Tenant:
        key = hashlib.sha256(token.encode()).digest()
        known, tenant = self._tenants.get(self._digest(key), (b"", None))
        if tenant is None or not hmac.compare_digest(known, key):
            raise Unauthenticated("the API key is unknown here", field="authorization")
        return tenant

    def check_operator(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Return when a call comes from an operator, by its API key or by a proof. Raises KvrelayError."""
        if self._anybody is not None:
            return
        token = _bearer(metadata)
        if self._credentials is not None and token.count(".") == _JWT_DOTS:
            with suppress(Unauthenticated):  # a key may have dots, too
                identity = self._credentials.held.verifier.identify(token, audience=OPERATOR_AUDIENCE)
                if identity.role is Role.OPERATOR:
                    return
        tenant = self._tenant_of(token)
        if not tenant.is_operator:
            raise AccessDenied(
                f"cannot show the cluster: tenant {tenant.name} is no operator;"
                " set `operator: true` for it, or ask on the host where the cluster's run folder is"
            )

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=16).digest()


def _bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return what a call shows. Raises Unauthenticated."""
    given = next((value for name, value in metadata or () if name == "authorization"), None)
    if given is None:
        raise Unauthenticated(
            "no API key: send the metadatum or header `authorization: Bearer <key>`", field="authorization"
        )
    text = given if isinstance(given, str) else given.decode(errors="replace")
    if not text.lower().startswith(_SCHEME):
        raise Unauthenticated("the credentials are not of the form `Bearer <key>`", field="authorization")
    return text[len(_SCHEME) :].strip()


def make_doorkeeper(config: ServingConfig, credentials: Credentials | None = None) -> Doorkeeper:
    """Return who knows the tenants of serving.yaml. Raises ConfigError for keys that cannot be used."""
    if config.router.auth == "none":
        limits = next(iter(config.tenants), None)
        anybody = ANYBODY if limits is None else replace(_tenant(limits, cache_salt=""), is_operator=True)
        return Doorkeeper(anybody=anybody, tenants={})
    secret = _resolve(config.router.salt_secret or "", "router.salt_secret")
    tenants: dict[bytes, Tenant] = {}
    for position, tenant_config in enumerate(config.tenants):
        what = "shared" if tenant_config.share_cache else f"tenant\0{tenant_config.name}"
        tenant = _tenant(tenant_config, cache_salt=_salt(secret, what))
        for key in _keys(tenant_config, f"tenants.{position}"):
            if key in tenants:
                raise ConfigError(f"tenants.{position}: a key of {tenant.name} is also one of {tenants[key].name}")
            tenants[key] = tenant
    return Doorkeeper(anybody=None, tenants=tenants, credentials=credentials)


def make_block_key(config: ServingConfig, issued: bytes) -> bytes:
    """Return what block hashes are keyed with: from `router.salt_secret`, else what the cluster's authority has issued.

    Raises ConfigError for a secret that is missing where the configuration says it is.
    """
    secret = _resolve(config.router.salt_secret or "", "router.salt_secret")
    if not secret:
        return issued
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(key=key, person=b"kvrelay-block", digest_size=32).digest()


def _keys(config: TenantConfig, where: str) -> Sequence[bytes]:
    """Return the SHA-256 of every key."""
    keys = [bytes.fromhex(digest) for digest in config.api_key_sha256]
    for position, value in enumerate(config.api_keys):
        key = _resolve(value, f"{where}.api_keys.{position}")
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(f"{where}.api_keys.{position}: has {len(key)} characters; at least {MIN_KEY_CHARS}")
        keys.append(hashlib.sha256(key.encode()).digest())
    return keys


def _resolve(value: str, where: str) -> str:
    """Return the value, or what the environment variable that it names holds."""
    if not value.startswith(ENV_PREFIX):
        return value
    name = value.removeprefix(ENV_PREFIX)
    if not os.environ.get(name):
        raise ConfigError(f"{where}: the environment variable {name} is not set")
    return os.environ[name]


def _salt(secret: str, what: str) -> str:
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(what.encode(), key=key, person=b"kvrelay-salt", digest_size=16).hexdigest()


def _tenant(config: TenantConfig, *, cache_salt: str) -> Tenant:
    return Tenant(
        name=config.name,
        weight=config.weight,
        max_queued=config.max_queued,
        max_concurrent=config.max_concurrent,
        requests_per_min=config.requests_per_min,
        tokens_per_min=config.tokens_per_min,
        max_priority=config.max_priority,
        is_operator=config.operator,
        cache_salt=cache_salt,
    )
