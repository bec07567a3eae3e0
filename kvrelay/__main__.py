"""The `kvrelay` command, and `python -m kvrelay` in a checkout that nothing installed."""

import os
import sys

from kvrelay.packages import ForeignPackage, check_packages, home_of, put_first

_EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Other users cannot change what it and its processes write."""
    os.umask(os.umask(0o022) | 0o022)
    put_first(home_of())
    try:
        check_packages(sys.path)
    except ForeignPackage as error:
        sys.exit(f"kvrelay: {error}")
    try:
        from cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules load; later it is a command's
        sys.exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
