"""Tests of the readers of checkpoints."""
