"""Serves and pulls content-addressed KV blocks under a lease; used by both worker kinds."""
