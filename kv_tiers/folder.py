"""Folders of the disk tier: `PATH/<key of the store>/<n>/`, each with the files `lock`, `index` and `blocks`.

Two processes never write into one folder: a process takes the first n whose `lock` nobody has locked. The kernel ends a
lock with its process, so that a restarted worker finds its predecessor's blocks. Stores of other keys (weights, dtype,
layout, version of the format) are removed once nobody has locked them.

Other users can neither read nor write: folders have mode 0700, files 0600.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from common.own_files import is_own
from kv_tiers.faults import FaultKind, TierFault
from kv_tiers.files import Files
from kv_tiers.records import FORMAT_VERSION, KEY_BYTES, RECORD_BYTES, count_records

_MAX_FOLDERS = 64
"""Most processes of a host with one model and one path."""
_FILES = ("blocks", "index", "lock")
_STORE_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_LONGEST_INDEX = 256 << 20


def store_key(fingerprint: str, block_bytes: int) -> bytes:
    """Return the key of the store for blocks of one kind."""
    what = f"{FORMAT_VERSION}\0{RECORD_BYTES}\0{block_bytes}\0{fingerprint}".encode()
    return hashlib.blake2b(what, person=b"kvrelay-tierkey", digest_size=KEY_BYTES).digest()


class Folder:
    """A locked folder with its open files."""

    def __init__(self, path: Path, files: Files) -> None:
        """Make it where it is missing. Raises BlockingIOError where another process has locked it, and OSError."""
        self.path = path
        self._files = files
        self._paths = {name: path / name for name in _FILES}
        self._fds: dict[str, int] = {}
        _make_private(path)
        try:
            self._open("lock")
            if not files.lock(self._fds["lock"]) or not self._is_there("lock"):
                raise BlockingIOError(f"another process has locked {path}")
            self._open("index")
            self._open("blocks")
        except BaseException:
            self.close()
            raise

    @property
    def index(self) -> int:
        """File descriptor of the records."""
        return self._fds["index"]

    @property
    def blocks(self) -> int:
        """File descriptor of the slots."""
        return self._fds["blocks"]

    def check(self) -> None:
        """Raise TierFault when the files have been removed or replaced."""
        if not all(map(self._is_there, _FILES)):
            raise TierFault(FaultKind.VANISHED, f"the files in {self.path} have been removed")

    def remove(self) -> None:
        """Remove the files and the folder, while it is locked. Raises OSError where a file cannot be removed."""
        for path in self._paths.values():
            self._files.remove(path)
        with suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Close the files, the locked one last."""
        for name in ("blocks", "index", "lock"):
            fd = self._fds.pop(name, None)
            if fd is not None:
                self._files.close(fd)

    def _open(self, name: str) -> None:
        path = self._paths[name]
        self._fds[name] = self._files.open(path)
        if not is_own(path):
            raise PermissionError(f"cannot use {path}: another user may write it; remove it")

    def _is_there(self, name: str) -> bool:
        return self._files.is_at(self._fds[name], self._paths[name])


def claim(root: Path, key: bytes, files: Files) -> Folder:
    """Return the first folder of a store that no process has locked. Raises OSError."""
    root.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    if not is_own(root):
        raise PermissionError(f"cannot use {root}: other users may write there; `chmod go-w` it or name another path")
    store = root / key.hex()
    _make_private(store)
    for n in range(_MAX_FOLDERS):
        try:
            return Folder(store / str(n), files)
        except BlockingIOError:
            continue
    raise BlockingIOError(f"cannot use {store}: {_MAX_FOLDERS} processes have locked all of its folders")


def unused(root: Path, key: bytes, files: Files) -> Iterator[Folder]:
    """Yield the folders of a store that no process has locked, each locked meanwhile. Skips what cannot be opened."""
    for path in _numbered(root / key.hex()):
        try:
            folder = Folder(path, files)
        except OSError:
            continue
        try:
            yield folder
        finally:
            folder.close()


def remove_others(root: Path, key: bytes, files: Files) -> int:
    """Remove stores of other keys that no process uses; returns how many blocks they had. Leaves what is not ours."""
    num_blocks = 0
    for store in root.iterdir():
        is_other = _STORE_NAME.fullmatch(store.name) and store.name != key.hex()
        if not is_other or store.is_symlink() or not store.is_dir():
            continue
        for folder in unused(root, bytes.fromhex(store.name), files):
            try:
                with (folder.path / "index").open("rb") as index:
                    num_blocks += count_records(index.read(_LONGEST_INDEX))
                folder.remove()
            except OSError:
                continue
        with suppress(OSError):
            store.rmdir()
    return num_blocks


def _numbered(store: Path) -> list[Path]:
    return sorted(lock.parent for lock in store.glob("*/lock") if lock.parent.name.isdecimal())


def _make_private(path: Path) -> None:
    """Make a folder that only its owner may enter. Raises PermissionError where it is another user's, or a link."""
    path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"cannot use {path}: it is another user's, or a link; remove it")
    if stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        path.chmod(stat.S_IRWXU)
