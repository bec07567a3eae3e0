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

from common.config import ENV_PREFIX, ConfigError, ServingConfig, TenantConfig
from common.errors import Unauthenticated
from router.tenants import ANYBODY, Tenant

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
_SCHEME = "bearer "


class Doorkeeper:
    """Knows every tenant."""

    def __init__(self, *, anybody: Tenant | None, tenants: Mapping[bytes, Tenant]) -> None:
        """`anybody` is who calls when nobody has to say; else `tenants` are looked up by the SHA-256 of their keys."""
        self._anybody = anybody
        self._pepper = secrets.token_bytes(32)
        self._tenants = {self._digest(key): (key, tenant) for key, tenant in tenants.items()}

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return the tenant that a call's metadata names. Raises Unauthenticated, which never repeats the key."""
        if self._anybody is not None:
            return self._anybody
        given = next((value for name, value in metadata or () if name == "authorization"), None)
        if given is None:
            raise Unauthenticated(
                "no API key: send the metadatum or header `authorization: Bearer <key>`", field="authorization"
            )
        text = given if isinstance(given, str) else given.decode(errors="replace")
        if not text.lower().startswith(_SCHEME):
            raise Unauthenticated("the credentials are not of the form `Bearer <key>`", field="authorization")
        key = hashlib.sha256(text[len(_SCHEME) :].strip().encode()).digest()
        known, tenant = self._tenants.get(self._digest(key), (b"", None))
        if tenant is None or not hmac.compare_digest(known, key):
            raise Unauthenticated("the API key is unknown here", field="authorization")
        return tenant

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=16).digest()


def make_doorkeeper(config: ServingConfig) -> Doorkeeper:
    """Return who knows the tenants of serving.yaml. Raises ConfigError for keys that cannot be used."""
    if config.router.auth == "none":
        limits = next(iter(config.tenants), None)
        return Doorkeeper(anybody=ANYBODY if limits is None else _tenant(limits, cache_salt=""), tenants={})
    secret = _resolve(config.router.salt_secret or "", "router.salt_secret")
    tenants: dict[bytes, Tenant] = {}
    for position, tenant_config in enumerate(config.tenants):
        what = "shared" if tenant_config.share_cache else f"tenant\0{tenant_config.name}"
        tenant = _tenant(tenant_config, cache_salt=_salt(secret, what))
        for key in _keys(tenant_config, f"tenants.{position}"):
            if key in tenants:
                raise ConfigError(f"tenants.{position}: a key of {tenant.name} is also one of {tenants[key].name}")
            tenants[key] = tenant
    return Doorkeeper(anybody=None, tenants=tenants)


def make_block_key(config: ServingConfig) -> bytes:
    """Return the key of the block hashes: from `router.salt_secret`, else drawn. Raises ConfigError for a lacking one.

    A drawn key is another one in each router and after each start.
    """
    secret = _resolve(config.router.salt_secret or "", "router.salt_secret")
    if secret:
        key = hashlib.sha256(secret.encode()).digest()
        return hashlib.blake2b(key=key, person=b"kvrelay-block", digest_size=32).digest()
    if config.router.count > 1:
        logger.warning(
            "router.salt_secret is not set: each router draws a block key of its own, and cannot use prefixes that"
            " came by another one; set the same secret for all"
        )
    return secrets.token_bytes(32)


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
        cache_salt=cache_salt,
    )
