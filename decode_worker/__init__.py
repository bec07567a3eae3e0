"""Pulls KV and writes answers."""
