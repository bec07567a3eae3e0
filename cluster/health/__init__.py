"""Looks after workers that are up and not well: those that stay slow, and those that fail what their peers do not."""
