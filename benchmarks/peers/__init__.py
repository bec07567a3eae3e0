"""Engines that a benchmark compares: each in its own process, answering requests over a pipe.

`protocol` is what both sides speak, `process` the benchmark's side, `*_arm` one engine each, `venv` makes a peer's
environment. An arm runs under the peer's own interpreter, where nothing of kvrelay is installed: it imports the
standard library, this package's `protocol`, and its engine.
"""
