"""Starts and supervises the processes."""
