"""Tests of the compiled CPU kernels."""
