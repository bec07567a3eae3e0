"""Starts the processes of a cluster and keeps them running."""
