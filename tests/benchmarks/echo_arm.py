"""An arm without an engine, for tests of what starts, asks and ends arms."""

import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.peers.protocol import Prompts, claim_stdout, serve


def main() -> None:
    """Answer with what the mode says."""
    mode = sys.argv[1]
    replies = claim_stdout()
    about: dict[str, int] = {}
    sys.stdout.write("noise that must not reach the replies\n")
    sys.stdout.flush()
    if mode == "silent":
        time.sleep(600)
    if mode == "helper":
        about["pid"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    if mode == "broken":
        raise SystemExit("this engine cannot start")

    def generate(prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        if mode == "raises":
            raise ValueError("no such prompt")
        if mode == "dies":
            sys.exit(3)
        for step in range(max_tokens - (mode == "short")):
            for index, prompt in enumerate(prompts):
                yield index, prompt[0] + step

    serve(replies, generate, about)


if __name__ == "__main__":
    main()
