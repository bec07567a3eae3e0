"""A tool that attacks every door with hostile input; README.md says how to use it."""
