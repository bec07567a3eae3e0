"""Pulls KV and generates answers."""
