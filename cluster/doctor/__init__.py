"""Checks of a host and of a running cluster, each with what to do about it. Looks only; changes nothing."""
