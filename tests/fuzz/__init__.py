"""Fuzzing of every door: `python -m tests.fuzz TARGET --seconds N`."""
