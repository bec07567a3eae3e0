"""Everything that measures: load tests, workloads, simulations, experiments, and their pages."""
