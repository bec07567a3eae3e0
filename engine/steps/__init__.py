"""The bookkeeping of an engine's steps: which sequences run, on which pages, and what becomes of their results."""
