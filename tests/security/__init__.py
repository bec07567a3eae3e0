"""What strangers, tenants and direct clients may not do, tried on real listeners; docs/security.md has the threats."""
