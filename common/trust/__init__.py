"""Identities inside a cluster and their rights. Threats: docs/security.md."""
