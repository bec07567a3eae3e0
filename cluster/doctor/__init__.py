"""Checks a host and a running cluster, with advice for each problem. Changes nothing."""
