"""Shared by both worker kinds: engine start-up, listeners, status, KV events, prefix pulls, text output."""
