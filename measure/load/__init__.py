"""The load-test harness: sends a workload to a running server, and measures what its users would see."""
