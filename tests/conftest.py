"""Settings of the whole suite."""

import os

import hypothesis

# In CI the same examples each time: a new counterexample belongs to the person who looks for it, not to whose change is
# being tested. Everywhere else Hypothesis keeps searching.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
