"""Settings of the whole suite."""

import os
from pathlib import Path

import hypothesis

# Without a GPU Triton's kernels run in its interpreter. That has to be said before anybody imports triton, as
# transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# In CI the same examples each time: a new counterexample belongs to the person who looks for it, not to whose change is
# being tested. Everywhere else Hypothesis keeps searching. How long an example takes says nothing on a busy machine.
_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_slow)
hypothesis.settings.register_profile("here", deadline=None, suppress_health_check=_slow)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")
