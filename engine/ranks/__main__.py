"""Process of a rank other than the first, whose program is a module with a `main`.

    python -m engine.ranks MODULE PIPE MEMORY

The last two arguments are descriptors, of the pipe and of the memory that ranks share.
"""

import signal
import sys
from importlib import import_module

from common.process import die_with_parent

if __name__ == "__main__":
    # First of all: a program imports torch for seconds, in which the first rank may end.
    die_with_parent()
    for each in (signal.SIGINT, signal.SIGTERM):  # of a whole group: the first rank decides when it ends
        signal.signal(each, signal.SIG_IGN)
    import_module(sys.argv[1]).main(*map(int, sys.argv[2:]))
