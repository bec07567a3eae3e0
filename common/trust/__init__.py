"""Who is who inside a cluster, and who may call what. What it protects against: docs/security.md."""
