"""Which kvrelay this is."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version() -> str:
    """Return the version that is installed; "unknown" where the sources run without having been installed."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "unknown"
