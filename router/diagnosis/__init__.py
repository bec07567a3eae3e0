"""Finds what has cost answers time in the last minutes, and which changes would help."""
