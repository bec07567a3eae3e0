"""Load tests: send a workload to a running server and measure the latencies of its users."""
