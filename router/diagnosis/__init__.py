"""Tells what costs the answers of the last minutes time, and which changes would help."""
