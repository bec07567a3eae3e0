"""Runs a request: attempts at its answer, one plan each."""
