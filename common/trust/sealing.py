"""Sealing of KV at rest: without the cluster's key, a disk shows sizes, times and which blocks are one tenant's.

The key of a tenant's blocks is derived from the root of its block hashes: 32 secret bytes that routers derive from the
cluster's block key, the model and the tenant's salt. A worker knows a root only from requests and keeps none at rest,
so what it finds on its disk after a restart it can read only once a request of that tenant has come.

AES-256 in GCM: the tag is also the check of the bytes. Nonces are random, of 96 bits, for less than 2**32 blocks of a
tenant.
"""

import hashlib
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.ids import HashRoot

NONCE_BYTES = 12
TAG_BYTES = 16
ROOT_TAG_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Bytes that only a holder of the root can read or have made."""

    ciphertext: memoryview
    """As long as the bytes."""
    seal: bytes
    """Nonce and tag."""


def root_tag(root: HashRoot) -> bytes:
    """Return the name of a root at rest: it reveals neither the root nor the key."""
    return hashlib.blake2b(root, person=b"kvrelay-roottag", digest_size=ROOT_TAG_BYTES).digest()


def seal(data: bytes | memoryview, *, root: HashRoot, context: bytes) -> Sealed:
    """Seal bytes under a root; `unseal` needs the same context."""
    nonce = os.urandom(NONCE_BYTES)
    whole = memoryview(_cipher(root).encrypt(nonce, data, context))
    return Sealed(ciphertext=whole[:-TAG_BYTES], seal=nonce + whole[-TAG_BYTES:])


def unseal(whole: bytes | bytearray | memoryview, nonce: bytes, *, root: HashRoot, context: bytes) -> bytes | None:
    """Return the bytes of a ciphertext that its tag follows; None unless all was sealed so, under root and context."""
    try:
        return _cipher(root).decrypt(nonce, whole, context)
    except InvalidTag:
        return None


def _cipher(root: HashRoot) -> AESGCM:
    return AESGCM(hashlib.blake2b(root, person=b"kvrelay-tierseal", digest_size=32).digest())
