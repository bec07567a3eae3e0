"""Changes a running cluster: sizes, roles, configuration, models."""
