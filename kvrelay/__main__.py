"""The `kvrelay` command, and `python -m kvrelay` in a checkout that nothing installed."""

import sys

from kvrelay.packages import ForeignPackage, check_packages, home_of, put_first


def main() -> None:
    """Run the command line."""
    put_first(home_of())
    try:
        check_packages(sys.path)
    except ForeignPackage as error:
        sys.exit(f"kvrelay: {error}")
    from cli.main import main as run

    run()


if __name__ == "__main__":
    main()
