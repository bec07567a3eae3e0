"""Cache folders of tests."""

from pathlib import Path

from common.model_files import cache_dir


def empty_cache(folder: Path) -> Path:
    """Return `folder` as a cache without models. It shares the user's compiled kernels: a compiler takes 15 s."""
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    return folder
