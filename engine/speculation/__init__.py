"""Speculation: drafting tokens that a step verifies beside the ones that it has to compute."""
