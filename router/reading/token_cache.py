"""A cache of tokenized beginnings of conversations, so that the next turn tokenizes and hashes only what is new.

A rendered conversation is cut right after special tokens of the chat template: a tokenizer takes these out of the text
before anything else and treats the pieces between them separately, so nothing is ever merged across such a cut, and

    ids(text) = ids(text[:cut]) + ids(text[start of the special token:])[1:]

(The second part begins with the special token, not after it, because some tokenizers treat the first piece of a text
differently.) The ids up to the last cut are kept under a keyed hash of the text before it; the next turn is looked up
from its last cut backwards. Callers in different *scopes* share nothing, neither ids nor times.
"""

import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import tokenizers

from common.block_hash import BlockHashes, hash_blocks
from common.ids import HashRoot
from common.tokens import TokenArray

MIN_CACHED_TOKENS = 64
"""Shorter beginnings are not kept."""
_BYTES_PER_TOKEN = 6
"""4 bytes for the id; the rest for the block's hash with the smallest blocks in use."""
_BYTES_PER_PREFIX = 600


@dataclass(slots=True, eq=False)
class KnownPrefix:
    """The ids of a text's beginning, and their block hashes once computed."""

    token_ids: TokenArray
    root: HashRoot | None = None
    block_size: int = 0
    hashes: BlockHashes = field(default_factory=BlockHashes)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenized prompt. `known` is the cached beginning that was found, `kept` the one kept for the next turn."""

    token_ids: TokenArray
    known: KnownPrefix | None = None
    kept: KnownPrefix | None = None
    prompt_end: str = ""
    """Last characters of a rendered conversation: whether the answer begins inside thoughts."""
    text: str = ""
    """The rendered conversation."""
    is_cut: bool = False
    """Whether the ids are not from the beginning on."""

    def hashes(self, *, root: HashRoot, block_size: int) -> BlockHashes:
        """Return the hashes of all full blocks, hashing only the new ones. Event loop only."""
        known, hashes = self.known, BlockHashes()
        if known is not None and (known.root, known.block_size) == (root, block_size):
            hashes = known.hashes
        parent = hashes[-1] if hashes else root
        rest = self.token_ids[len(hashes) * block_size :]
        hashes += hash_blocks(rest, root=parent, block_size=block_size)
        if self.kept is not None:
            self.kept.root, self.kept.block_size = root, block_size
            self.kept.hashes = hashes[: len(self.kept.token_ids) // block_size]
        return hashes


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where a text may be cut."""

    start: int
    """Start of the special token before the cut, in characters."""
    end: int
    token_id: int


class CutFinder:
    """Finds the places where a tokenizer's texts may be cut. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if not token.normalized and token.content
        }
        self._ids = {
            content: token_id
            for content, (token_id, token) in added.items()
            if token.special
            and not (token.lstrip or token.rstrip)  # strips neighbouring spaces
            and not any(other != content and other.startswith(content) for other in added)
        }
        if any(token.single_word for _token_id, token in added.values()):
            self._ids = {}  # such a token depends on the characters around it
        # Like the tokenizer: the leftmost match, and of several there the longest.
        longest_first = sorted(added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    @property
    def any_token(self) -> str | None:
        """A special token behind which a text may be cut; None if there is none."""
        return min(self._ids, default=None)

    def find(self, text: str) -> list[Cut]:
        """Return the cuts of a text, in order."""
        return list(self._find(text))

    def _find(self, text: str) -> Iterator[Cut]:
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            token_id = self._ids.get(match[0])
            if token_id is not None:
                yield Cut(match.start(), match.end(), token_id)


class TokenCache:
    """Known beginnings, least recently used first, within a bound of memory. Thread-safe."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Memory in use, estimated."""
        self._prefixes: OrderedDict[bytes, KnownPrefix] = OrderedDict()
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)

    def digests(self, text: str, cuts: list[Cut], *, scope: bytes) -> list[bytes]:
        """Return a hash of the text before each cut, for one scope."""
        state = hashlib.blake2b(len(scope).to_bytes(4, "little") + scope, key=self._key, digest_size=16)
        found: list[bytes] = []
        end = 0
        for cut in cuts:
            state.update(text[end : cut.end].encode(errors="surrogatepass"))  # broken spellings of control tokens
            found.append(state.digest())
            end = cut.end
        return found

    def find(self, digests: list[bytes]) -> tuple[int, KnownPrefix] | None:
        """Return the position of the last known digest, with its beginning."""
        with self._lock:
            for place in range(len(digests) - 1, -1, -1):
                known = self._prefixes.get(digests[place])
                if known is not None:
                    self._prefixes.move_to_end(digests[place])
                    return place, known
        return None

    def keep(self, digest: bytes, prefix: KnownPrefix) -> None:
        """Keep a beginning; drop the least recently used ones beyond the bound."""
        with self._lock:
            previous = self._prefixes.pop(digest, None)
            if previous is not None:
                self.num_bytes -= _size(previous)
            self._prefixes[digest] = prefix
            self.num_bytes += _size(prefix)
            while self.num_bytes > self._max_bytes:
                _digest, oldest = self._prefixes.popitem(last=False)
                self.num_bytes -= _size(oldest)


def _size(prefix: KnownPrefix) -> int:
    return _BYTES_PER_PREFIX + _BYTES_PER_TOKEN * len(prefix.token_ids)
