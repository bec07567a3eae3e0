"""Files that this user's processes make once, and later load or run: whole, and changed by no other user."""

import errno
import os
import stat
from pathlib import Path

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(folder: Path) -> Path:
    """Return a folder in which only its owner may write, made when it is missing.

    What a loose umask granted to others is taken back, from its parent too: a user who may write there can put another
    folder in its place. Raises PermissionError for the folder of another user, and OSError.
    """
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        found = each.stat()
        if found.st_uid == os.geteuid() and _is_open(found):
            each.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_MAY_WRITE)
    if not is_own(folder):
        raise PermissionError(errno.EPERM, "another user may write there; remove the folder", str(folder))
    return folder


def is_own(path: Path) -> bool:
    """Return whether a file or folder belongs to this user or root, and no other user may write it. Raises OSError."""
    found = path.stat()
    return found.st_uid in (os.geteuid(), 0) and not _is_open(found)


def publish(made: Path, target: Path) -> None:
    """Move a finished file or folder to its place. A crash leaves it whole or away: its content reaches the disk first.

    Raises OSError, for a folder also where the target is one that is not empty.
    """
    for each in (*made.rglob("*"), made):
        _sync(each)
    made.rename(target)
    _sync(target.parent)


def _is_open(found: os.stat_result) -> bool:
    """Return whether others may write a file, or rename what a folder holds."""
    is_sticky = stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX)
    return bool(found.st_mode & _OTHERS_MAY_WRITE) and not is_sticky


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
