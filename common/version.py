"""The version of kvrelay."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version() -> str:
    """Return the installed version, or "unknown" if the sources run without installation."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "unknown"
