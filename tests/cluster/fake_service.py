"""A process that follows the services' protocol and does nothing else: one ready line, then waits for SIGTERM.

fake_service.py ADDRESS [--die-after-ready | --fail MESSAGE | --never-ready | --ignore-sigterm | --with-child |
  --explain REASON | --fail-with-child | --die-before-the-answer | --say MODULE]
"""

import json
import os
import select
import signal
import subprocess
import sys
from importlib import import_module

from common.process import CannotStart, die_with_parent, failure_line


def main() -> int:
    die_with_parent()
    address, mode = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    sys.stderr.write("hello from the log\n")
    if mode == "--fail":
        sys.stderr.write(f"{sys.argv[3]}\n")
        return 3
    if mode == "--explain":
        sys.stdout.write(failure_line(CannotStart(sys.argv[3], key="model.device")) + "\n")
        return 1
    if mode == "--ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "--with-child":  # which holds our streams
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    if mode == "--fail-with-child":  # which holds our stdin
        subprocess.Popen(["/bin/sleep", "60"], stdout=subprocess.DEVNULL)
        return 3
    if mode == "--die-before-the-answer":
        from common.trust.credentials import Credentials  # most of a start, which the other modes do without

        request = Credentials().request(()).to_json()
        sys.stdout.write(f"{json.dumps({'event': 'enrol', 'request': request})}\n")
        sys.stdout.flush()
        select.select([sys.stdin], [], [])  # the answer is there, unread
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "--say":
        from common.tracing import SpanContext

        sys.stderr.write(f"{import_module(sys.argv[3]).WORD} {SpanContext.root().trace_id}\n")
    if mode != "--never-ready":
        ready = {"event": "ready", "address": address, "admin_address": address, "metrics_port": 0, "pid": os.getpid()}
        sys.stdout.write(f"not the ready line\n{json.dumps(ready)}\n")
        sys.stdout.flush()
    if mode != "--die-after-ready":
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
