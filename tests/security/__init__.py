"""Attacks of strangers, tenants and direct clients on real listeners; docs/security.md has the threats."""
