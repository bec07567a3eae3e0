"""The child of test_sandbox.py: it does what a request names."""

import os
import signal
import time

from common.sandbox import serve


def answer(request: bytes) -> bytes:
    match request:
        case b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"spin":
            while True:
                pass
        case b"eat":
            return bytes(1 << 30)
        case b"hang":
            time.sleep(60)
        case b"pid":
            return str(os.getpid()).encode()
    return request


if __name__ == "__main__":
    serve(answer, cpu_s=0.2, memory_bytes=256 << 20)
